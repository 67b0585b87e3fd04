"""Control messages are JSON: what they can hold, what they refuse, and that nothing is a pickle."""

from __future__ import annotations

import ast
import math
import re
import struct
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Queue
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from cases import talking
from harness.ranks import run_ranks
from hypothesis import given
from hypothesis import strategies as st

import offbeat
from offbeat.core.transport import packed
from offbeat.core.transport.packed import TUPLE, pack, unpack, unreadable

PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text().filter(lambda key: key != TUPLE), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(PLAIN)
def test_comes_out_as_it_went_in(value: Any) -> None:
    """With types, and floats with their sign of zero."""
    assert repr(unpack(pack(value), 0)) == repr(value)


@given(st.integers(0, 2**64 - 1))
def test_floats_keep_their_bits(bits: int) -> None:
    (x,) = struct.unpack("<d", struct.pack("<Q", bits))
    back = unpack(pack(x), 0)
    assert (math.isnan(x) and math.isnan(back)) or struct.pack("<d", back) == struct.pack("<d", x)


@pytest.mark.parametrize(
    ("value", "place", "kind"),
    [
        (torch.zeros(1), "the value is", "Tensor"),
        ([0, (1, {2})], "the value[1][1]", "set"),
        ({"a": {"b": b"bytes"}}, "the value['a']['b']", "bytes"),
        ([np.int64(3)], "the value[0]", "int64"),
        ({"a": {3: 1}}, "the value['a']", "key 3"),
        ({TUPLE: 1}, "the value has", f"key '{TUPLE}'"),
    ],
)
def test_what_cannot_be_said_is_named(value: Any, place: str, kind: str) -> None:
    with pytest.raises(ValueError, match="dicts with text keys") as caught:
        unpack(pack(value), 0)
    assert place in str(caught.value)
    assert kind in str(caught.value)


class MemoryGroup:
    """Process group of threads; counts the messages and bytes that its rank sends."""

    def __init__(self, rank: int, ranks: int, mail: dict[tuple[int, int], Queue[Any]]):
        self._rank, self._ranks, self._mail = rank, ranks, mail
        self.messages = self.bytes = 0

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._ranks

    def send(self, tensors: list[torch.Tensor], target: int, _tag: int) -> Any:
        self.messages += 1
        self.bytes += tensors[0].nbytes
        self._mail[self._rank, target].put(tensors[0].clone())
        return SimpleNamespace(wait=lambda: None)

    def recv(self, tensors: list[torch.Tensor], source: int, _tag: int) -> Any:
        box = self._mail[source, self._rank]
        return SimpleNamespace(wait=lambda: tensors[0].copy_(box.get(timeout=20)))


def on_ranks(ranks: int, act: Any) -> tuple[list[Any], list[MemoryGroup]]:
    """What every rank returns, and the groups of the ranks."""
    mail: dict[tuple[int, int], Queue[Any]] = defaultdict(Queue)
    for pair in ((a, b) for a in range(ranks) for b in range(ranks)):
        mail[pair]  # before the threads
    groups = [MemoryGroup(rank, ranks, mail) for rank in range(ranks)]
    with ThreadPoolExecutor(ranks) as pool:
        return list(pool.map(act, groups)), groups


@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 8, 9])
@pytest.mark.parametrize("kinds", [1, 2, 9])
def test_every_rank_gets_all_values_in_logarithmic_rounds(ranks: int, kinds: int) -> None:
    values = [{"rank": rank % kinds, "long": "x" * 300 * (rank % kinds)} for rank in range(ranks)]

    def twice(group: Any) -> list[Any]:
        first = packed.gather(values[group.rank()], group)
        return [first, packed.gather(group.rank(), group)]

    found, groups = on_ranks(ranks, twice)
    assert found == [[values, [*range(ranks)]]] * ranks
    rounds = (ranks - 1).bit_length()
    assert max(group.messages for group in groups) <= rounds * (2 if kinds == 1 else 3)
    if kinds == 1:
        assert len({id(value) for value in found[0][0]}) == 1


def test_equal_values_are_sent_once() -> None:
    found, groups = on_ranks(8, lambda group: packed.gather("x" * 10_000, group))
    assert found == [["x" * 10_000] * 8] * 8
    assert max(group.bytes for group in groups) == 7 * (packed.SIZE_BYTES + packed.FIRST_BYTES)
    _, groups = on_ranks(8, lambda group: packed.gather("x" * 10_000 * (group.rank() == 0), group))
    assert sum(group.bytes for group in groups) < 8 * 7 * 256 + 7 * 10_100


def test_large_values_that_differ_in_their_last_byte_are_distinct() -> None:
    """Of equal size, so that only the digests of the first exchange differ."""
    values = ["x" * 1000 + str(rank % 2) for rank in range(3)]
    found, _ = on_ranks(3, lambda group: packed.gather(values[group.rank()], group))
    assert found == [values] * 3


def test_joined_values_of_all_ranks() -> None:
    values = [("a", 0.1), None, ("a", 0.1), {"b": [1]}]
    data = packed.join([pack(value) for value in values])
    assert packed.split(data) == values
    assert len(packed.join([pack("x" * 1000)] * 1000)) < 200
    with pytest.raises(ValueError, match="rank 2 cannot send its value"):
        packed.split(packed.join([pack(1), pack(2), pack({3})]))


def test_ranks_tell_each_other() -> None:
    """One that cannot say something is named on all, and they stay together."""
    first, second = run_ranks(2, talking.tell_all_sorts)
    assert first == second
    nothing, said, state, refused, after = first
    assert nothing == [None, None]
    assert said == [
        {"rank": 0, "long": ("", 0.1)},
        {"rank": 1, "long": ("x" * 5000, 1.1)},
    ]
    assert state == {"step": 3, "moments": [[0.0, 1.0, 2.0, 3.0, 4.0], []], "first": (True, None)}
    assert "rank 1" in refused
    assert "the value[1] is a set" in refused
    assert after == ["still together"] * 2


def test_whether_others_could_read_a_state() -> None:
    assert unreadable(talking.STATE) is None
    assert "Path" in str(unreadable({"path": Path("a")}))


def test_no_pickles() -> None:
    """No object collectives, and nothing is loaded that could run code."""
    found = []
    for path in Path(offbeat.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import | ast.ImportFrom):
                names = [alias.name for alias in node.names]
                names.append(getattr(node, "module", None) or "")
                found += [(path.name, name) for name in names if "pickle" in name]
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            called = ast.unparse(node.func)
            safe = any(
                k.arg == "weights_only" and ast.unparse(k.value) == "True" for k in node.keywords
            )
            collective = re.search("_object(_list)?$", node.func.attr)
            if collective or (called == "torch.load" and not safe):
                found.append((path.name, called))
    # A checkpoint holds whatever its script gave, and says so. The others receive from processes
    # that they have started, over socket pairs and pipes.
    assert {name for name, _ in found} == {"frozen.py", "channel.py", "rehearse.py"}
