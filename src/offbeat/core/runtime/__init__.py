"""The runtime: plans on a real model, over torch.distributed."""
