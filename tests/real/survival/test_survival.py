"""The table of docs/failures.md: what survives what, under every strategy.

Some cells are run by the suite. `OFFBEAT_REWRITE_GOLDENS=1` runs all, and writes the table again.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from cases.strategy_lists import ALL
from cases.survival.cells import EVENTS, OUTCOMES, STRATEGIES

PAGE = Path(__file__).parents[3] / "docs" / "failures.md"
TABLE = re.compile(r"^\| strategy \|.*\n(?:\|.*\n)+", re.MULTILINE)
REWRITING = os.environ.get("OFFBEAT_REWRITE_GOLDENS") == "1"
RUN = [
    ("a2cid2", "a rank is killed"),
    ("dear", "rank 0 is killed"),
    ("dear", "members fail, join, leave"),
    ("dreamddp, due=forward", "members fail, join, leave"),
    ("sparseloco", "members fail, join, leave"),
]


def table(outcomes: dict[tuple[str, str], str]) -> str:
    """The table as text: one row per strategy."""
    lines = [f"| strategy | {' | '.join(EVENTS)} |", "|---" * (1 + len(EVENTS)) + "|"]
    for name in STRATEGIES:
        cells = [outcomes[name, event] for event in EVENTS]
        lines.append(f"| `{name}` | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def cells_of(text: str) -> dict[tuple[str, str], str]:
    """The outcomes that the page shows."""
    found = TABLE.search(text)
    assert found is not None
    rows = re.findall(r"^\| `(.+?)` \| (.+) \|$", found.group(), re.MULTILINE)
    return {
        (name, event): cell
        for name, cells in rows
        for event, cell in zip(EVENTS, cells.split(" | "), strict=True)
    }


@pytest.mark.skipif(not PAGE.exists(), reason="not a checkout")
def test_the_table_has_all_strategies_and_events() -> None:
    text = PAGE.read_text()
    if REWRITING:
        outcomes = {
            (name, event): run(name) for name in STRATEGIES for event, run in EVENTS.items()
        }
        text = TABLE.sub(table(outcomes), text)
        PAGE.write_text(text)
    shown = cells_of(text)
    assert shown.keys() == {(name, event) for name in STRATEGIES for event in EVENTS}
    assert {strategy for strategy, _ in STRATEGIES.values()} == set(ALL)
    explained = set(re.findall(r"^\| ([^|]+?) \| [^|]+ \|$", text, re.MULTILINE))
    assert explained >= OUTCOMES >= set(shown.values())


@pytest.mark.parametrize(("name", "event"), RUN)
def test_cells_are_as_shown(name: str, event: str) -> None:
    assert EVENTS[event](name) == cells_of(PAGE.read_text())[name, event]
