"""Flat buckets for a model's tensors, named buffers of the same layout, and optimizer state."""
