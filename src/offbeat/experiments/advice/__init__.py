"""Advice: which strategies suit a model and its network, beside methods of other libraries."""
