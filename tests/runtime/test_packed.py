"""Control messages are JSON: what they can hold, what they refuse, and that nothing is a pickle."""

from __future__ import annotations

import ast
import math
import re
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support import talking
from support.worlds import run_world

import offbeat
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


def test_ranks_tell_each_other() -> None:
    """One that cannot say something is named on all, and they stay together."""
    first, second = run_world(talking.tell_all_sorts, 2)
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
    # A checkpoint holds whatever its script gave, and says so.
    assert found == [("frozen.py", "pickle")]
