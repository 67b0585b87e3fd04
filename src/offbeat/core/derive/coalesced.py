"""Coalesced steps: adjacent steps that only apply the same rule, merged into one step."""

from __future__ import annotations

from dataclasses import replace

from offbeat.core.derive import effects
from offbeat.core.plan.program import Step
from offbeat.core.plan.types import Apply


def coalesce_steps(steps: tuple[Step, ...], buckets: int) -> tuple[Step, ...]:
    """Return the steps with each run of adjacent buckets that only apply the same rule as one step.

    The result of the plan is the same, because such a rule only accesses its own buckets.
    """
    merged: list[Step] = []
    run: list[Step] = []
    for step in steps:
        if run and not _can_merge(run[-1], step, buckets):
            merged.append(_merge_steps(run, buckets))
            run = []
        run.append(step)
    return (*merged, _merge_steps(run, buckets)) if run else ()


def _can_merge(last: Step, step: Step, buckets: int) -> bool:
    """Return whether a step can be merged with the step before it."""
    if not (_only_applies(last) and _only_applies(step)):
        return False
    (lag, a), (other, b) = last.apply[0], step.apply[0]
    alike = lag == other and _apply_key(a) == _apply_key(b)
    touching = a.buckets.stop == b.buckets.start or b.buckets.stop == a.buckets.start
    return alike and touching and (last.position < buckets) == (step.position < buckets)


def _apply_key(apply: Apply) -> tuple[object, ...]:
    """Return the fields of an apply that must be equal in merged steps."""
    return apply.rule, apply.args, apply.when, apply.ago


def _only_applies(step: Step) -> bool:
    """Return whether a step consists of one apply that may be merged."""
    busy = step.wait or step.decide or step.ask or step.release
    return not busy and len(step.apply) == 1 and _is_at_own_moment(step.apply[0][1])


def _is_at_own_moment(apply: Apply) -> bool:
    """Return whether the apply concerns one bucket at that bucket's own moment, and may be
    merged."""
    bucket = apply.at.bucket
    return (
        effects.is_by_bucket(apply)
        and bucket is not None
        and apply.buckets == range(bucket, bucket + 1)
    )


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
