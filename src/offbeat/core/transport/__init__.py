"""Transport of a plan's messages between ranks: links, collectives, control and heartbeat."""
