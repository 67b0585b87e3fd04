"""Verification of plans: checks, an interpreter, and the equations of training algorithms."""
