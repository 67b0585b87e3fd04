"""Solvers of the strategies' planning problems, on plain numbers and without torch."""
