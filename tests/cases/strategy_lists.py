"""All strategies by name, in three kinds."""

from __future__ import annotations

from offbeat.strategies import Planned, Strategy, find, strategy_names

ALL: dict[str, type[Strategy]] = {name: find(name) for name in strategy_names()}
STRATEGIES = {name: cls for name, cls in ALL.items() if issubclass(cls, Planned)}
SERVED = {name: cls for name, cls in ALL.items() if cls.needs.servers}
GOSSIP = {name: cls for name, cls in ALL.items() if cls.needs.allows_joining}
