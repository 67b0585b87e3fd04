"""Runtime that executes plans on a PyTorch model over torch.distributed."""
