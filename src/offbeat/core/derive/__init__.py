"""Derived plans and facts: what follows from a plan and the effects of its rules."""
