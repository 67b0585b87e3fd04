"""Functions `save` and `load` for checkpoints, and the choice of the checkpoint to load."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from offbeat.core.buckets import random_states as randomness
from offbeat.core.checkpoint import shard
from offbeat.core.checkpoint.folder import NAME, Folder
from offbeat.core.checkpoint.frozen import Frozen, freeze
from offbeat.core.checkpoint.saving import SaveGroup, Saver, Saving
from offbeat.core.checkpoint.shard import Manifest
from offbeat.core.checkpoint.sharded import as_shards, join_shards
from offbeat.core.console import console
from offbeat.core.observers import Observer
from offbeat.core.transport.topology import Topology

if TYPE_CHECKING:
    from offbeat.core.runtime.prepared import Model, Optimizer
    from offbeat.core.runtime.session import Session
    from offbeat.core.start.launch_request import LaunchRequest

KEEP = 2


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that `offbeat.load` has loaded.

    Attributes:
        path: directory of the checkpoint.
        iteration: iteration after which it was saved.
        exact: whether training continues bit by bit as the saved run would have. If false, weights,
            optimizer and iteration are loaded, and the strategy begins with a new plan.
        extra: saved values of `extra` that were not loaded into an object.
    """

    path: Path
    iteration: int
    exact: bool
    extra: dict[str, Any] = field(default_factory=dict)


def save(
    path: str | Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    extra: Mapping[str, Any] | None = None,
    *,
    keep: int = KEEP,
) -> Saving:
    """Save a checkpoint into the folder `path`, in the background.

    Every rank must call it between iterations. Each rank saves its own state.

    Args:
        path: folder of the checkpoints.
        model: model returned by `prepare`.
        optimizer: optimizer returned by `prepare`, or the list of optimizers.
        extra: by name, objects with `state_dict` and `load_state_dict` (schedulers, samplers), or
            values that can be pickled.
        keep: number of checkpoints to keep. Older ones are deleted when the new checkpoint is
            complete on every rank.

    Returns:
        A `Saving`. Call its `wait()` to wait until the checkpoint is on the disk.

        If the members of the job change and one fails meanwhile, the others go on and `wait`
        raises; the checkpoint before stays.

    Raises:
        ValueError: the state of the strategy is not in this process, or an argument is invalid.
        RuntimeError: an iteration is in progress.
    """
    session, optimizer = _session(model, optimizer)
    folder = Folder(path)
    if folder.only is not None:
        raise ValueError(f"path ({path}) must be the folder of checkpoints, not one of them")
    if not isinstance(keep, int) or keep < 1:
        raise ValueError(f"keep ({keep!r}) must be at least 1, the newest checkpoint")

    def begin() -> Saving:
        position = session.capture_position()
        saver = _saver(session)
        manifest = Manifest(
            session.worker,
            saver.company.size,
            position.iteration,
            session.strategy,
            position.alike,
            session.record,
            session.cluster.topology.record(),
        )
        samples = session.capture_samples()
        if session.worker == 0 and samples is None:
            _note_batches(saver, (extra or {}).values())
        # Of the module itself: that of the prepared model says that replicas differ.
        module = cast("Model", model).module
        frozen = partial(_freeze_all, module, optimizer, position.state, extra or {}, samples)
        return saver.save(_folder(path, session), frozen, manifest, keep)

    saving, lost = session.run_joint_call(begin)
    if saving is not None:
        return saving
    words = f"the checkpoint in {folder.path} was not saved: {_describe_lost(lost)}"
    console.print("checkpoint", words, "error", rank=session.worker)
    return Saving(folder.path, lambda: words)


def _note_batches(saver: Saver, extra: Iterable[Any]) -> None:
    """Print once that the checkpoint holds no batch, unless `extra` has a loader, a sampler or a
    batch, which can be iterated."""
    holds_batches = any(
        hasattr(thing, "__iter__") and not isinstance(thing, str) for thing in extra
    )
    if saver.has_noted_batches or holds_batches:
        return
    saver.has_noted_batches = True
    text = (
        "the checkpoint holds no position in the data, and no batch that the script has fetched "
        "ahead, such as by get_batch after backward. To continue exactly, pass the sampler, the "
        "loader or this batch in extra of offbeat.save"
    )
    console.print("checkpoint", text, "notice")


def _describe_lost(lost: str) -> str:
    """Return why a call of all ranks has failed."""
    return f"member {lost} has failed meanwhile" if lost else "other ranks did not complete it"


