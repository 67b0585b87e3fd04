"""Links: one order on all ranks, whatever the order of release; failures reach everyone."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from offbeat.core.transport.collectives import Collectives, _no_send
from offbeat.core.transport.device import CPU
from offbeat.core.transport.link import Fate, LinkThread, Message
from offbeat.plan import Moment, Verb, transfer

TRANSFER = transfer(
    "grad", range(1), after=Moment("grad", 0), before=Moment("step"), phases=[0], link="net"
)
LONG_S = 10.0


@contextmanager
def link_of(collective: Callable[[Tensor], None]) -> Iterator[LinkThread]:
    link = LinkThread("net", only({"all_reduce": collective}), CPU())
    yield link
    assert link.close()


def only(by_verb: dict[Verb, Callable[[Tensor], None]]) -> Collectives:
    """Collectives, and nobody to send to."""
    return Collectives(by_verb, lambda *_: None)


def enqueue(link: LinkThread, count: int) -> list[Message]:
    return [link.enqueue(TRANSFER, i) for i in range(count)]


def release(link: LinkThread, message: Message) -> None:
    """With a tensor that holds the message's number."""
    link.release(message, (torch.full((2,), float(message.iteration)),))


@settings(max_examples=30, deadline=None)
@given(st.permutations(range(7)))
def test_issues_in_the_order_of_enqueueing(releases: list[int]) -> None:
    issued: list[float] = []
    with link_of(lambda t: issued.append(t[0].item())) as link:
        messages = enqueue(link, 7)
        for i in releases:
            release(link, messages[i])
        assert all(message.wait(LONG_S) for message in messages)
    assert issued == list(range(7))
    assert link.bytes_sent == 7 * 8


def test_an_early_release_waits_for_what_is_before_it() -> None:
    issued: list[float] = []
    with link_of(lambda t: issued.append(t[0].item())) as link:
        first, second = enqueue(link, 2)
        release(link, second)
        assert not second.wait(0.05)
        assert issued == []
        release(link, first)
        assert second.wait(LONG_S)
        assert second.wait(0.0), "waiting again must return at once"
    assert issued == [0, 1]


def test_marks_follow_each_other() -> None:
    with link_of(lambda _: None) as link:
        messages = enqueue(link, 3)
        for message in reversed(messages):
            release(link, message)
        assert all(message.wait(LONG_S) for message in messages)
    for message in messages:
        assert message.released <= message.start <= message.end
    for before, after in pairwise(messages):
        assert before.end <= after.start


def test_several_tensors_are_one_message() -> None:
    sizes: list[int] = []
    with link_of(lambda t: sizes.append(t.numel())) as link:
        tensors = (torch.zeros(3), torch.zeros(2, dtype=torch.bfloat16))
        message, empty = enqueue(link, 2)
        link.release(empty, ())
        link.release(message, tensors)
        assert empty.wait(LONG_S)
    assert sizes == [3, 2]
    assert link.bytes_sent == 12 + 4


def test_a_rank_with_bad_values_in_several_tensors_counts_once() -> None:
    """Of a message with tensors of two dtypes, each of which is checked."""
    found = iter([[2, 1], [1]])
    with link_of(lambda _: None) as link:
        link.guard = lambda *_: next(found)
        [message] = enqueue(link, 1)
        link.release(message, (torch.zeros(3), torch.zeros(2, dtype=torch.bfloat16)))
        assert message.wait(LONG_S)
    assert message.error is None
    assert message.culprits == [1, 2]


def test_halves_count_half() -> None:
    issued: list[str] = []
    verbs: tuple[Verb, ...] = ("reduce_scatter", "all_gather", "all_reduce")
    act = only({verb: lambda _, verb=verb: issued.append(verb) for verb in verbs})
    link = LinkThread("net", act, CPU())
    for verb in verbs:
        message = link.enqueue(replace(TRANSFER, verb=verb), 0)
        link.release(message, (torch.zeros(3),))
        assert message.wait(LONG_S)
    assert link.close()
    assert issued == list(verbs)
    assert link.bytes_sent == 6 + 6 + 12


