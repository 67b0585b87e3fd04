"""Measurement of ready order and times of a model, link rates, and losses."""
