"""save and load: a checkpoint of everything that a bit-exact continuation needs."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from offbeat.core.buckets import random_states as randomness
from offbeat.core.checkpoint import shard
from offbeat.core.checkpoint.folder import NAME, Folder
from offbeat.core.checkpoint.frozen import Frozen, freeze
from offbeat.core.checkpoint.saving import CheckpointGroup, Saver, Saving
from offbeat.core.checkpoint.shard import Manifest

if TYPE_CHECKING:
    from offbeat.core.runtime.prepared import Session

KEEP = 2


@dataclass(frozen=True)
class Checkpoint:
    """What `offbeat.load` has found: the `iteration` at which it was saved, and what was `extra`
    and could not be loaded into an object. `exact`: training goes on bit for bit as it would have;
    else weights, optimizer and iteration are loaded, and the strategy begins anew."""

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
    """Save a checkpoint into the folder `path`, in the background; `wait()` for it if need be.

    Every rank must call it, between iterations, with what `prepare` returned (`optimizer` may be a
    list); each saves its own state. `extra`: objects with `state_dict` and `load_state_dict`
    (schedulers, samplers), or values that pickle. The newest `keep` checkpoints stay; an older one
    goes when the new one is
    whole on every rank. ValueError for strategies whose state is elsewhere, RuntimeError within an
    iteration.
    """
    session, optimizer = _session(model, optimizer)
    folder = Folder(path)
    if folder.only is not None:
        raise ValueError(f"path ({path}) must be the folder of checkpoints, not one of them")
    if not isinstance(keep, int) or keep < 1:
        raise ValueError(f"keep ({keep!r}) must be at least 1, the newest checkpoint")
    position = session.capture_position()
    saver = _saver(session)
    manifest = Manifest(
        session.worker, saver.company.size, position.iteration, session.strategy, position.alike
    )
    frozen = partial(_frozen, model, optimizer, position.state, extra or {})
    return saver.save(_folder(path, session), frozen, manifest, keep)


def load(
    path: str | Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    extra: Mapping[str, Any] | None = None,
) -> Checkpoint:
    """Go on from the newest checkpoint in `path` that is whole on every rank, or from the one that
    `path` is. Only load what you trust: it is unpickled.

    Every rank must call it, after `prepare` and before the first iteration. With the strategy and
    the number of ranks that saved it, each rank goes on exactly where it stood, at the same place
    of the same plan, random states included; a warning names DataLoaders that draw from torch's
    global generator when the script iterates over them again. Otherwise, if all ranks had the same
    weights (after `model.consolidate()`, or where only gradients are averaged), all get those of
    rank 0 and its optimizer state. Objects in `extra` are loaded. FileNotFoundError without a
    checkpoint; ValueError for one that this job cannot go on from; RuntimeError for one that is
    damaged.
    """
    session, optimizer = _session(model, optimizer)
    folder, saver = _folder(path, session), _saver(session)
    saver.settle()  # this job may still be saving what it is to load
    company = saver.company
    name, manifest = _chosen(folder, session, company)
    directory = folder.shard(name, session.worker)
    exact = _same_job(manifest, session, company)
    if exact:
        found = _agreed(_read(directory), company, session.worker)
    else:
        source = _read(directory) if session.worker == 0 else None
        whole = _agreed(source, company, session.worker)
        common = ("model", "buffers", "optimizer", "extra")
        found = company.share(whole and {name: whole[name] for name in common})
    model.load_state_dict(found["model"])
    buffers = dict(model.named_buffers())
    for buffer, value in found["buffers"].items():
        buffers[buffer].data.copy_(value)
    optimizer.load_state_dict(found["optimizer"])
    rest = _load_extra(found["extra"], extra or {}, directory)
    session.resume(manifest.iteration, found["state"] if exact else None)
    if exact:
        randomness.restore(found["random"], session.cluster.where)
        if session.worker == 0 and (loaders := randomness.count_unseeded_loaders()):
            warnings.warn(
                f"{loaders} DataLoader(s) of this process have generator=None: each new iterator "
                "draws its seed from torch's global generator, so a run that resumes within a pass "
                "over the data draws other random numbers than the uninterrupted run; pass "
                "generator=torch.Generator() and a sampler with a state_dict",
                stacklevel=2,
            )
    return Checkpoint(folder.path / name, manifest.iteration, exact, rest)


def iteration(model: nn.Module) -> int:
    """Iterations that a prepared model has trained, those before it was resumed included."""
    return _session_of(model).iteration


# ---- what is saved --------------------------------------------------------------------------


def _frozen(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    state: Mapping[str, Any],
    extra: Mapping[str, Any],
) -> Frozen:
    weights, device = model.state_dict(), next(model.parameters()).device
    kept = optimizer.state_dict()
    value = {
        "model": weights,
        "buffers": {n: b for n, b in model.named_buffers() if n not in weights},
        "optimizer": kept,
        "state": state,
        "random": randomness.capture(device),
        "extra": {name: _of_extra(thing) for name, thing in extra.items()},
    }
    names = {f"model.{name}": t for name, t in weights.items() if isinstance(t, Tensor)}
    for index, mine in kept["state"].items():
        tensors = {k: t for k, t in mine.items() if isinstance(t, Tensor)}
        names |= {f"optimizer.state.{index}.{key}": t for key, t in tensors.items()}
    return freeze(value, names)


def _of_extra(thing: Any) -> tuple[str, Any]:
    return ("state", thing.state_dict()) if _stateful(thing) else ("value", thing)


def _load_extra(
    saved: Mapping[str, tuple[str, Any]], extra: Mapping[str, Any], directory: Path
) -> dict[str, Any]:
    """Load objects; what is left of what was saved."""
    rest = {name: value for name, (_, value) in saved.items()}
    for name, thing in extra.items():
        if name not in saved:
            raise ValueError(
                f"extra ({name!r}) must be one of what {directory} has: "
                f"{', '.join(map(repr, saved)) or 'nothing'}"
            )
        if saved[name][0] == "state" and _stateful(thing):
            thing.load_state_dict(rest.pop(name))
    return rest


def _stateful(thing: Any) -> bool:
    methods = (getattr(thing, name, None) for name in ("state_dict", "load_state_dict"))
    return not isinstance(thing, type) and all(map(callable, methods))


# ---- which is loaded ------------------------------------------------------------------------


def _chosen(folder: Folder, session: Session, company: CheckpointGroup) -> tuple[str, Manifest]:
    """The newest checkpoint that all ranks have, or that rank 0 has of a job of another size."""
    mine = {name: asdict(manifest) for name, manifest in folder.whole(session.worker).items()}
    everyone = [
        {name: Manifest(**manifest) for name, manifest in theirs.items()}
        for theirs in company.gather(mine)
    ]
    for name, manifest in everyone[0].items():
        missing = [rank for rank, mine in enumerate(everyone) if name not in mine]
        if manifest.world_size == company.size and missing:
            continue
        newer = [other for other in company.gather(folder.names())[0] if other > name]
        if newer:
            warnings.warn(
                f"{folder.path / newer[0]} is not whole on every rank; {name} is loaded",
                stacklevel=3,
            )
        _require_usable(folder.path / name, manifest, session, company)
        return name, manifest
    raise FileNotFoundError(_nothing(folder, everyone))


def _nothing(folder: Folder, everyone: Sequence[Mapping[str, Manifest]]) -> str:
    here = [rank for rank, mine in enumerate(everyone) if mine]
    if not here:
        return f"there is no checkpoint in {folder.path} on any rank; save one with offbeat.save"
    without = next((rank for rank, mine in enumerate(everyone) if not mine), 0)
    return (
        f"there is no checkpoint in {folder.path} that is whole on every rank: rank {here[0]} has "
        f"{next(iter(everyone[here[0]]))}, rank {without} "
        f"{next(iter(everyone[without]), 'none')}; bring every rank's part to its host"
    )


def _same_job(manifest: Manifest, session: Session, company: CheckpointGroup) -> bool:
    return manifest.world_size == company.size and manifest.strategy == session.strategy


def _require_usable(
    path: Path, manifest: Manifest, session: Session, company: CheckpointGroup
) -> None:
    if not manifest.alike and not _same_job(manifest, session, company):
        raise ValueError(
            f"the checkpoint {path} is of {manifest.world_size} ranks under {manifest.strategy}, "
            f"each with weights of its own, and here are {company.size} under {session.strategy}; "
            "start the job alike, or call model.consolidate() before offbeat.save: any number of "
            "ranks and any strategy can go on from that"
        )


def _read(directory: Path) -> Any:
    """What was saved, or the error."""
    try:
        return shard.read(directory)
    except Exception as error:
        return error


def _agreed(found: Any, company: CheckpointGroup, worker: int) -> Any:
    """RuntimeError on every rank if one could not read."""
    mine = f"rank {worker}: {found}" if isinstance(found, Exception) else None
    failed = [words for words in company.gather(mine) if words is not None]
    if failed:
        raise RuntimeError(f"the checkpoint could not be loaded: {'; '.join(failed)}")
    return found


# ---- whose ----------------------------------------------------------------------------------


def _session_of(model: nn.Module) -> Session:
    session = getattr(model, "_session", None)
    if session is None:
        raise ValueError(_not_prepared("model", model))
    return session


def _session(
    model: nn.Module, optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer]
) -> tuple[Session, torch.optim.Optimizer]:
    """Return the session, and the optimizer of all parameters."""
    session = _session_of(model)
    if isinstance(optimizer, Sequence):
        optimizer = _as_one(optimizer)
    if getattr(optimizer, "_session", None) is not session:
        raise ValueError(_not_prepared("optimizer", optimizer))
    if session.elsewhere is not None:
        raise ValueError(session.elsewhere)
    return session, optimizer


def _as_one(parts: Sequence[torch.optim.Optimizer]) -> torch.optim.Optimizer:
    """Return the optimizer that `prepare` made of several."""
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
    assert isinstance(session.saver, Saver)
    return session.saver


def _folder(path: str | Path, session: Session) -> Folder:
    """The job's, or the worker's own where each saves for itself."""
    if not session.alone or NAME.fullmatch(Path(path).name):
        return Folder(path)
    return Folder(Path(path) / f"worker-{session.worker}")