def test_a_link_counts_what_its_own_group_sends() -> None:
    """A collective of two levels states how much of a message its own group carries."""
    act = replace(only({"all_reduce": lambda _: None}), sent_bytes=lambda _, size: size // 4)
    link = LinkThread("net", act, CPU())
    message = link.enqueue(TRANSFER, 0)
    link.release(message, (torch.zeros(8), torch.zeros(2)))
    assert message.wait(LONG_S)
    assert link.close()
    assert link.bytes_sent == message.sent_bytes == 8 + 2


def test_a_failure_fails_everything_after_it() -> None:
    """With the same cause, and without another collective: the ranks are out of step."""
    issued: list[float] = []

    def fail_at_1(tensor: Tensor) -> None:
        issued.append(tensor[0].item())
        if issued[-1] == 1:
            raise RuntimeError("Connection closed by peer")

    with link_of(fail_at_1) as link:
        messages = enqueue(link, 4)
        for message in messages:
            release(link, message)
        assert all(message.wait(LONG_S) for message in messages)
    assert issued == [0, 1]
    assert messages[0].error is None
    assert messages[1].error is messages[2].error is messages[3].error
    assert str(messages[1].error) == "Connection closed by peer"
    assert link.bytes_sent == 8


def test_close_says_when_it_is_stuck() -> None:
    leave = threading.Event()
    link = LinkThread("net", only({"all_reduce": lambda _: leave.wait(LONG_S) and None}), CPU())
    [message] = enqueue(link, 1)
    release(link, message)
    assert not link.close(timeout_s=0.05)
    leave.set()
    assert link.close()
    assert message.wait(LONG_S)


def test_unreleased_messages_do_not_keep_a_link_open() -> None:
    with link_of(lambda _: None) as link:
        messages = enqueue(link, 2)
        release(link, messages[1])
    assert not messages[0].wait(0.0)


def test_what_is_passed_over_lets_the_next_one_go() -> None:
    """It keeps its place in the order, and nothing of it is sent."""
    issued: list[float] = []
    with link_of(lambda t: issued.append(t[0].item())) as link:
        messages = enqueue(link, 3)
        release(link, messages[2])
        link.skip(messages[1])
        release(link, messages[0])
        assert all(message.wait(LONG_S) for message in messages)
    assert issued == [0, 2]
    assert (messages[1].start, messages[1].error) == (None, None)
    assert [message.fate for message in messages[:2]] == [Fate.ARRIVED, Fate.SKIPPED]
    assert link.bytes_sent == 2 * 8


@pytest.mark.parametrize("verb", ["send", "exchange"])
def test_a_message_between_two_ranks_is_sent(verb: Verb) -> None:
    sent: list[tuple[float, int, int]] = []

    def note(t: Tensor, source: int, target: int) -> None:
        sent.append((t[0].item(), source, target))

    act = Collectives({}, note) if verb == "send" else Collectives({}, _no_send, swap=note)
    link = LinkThread("net", act, CPU())
    message = link.enqueue(replace(TRANSFER, verb=verb, ranks=(2, 0)), 5)
    release(link, message)
    assert message.wait(LONG_S)
    assert link.close()
    assert sent == [(5.0, 2, 0)]
    assert link.bytes_sent == 8


def test_a_message_that_arrives_after_the_link_is_detached_is_not_the_last() -> None:
    """The members of the job compare their last messages, after which no message may count."""
    begun, leave = threading.Event(), threading.Event()

    def block_at_1(tensor: Tensor) -> None:
        if tensor[0] == 1:
            begun.set()
            leave.wait(LONG_S)

    with link_of(block_at_1) as link:
        link.keeps_last = True
        messages = enqueue(link, 2)
        for message in messages:
            release(link, message)
        assert begun.wait(LONG_S)
        assert link.detach() is messages[0]
        leave.set()
        assert messages[1].wait(LONG_S)
        assert link.detach() is messages[0]


def test_suspects_of_all_tensors_of_a_message_are_kept() -> None:
    link = LinkThread("net", only({"all_reduce": lambda _: None}), CPU())
    suspects = iter([[0], [], [2]])
    link.guard = lambda *_: next(suspects)
    message = link.enqueue(TRANSFER, 0)
    link.release(message, tuple(torch.zeros(2) for _ in range(3)))
    assert message.wait(LONG_S)
    assert link.close()
    assert message.culprits == [0, 2]
