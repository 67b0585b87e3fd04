"""DreamDDP: partial synchronization with sets of layers whose averages fit under backward."""

from offbeat.strategies.dreamddp.strategy import DreamDDP

__all__ = ["DreamDDP"]
