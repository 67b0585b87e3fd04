"""The matrix of scripts and strategies: nothing in it is different in silence, and the page shows
it.

`OFFBEAT_REWRITE_GOLDENS=1` writes docs/compatibility.md again.
"""

from __future__ import annotations

import os
from functools import cache
from typing import Any

import pytest
from worlds import run_world

from matrix import page
from matrix.features import FEATURES
from matrix.job import STRATEGIES
from matrix.running import DIFFERENT, LIKE_DDP, LIKE_REFERENCE, Verdict, verdicts, yardsticks

pytestmark = pytest.mark.xdist_group("matrix")  # all of them share what DDP leaves


@cache
def by_ddp() -> list[Any]:
    return run_world(yardsticks, 2)


@cache
def outcomes(name: str) -> dict[str, Verdict]:
    first, second = run_world(verdicts, 2, name, by_ddp(), timeout_s=120.0)
    assert first == second
    return first


def test_there_are_enough_cases() -> None:
    assert len(STRATEGIES) >= 8
    assert len(FEATURES) * len(STRATEGIES) >= 80


@pytest.mark.parametrize("name", STRATEGIES)
def test_no_script_trains_otherwise_in_silence(name: str) -> None:
    silent = {key: v.words for key, v in outcomes(name).items() if v.kind == DIFFERENT}
    assert not silent
    expected = LIKE_DDP if STRATEGIES[name].synchronous else LIKE_REFERENCE
    assert outcomes(name)["plain"].kind == expected


def test_the_page() -> None:
    text = page.page({name: outcomes(name) for name in STRATEGIES})
    if os.environ.get("OFFBEAT_REWRITE_GOLDENS") == "1":
        page.PATH.write_text(text)
    assert page.PATH.read_text() == text
