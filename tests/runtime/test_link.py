"""Links: one order on all ranks, whatever the order of release; failures reach everyone."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from offbeat.plan import Moment, Verb, transfer
from offbeat.transport.device import CPU
from offbeat.transport.link import Flight, Link

TRANSFER = transfer(
    "grad", range(1), after=Moment("grad", 0), before=Moment("step"), phases=[0], link="net"
)
LONG_S = 10.0


@contextmanager
def link_of(collective: Callable[[Tensor], None]) -> Iterator[Link]:
    link = Link("net", {"mean": collective}, CPU())
    yield link
    assert link.close()


def book(link: Link, count: int) -> list[Flight]:
    """Flights whose tensors hold their number."""
    return [link.book(TRANSFER, i, (torch.full((2,), float(i)),)) for i in range(count)]


@settings(max_examples=30, deadline=None)
@given(st.permutations(range(7)))
def test_issues_in_booked_order(releases: list[int]) -> None:
    issued: list[float] = []
    with link_of(lambda t: issued.append(t[0].item())) as link:
        flights = book(link, 7)
        for i in releases:
            link.release(flights[i])
        assert all(flight.wait(LONG_S) for flight in flights)
    assert issued == list(range(7))
    assert link.bytes_sent == 7 * 8


def test_an_early_release_waits_for_what_is_before_it() -> None:
    issued: list[float] = []
    with link_of(lambda t: issued.append(t[0].item())) as link:
        first, second = book(link, 2)
        link.release(second)
        assert not second.wait(0.05)
        assert issued == []
        link.release(first)
        assert second.wait(LONG_S)
        assert second.wait(0.0), "waiting again must return at once"
    assert issued == [0, 1]


def test_marks_follow_each_other() -> None:
    with link_of(lambda _: None) as link:
        flights = book(link, 3)
        for flight in reversed(flights):
            link.release(flight)
        assert all(flight.wait(LONG_S) for flight in flights)
    for flight in flights:
        assert flight.released <= flight.start <= flight.end
    for before, after in pairwise(flights):
        assert before.end <= after.start


def test_several_tensors_are_one_flight() -> None:
    sizes: list[int] = []
    with link_of(lambda t: sizes.append(t.numel())) as link:
        tensors = (torch.zeros(3), torch.zeros(2, dtype=torch.bfloat16))
        flight, empty = link.book(TRANSFER, 0, tensors), link.book(TRANSFER, 0, ())
        link.release(empty)
        link.release(flight)
        assert empty.wait(LONG_S)
    assert sizes == [3, 2]
    assert link.bytes_sent == 12 + 4


def test_halves_count_half() -> None:
    issued: list[str] = []
    verbs: tuple[Verb, ...] = ("reduce_scatter", "all_gather", "mean")
    link = Link("net", {verb: lambda _, verb=verb: issued.append(verb) for verb in verbs}, CPU())
    for verb in verbs:
        flight = link.book(replace(TRANSFER, verb=verb), 0, (torch.zeros(3),))
        link.release(flight)
        assert flight.wait(LONG_S)
    assert link.close()
    assert issued == list(verbs)
    assert link.bytes_sent == 6 + 6 + 12


def test_a_failure_fails_everything_after_it() -> None:
    """With the same cause, and without another collective: the ranks are out of step."""
    issued: list[float] = []

    def fail_at_1(tensor: Tensor) -> None:
        issued.append(tensor[0].item())
        if issued[-1] == 1:
            raise RuntimeError("Connection closed by peer")

    with link_of(fail_at_1) as link:
        flights = book(link, 4)
        for flight in flights:
            link.release(flight)
        assert all(flight.wait(LONG_S) for flight in flights)
    assert issued == [0, 1]
    assert flights[0].error is None
    assert flights[1].error is flights[2].error is flights[3].error
    assert str(flights[1].error) == "Connection closed by peer"
    assert link.bytes_sent == 8


def test_close_says_when_it_is_stuck() -> None:
    leave = threading.Event()
    link = Link("net", {"mean": lambda _: leave.wait(LONG_S) and None}, CPU())
    [flight] = book(link, 1)
    link.release(flight)
    assert not link.close(timeout_s=0.05)
    leave.set()
    assert link.close()
    assert flight.wait(LONG_S)


def test_unreleased_flights_do_not_keep_a_link_open() -> None:
    with link_of(lambda _: None) as link:
        flights = book(link, 2)
        link.release(flights[1])
    assert not flights[0].wait(0.0)
