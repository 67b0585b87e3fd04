"""Blocks: the record of one rank on disk, which grows while it trains.

One JSON object per line. A line's fields replace those of the lines before; the fields in COLUMNS
go on. So a run that was killed is readable up to its last whole block, and memory stays flat.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar
from weakref import WeakValueDictionary

SCHEMA = 2
SUFFIX = ".jsonl"
COLUMNS = ("ends_s", "losses", "without_update", "warnings", "decisions")  # and those of `votes`
MOST_LOSSES = 20_000  # of a record that is read; beyond, they are means of some iterations


def path_of(directory: str | Path, rank: int) -> Path:
    """Where a rank's record is."""
    return Path(directory) / f"rank{rank}{SUFFIX}"


def records_in(directory: Path) -> list[Path]:
    """The records of all ranks, by rank."""
    found = [*directory.glob(f"rank*{SUFFIX}"), *directory.glob("rank*.json")]
    return sorted(found, key=lambda path: (_rank_of(path), path.name))


class Blocks:
    """Writes one record; the file is begun anew with the first block.

    Where a script trains two models at once the record is that of the one that began later.
    """

    _last: ClassVar[WeakValueDictionary[Path, Blocks]] = WeakValueDictionary()  # who writes where

    def __init__(self, path: Path) -> None:
        self.path = path
        self._begun = False

    def append(self, block: Mapping[str, Any]) -> None:
        """Add one block, in one write. OSError if it cannot be."""
        if self._begun and self._last.get(self.path) is not self:
            return
        line = json.dumps({"schema": SCHEMA, **block}, separators=(",", ":")) + "\n"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a" if self._begun else "w") as file:
            file.write(line)
        self._begun, self._last[self.path] = True, self


def read(path: str | Path) -> dict[str, Any]:
    """A record as one object; ValueError on what is none.

    `cut` says in words that it was never closed, None if it was. Of more than MOST_LOSSES
    iterations the losses are means of `losses_of` neighbours each.
    """
    path = Path(path)
    if path.suffix != SUFFIX:  # of one piece
        return json.loads(path.read_text())
    merged = _Merged()
    torn = False
    with path.open("rb") as file:
        for line in file:
            block = _parse_block(line)
            if block is None:
                torn = True  # a whole block after it would be a broken file
            elif torn:
                raise ValueError("a block in its middle is not JSON")
            else:
                merged.add(block)
    return merged.record(torn)


def first_block(path: str | Path) -> dict[str, Any]:
    """What a record says of itself, without its columns; empty if it says nothing yet."""
    path = Path(path)
    with path.open("rb") as file:
        return (_parse_block(file.readline()) or {}) if path.suffix == SUFFIX else read(path)


def iterations_so_far(path: str | Path) -> int:
    """How many iterations a record holds that may still grow; 0 if it does not exist."""
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


class _Merged:
    """Blocks of one record, put together."""

    def __init__(self) -> None:
        self._fields: dict[str, Any] = {}
        self._columns: dict[str, list[Any]] = {name: [] for name in COLUMNS if name != "losses"}
        self._losses = _Losses()
        self._votes: dict[str, Any] = {}

    def add(self, block: dict[str, Any]) -> None:
        if block.pop("schema", None) != SCHEMA:
            raise ValueError(f"schema of every block must be {SCHEMA}; run again with this version")
        if block["first"] != len(self._columns["ends_s"]):
            raise ValueError(f"the block from iteration {block['first']} on must follow the others")
        for name, column in self._columns.items():
            column += block.pop(name, ())
        for iteration, loss in block.pop("losses", ()):
            self._losses.add(iteration, float("nan") if loss is None else loss)
        _extend_columns(self._votes, block.pop("votes", {}))
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
            "schema": 1,
            "losses": [[i, ends[i], loss] for i, loss in self._losses.means() if i < len(ends)],
            "losses_of": self._losses.width,
            "trace": trace,
            "votes": self._votes,
            "cut": None if closed else _describe_cut(len(ends), torn),
        }


class _Losses:
    """Losses of iterations, or their means over `width` neighbours, a power of two, so that two
    ranks' ends of neighbourhoods meet."""

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
    """A whole block, or None of what a killed process has left."""
    if not line.endswith(b"\n"):
        return None
    try:
        block = json.loads(line)
    except ValueError:
        return None
    return block if isinstance(block, dict) else None


def _last_lines(file: Any) -> Iterator[bytes]:
    """The last line and the one before, without reading the rest."""
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
