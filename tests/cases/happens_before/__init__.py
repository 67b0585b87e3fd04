"""A checker of the order of a GPU's work, that needs no GPU."""
