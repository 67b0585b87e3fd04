"""Integrations of offbeat into training frameworks, in place of DDP. Each module imports its
framework.
"""
