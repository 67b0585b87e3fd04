"""Experiments: comparisons of strategies, records, reports and selection of strategies."""
