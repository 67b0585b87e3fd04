"""Packed: what ranks tell each other beside the links, as JSON bytes in tensors.

Never a pickle: whoever reads one runs what its writer wants.
"""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

TUPLE = "()"  # {"()": [1, 2]} is the tuple (1, 2), which a JSON list is not
CAN_BE_SAID = "say it in None, numbers, text, lists, tuples and dicts with text keys"
ONE_VERSION = "start all ranks with the same version of offbeat"


def pack(value: Any) -> bytes:
    """A value as JSON bytes; ValueError that names the place of what JSON cannot hold."""
    return json.dumps(_tagged(value, "the value"), separators=(",", ":")).encode()


def unpack(data: bytes) -> Any:
    """Inverse of `pack`: tuples are tuples, and floats are the same bit by bit."""
    return _untagged(json.loads(data))


def gather(value: Any, group: dist.ProcessGroup) -> list[Any]:
    """Everyone's value, by rank: sizes first, then the bytes, padded to the largest.

    ValueError on every rank, naming one, if its value cannot be packed.
    """
    try:
        said = {"value": _tagged(value, "the value")}
    except ValueError as error:  # the others wait in the collective, and must know as well
        said = {"error": str(error)}
    heard = _gather_bytes(json.dumps(said, separators=(",", ":")).encode(), group)
    values: list[Any] = []
    for rank, data in enumerate(heard):
        try:
            theirs = json.loads(data)
        except ValueError as error:
            raise ValueError(
                f"rank {rank} sent what is not JSON ({error}); {ONE_VERSION}"
            ) from None
        if "error" in theirs:
            raise ValueError(f"rank {rank} cannot tell the others: {theirs['error']}")
        values.append(_untagged(theirs["value"]))
    return values


def broadcast_state(state: Any, source: int, group: dist.ProcessGroup) -> Any:
    """One rank's tensors, numbers and containers of them on all ranks.

    As `torch.save` writes them; read with `weights_only`, which builds nothing else.
    """
    mine = dist.get_rank() == source
    data = _saved(state) if mine else torch.empty(0, dtype=torch.uint8, device="cpu")
    size = torch.tensor([data.numel()], dtype=torch.int64, device="cpu")
    dist.broadcast(size, source, group)
    if not mine:
        data = torch.empty(int(size), dtype=torch.uint8, device="cpu")
    dist.broadcast(data, source, group)
    return state if mine else torch.load(io.BytesIO(data.numpy().data), weights_only=True)


def unreadable(state: Any) -> str | None:
    """Why other ranks could not read it; None if they can."""
    try:
        torch.load(io.BytesIO(_saved(state).numpy().data), weights_only=True)
    except Exception as error:
        return str(error)
    return None


def _saved(state: Any) -> Tensor:
    file = io.BytesIO()
    torch.save(state, file)
    return torch.frombuffer(file.getbuffer(), dtype=torch.uint8)


def _gather_bytes(mine: bytes, group: dist.ProcessGroup) -> list[bytes]:
    ranks = dist.get_world_size(group)
    sizes = [torch.empty(1, dtype=torch.int64, device="cpu") for _ in range(ranks)]
    dist.all_gather(sizes, torch.tensor([len(mine)], dtype=torch.int64, device="cpu"), group=group)
    most = max(map(int, sizes))
    padded = torch.frombuffer(bytearray(mine.ljust(most, b" ")), dtype=torch.uint8)
    rows = [torch.empty(most, dtype=torch.uint8, device="cpu") for _ in range(ranks)]
    dist.all_gather(rows, padded, group=group)
    return [row.numpy().tobytes() for row in rows]  # JSON does not mind spaces


def _tagged(value: Any, place: str) -> Any:
    """With tuples marked as such; ValueError if anything in it is not JSON's."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, list):
        return _each(value, place)
    if isinstance(value, tuple):
        return {TUPLE: _each(value, place)}
    if not isinstance(value, dict):
        raise ValueError(
            f"{place} is a {type(value).__name__}, which JSON cannot hold; {CAN_BE_SAID}"
        )
    for key in value:
        if not isinstance(key, str) or key == TUPLE:
            raise ValueError(f"{place} has the key {key!r}, which JSON cannot hold; {CAN_BE_SAID}")
    return {key: _tagged(item, f"{place}[{key!r}]") for key, item in value.items()}


def _each(values: Sequence[Any], place: str) -> list[Any]:
    return [_tagged(value, f"{place}[{i}]") for i, value in enumerate(values)]


def _untagged(value: Any) -> Any:
    if isinstance(value, list):
        return [_untagged(item) for item in value]
    if not isinstance(value, dict):
        return value
    if value.keys() == {TUPLE}:
        return tuple(_untagged(item) for item in value[TUPLE])
    return {key: _untagged(item) for key, item in value.items()}
