"""Messages that a member still awaits when others have failed, and their outcome."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from torch import Tensor

from offbeat.core.plan import INSIDE, Transfer, base_link
from offbeat.core.runtime.engine import Engine
from offbeat.core.transport.link import Fate, Message


def awaited_messages(engine: Engine) -> Iterator[Message]:
    """Yield the messages that this rank has released and has not received yet."""
    run = engine.run
    awaited = [
        iteration.messages[index]
        for iteration in run.cursor.iterations.values()
        for index in sorted(iteration.outstanding)
    ]
    sent = (*awaited, *run.votes.pending)
    return (one for one in sent if one.was_sent)


def await_messages(engine: Engine) -> None:
    """Wait for all messages that this rank has released, without storing their results."""
    for message in awaited_messages(engine):
        engine.waiting.wait(message, engine.flat)


def awaited_message(engine: Engine, link: str, order: int) -> Message:
    """Return the message with a number on a link, which this rank still awaits."""
    named = (m for m in awaited_messages(engine) if m.transfer.link == link)
    return next(message for message in named if message.order == order)


def settle(
    engine: Engine, outcome: Callable[[Message], tuple[Sequence[Tensor] | None, bool]]
) -> None:
    """Set the outcome of all messages that this rank still awaits, after a failure. No further
    message of the plan is sent.

    Args:
        engine: engine of this rank.
        outcome: returns the result of a message, and whether another rank has sent it. The result
            is None if the message is skipped, or repeated among the survivors if the plan averages
            gradients.
    """
    end, actions = engine.device.mark(), engine.run.actions
    averages = engine.traits.averages_gradients

    def repeats(transfer: Transfer) -> bool:
        """Return whether a message without a result is repeated after a failure: one of gradients
        that are averaged in the iteration that computes them."""
        return averages or base_link(transfer.link) == INSIDE

    if actions.lost is None:
        actions.lost = []
    actions.repeats = repeats
    for message in awaited_messages(engine):
        if message.settled:  # after an earlier failure of the same epoch
            continue
        tensors, is_foreign = outcome(message)
        message.settle(end, tensors, repeats=repeats(message.transfer), is_foreign=is_foreign)
        if message.fate is Fate.SKIPPED:
            actions.lost.append(message.transfer)
