"""Integrations: offbeat in the place of DDP, within frameworks that each module imports."""
