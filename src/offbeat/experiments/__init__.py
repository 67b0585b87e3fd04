"""Experiments: comparisons of strategies in the lab, records, reports and advice."""
