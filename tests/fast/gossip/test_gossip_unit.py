"""Consolidation of one gossip session, without other workers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from offbeat.gossip.chunks import Wire
from offbeat.gossip.clock import Clock
from offbeat.gossip.session import GossipSession
from offbeat.gossip.state import Mixing, State


class Alone:
    """Gossip without other workers. `calls` has the numbers of each reduction, and pauses."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def all_reduce(self, numbers: list[torch.Tensor]) -> tuple[list[torch.Tensor], float, int]:
        self.calls.append([one.tolist() for one in numbers])
        return numbers, 0.0, 1

    def pause_all(self, t: float) -> float:
        self.calls.append("pause")
        return t

    def agree_on_means(self, means: list[torch.Tensor]) -> list[torch.Tensor]:
        return means


def test_consolidate_averages_the_midpoints_of_both_copies() -> None:
    """The average of (x + x~) / 2 is exact, that of x alone is not."""
    x, gossip = torch.tensor([1.0, 5.0]), Alone()
    state = State([x], Wire([x]), Mixing(0.3, 0.5, 1.4))
    assert state._tilde is not None
    state._tilde[0].add_(2.0)
    session: Any = SimpleNamespace(
        _clock=Clock(),
        _state=state,
        _flats=[x],
        _buffers=list,
        _set_buffers=lambda means: gossip.calls.append(means),
    )
    GossipSession._average(session, gossip)  # type: ignore[arg-type]
    assert gossip.calls == [[[0.0]], "pause", [[2.0, 6.0]], []]
    assert x.tolist() == state._tilde[0].tolist() == [2.0, 6.0]
