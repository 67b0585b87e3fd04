"""Strategies as the core knows them: interface, registry, text."""
