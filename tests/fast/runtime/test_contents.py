"""Contents of messages: from which copy of a buffer they are taken, and where results go."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from oracle.quadratic import Net

from offbeat.core.buckets.flat import Flat
from offbeat.core.buckets.layout import BucketSpec
from offbeat.core.runtime.contents import Storage
from offbeat.core.transport.link import Message
from offbeat.plan import Buffer, Moment, transfer

SIZES = (3, 2)


def storage(*, staged: bool) -> Storage:
    """Of a model of ones, with two copies of the gradients and a buffer of two copies."""
    flat = Flat(Net(np.ones(sum(SIZES)), SIZES), [BucketSpec("b", ("layers.0.w", "layers.1.w"))])
    flat.create_gradients()
    flat.adopt(
        {
            "param": Buffer("param", "param"),
            "grad": Buffer("grad", "grad", copies=2),
            "sum": Buffer("sum", "grad", copies=2),
        }
    )
    return Storage(flat, Mock(), Mock(), Mock(), staged)


def sent(held: Storage, **more: Any) -> Message:
    """A message of the older copy of the gradients, whose values arrive as sevens."""
    rule = transfer(
        "grad",
        range(1),
        after=Moment("grad", 0),
        before=Moment("step", lag=1),
        phases=[0],
        link="net",
        age=1,
        **more,
    )
    contents = held.contents_of(rule, in_nodes=False)
    message = Message(rule, 0, 0, contents)
    message.tensors = [x.fill_(7.0) for x in contents.take(message, 0)]
    return message


def values(held: Storage, buffer: str) -> list[float]:
    """Of each copy, the newest first."""
    flat = held.flat
    copies = [flat.copy_index(buffer, age) for age in range(2)]
    return [float(flat.tensors(buffer, range(1), copy)[0][0]) for copy in copies]


@pytest.mark.parametrize("staged", [False, True])
def test_a_result_returns_to_the_copy_from_which_it_was_taken(staged: bool) -> None:
    """Although that copy has another age meanwhile."""
    held = storage(staged=staged)
    message = sent(held)
    assert values(held, "grad") == ([0.0, 0.0] if staged else [0.0, 7.0])
    held.flat.rotate("grad")
    assert message.contents is not None
    message.contents.put(message)
    assert values(held, "grad") == [7.0, 0.0]


def test_a_result_for_another_buffer_goes_into_its_newest_copy() -> None:
    held = storage(staged=False)
    message = sent(held, into="sum")
    assert message.contents is not None
    message.contents.put(message)
    assert (values(held, "sum"), values(held, "grad")) == ([7.0, 0.0], [0.0, 0.0])
