"""Codes between two ranks: parts of a message that are encoded while earlier ones are sent."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases.batches import Batch, Call
from harness.ranks import run_ranks

from offbeat.core.codecs import WIRES, codec
from offbeat.core.codecs.average import (
    PARTS,
    OriginError,
    Outcome,
    Part,
    Settings,
    average,
    equivalent_bytes,
)
from offbeat.core.codecs.pieces import PIECE
from offbeat.core.transport.collectives import Collectives, collectives
from offbeat.core.transport.control import new_group

HOST = torch.device("cpu")
PIECEWISE = [name for name, cls in WIRES.items() if cls.piecewise]
SIZES = (PIECE + 1, 2 * PIECE, 9 * PIECE + 777)
LIMIT_S = 0.5


# ---- in worlds ------------------------------------------------------------------------------


def _connect(connections: int = 1, limit_s: float = 30.0) -> Collectives:
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    return collectives(new_group("gloo", limit_s), "gloo", HOST, limit_s, connections)


def _numbers(size: int, rank: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(rank), dtype=dtype)


def _average(
    act: Collectives, name: str, x: torch.Tensor, *, origin: int = 7
) -> tuple[Part, Outcome]:
    part = Part(x.clone(), torch.full((3,), float(act.rank)), {})
    how = Settings(codec(name, {}), "gather", 0, True, origin)
    return part, average(part, how, act)


def _bits(part: Part, outcome: Outcome) -> tuple[Any, ...]:
    assert part.mean is not None
    tensors = (part.mean, part.plain, part.numbers)
    return *(x.numpy().tobytes() for x in tensors), list(outcome.bad), outcome.bytes


def compare_parts() -> list[tuple[str, int, Any, Any, int]]:
    """Return by case the bits in parts, those of one all-gather, and the predicted bytes."""
    act = _connect()
    assert act.duplex is not None
    found, at_once = [], replace(act, duplex=None)
    for name in PIECEWISE:
        for size, dtype in zip(SIZES, (torch.float32, torch.float64, torch.float32), strict=True):
            x = _numbers(size, act.rank, dtype)
            parts, whole = (_bits(*_average(one, name, x)) for one in (act, at_once))
            predicted = equivalent_bytes(codec(name, {}), "gather", size, x.itemsize, 12, 2)
            found.append((name, size, parts, whole, predicted))
    return found


def average_with_a_bad_rank() -> tuple[Any, ...]:
    """Return the bits in parts and at once if rank 1 has a value that is not finite."""
    act = _connect()
    x = _numbers(3 * PIECE, act.rank, torch.float32)
    if act.rank == 1:
        x[-1] = torch.inf
    ways = (act, replace(act, duplex=None))
    return tuple(_bits(*_average(one, "int4", x)) for one in ways)


def average_different_changes() -> list[Any]:
    """Return an error of ranks with different origins, and bits of the next message."""
    act = _connect(connections=2)
    x = _numbers(3 * PIECE, act.rank, torch.float32)
    with pytest.raises(OriginError) as caught:
        _average(act, "int8", x, origin=act.rank)
    return [str(caught.value), *_bits(*_average(act, "int8", x))[:1]]


def wait_for_a_silent_rank() -> float:
    """Return the seconds until rank 0 gives up on rank 1, which never takes part."""
    act = _connect(limit_s=LIMIT_S)
    dist.barrier()
    if act.rank == 1:
        time.sleep(3 * LIMIT_S)
        return LIMIT_S
    begun_s = time.monotonic()
    with pytest.raises(RuntimeError):
        _average(act, "sign", _numbers(3 * PIECE, 0, torch.float32))
    return time.monotonic() - begun_s


def other_groups() -> list[bool]:
    """Return whether groups of three ranks, and of one, have single messages."""
    dist.init_process_group("gloo")
    alone = new_group("gloo", 30.0, [[0], [1], [2]])
    groups = dist.group.WORLD, alone
    return [collectives(g, "gloo", HOST, 30.0).duplex is not None for g in groups]  # type: ignore[arg-type]


# ---- tests ----------------------------------------------------------------------------------

TWO = Batch(2)


@TWO.given(compare_parts)
def test_parts_change_no_bit(call: Call) -> None:
    """Ten pieces are four parts; two pieces are two."""
    assert PARTS == 4
    first, second = call.results
    assert [case[0] for case in first[::3]] == PIECEWISE == ["bf16", "fp16", "int8", "int4", "sign"]
    for one, other in zip(first, second, strict=True):
        for name, size, parts, whole, predicted in (one, other):
            assert parts == whole, (name, size)
            assert parts[-1] == predicted
        assert one[2][:2] == other[2][:2], "both ranks have the same mean"


@TWO.given(average_with_a_bad_rank)
def test_a_bad_rank_counts_as_at_once(call: Call) -> None:
    for parts, whole in call.results:
        assert parts[3] == [1]
        assert parts == whole


@TWO.given(average_different_changes)
def test_different_origins_are_refused_after_all_parts(call: Call) -> None:
    """With two connections, and so that the next message is whole."""
    first, second = call.results
    assert "weights were loaded on some ranks only" in first[0]
    assert first == second


@TWO.given(wait_for_a_silent_rank)
def test_a_silent_rank_is_not_waited_for(call: Call) -> None:
    first, _ = call.results
    assert LIMIT_S / 2 < first < 20 * LIMIT_S


def test_only_two_ranks_send_parts() -> None:
    assert run_ranks(3, other_groups) == [[False, False]] * 3
