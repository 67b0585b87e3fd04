"""Start of a process: the launcher's request, the strategy, and the connections of the job."""