def load(
    path: str | Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    extra: Mapping[str, Any] | None = None,
) -> Checkpoint:
    """Load the newest checkpoint in `path` that is complete on every rank.

    Every rank must call it, after `prepare` and before the first iteration. Load trusted files
    only: a checkpoint is unpickled.

    If strategy, number of ranks and nodes are those of the saved job, each rank continues exactly
    from its saved state: position in the plan, optimizer state and random states included. A
    warning counts DataLoaders that draw seeds from torch's global generator, because they do not
    continue exactly. In a job with another strategy, number of ranks, or nodes, all ranks get
    weights and optimizer state of rank 0, or of its node where the model was sharded. This requires
    equal weights on all replicas of the saved job, as after `model.consolidate()`, or with a
    strategy that averages gradients only.

    Args:
        path: folder of the checkpoints, or directory of one checkpoint.
        model: model returned by `prepare`.
        optimizer: optimizer returned by `prepare`, or the list of optimizers.
        extra: objects by name, whose saved state is loaded.

    Returns:
        The loaded checkpoint.

    Raises:
        FileNotFoundError: no rank has a checkpoint, or this process has joined a running job, whose
            members have sent their state.
        ValueError: this job cannot continue from the checkpoint, or none is complete on every rank.
        RuntimeError: the checkpoint is damaged.
    """
    session, whole = _session(model, optimizer)
    if session.has_joined:
        raise FileNotFoundError(
            f"the checkpoints in {path} are not loaded, because this process has joined a running "
            "job and has the state of a member"
        )
    act = partial(_load, path, session, model, whole, extra or {})
    loaded, lost = session.run_joint_call(act)
    if loaded is None:
        raise RuntimeError(
            f"the checkpoint in {path} was not loaded: {_describe_lost(lost)}; start all members "
            "again"
        )
    return loaded


def _load(
    path: str | Path,
    session: Session,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    extra: Mapping[str, Any],
) -> Checkpoint:
    folder, saver = _folder(path, session), _saver(session)
    saver.settle()  # the checkpoint to load may still be written
    company = saver.company
    name, manifest = _choose_checkpoint(folder, session, company)
    directory = folder.shard(name, session.worker)
    exact = _same_job(manifest, session, company)
    read = partial(shard.read, directory)
    if not exact:
        read = partial(_read_replica, folder, name, manifest, model, optimizer)
    reads = exact or session.worker == 0 or session.alone
    found = _read(read if reads else None, company, session.worker)
    found = found if exact else company.share(found)
    found = as_shards(model, optimizer, found, whole=not exact)
    model.load_state_dict(found["model"])
    buffers = dict(model.named_buffers())
    for buffer, value in found["buffers"].items():
        buffers[buffer].data.copy_(value)
    optimizer.load_state_dict(found["optimizer"])
    rest = _load_extra(found["extra"], extra, directory)
    session.resume(manifest.iteration, found["state"] if exact else None)
    session.resume_samples(found.get("samples"))
    session.note_loaded(manifest.record)
    if exact:
        randomness.restore(found["random"], session.cluster.where)
        if session.worker == 0 and (loaders := randomness.count_unseeded_loaders()):
            warnings.warn(
                f"{loaders} DataLoader(s) of this process have generator=None: each new iterator "
                "draws its seed from torch's global generator, so a run that resumes within a pass "
                "over the data draws other random numbers than the uninterrupted run; pass "
                "generator=torch.Generator() and a sampler with a state_dict",
                stacklevel=4,
            )
    return Checkpoint(folder.path / name, manifest.iteration, exact, rest)


def iteration(model: nn.Module) -> int:
    """Return the number of trained iterations of a prepared model.

    Iterations before the loaded checkpoint are included.

    Args:
        model: model that `prepare` has returned.
    """
    return _session_of(model).iteration


def enable_checkpoints(job: LaunchRequest, model: Model, optimizer: Optimizer) -> None:
    """Load the newest checkpoint if the job resumes, and save every `checkpoint_every` iterations.

    Every rank must call it.
    """
    path, every, session = job.checkpoint, job.checkpoint_every, model._session
    if path is None:
        return
    if job.resume:
        try:
            found = load(path, model, optimizer)
            text = f"resumes from {found.path}, iteration {found.iteration}"
        except FileNotFoundError:
            text = f"starts from the beginning, because {path} has no checkpoint"
        if session.worker == 0:
            console.print("checkpoint", text, iteration=session.iteration)
    session.save_at_changes(partial(save, path, model, optimizer))
    if every is not None:
        session.observers.add(_Saving(path, every, model, optimizer))


class _Saving(Observer):
    """Saves a checkpoint every few iterations."""

    def __init__(self, path: str, every: int, model: Model, optimizer: Optimizer) -> None:
        self._path, self._every, self._model, self._optimizer = path, every, model, optimizer

    def stepped(self, number: int) -> None:
        if number % self._every == 0 and not self._model._session.observing:
            save(self._path, self._model, self._optimizer)


