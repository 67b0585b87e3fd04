"""Steps of a program, with neighbours that only apply the same rule as one."""

from __future__ import annotations

from dataclasses import replace

from offbeat.core.derive import effects
from offbeat.core.plan.program import Step
from offbeat.core.plan.types import Apply


def coalesce_steps(steps: tuple[Step, ...], buckets: int) -> tuple[Step, ...]:
    """Steps with every run of neighbouring buckets that only apply the same rule as one step:
    the same outcome where rules only touch their own buckets, in fewer steps."""
    found: list[Step] = []
    run: list[Step] = []
    for step in steps:
        if run and not _continues(run[-1], step, buckets):
            found.append(_as_one(run, buckets))
            run = []
        run.append(step)
    return (*found, _as_one(run, buckets)) if run else ()


def _continues(last: Step, step: Step, buckets: int) -> bool:
    if not (_only_applies(last) and _only_applies(step)):
        return False
    (lag, a), (other, b) = last.apply[0], step.apply[0]
    alike = lag == other and _how(a) == _how(b)
    touching = a.buckets.stop == b.buckets.start or b.buckets.stop == a.buckets.start
    return alike and touching and (last.position < buckets) == (step.position < buckets)


def _how(apply: Apply) -> tuple[object, ...]:
    return apply.rule, apply.args, apply.when, apply.ago


def _only_applies(step: Step) -> bool:
    busy = step.wait or step.decide or step.ask or step.release
    return not busy and len(step.apply) == 1 and _at_home(step.apply[0][1])


def _at_home(apply: Apply) -> bool:
    """Return whether the apply is of one bucket, at that bucket's own moment, and may move."""
    bucket = apply.at.bucket
    return (
        effects.is_by_bucket(apply)
        and bucket is not None
        and apply.buckets == range(bucket, bucket + 1)
    )


def _as_one(run: list[Step], buckets: int) -> Step:
    if len(run) == 1:
        return run[0]
    first, last = run[0].apply[0][1].buckets, run[-1].apply[0][1].buckets
    joined = range(min(first.start, last.start), max(first.stop, last.stop))
    # Forwards follow their moments, so they apply early; gradients come first.
    kept = run[0] if run[0].position < buckets else run[-1]
    lag, apply = kept.apply[0]
    return kept._replace(apply=((lag, replace(apply, buckets=joined)),))
