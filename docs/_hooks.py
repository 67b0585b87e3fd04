"""Menu of the site: one page per strategy, grouped by the results and the processes it needs."""

from __future__ import annotations

from typing import Any

from offbeat.strategies import Strategy, find, strategy_names

GROUPS = ("Same numbers as DDP", "Rare or late averages", "With servers", "Gossip")


def on_config(config: Any) -> Any:
    """Add the pages of all strategies to the menu."""
    groups: dict[str, list[str]] = {}
    for name in strategy_names():
        groups.setdefault(_group(find(name)), []).append(f"strategies/{name}.md")
    menu = next(entry["Strategies"] for entry in config.nav if "Strategies" in entry)
    menu += [{title: groups[title]} for title in GROUPS if title in groups]
    return config


def _group(cls: type[Strategy]) -> str:
    same, other, served, gossip = GROUPS
    if cls.needs.allows_joining:
        return gossip
    if cls.needs.servers:
        return served
    return same if cls.synchronous else other
