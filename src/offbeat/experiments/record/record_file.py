"""File format of the record of one rank: blocks that are appended during training.

Each block is one line with a JSON object. The fields in `COLUMNS`, `votes` and `metrics` continue
the columns of the earlier blocks; other fields replace their earlier values. The record of a killed
run can be read up to its last complete block, and the memory for an unwritten block is bounded.
"""

from __future__ import annotations

import errno
import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar
from weakref import WeakValueDictionary

from offbeat.core.files import require_schema

SCHEMA = 2
SUFFIX = ".jsonl"
COLUMNS = ("ends_s", "losses", "without_update", "warnings", "decisions")
MOST_UNWRITTEN_BYTES = 1 << 26  # largest size of the blocks kept while the file cannot be written
MOST_LOSSES = 20_000  # largest number of losses kept of a record; longer records average neighbours


def path_of(directory: str | Path, rank: int) -> Path:
    """Return the path of a rank's record."""
    return Path(directory) / f"rank{rank}{SUFFIX}"


def records_in(directory: Path) -> list[Path]:
    """Return the paths of all records in a folder, in order of rank."""
    return sorted(directory.glob(f"rank*{SUFFIX}"), key=lambda path: (_rank_of(path), path.name))


class RecordWriter:
    """Writer of one record. The first block truncates the file.

    If a script trains two models at once, only the writer that began last appends to the file.
    """

    _last: ClassVar[WeakValueDictionary[Path, RecordWriter]] = WeakValueDictionary()

    def __init__(self, path: Path) -> None:
        self.path = path
        self._begun = False
        self._unwritten = b""  # blocks whose write has failed
        self._is_full = False  # whether blocks have been dropped

    def append(self, block: Mapping[str, Any]) -> None:
        """Append one block, after the blocks whose write has failed, in a single write.

        With more than `MOST_UNWRITTEN_BYTES` of unwritten blocks, this and all later blocks are
        dropped.

        Raises:
            OSError: the file cannot be written. It ends with the last complete block.
        """
        if self._begun and self._last.get(self.path) is not self:
            return
        self._is_full = self._is_full or len(self._unwritten) > MOST_UNWRITTEN_BYTES
        if not self._is_full:
            line = json.dumps({"schema": SCHEMA, **block}, separators=(",", ":"))
            self._unwritten += f"{line}\n".encode()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("ab" if self._begun else "wb", buffering=0) as file:
            before = file.seek(0, os.SEEK_END)
            written = file.write(self._unwritten)
            if written < len(self._unwritten):
                file.truncate(before)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._unwritten = b""
        self._begun, self._last[self.path] = True, self


def read(path: str | Path) -> dict[str, Any]:
    """Read a record as one object.

    Args:
        path: path of the record.

    Returns:
        Fields of the record, with the measured trace as `trace`. `cut` describes where the record
        ends if the run was killed, else it is None. With more than `MOST_LOSSES` losses, each loss
        is the mean over `losses_of` iterations.

    Raises:
        ValueError: the file is not a record.
    """
    merged = _MergedRecord()
    torn = False
    with Path(path).open("rb") as file:
        for line in file:
            block = _parse_block(line)
            if block is None:
                torn = True  # only allowed in the last line
            elif torn:
                raise ValueError("a block in its middle is not JSON")
            else:
                merged.add(block)
    return merged.record(torn)


def first_block(path: str | Path) -> dict[str, Any]:
    """Return the first block of a record; empty if no block is complete."""
    with Path(path).open("rb") as file:
        return _parse_block(file.readline()) or {}


def iterations_so_far(path: str | Path) -> int:
    """Return the number of iterations in a record that may still grow; 0 without a file."""
    try:
        with Path(path).open("rb") as file:
            last = None
            for line in _last_lines(file):
                last = _parse_block(line)
                if last is not None:
                    break
    except OSError:
        return 0
    return 0 if last is None else int(last["first"]) + len(last["ends_s"])


