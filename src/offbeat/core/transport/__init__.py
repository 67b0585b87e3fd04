"""Transports: how the transfers of a plan reach the other ranks."""