# ---- contents -------------------------------------------------------------------------------


def _freeze_all(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    state: Mapping[str, Any],
    extra: Mapping[str, Any],
    samples: tuple[Any, Any] | None = None,
) -> Frozen:
    weights, device = model.state_dict(), next(model.parameters()).device
    kept = optimizer.state_dict()
    value = {
        "model": weights,
        "buffers": {n: b for n, b in model.named_buffers() if n not in weights},
        "optimizer": kept,
        "state": state,
        "samples": samples,  # of jobs whose members change
        "random": randomness.capture(device),
        "extra": {name: _extra_state(thing) for name, thing in extra.items()},
    }
    names = {f"model.{name}": t for name, t in weights.items() if isinstance(t, Tensor)}
    for index, state_of_one in kept["state"].items():
        tensors = {k: t for k, t in state_of_one.items() if isinstance(t, Tensor)}
        names |= {f"optimizer.state.{index}.{key}": t for key, t in tensors.items()}
    return freeze(value, names)


def _extra_state(thing: Any) -> tuple[str, Any]:
    return ("state", thing.state_dict()) if _has_state_dict(thing) else ("value", thing)


def _load_extra(
    saved: Mapping[str, tuple[str, Any]], extra: Mapping[str, Any], directory: Path
) -> dict[str, Any]:
    """Load the state of objects. Return the saved values that were not loaded."""
    rest = {name: value for name, (_, value) in saved.items()}
    for name, thing in extra.items():
        if name not in saved:
            raise ValueError(
                f"extra ({name!r}) must be one of what {directory} has: "
                f"{', '.join(map(repr, saved)) or 'nothing'}"
            )
        if saved[name][0] == "state" and _has_state_dict(thing):
            thing.load_state_dict(rest.pop(name))
    return rest


def _has_state_dict(thing: Any) -> bool:
    methods = (getattr(thing, name, None) for name in ("state_dict", "load_state_dict"))
    return not isinstance(thing, type) and all(map(callable, methods))


# ---- choice ---------------------------------------------------------------------------------


def _choose_checkpoint(
    folder: Folder, session: Session, company: SaveGroup
) -> tuple[str, Manifest]:
    """Return name and manifest of the newest checkpoint of rank 0 that this job can load.

    A checkpoint of a job with the same number of ranks must be complete on every rank.
    """
    complete = {
        name: asdict(manifest) for name, manifest in folder.manifests(session.worker).items()
    }
    found = company.gather((folder.refusal(session.worker), complete))
    refusals = [f"rank {rank}: {words}" for rank, (words, _) in enumerate(found) if words]
    if refusals:
        raise ValueError(f"the checkpoint could not be loaded: {'; '.join(refusals)}")
    everyone = [
        {name: Manifest(**manifest) for name, manifest in by_name.items()} for _, by_name in found
    ]
    for name, manifest in everyone[0].items():
        missing = [rank for rank, by_name in enumerate(everyone) if name not in by_name]
        if manifest.world_size == company.size:
            if missing:
                continue
            ranks = {rank: by_name[name] for rank, by_name in enumerate(everyone)}
            _require_one_job(folder.path / name, ranks)
        newest = company.gather(folder.names())[0][0]
        if newest != name:
            warnings.warn(
                f"{folder.path / newest} is not complete on every rank; {name} is loaded",
                stacklevel=5,
            )
        _require_usable(folder.path / name, manifest, session, company)
        return name, manifest
    here = [rank for rank, by_name in enumerate(everyone) if by_name]
    if not here:
        raise FileNotFoundError(
            f"there is no checkpoint in {folder.path} on any rank; save one with offbeat.save"
        )
    without = next((rank for rank, by_name in enumerate(everyone) if not by_name), 0)
    # A job that began from the start would delete these parts as old checkpoints.
    raise ValueError(
        f"there is no checkpoint in {folder.path} that is complete on every rank: rank {here[0]} "
        f"has {next(iter(everyone[here[0]]))}, rank {without} "
        f"{next(iter(everyone[without]), 'none')}; bring every rank's part to its host, or move "
        "all parts away to begin from the start"
    )


def _job_of(manifest: Manifest) -> tuple[int, str, Mapping[str, Any]]:
    return manifest.world_size, manifest.strategy, manifest.nodes


def _require_one_job(path: Path, manifests: Mapping[int, Manifest]) -> None:
    """Raise ValueError if the shards of a checkpoint, by rank, are of different jobs."""
    for rank, one in manifests.items():
        if _job_of(one) != _job_of(manifests[0]):
            raise ValueError(
                f"{path} must be of one job on all ranks, and rank 0 has a shard of "
                f"{_describe_job(*_job_of(manifests[0]))}, rank {rank} of "
                f"{_describe_job(*_job_of(one))}; bring every rank's shard of one job to its host"
            )


