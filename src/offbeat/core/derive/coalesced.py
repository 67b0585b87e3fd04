"""Coalesced steps: adjacent steps that only apply the same rule, merged into one step."""

from __future__ import annotations

from dataclasses import replace
from itertools import groupby

from offbeat.core.derive import effects
from offbeat.core.plan.program import Step


def coalesce_steps(steps: tuple[Step, ...], buckets: int) -> tuple[Step, ...]:
    """Return the steps with each run of adjacent buckets that only apply the same rule as one step.

    The result of the plan is the same, because such a rule only accesses its own buckets.
    """
    merged: list[Step] = []
    for key, group in groupby(enumerate(steps), lambda one: _run_key(*one, buckets)):
        run = [step for _, step in group]
        merged += run if key is None else [_merge_steps(run, buckets)]
    return tuple(merged)


def _run_key(number: int, step: Step, buckets: int) -> tuple[object, ...] | None:
    """Return what the steps of a run have in common; None if a step cannot be merged, because it is
    not one apply of one bucket at that bucket's own moment.

    Buckets are adjacent if their positions are, so the difference between the position and the
    number of the step is the same in a run.
    """
    if step.wait or step.decide or step.ask or step.release or len(step.apply) != 1:
        return None
    lag, apply = step.apply[0]
    bucket, place = apply.at.bucket, step.position
    if bucket is None or apply.buckets != range(bucket, bucket + 1):
        return None
    if not effects.is_by_bucket(apply):
        return None
    same = apply.rule, apply.args, apply.when, apply.ago
    return lag, *same, place < buckets, place - number


def _merge_steps(run: list[Step], buckets: int) -> Step:
    """Return one step with the applies of all steps of a run."""
    if len(run) == 1:
        return run[0]
    first, last = run[0].apply[0][1].buckets, run[-1].apply[0][1].buckets
    joined = range(min(first.start, last.start), max(first.stop, last.stop))
    # The forward of a bucket follows its moment, so apply at the first one; gradients precede it.
    kept = run[0] if run[0].position < buckets else run[-1]
    lag, apply = kept.apply[0]
    return kept._replace(apply=((lag, replace(apply, buckets=joined)),))
