"""What ranks of two nodes do with frameworks, models sharded inside; and both worlds of frameworks
in one process that has imported these."""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from harness.ranks import run_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from cases import frameworks_workers
from cases.frameworks_workers import BATCH, RANKS, SCRIPTS, forget_accelerate
from cases.sharded_jobs import average

NODES, INSIDE = 2, 2
OBSERVED, PERIOD = 6, 2  # iterations that all average, then one of so many
SAVED = 8  # the iteration after which Lightning saves, between two averages
LIGHTNING = "with_lightning_nodes.py"
CLIPPED = {
    "with_accelerate_nodes.py": True,
    LIGHTNING: False,
    "with_trainer_nodes.py": True,
}


def both_worlds(directory: str, limit_s: float) -> tuple[list[Any], list[Any]]:
    """What each rank has seen: of two ranks, and of two nodes of two."""
    flat = run_ranks(RANKS, frameworks_workers.everything, directory, timeout_s=limit_s)
    return flat, run_ranks(NODES * INSIDE, in_nodes, directory, timeout_s=limit_s)


def in_nodes(directory: str) -> dict[str, dict[str, Any]]:
    """By script: its losses and whole weights, and those of a loop with torch alone."""
    rank = int(os.environ["RANK"])
    os.environ |= {
        "TORCHELASTIC_RUN_ID": "1",
        "GROUP_RANK": str(rank // INSIDE),
        "LOCAL_RANK": str(rank % INSIDE),
        "LOCAL_WORLD_SIZE": str(INSIDE),
        "HF_HUB_OFFLINE": "1",
        "OFFBEAT_STRATEGY": f"local-sgd:period={PERIOD}",  # its plan does not depend on times
    }
    torch.set_num_threads(1)
    sys.path.insert(0, str(SCRIPTS))
    return {name: _run(name, Path(directory, name)) for name in CLIPPED}


def _run(name: str, where: Path) -> dict[str, Any]:
    before, sys.argv = sys.argv, [name, str(where)]
    try:
        with _noted() as seen, _lightning_saves(where) as saved:
            names = runpy.run_path(str(SCRIPTS / name), run_name="__main__")
    finally:
        sys.argv = before
    model = names["model"]
    found = {"losses": names["losses"], "weights": _whole(getattr(model, "module", model))}
    forget_accelerate()
    averaged = [SAVED] if name == LIGHTNING else []
    return found | saved | _reference(seen, CLIPPED[name], averaged)


@contextmanager
def _lightning_saves(where: Path) -> Iterator[dict[str, Any]]:
    """Let Lightning save a checkpoint after iteration `SAVED`. Give back the whole weights after
    that, and what torch reads from the checkpoint: weights, and names of the optimizer's state."""
    import lightning
    from tiny_llama import build

    found: dict[str, Any] = {}
    before = lightning.LightningModule.on_train_batch_end

    def save(module: Any, *_: Any) -> None:
        if module.trainer.global_step != SAVED + 1:
            return
        module.trainer.save_checkpoint(where / "checkpoint")
        found["averaged"] = _whole(module.model)

    lightning.LightningModule.on_train_batch_end = save
    try:
        yield found
    finally:
        lightning.LightningModule.on_train_batch_end = before
    if found:
        path = str(where / "checkpoint")
        read = {"state_dict": {f"model.{n}": t for n, t in build().state_dict().items()}}
        dcp.load(read, checkpoint_id=path, no_dist=True)
        found["read"] = {_short(n): t for n, t in read["state_dict"].items()}
        kept = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
        found["states"] = sorted(n for n in kept if n.startswith("optimizer_0.state."))


@contextmanager
def _noted() -> Iterator[list[int]]:
    """Note the samples that a script takes."""
    from tiny_llama import Counting

    seen: list[int] = []
    take = Counting.__getitem__

    def note(data: Counting, index: int) -> dict[str, torch.Tensor]:
        seen.append(index)
        return take(data, index)

    Counting.__getitem__ = note
    try:
        yield seen
    finally:
        Counting.__getitem__ = take


def _reference(seen: list[int], clipped: bool, averaged: Sequence[int]) -> dict[str, Any]:
    """The same training with averages of this function between the nodes, also after the iterations
    `averaged`."""
    from tiny_llama import Counting, build

    data, model = Counting(), build()
    mesh = init_device_mesh("cpu", (NODES, INSIDE), mesh_dim_names=("between", "inside"))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh["inside"])
    fully_shard(model, mesh=mesh["inside"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    losses = []
    for iteration in range(len(seen) // BATCH):
        rows = [data[i] for i in seen[iteration * BATCH :][:BATCH]]
        loss = model(**{name: torch.stack([row[name] for row in rows]) for name in rows[0]}).loss
        loss.backward()
        losses.append(loss.item())
        if iteration < OBSERVED:
            average(mesh, (p.grad for p in model.parameters() if p.grad is not None))
        if clipped:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        planned = iteration >= OBSERVED and (iteration - OBSERVED) % PERIOD == PERIOD - 1
        if planned or iteration in averaged:
            average(mesh, model.parameters())
    return {"reference_losses": losses, "reference": _whole(model)}


def _whole(model: nn.Module) -> dict[str, torch.Tensor]:
    return {
        _short(name): p.full_tensor().detach().clone()  # type: ignore[attr-defined]
        for name, p in model.named_parameters()
    }


def _short(name: str) -> str:
    return name.removeprefix("model.model.").removeprefix("model.")
