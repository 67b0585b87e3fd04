"""Generations: the gradients of one iteration or of several merged ones, named by iterations."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from offbeat.core.sim.trace import COMPUTE, Span

GRADIENTS = ("grad", "reduce_scatter", "all_gather")  # kinds of messages that hold gradients

Generation = tuple[int, int]  # iterations [first, stop)


def held_generation(span: Span) -> Generation | None:
    """Return the iterations whose gradients a message holds; None without gradients."""
    if span.lane == COMPUTE or span.kind not in GRADIENTS:
        return None
    return span.carries or (span.iteration, span.iteration + 1)


@dataclass(frozen=True)
class Generations:
    """Generations in the messages of a trace, in order.

    Attributes:
        known: all generations.
        late: whether a message holds gradients of other iterations than its own.
    """

    known: tuple[Generation, ...] = ()
    late: bool = False

    @classmethod
    def from_spans(cls, spans: Iterable[Span]) -> Generations:
        """Return the generations that the messages in `spans` carry."""
        found = {(span.iteration, held) for span in spans if (held := held_generation(span))}
        late = any(held != (iteration, iteration + 1) for iteration, held in found)
        return cls(tuple(sorted({held for _, held in found})), late)

    def generation_of(self, span: Span) -> Generation | None:
        """Return the generation that a message holds or an update applies; None if unknown."""
        held = (
            span.carries
            or held_generation(span)
            or (self._applied_generation(span) if self.late else None)
        )
        return held if held in self.known else None

    def _applied_generation(self, span: Span) -> Generation | None:
        """Return the generation of an update: the one before the generation that it closes."""
        if span.kind != "update":
            return None
        closed = next((g for g in self.known if g[1] == span.iteration + 1), None)
        return next((g for g in self.known if closed and g[1] == closed[0]), None)
