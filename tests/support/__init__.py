"""Support modules of the tests: worlds of processes, functions of ranks, models, random plans."""
