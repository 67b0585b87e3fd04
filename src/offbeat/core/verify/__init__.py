"""Verification of plans: checks and an interpreter."""
