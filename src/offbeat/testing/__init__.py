"""Tests for authors of strategies: equations and the conformance suite."""
