"""Running the matrix: one world per strategy, one script after the other, and a verdict on each."""

from __future__ import annotations

import contextlib
import io
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from cases.matrix.features import FEATURES, Feature
from cases.matrix.job import OBSERVED, ON_MEASURED, STEPS, STRATEGIES, Job

LIKE_DDP, LIKE_REFERENCE, REFUSED, NOT_RUN, DIFFERENT = "= DDP", "= reference", "refused", "-", "?"
SIGNS = {LIKE_DDP: "✓", LIKE_REFERENCE: "≈", REFUSED: "✗", NOT_RUN: "–", DIFFERENT: "?"}
IN_WORDS = ("ValueError: ", "RuntimeError: ")
TOO_LATE = ("did not arrive", "timed out", "Timed out", "Connection", "has failed; start it again")


@dataclass(frozen=True)
class Verdict:
    """What a script came to under a strategy; `words` of a refusal, or what was different."""

    kind: str
    words: str = ""


@dataclass
class Left:
    """What a script leaves on this rank, or why it failed."""

    weights: list[list[float]]
    seen: list[float]
    ran: Any = None
    error: str = ""


def run(feature: Feature, job: Job) -> Left:
    error: BaseException | None = None
    left = Left([], [])
    torch.manual_seed(0)
    with contextlib.redirect_stderr(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            feature.script(job)
            left.ran = job.history()
            left.weights, left.seen = job.result()
        except Exception as failure:
            error, left.error = failure, f"{type(failure).__name__}: {failure}"
        with contextlib.suppress(RuntimeError):
            job.end(error)
    return left


def yardsticks(keys: Sequence[str], steps: int = STEPS) -> dict[str, Left]:
    """What these scripts leave on this rank under torch's own DDP."""
    if not dist.is_initialized():
        dist.init_process_group("gloo", timeout=timedelta(seconds=30))
    wanted = {key: FEATURES[key] for key in keys if FEATURES[key].yardstick}
    return {
        key: run(one, Job(None, find_unused=one.find_unused, steps=steps))
        for key, one in wanted.items()
    }


def judge(
    feature: Feature, name: str, yardstick: Left | None, measured: Path | None = None
) -> Verdict:
    """This rank's verdict, which takes the other rank's failures into account. Where profiles are
    measured, into a folder, there are as many iterations more."""
    if name in feature.not_for:
        return Verdict(NOT_RUN)
    strategy = STRATEGIES[name] if measured is None else ON_MEASURED.get(name, STRATEGIES[name])
    how: dict[str, Any] = {"measured": measured, "steps": STEPS + (OBSERVED if measured else 0)}
    mine = run(feature, Job(strategy, find_unused=feature.find_unused, **how))
    errors: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(errors, mine.error)
    if any(errors):
        words = next(words for words in errors if words)
        late = any(sign in words for sign in TOO_LATE) or not words.startswith(IN_WORDS)
        return Verdict(DIFFERENT if late else REFUSED, words)
    apart = "there is no yardstick"
    if yardstick is not None:
        apart = everywhere(difference(mine, yardstick, feature.tolerance))
        if not apart:
            return Verdict(LIKE_DDP)
    if name == "DDP":
        return Verdict(DIFFERENT, apart)
    theirs = run(feature, Job(strategy, plainly=True, ran=mine.ran, **how))
    apart = everywhere(difference(mine, theirs, feature.tolerance))
    return Verdict(DIFFERENT, apart) if apart else Verdict(LIKE_REFERENCE)


def everywhere(words: str) -> str:
    """What some rank says."""
    said: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(said, words)
    return next((one for one in said if one), "")


def difference(mine: Left, theirs: Left, tolerance: float) -> str:
    """What is not the same, in words; empty: nothing."""
    if theirs.error:
        return f"the yardstick failed: {theirs.error}"
    if len(mine.seen) != len(theirs.seen):
        return f"saw {len(mine.seen)} numbers, not {len(theirs.seen)}"
    pairs = [*zip(mine.weights, theirs.weights, strict=True), (mine.seen, theirs.seen)]
    for i, (a, b) in enumerate(map(np.array, pair) for pair in pairs):
        if not np.allclose(a, b, rtol=tolerance, atol=tolerance, equal_nan=True):
            what = f"parameter {i}" if i < len(mine.weights) else "what the script saw"
            return f"{what} is {abs(a - b).max():.1e} apart"
    return ""


def verdicts(
    name: str, keys: Sequence[str], by_ddp: list[dict[str, Left]], measured: Path | None = None
) -> dict[str, Verdict]:
    """Of these scripts under one strategy, given every rank's yardsticks; to be called on every
    rank of a world."""
    if not dist.is_initialized():
        dist.init_process_group("gloo", timeout=timedelta(seconds=30))
    mine = by_ddp[dist.get_rank()]
    found = {}
    for key in keys:
        folder = measured and measured / key
        if folder:
            folder.mkdir(exist_ok=True)
        found[key] = judge(FEATURES[key], name, mine.get(key), folder)
    return found
