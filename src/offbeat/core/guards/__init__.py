"""Guards: what watches a run, each for one kind of silent mistake."""
