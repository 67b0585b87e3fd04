"""Records: what each rank measures in a run, written and read."""
