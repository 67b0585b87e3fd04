"""Runs: what a launcher asks of its processes, and comparisons of strategies in the lab."""