class _MergedRecord:
    """The merged blocks of one record."""

    def __init__(self) -> None:
        self._fields: dict[str, Any] = {}
        self._columns: dict[str, list[Any]] = {name: [] for name in COLUMNS if name != "losses"}
        self._losses = _LossMeans()
        self._votes: dict[str, Any] = {}
        self._metrics: dict[str, Any] = {}

    def add(self, block: dict[str, Any]) -> None:
        require_schema(block.pop("schema", None), SCHEMA, "every block")
        if block["first"] != len(self._columns["ends_s"]):
            raise ValueError(f"the block from iteration {block['first']} on must follow the others")
        for name, column in self._columns.items():
            column += block.pop(name, ())
        for iteration, loss in block.pop("losses", ()):
            self._losses.add(iteration, float("nan") if loss is None else loss)
        _extend_columns(self._votes, block.pop("votes", {}))
        _extend_columns(self._metrics, block.pop("metrics", {}))
        self._fields |= block

    def record(self, torn: bool) -> dict[str, Any]:
        if not self._fields:
            raise ValueError("the record holds no whole block")
        fields, columns = dict(self._fields), self._columns
        ends = columns.pop("ends_s")
        del fields["first"]
        closed = fields.pop("closed", False)
        trace = {
            "schema": 1,
            "source": "measured",
            "strategy": fields["strategy"],
            "ends_s": [ends],
            "starts_s": [0.0],
            "spans": fields.pop("spans", {"fields": [], "rows": []}),
            "period": fields.pop("period"),
            "uneven": fields.pop("uneven"),
            "notes": fields.pop("notes", {}),
        }
        return {
            **fields,
            **columns,
            "losses": [[i, ends[i], loss] for i, loss in self._losses.means() if i < len(ends)],
            "losses_of": self._losses.width,
            "metrics": {
                name: [
                    [i, ends[i], math.nan if value is None else value]
                    for i, value in values
                    if i < len(ends)
                ]
                for name, values in self._metrics.items()
            },
            "trace": trace,
            "votes": self._votes,
            "cut": None if closed else _describe_cut(len(ends), torn),
        }


class _LossMeans:
    """Losses of iterations, averaged over groups of `width` consecutive iterations.

    `width` is a power of two, so that groups of different ranks have common boundaries.
    """

    def __init__(self) -> None:
        self.width = 1
        self._sums: dict[int, tuple[float, int, int]] = {}  # sum, count, last iteration

    def add(self, iteration: int, loss: float) -> None:
        self._add_mean(iteration, loss, 1)
        if len(self._sums) > MOST_LOSSES:
            self.width *= 2
            before, self._sums = self._sums, {}
            for total, count, last in before.values():
                self._add_mean(last, total, count)

    def _add_mean(self, iteration: int, loss: float, count: int) -> None:
        total, before, _ = self._sums.get(iteration // self.width, (0.0, 0, 0))
        self._sums[iteration // self.width] = total + loss, before + count, iteration

    def means(self) -> Iterator[tuple[int, float]]:
        for total, count, last in self._sums.values():
            yield last, total / count


def _extend_columns(into: dict[str, Any], more: Mapping[str, Any]) -> None:
    for name, value in more.items():
        if isinstance(value, dict):
            _extend_columns(into.setdefault(name, {}), value)
        else:
            into.setdefault(name, []).extend(value)


def _describe_cut(iterations: int, torn: bool) -> str:
    middle = ", in the middle of a block, which is left out" if torn else ""
    return f"ends after {iterations:,} iterations{middle}: the run was killed, or still goes on"


def _parse_block(line: bytes) -> dict[str, Any] | None:
    """Return the block of a line; None for the incomplete line of a killed process."""
    if not line.endswith(b"\n"):
        return None
    try:
        block = json.loads(line)
    except ValueError:
        return None
    return block if isinstance(block, dict) else None


def _last_lines(file: Any) -> Iterator[bytes]:
    """Yield the last line and the one before, without reading the whole file."""
    file.seek(0, 2)
    size, step = file.tell(), 1 << 16
    while True:
        begin = max(0, size - step)
        file.seek(begin)
        lines = file.read(size - begin).splitlines(keepends=True)
        if begin == 0 or len(lines) > 2:
            yield from reversed(lines[-2:])
            return
        step *= 4


def _rank_of(path: Path) -> int:
    digits = path.stem.removeprefix("rank")
    return int(digits) if digits.isdigit() else 1 << 30
