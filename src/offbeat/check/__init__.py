"""`offbeat check`: facts of all hosts of a job, and measurement of the network between them."""
