"""What the ranks of the injection tests' world do."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from offbeat.data import Injected, Injection

INJECTION = Injection(alpha=0.67, beta=0.5, seed=3)  # two of three ranks
BATCH = 10  # of which 5 are loaded
TIMEOUT_S = 2.0


def batch(rank: int, number: int, size: int = 5) -> dict[str, Any]:
    """A batch whose samples say where they come from, in tensors of three kinds."""
    ids = torch.arange(size) + 100 * number + 10_000 * rank
    return {"odd": ids % 2 == 1, "x": (ids[:, None, None] * torch.ones(2, 3), [ids])}


def plain(made: dict[str, Any]) -> dict[str, Any]:
    x, (ids,) = made["x"]
    tensors: dict[str, Tensor] = {"odd": made["odd"], "x": x, "ids": ids}
    return {name: tensor.tolist() for name, tensor in tensors.items()} | {"dtype": str(x.dtype)}


def share_samples() -> dict[str, Any]:
    """Three epochs: of unequal length, of unlike batches, and one that rank 2 leaves."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    epochs = Injected(
        [batch(rank, i) for i in range(4 - (rank == 1))],
        INJECTION,
        batch=BATCH,
        timeout_s=TIMEOUT_S,
    )
    result: dict[str, Any] = {"batches": [plain(made) for made in epochs]}
    result["state"] = epochs.state_dict()
    epochs.loader = [batch(rank, 0, 5 - (rank == 0))]
    try:
        list(epochs)
    except ValueError as error:
        result["unlike"] = str(error)
    epochs.loader = [batch(rank, i) for i in range(2)]
    result["lost"] = _leave(iter(epochs), rank)
    return result


def _leave(batches: Any, rank: int) -> str:
    """Rank 2 takes one batch and is silent until the others have given up."""
    store = distributed_c10d._get_default_store()
    next(batches)
    words = ""
    if rank == 2:
        store.wait(["gave up 0", "gave up 1"])
    else:
        try:
            next(batches)
        except RuntimeError as error:
            words = str(error)
    store.set(f"gave up {rank}", "")
    if rank == 0:  # it holds the store, so it leaves last
        store.wait(["gave up 1", "gave up 2"])
    return words
