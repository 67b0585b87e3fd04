"""Exchange of small values between ranks as JSON bytes in tensors.

Pickle is not used, because unpickling runs code that the sender chooses.
"""

from __future__ import annotations

import io
import json
import zlib
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from offbeat.core.transport.tagged import all_gather_sized, broadcast

CPU = torch.device("cpu")
SIZE_BYTES, FIRST_BYTES = 8, 248  # of the first exchange: the size of the value, and its begin
TUPLE = "()"  # {"()": [1, 2]} is the tuple (1, 2), which a JSON list is not
JSON_TYPES = "use None, numbers, text, lists, tuples and dicts with text keys"
ONE_VERSION = "start all ranks with the same version of offbeat"


def pack(value: Any) -> bytes:
    """Return a value as JSON bytes. If JSON cannot hold a part of it, return the error instead."""
    try:
        message = {"value": _tag_tuples(value, "the value")}
    except ValueError as error:  # other ranks wait in the collective, so send them the error
        message = {"error": str(error)}
    return json.dumps(message, separators=(",", ":")).encode()


def unpack(data: bytes, rank: int) -> Any:
    """Return the value that a rank has packed. Tuples and all bits of floats are restored.

    Raises:
        ValueError: the rank has sent no value; names the rank.
    """
    try:
        message = json.loads(data, object_hook=_restore_tuple)
    except ValueError as error:
        raise ValueError(
            f"rank {rank} sent data that is not JSON ({error}); {ONE_VERSION}"
        ) from None
    if "error" in message:
        raise ValueError(f"rank {rank} cannot send its value: {message['error']}")
    return message["value"]


def gather(value: Any, group: dist.ProcessGroup) -> list[Any]:
    """Return every rank's value, by rank. Equal values are one object.

    The first exchange holds the sizes, and values of up to `FIRST_BYTES` bytes or digests of larger
    ones. The larger values follow, each distinct one once. So traffic and memory do not grow with
    the size of equal values.

    Raises:
        ValueError: on every rank, if a value cannot be packed; names the rank.
    """
    mine = pack(value)
    begin = mine if len(mine) <= FIRST_BYTES else blake2b(mine).digest()
    row = len(mine).to_bytes(SIZE_BYTES, "little") + begin.ljust(FIRST_BYTES)
    rows = all_gather_sized(row, [len(row)] * group.size(), group)
    first: dict[bytes, int] = {}
    for rank, row in enumerate(rows):
        first.setdefault(row, rank)
    sizes = {row: int.from_bytes(row[:SIZE_BYTES], "little") for row in first}
    found = {row: row[SIZE_BYTES:][:size] for row, size in sizes.items() if size <= FIRST_BYTES}
    if len(found) < len(first):
        found |= _gather_large({row: rank for row, rank in first.items() if row not in found},
                               sizes, mine, rows[group.rank()], group)  # fmt: skip
    values = {row: unpack(found[row], rank) for row, rank in first.items()}
    return [values[row] for row in rows]


def join(texts: Sequence[bytes]) -> bytes:
    """Return packed values of all ranks as one text, in which equal values occur once."""
    places = {text: place for place, text in enumerate(dict.fromkeys(texts))}
    message = [[text.decode() for text in places], [places[text] for text in texts]]
    return zlib.compress(json.dumps(message, separators=(",", ":")).encode())


def split(data: bytes) -> list[Any]:
    """Return the values of a result of `join`, by rank. Equal values are one object.

    Raises:
        ValueError: a rank has sent no value; names the rank.
    """
    texts, places = json.loads(zlib.decompress(data))
    values = [unpack(text.encode(), places.index(place)) for place, text in enumerate(texts)]
    return [values[place] for place in places]


def broadcast_state(
    state: Any, source: int, group: dist.ProcessGroup, where: torch.device = CPU
) -> Any:
    """Return the state of rank `source` on all ranks.

    The state consists of tensors, numbers and containers. It is written by `torch.save` and read
    with `weights_only=True`, which creates no other objects. On other ranks, tensors that are not
    on the CPU of rank `source` are on `where`.
    """
    is_source = dist.get_rank() == source
    data = serialize(state) if is_source else torch.empty(0, dtype=torch.uint8, device="cpu")
    size = torch.tensor([data.numel()], dtype=torch.int64, device="cpu")
    root = dist.get_group_rank(group, source)
    broadcast(size, root, group)
    if not is_source:
        data = torch.empty(int(size), dtype=torch.uint8, device="cpu")
    broadcast(data, root, group)
    return state if is_source else load(data, where)


def unreadable(state: Any) -> str | None:
    """Return why other ranks could not read a state; None if they can."""
    try:
        load(serialize(state))
    except Exception as error:
        return str(error)
    return None


def serialize(state: Any) -> Tensor:
    file = io.BytesIO()
    torch.save(state, file)
    return torch.frombuffer(file.getbuffer(), dtype=torch.uint8)


def load(data: Tensor, where: torch.device = CPU) -> Any:
    def place(storage: Any, sender_device: str) -> Any:
        return storage if sender_device == "cpu" or where == CPU else storage.to(device=where)

    return torch.load(io.BytesIO(data.numpy().data), weights_only=True, map_location=place)


def _gather_large(
    senders: dict[bytes, int],
    sizes: dict[bytes, int],
    mine: bytes,
    own: bytes,
    group: dist.ProcessGroup,
) -> dict[bytes, bytes]:
    """Return large values by their rows.

    Args:
        senders: rank that sends the value of each row.
        sizes: bytes of the value of each row.
        mine: value of this rank.
        own: row of this rank.
        group: group of the ranks.
    """
    if len(senders) == 1 and len(sizes) == 1:  # equal values on all ranks
        return {own: mine}
    counts = [0] * group.size()
    for row, rank in senders.items():
        counts[rank] = sizes[row]
    parts = all_gather_sized(mine if senders.get(own) == group.rank() else b"", counts, group)
    return {row: parts[rank] for row, rank in senders.items()}


def _tag_tuples(value: Any, place: str) -> Any:
    """Return the value with tuples as `{TUPLE: [...]}`. Raise ValueError for types not in JSON."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, tuple)):
        items = [_tag_tuples(item, f"{place}[{i}]") for i, item in enumerate(value)]
        return items if isinstance(value, list) else {TUPLE: items}
    if not isinstance(value, dict):
        raise ValueError(
            f"{place} is a {type(value).__name__}, which JSON cannot hold; {JSON_TYPES}"
        )
    for key in value:
        if not isinstance(key, str) or key == TUPLE:
            raise ValueError(f"{place} has the key {key!r}, which JSON cannot hold; {JSON_TYPES}")
    return {key: _tag_tuples(item, f"{place}[{key!r}]") for key, item in value.items()}


def _restore_tuple(value: dict[str, Any]) -> Any:
    return tuple(value[TUPLE]) if value.keys() == {TUPLE} else value
