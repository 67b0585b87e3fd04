"""Guards: checks of a training run, each for one kind of error that raises no exception itself."""
