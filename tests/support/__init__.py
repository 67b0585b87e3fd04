"""Support of several tests: ranks in threads, quadratic models, random plans, gossip."""