def _same_job(manifest: Manifest, session: Session, company: SaveGroup) -> bool:
    return _job_of(manifest) == _own_job(session, company)


def _own_job(session: Session, company: SaveGroup) -> tuple[int, str, Mapping[str, Any]]:
    return company.size, session.strategy, session.cluster.topology.record()


def _require_usable(path: Path, manifest: Manifest, session: Session, company: SaveGroup) -> None:
    if not manifest.alike and not _same_job(manifest, session, company):
        own, remedy = _own_job(session, company), "start the job alike"
        if manifest.world_size > 1:  # otherwise each worker saves its own replica
            remedy += (
                ", or call model.consolidate() before offbeat.save: any number of ranks, any nodes "
                "and any strategy can go on from that"
            )
        raise ValueError(
            f"the checkpoint {path} is of {_describe_job(*_job_of(manifest))}, whose ranks have "
            f"states of their own, and here are {_describe_job(*own)}; {remedy}"
        )


def _describe_job(ranks: int, strategy: str, nodes: Mapping[str, Any]) -> str:
    topology = Topology.from_record(nodes)
    shape = "" if topology is None else f" ({topology.describe()})"
    return f"{ranks} ranks{shape} under {strategy}"


def _read_replica(
    folder: Folder,
    name: str,
    manifest: Manifest,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
) -> dict[str, Any]:
    """Return the state that another job continues from: that of rank 0, or of its node if the model
    was sharded."""
    topology = Topology.from_record(manifest.nodes)
    ranks = topology.node_of(0) if topology is not None and topology.sharded else (0,)
    found = {rank: one[name] for rank in ranks if name in (one := folder.manifests(rank))}
    if missing := [rank for rank in ranks if rank not in found]:
        raise ValueError(
            f"{folder.path / name} must hold the shards of ranks {', '.join(map(str, ranks))}, "
            f"which shared a replica, not without {', '.join(map(str, missing))}; copy these "
            "shards to the host of rank 0"
        )
    _require_one_job(folder.path / name, found)
    whole = join_shards(model, optimizer, [shard.read(folder.shard(name, r)) for r in ranks])
    return {key: whole.get(key) for key in ("model", "buffers", "optimizer", "extra", "samples")}


def _read(read: Callable[[], Any] | None, company: SaveGroup, worker: int) -> Any:
    """Return what `read` returns; None without it.

    Raises:
        RuntimeError: on every rank, if a rank could not read.
    """
    found = error = None
    try:
        found = None if read is None else read()
    except Exception as failure:
        error = f"rank {worker}: {failure}"
    failed = [words for words in company.gather(error) if words is not None]
    if failed:
        raise RuntimeError(f"the checkpoint could not be loaded: {'; '.join(failed)}")
    return found


# ---- session --------------------------------------------------------------------------------


def _session_of(model: nn.Module) -> Session:
    session = getattr(model, "_session", None)
    if session is None:
        raise ValueError(_not_prepared("model", model))
    return session


def _session(
    model: nn.Module, optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer]
) -> tuple[Session, torch.optim.Optimizer]:
    """Return the session of a prepared model, and the optimizer of all parameters."""
    session = _session_of(model)
    if isinstance(optimizer, Sequence):
        optimizer = _combined_optimizer(optimizer)
    if getattr(optimizer, "_session", None) is not session:
        raise ValueError(_not_prepared("optimizer", optimizer))
    if session.elsewhere is not None:
        raise ValueError(session.elsewhere)
    return session, optimizer


def _combined_optimizer(parts: Sequence[torch.optim.Optimizer]) -> torch.optim.Optimizer:
    """Return the optimizer that combines the list of optimizers returned by `prepare`."""
    whole = getattr(parts[0], "_whole", None) if parts else None
    if whole is None or list(map(id, parts)) != list(map(id, whole._parts)):
        raise ValueError(
            f"optimizer (a list of {len(parts)}) must be the list that offbeat.prepare returned: "
            "the same optimizers in the same order"
        )
    return whole


def _not_prepared(which: str, what: object) -> str:
    return f"{which} ({type(what).__name__}) must be the one that offbeat.prepare returned"


def _saver(session: Session) -> Saver:
    session.cluster.require_open()
    if session.saver is None:
        session.saver = Saver(None if session.alone else session.cluster.control)
    return session.saver


def _folder(path: str | Path, session: Session) -> Folder:
    """Return the folder of the job, or that of this worker if workers save separately."""
    if not session.alone or NAME.fullmatch(Path(path).name):
        return Folder(path)
    return Folder(Path(path) / f"worker-{session.worker}")
