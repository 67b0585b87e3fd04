"""Log of the steps of one rank, in the order in which it executes them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from offbeat.core.derive.effects import is_update
from offbeat.core.plan import Apply, Transfer, Vote
from offbeat.core.verify.worker import Worker

if TYPE_CHECKING:
    from torch import nn


def log_steps(source: nn.Module | Worker) -> list[str]:
    """Log the steps of the plan on this rank from now on. The log does not depend on the times of
    messages: a message is received where the plan waits for it.

    A line has the number of the iteration in the plan, the step, and its message, rule or vote with
    the number of its iteration if that is an earlier one: "it 3 receive grad[2:4]@net of 1".
    Between two iterations the number is that of the next one. Steps are "release", "skip" (a
    message that a vote excludes), "receive", "apply", "vote", "decide yes" and "decide no". Calls
    of the optimizer are left out; an optimizer of the test can log them.

    Args:
        source: model that `offbeat.prepare` has returned, or worker of an interpreted plan.

    Returns:
        List to which each step is appended.

    Raises:
        ValueError: the model is not prepared, or its strategy runs without a plan.
    """
    log: list[str] = []

    def write(what: str, now: int, iteration: int, rule: Transfer | Apply | Vote) -> None:
        if not (isinstance(rule, Apply) and is_update(rule)):
            name = rule.name if isinstance(rule, Vote) else rule.id
            log.append(f"it {now} {what} {name}" + (f" of {iteration}" if iteration < now else ""))

    if isinstance(source, Worker):
        source.step_observers.append(write)
        return log
    engine = getattr(getattr(source, "_session", None), "engine", None)
    if engine is None:
        raise ValueError(
            f"source ({type(source).__name__}) must be a model that offbeat.prepare has returned "
            "for a strategy whose plan the runtime executes, such as WFBP()"
        )
    engine.step_observers.append(write)
    return log
