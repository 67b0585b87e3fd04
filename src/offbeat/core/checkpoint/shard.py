"""A shard: what one rank saves, a directory in the format of torch.distributed.checkpoint."""

from __future__ import annotations

import json
import os
import shutil
import zlib
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from offbeat.core.checkpoint.frozen import Frozen, empty

SCHEMA = 1
MANIFEST = "manifest.json"
REST = "offbeat"  # everything but the tensors
CHUNK_BYTES = 1 << 22
# torch.distributed.checkpoint takes most of a second to import: only who saves or loads waits.


@dataclass(frozen=True)
class Manifest:
    """What a shard is of, and its files with sizes and CRC-32 sums: who has all of them is whole.

    `alike`: every rank has the same weights, and any number of ranks can go on from them.
    """

    worker: int
    world_size: int
    iteration: int
    strategy: str
    alike: bool
    files: dict[str, tuple[int, int]] = field(default_factory=dict)
    schema: int = SCHEMA


def write(directory: Path, frozen: Frozen, manifest: Manifest) -> None:
    """Write a shard; when it returns everything is on the disk, the manifest last."""
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    state: dict[str, Any] = {**frozen.tensors, REST: (frozen.pickle, frozen.looks)}
    _store(directory, state)
    sync(directory)
    files = {path.name: _sums(path) for path in sorted(directory.iterdir())}
    text = json.dumps(asdict(manifest) | {"files": files}, indent=1)
    with (directory / MANIFEST).open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    sync(directory)
    sync(directory.parent)  # it holds this one's name


def read(directory: Path) -> Any:
    """The value that was saved. ValueError naming a file that is not what was written."""
    for name, expected in look_up(directory).files.items():
        if tuple(expected) != _sums(directory / name):
            raise ValueError(
                f"{directory / name} is not what was written (size or checksum differ); load the "
                "checkpoint before it by giving its directory"
            )
    rest: dict[str, Any] = {REST: None}
    _fill(directory, rest)
    data, looks = rest[REST]
    tensors = {name: empty(look) for name, look in looks.items()}
    if tensors:
        _fill(directory, tensors)
    return Frozen(data, tensors).thaw()


def look_up(directory: Path) -> Manifest:
    """The manifest. OSError or ValueError if there is none or a file is missing or cut."""
    data = json.loads((directory / MANIFEST).read_text())
    if data.get("schema") != SCHEMA:
        raise ValueError(f"{directory} has schema {data.get('schema')!r}, not {SCHEMA}")
    manifest = Manifest(**data)
    for name, (size, _) in manifest.files.items():
        if (directory / name).stat().st_size != size:
            raise ValueError(f"{directory / name} must have {size} bytes")
    return manifest


def sync(directory: Path) -> None:
    """Names of files are on the disk, too."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _store(directory: Path, state: dict[str, Any]) -> None:
    """As torch's `save` of one process alone does it, which warns that there is only one."""
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
    from torch.distributed.checkpoint.filesystem import FileSystemWriter

    writer = FileSystemWriter(directory)  # it syncs its files
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
    """As torch's `load` does it."""
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


def _sums(path: Path) -> tuple[int, int]:
    """Size and CRC-32."""
    size = crc = 0
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            size, crc = size + len(chunk), zlib.crc32(chunk, crc)
    return size, crc
