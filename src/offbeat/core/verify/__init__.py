"""Verification: plans executed with numbers, and their errors."""
