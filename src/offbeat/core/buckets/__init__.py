"""Storage: a model's tensors in flat buckets, named buffers beside them, optimizer state."""
