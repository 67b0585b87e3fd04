"""Asynchronous gossip: workers in pairs average their parameters while everybody computes."""
