"""Rehearsals: all replicas of a job in one process, with real losses and simulated time."""
