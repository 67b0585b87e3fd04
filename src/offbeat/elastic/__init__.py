"""Members: jobs whose replicas leave, fail and join while the others train."""
