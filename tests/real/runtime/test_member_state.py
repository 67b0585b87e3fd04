"""State for joining ranks, of which every source sends a part."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases.workers import snapshot
from harness.ranks import run_ranks
from torch import Tensor

from offbeat.core.transport.topology import Topology
from offbeat.elastic import state as member_state
from offbeat.elastic.state import Feeding

NODES = {"single ranks": ((0,), (1,), (2,), (3,)), "nodes": ((0, 1), (2, 3))}
JOINING = {"single ranks": [3], "nodes": [2, 3]}


def tensors_of(seed: int) -> list[Tensor]:
    random = torch.Generator().manual_seed(seed)
    return [
        torch.randn(7, 5, generator=random),
        torch.randn(6, 4, generator=random).t(),  # with other strides
        torch.randn(3, 8, generator=random)[:, ::2],  # with gaps
        torch.randint(0, 99, (), generator=random),
        torch.empty(0),
        torch.randn(33, generator=random, dtype=torch.float64).to(torch.bfloat16),
    ]


def feed(nodes: str, equal: bool) -> tuple[list[Tensor], Any, int]:
    """Return the tensors, the state and the bytes that this rank has sent."""
    dist.init_process_group("gloo")
    member_state.PIECE_BYTES = 50
    sent, start = [0], dist.isend

    def isend(data: Tensor, *args: Any, **kwargs: Any) -> Any:
        sent[0] += data.nbytes
        return start(data, *args, **kwargs)

    dist.isend = isend
    rank = dist.get_rank()
    group = dist.group.WORLD
    control = SimpleNamespace(
        rank=rank, group=group, collective=lambda _: nullcontext(), run_checked=lambda act: act()
    )
    cluster: Any = SimpleNamespace(
        topology=Topology(NODES[nodes]), control=control, everyone=None, where=torch.device("cpu")
    )
    feeding = Feeding(cluster, JOINING[nodes])
    has_state = rank not in JOINING[nodes]
    tensors = tensors_of((1 if equal else 1 + rank) if has_state else 99)
    feeding.send(tensors, are_equal=equal)
    by_tensors = sent[0]
    state = {"state": {0: {"step": tensors[3], "avg": tensors[1]}}, "param_groups": [{"lr": 0.1}]}
    state = feeding.send_state(state if has_state else {"state": {}}, are_equal=equal)
    return snapshot(tensors), snapshot(state), by_tensors


@pytest.mark.parametrize("equal", [True, False])
@pytest.mark.parametrize("nodes", NODES)
def test_joining_ranks_receive_one_copy(nodes: str, equal: bool) -> None:
    ranks = run_ranks(4, feed, nodes, equal)
    right, size = tensors_of(1), sum(t.nbytes for t in tensors_of(1))
    for rank in JOINING[nodes]:
        tensors, state, _ = ranks[rank]
        assert all(a.equal(b) for a, b in zip(tensors, right, strict=True))
        assert state["state"][0]["avg"].equal(right[1])
        assert state["state"][0]["step"].equal(right[3])
        assert state["param_groups"] == [{"lr": 0.1}]
    sent = [by_tensors for _, _, by_tensors in ranks]
    sources = len(sent) - len(JOINING[nodes])
    assert sum(sent[:sources]) == size
    if equal:
        assert max(sent[:sources]) - min(sent[:sources]) <= sources * (size // 100 + 1)
    else:
        assert sent[0] == size
    assert sum(sent[sources:]) == (size if nodes == "nodes" else 0)
