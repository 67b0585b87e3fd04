"""Writers and readers of the records of a run, one record per rank."""
