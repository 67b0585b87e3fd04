"""Interface, registry and text form of strategies."""
