"""Switch in user space for delays and losses that the kernel cannot provide."""
