"""Journal of the membership service: a file of commands that restores its state after a restart.

The first line names the format. Each further line is an entry: a checksum, and in JSON its kind
(snapshot or command), the number of earlier entries that the disk held when it was written, and its
value. A command is written before it is applied and answered. So an incomplete last line belongs to
a command without an answer, and is dropped. Some commands are written without a wait for the disk:
damaged entries are dropped if no later entry states that the disk held them.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

from offbeat.core.files import require_schema

SCHEMA = 1
LEAST_REWRITE_BYTES = 4 << 20  # the journal is rewritten if it has grown by this size
COMMAND, SNAPSHOT = "command", "snapshot"  # kinds of entries
_FORMAT = "offbeat-membership-journal"

Entry = tuple[str, dict[str, Any]]


class Journal:
    """An open journal. One process may have it open.

    Args:
        path: path of the file. A missing file is created.

    Attributes:
        entries: kind and value of the entries that the file holds, in the order of writing: at most
            one snapshot, first, and commands.

    Raises:
        ValueError: the file is no journal, is damaged before its last line, or another process has
            it open.
        SchemaError: another version of offbeat has written the file.
        OSError: the file cannot be opened.
    """

    def __init__(self, path: Path):
        self.path = path
        self._file = _open_locked(path)
        try:
            self.entries, self._size_bytes = _read(path, self._file)
        except BaseException:
            self._file.close()
            raise
        self._file.truncate(self._size_bytes)
        self._rewritten_bytes = self._size_bytes
        self._count, self._synced_count = len(self.entries), 0
        if not self._size_bytes:
            self._write(_header())
            _sync_folder(path)

    @property
    def is_long(self) -> bool:
        """Whether a snapshot should replace the commands."""
        return self._size_bytes > 2 * self._rewritten_bytes + LEAST_REWRITE_BYTES

    def append(self, command: dict[str, Any], *, sync: bool) -> None:
        """Append a command.

        Args:
            command: command.
            sync: whether the command must outlast a failure of the host, not only of the process.

        Raises:
            OSError: names the file, which keeps its former entries, as on a full disk.
        """
        self._write(_line(COMMAND, self._synced_count, command), sync=sync)
        self._count += 1
        if sync:
            self._synced_count = self._count

    def rewrite(self, snapshot: dict[str, Any]) -> None:
        """Replace all entries by a snapshot, atomically.

        Raises:
            OSError: names the file, which keeps its former entries.
        """
        data, draft = _header() + _line(SNAPSHOT, 0, snapshot), _draft_of(self.path)
        self._rewritten_bytes = self._size_bytes  # if it fails, the next attempt is later
        try:
            file = _open_locked(draft)
            try:
                file.truncate(0)
                _write_at(file, 0, data)
                os.fsync(file.fileno())
                draft.replace(self.path)
            except BaseException:
                file.close()
                draft.unlink(missing_ok=True)
                raise
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self.path)) from error
        self._file.close()
        self._file, self._size_bytes, self._rewritten_bytes = file, len(data), len(data)
        self._count = self._synced_count = 1
        _sync_folder(self.path)

    def close(self) -> None:
        """Close the file, so that another process may open it."""
        self._file.close()

    def _write(self, data: bytes, *, sync: bool = True) -> None:
        try:
            _write_at(self._file, self._size_bytes, data)
            if sync:
                os.fsync(self._file.fileno())
        except OSError as error:
            with suppress(OSError):
                self._file.truncate(self._size_bytes)
            raise OSError(error.errno, error.strerror, str(self.path)) from error
        self._size_bytes += len(data)


def _draft_of(path: Path) -> Path:
    return path.with_name(path.name + ".part")


def _write_at(file: BinaryIO, offset: int, data: bytes) -> None:
    view = memoryview(data)
    while len(view):
        count = os.pwrite(file.fileno(), view, offset)
        view, offset = view[count:], offset + count


def _open_locked(path: Path) -> BinaryIO:
    """Open a file that no other process has open, without a change of its content."""
    import fcntl  # not on Windows, where offbeat can plan and simulate only

    while True:
        file = open(os.open(path, os.O_RDWR | os.O_CREAT, 0o600), "r+b", buffering=0)  # noqa: SIM115, PTH123
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            raise ValueError(
                f"journal ({path}) must be open in one service, and another one has it open; end "
                "that service, or give another journal"
            ) from None
        except OSError as error:
            file.close()
            raise ValueError(
                f"journal ({path}) must be on a file system with locks ({error.strerror}); give a "
                "local path"
            ) from error
        with suppress(FileNotFoundError):
            # Otherwise another service has replaced the file before the lock.
            if path.stat().st_ino == os.fstat(file.fileno()).st_ino:
                return file
        file.close()


def _sync_folder(path: Path) -> None:
    """Make the name of a new file outlast a failure of the host."""
    folder = os.open(path.absolute().parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _header() -> bytes:
    return (json.dumps({"format": _FORMAT, "schema": SCHEMA}) + "\n").encode()


def _line(kind: str, synced_count: int, value: dict[str, Any]) -> bytes:
    text = json.dumps([kind, synced_count, value], separators=(",", ":")).encode()
    return b"%08x %b\n" % (zlib.crc32(text), text)


def _read(path: Path, file: BinaryIO) -> tuple[list[Entry], int]:
    """Return the complete entries, and the size of the part of the file that holds them."""
    file.seek(0)
    *lines, rest = file.read().split(b"\n")
    if not lines and _header().startswith(rest):
        return [], 0
    try:
        header = json.loads(lines[0])
        is_journal = header["format"] == _FORMAT
    except (IndexError, KeyError, TypeError, ValueError):
        is_journal, header = False, {}
    if not is_journal:
        raise ValueError(
            f"journal ({path}) must be a file of `offbeat membership`, or a new file; its first "
            "line names another format"
        )
    require_schema(header.get("schema"), SCHEMA, path)
    entries = [_parse(line) for line in lines[1:]]
    complete = entries.index(None) if None in entries else len(entries)
    if any(entry is not None and entry[1] > complete for entry in entries[complete:]):
        raise ValueError(
            f"line {complete + 2} of the journal ({path}) is damaged, and the disk held it before "
            "later lines; restore the file from a copy, or begin the job again with a new journal"
        )
    found = [(entry[0], entry[2]) for entry in entries[:complete] if entry is not None]
    return found, sum(len(line) + 1 for line in lines[: complete + 1])


def _parse(line: bytes) -> tuple[str, int, dict[str, Any]] | None:
    """Return kind, number of synced entries, and value of an entry; None if it is damaged."""
    checksum, _, text = line.partition(b" ")
    if checksum != b"%08x" % zlib.crc32(text):
        return None
    kind, synced_count, value = json.loads(text)
    return kind, synced_count, value


def replay(
    journal: Journal,
    restore: Callable[[dict[str, Any]], None],
    apply: Callable[[dict[str, Any]], None],
) -> None:
    """Pass the entries of a journal to `restore` (snapshots) and `apply` (commands), and drop them.

    Raises:
        ValueError: an entry cannot be applied; names the file and the line.
    """
    entries, journal.entries = journal.entries, []
    for number, (kind, value) in enumerate(entries, 2):
        try:
            (restore if kind == SNAPSHOT else apply)(value)
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"line {number} of the journal ({journal.path}) cannot be applied ({error}); use "
                "the version of offbeat that has written it, or a new journal"
            ) from error
