"""What scripts do, under every strategy: the same as torch's DDP, as the strategy's reference, or
refused in words."""
