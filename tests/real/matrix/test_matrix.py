"""The matrix of scripts and strategies: nothing in it is different in silence, and the page shows
it.

A quarter of the scripts, each under a third of the strategies; `OFFBEAT_WHOLE_MATRIX=1`: all.
`OFFBEAT_REWRITE_GOLDENS=1` runs all, and writes docs/compatibility.md again.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import pytest
from cases.matrix import page
from cases.matrix.features import FEATURES
from cases.matrix.job import OBSERVED, STEPS, STRATEGIES
from cases.matrix.running import DIFFERENT, LIKE_DDP, LIKE_REFERENCE, Verdict, verdicts, yardsticks
from harness.ranks import in_turn, run_ranks

pytestmark = pytest.mark.xdist_group("matrix")  # all of them share what DDP leaves

# Of every kind: gradients, precision, accumulation, iterations without an update, models,
# optimizers, and whoever looks at the model or changes it.
QUARTER = (
    "plain", "clip_norm", "scaler_overflow", "accumulation", "two_losses", "dropped", "idle", "nan",
    "batch_norm", "dropout", "unused_by_one", "adamw", "clamped", "loaded", "frozen_later",
    "unfrozen_later", "ema",
)  # fmt: skip
# Where the first iterations are observed, and the plan is made from what was measured: what a
# script does in the former decides about the latter.
OBSERVED_SCRIPTS = {
    "WFBP": ("clip_later", "accumulation_without_no_sync", "scaler_overflow", "unused_by_one"),
    "P3": ("scaler_and_clip", "ema"),
    "DeAR": ("clip_norm", "dropout", "gradients_logged", "frozen_later", "loaded"),
    "DreamDDP": (
        "accumulation_and_clip", "adamw", "batch_norm", "clip_later", "dropped", "idle", "plain",
    ),
    "LocalSGD": ("closure", "gan", "scaler_overflow", "skipped_alone", "unused_by_one"),
    "SelSync": ("clip_value",),
    "DeFT": ("evaluation", "frozen_later"),
    "Cyclic": ("loaded",),
}  # fmt: skip
REWRITING = os.environ.get("OFFBEAT_REWRITE_GOLDENS") == "1"
WHOLE = REWRITING or os.environ.get("OFFBEAT_WHOLE_MATRIX") == "1"
RUN = tuple(FEATURES) if WHOLE else QUARTER


def scripts_of(name: str) -> tuple[str, ...]:
    """All pairs of a script and a strategy would be 150 trainings. The strategies take the scripts
    in turn, so that each script runs under strategies that average gradients at once, in parts and
    late, and parameters."""
    turn = [*STRATEGIES].index(name) % 3
    return RUN if WHOLE else ("plain", *QUARTER[1:][turn::3])


@cache
def by_ddp() -> list[Any]:
    return run_ranks(2, yardsticks, RUN)


# Strategies that share a world, which costs as much as a few scripts.
AT_A_TIME = 1 if WHOLE else 5


def in_one_world(names: tuple[str, ...], calls: list[tuple[Any, ...]]) -> dict[str, Any]:
    first, second = run_ranks(2, in_turn, verdicts, calls, timeout_s=200.0)
    assert first == second
    return dict(zip(names, first, strict=True))


def names_beside(name: str, names: Iterable[str]) -> tuple[str, ...]:
    """The strategies that share a world with this one, itself too."""
    everyone = [*names]
    first = everyone.index(name) // AT_A_TIME * AT_A_TIME
    return tuple(everyone[first : first + AT_A_TIME])


@cache
def outcomes_of(names: tuple[str, ...]) -> dict[str, dict[str, Verdict]]:
    return in_one_world(names, [(name, scripts_of(name), by_ddp()) for name in names])


def outcomes(name: str) -> dict[str, Verdict]:
    return outcomes_of(names_beside(name, STRATEGIES))[name]


@pytest.mark.parametrize("name", STRATEGIES)
def test_no_script_trains_otherwise_in_silence(name: str) -> None:
    silent = {key: v.words for key, v in outcomes(name).items() if v.kind == DIFFERENT}
    assert not silent
    expected = LIKE_DDP if STRATEGIES[name].synchronous else LIKE_REFERENCE
    assert outcomes(name)["plain"].kind == expected


@cache
def observed_by_ddp() -> list[Any]:
    keys = sorted({key for keys in OBSERVED_SCRIPTS.values() for key in keys})
    return run_ranks(2, yardsticks, keys, OBSERVED + STEPS)


@pytest.fixture(scope="module")
def observed_outcomes(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Any]:
    """A function of a strategy: the verdicts on its scripts without a given profile."""

    @cache
    def outcomes_of(names: tuple[str, ...]) -> dict[str, Any]:
        folders = [tmp_path_factory.mktemp("profiles") for _ in names]
        calls = zip(names, map(OBSERVED_SCRIPTS.get, names), folders, strict=True)
        ddp = observed_by_ddp()
        return in_one_world(names, [(name, keys, ddp, folder) for name, keys, folder in calls])

    return lambda name: outcomes_of(names_beside(name, OBSERVED_SCRIPTS))[name]


@pytest.mark.parametrize("name", OBSERVED_SCRIPTS)
def test_observed_iterations_come_first(name: str, observed_outcomes: Callable[[str], Any]) -> None:
    """Without a given profile: iterations of BSP, then the strategy, on the measured plan."""
    expected = LIKE_DDP if STRATEGIES[name].synchronous else LIKE_REFERENCE
    found = observed_outcomes(name)
    assert {key: v for key, v in found.items() if v.kind != expected} == {}


def test_the_page() -> None:
    if WHOLE:
        text = page.page({name: outcomes(name) for name in STRATEGIES})
        if REWRITING:
            page.PATH.write_text(text)
        assert page.PATH.read_text() == text
    said = page.read(page.PATH.read_text())
    assert len(said) == len(FEATURES) * len(STRATEGIES)
    for name in STRATEGIES:
        for key, verdict in outcomes(name).items():
            assert said[FEATURES[key].title, name] == page.shown(verdict), (key, name)
