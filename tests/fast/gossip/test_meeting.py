"""Meetings: the same bits for everybody, in whatever order chunks arrive, and after a new start."""

from __future__ import annotations

import random
from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from offbeat.frames.frames import WireError
from offbeat.gossip.chunks import CHUNK_BYTES
from offbeat.gossip.neighbours import Neighbours
from offbeat.gossip.protocol import Kind
from offbeat.gossip.tree_reduction import Output, TreeReduction
from offbeat.gossip.view import State, View

EDGES = [(0, 1), (0, 2), (1, 3), (1, 4), (2, 4)]


class Net:
    """Meetings of all members, and what is on its way, in order on each edge."""

    def __init__(self, views: dict[int, View], numbers: dict[int, list[Tensor]]):
        self.views = views
        self.meetings = {me: TreeReduction(numbers[me], float(me)) for me in views}
        for meeting in self.meetings.values():
            meeting.wire.chunks = [  # small ones
                type(c)(c.flat, at, min(at + 3, c.stop))
                for c in meeting.wire.chunks
                for at in range(c.start, c.stop, 3)
            ]
        self.ways: dict[tuple[int, int], deque[tuple[int, Output]]] = {}

    def start(self) -> None:
        for me, meeting in self.meetings.items():
            place = self.views[me].place()
            assert place is not None
            self.put(me, list(meeting.start(place)))

    def put(self, me: int, outs: list[Output]) -> None:
        place = self.meetings[me].place
        assert place is not None
        for out in outs:
            self.ways.setdefault((me, out.to), deque()).append((place.digest, out))

    def step(self, order: random.Random) -> bool:
        full = [way for way, words in self.ways.items() if words]
        if not full:
            return False
        sender, to = order.choice(full)
        digest, out = self.ways[sender, to].popleft()
        meeting = self.meetings.get(to)
        if meeting is None or meeting.place is None or meeting.place.digest != digest:
            return True
        raw = torch.frombuffer(bytearray(out.body), dtype=torch.uint8)
        body = meeting.as_numbers(out.chunk, raw)
        if out.up:
            self.put(to, list(meeting.add_child(sender, out.chunk, body, out.largest)))
        else:
            self.put(to, list(meeting.take_result(out.chunk, body, out.largest)))
        return True


def numbers(seed: int) -> list[Tensor]:
    made = torch.Generator().manual_seed(seed)
    return [torch.randn(7, generator=made), torch.randn(4, generator=made).double()]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("dies", [None, 4])
def test_everybody_has_the_same_sums(seed: int, dies: int | None) -> None:
    order = random.Random(seed)
    given = {me: numbers(me) for me in range(5)}
    net = Net({me: View(me, EDGES) for me in range(5)}, given)
    net.start()
    if dies is not None:
        for _ in range(5):
            net.step(order)
        del net.meetings[dies], net.views[dies]
        told = [net.views[n].set_edge(dies, State.GONE) for n in (1, 2)]
        for view in net.views.values():
            for known in told:
                view.merge(known)
        net.start()
    while net.step(order):
        for meeting in net.meetings.values():
            assert meeting.done == (meeting.results == len(meeting.wire.chunks))
    for place in (0, 1):
        expected = sum(given[me][place].double() for me in net.views)
        for meeting in net.meetings.values():
            assert meeting.done
            torch.testing.assert_close(meeting.result[place].double(), expected)
            assert torch.equal(meeting.result[place], net.meetings[0].result[place])
    assert {meeting.largest for meeting in net.meetings.values()} == {float(max(net.views))}


def test_numbers_of_another_size_or_out_of_order_are_refused() -> None:
    meeting = TreeReduction(numbers(1), 0.0)
    place = View(0, [(0, 1)]).place()
    assert place is not None
    assert list(meeting.start(place)) == []
    with pytest.raises(ValueError, match="must have 28"):
        meeting.as_numbers(0, torch.zeros(3, dtype=torch.uint8))
    with pytest.raises(ValueError, match="none of 2"):
        meeting.as_numbers(2, torch.zeros(3, dtype=torch.uint8))
    with pytest.raises(ValueError, match="chunk 1 of 1 is not expected"):
        list(meeting.add_child(1, 1, torch.zeros(7), 0.0))
    assert meeting.incomplete_children() == [1]


@pytest.mark.parametrize("kind", [Kind.UP, Kind.DOWN])
def test_chunks_of_reductions_have_a_largest_size(kind: Kind) -> None:
    """A neighbour could otherwise take any memory."""
    neighbours: Any = Neighbours.__new__(Neighbours)
    body, memory = neighbours.body_buffer(1, SimpleNamespace(kind=kind, body_bytes=CHUNK_BYTES))
    assert len(body) == len(memory) == CHUNK_BYTES
    with pytest.raises(WireError, match="is too large"):
        neighbours.body_buffer(1, SimpleNamespace(kind=kind, body_bytes=CHUNK_BYTES + 1))
