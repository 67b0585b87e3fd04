"""Framing and authentication of the sockets that gossip and servers share."""
