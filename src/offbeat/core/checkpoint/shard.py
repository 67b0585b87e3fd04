"""Shard of a checkpoint: one rank's directory, in the format of torch.distributed.checkpoint."""

from __future__ import annotations

import json
import os
import shutil
import zlib
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from offbeat.core.checkpoint.frozen import Frozen, empty
from offbeat.core.files import require_schema

SCHEMA = 1
MANIFEST = "manifest.json"
REST = "offbeat"  # key of everything but the tensors
CHUNK_BYTES = 1 << 22
# Importing torch.distributed.checkpoint takes most of a second, so functions import it on use.


@dataclass(frozen=True)
class Manifest:
    """Description of a shard, and its files with sizes and CRC-32 checksums.

    A shard is complete if all files exist with these sizes. `alike` is whether all ranks have the
    same weights. If it is true, any number of ranks can continue from the checkpoint. `record` is
    the id of the record of the run; None if it was not recorded. `nodes` is `Topology.record()` of
    the job; empty if every rank held a replica of its own.
    """

    worker: int
    world_size: int
    iteration: int
    strategy: str
    alike: bool
    record: str | None = None
    nodes: dict[str, Any] = field(default_factory=dict)
    files: dict[str, tuple[int, int]] = field(default_factory=dict)
    schema: int = SCHEMA


def write(directory: Path, frozen: Frozen, manifest: Manifest) -> None:
    """Write a shard to the disk, the manifest last. All files are synced when it returns."""
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    state: dict[str, Any] = {**frozen.tensors, REST: (frozen.pickle, frozen.looks)}
    _store(directory, state)
    sync(directory)
    files = {path.name: _size_and_crc(path) for path in sorted(directory.iterdir())}
    text = json.dumps(asdict(manifest) | {"files": files}, indent=1)
    with (directory / MANIFEST).open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    sync(directory)
    sync(directory.parent)  # the parent holds the name of this directory


def require_whole(directory: Path) -> None:
    """Raise ValueError if size or checksum of a file differs from the manifest; names the file."""
    for name, expected in read_manifest(directory).files.items():
        if tuple(expected) != _size_and_crc(directory / name):
            raise ValueError(
                f"{directory / name} is not what was written (size or checksum differ); load the "
                "checkpoint before it by giving its directory"
            )


def read(directory: Path) -> Any:
    """Return the saved value.

    Raises:
        ValueError: size or checksum of a file differs from the manifest; names the file.
    """
    require_whole(directory)
    rest: dict[str, Any] = {REST: None}
    _fill(directory, rest)
    data, looks = rest[REST]
    tensors = {name: empty(look) for name, look in looks.items()}
    if tensors:
        _fill(directory, tensors)
    return Frozen(data, tensors).thaw()


def read_manifest(directory: Path) -> Manifest:
    """Return the manifest of a shard.

    Raises:
        OSError: the manifest or a file is missing.
        SchemaError: the schema is that of another version.
        ValueError: fields are missing or unknown, or a file has another size.
    """
    data = json.loads((directory / MANIFEST).read_text())
    require_schema(data.get("schema"), SCHEMA, directory)
    known = {field.name for field in fields(Manifest)}
    if odd := data.keys() ^ known:
        path = directory / MANIFEST
        raise ValueError(f"{path}: field {min(odd)!r} is missing or unknown in schema {SCHEMA}")
    manifest = Manifest(**data)
    for name, (size, _) in manifest.files.items():
        if (directory / name).stat().st_size != size:
            raise ValueError(f"{directory / name} must have {size} bytes")
    return manifest


def sync(directory: Path) -> None:
    """Sync a directory, so that the names of its files are on the disk."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _store(directory: Path, state: dict[str, Any]) -> None:
    """Write the state as torch's `save` does for a single process, but without its warning."""
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
    from torch.distributed.checkpoint.filesystem import FileSystemWriter

    writer = FileSystemWriter(directory)  # the writer syncs its files
    planner = DefaultSavePlanner(flatten_state_dict=False)
    planner.set_up_planner(state, writer.storage_meta(), is_coordinator=True)
    writer.set_up_storage_writer(True)
    mine = writer.prepare_local_plan(planner.create_local_plan())
    plans, metadata = planner.create_global_plan([mine])
    [mine] = writer.prepare_global_plan(plans)
    results = writer.write_data(planner.finish_plan(mine), planner)
    results.wait()
    writer.finish(metadata, [results.value()])


def _fill(directory: Path, state: dict[str, Any]) -> None:
    """Read into the tensors of `state` as torch's `load` does."""
    from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
    from torch.distributed.checkpoint.filesystem import FileSystemReader

    reader = FileSystemReader(directory)
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    metadata = reader.read_metadata()
    planner.set_up_planner(state, metadata, is_coordinator=True)
    reader.set_up_storage_reader(metadata, is_coordinator=True)
    mine = reader.prepare_local_plan(planner.create_local_plan())
    [mine] = reader.prepare_global_plan(planner.create_global_plan([mine]))
    reader.read_data(planner.finish_plan(mine), planner).wait()


def _size_and_crc(path: Path) -> tuple[int, int]:
    """Return size and CRC-32 checksum of a file."""
    size = crc = 0
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            size, crc = size + len(chunk), zlib.crc32(chunk, crc)
    return size, crc
