"""Asynchronous gossip: pairs of workers average their parameters while all workers compute."""
