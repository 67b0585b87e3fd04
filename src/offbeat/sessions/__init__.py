"""Sessions without a plan: what those of gossip and servers share."""
