"""Jobs whose nodes share a replica: models, and what their ranks do."""

from __future__ import annotations

import atexit
import contextlib
import io
import math
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from oracle.training import Replica, average_parameters, bsp, copy_buffers
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import checkpoint

import offbeat
from cases.models import (
    USUAL,
    Case,
    Loop,
    batch,
    build_model,
    build_optimizer,
    build_scheduler,
    loss_of,
    profile_of,
)
from cases.node_jobs import (
    ADAM,
    CODED,
    CODES,
    NORMED,
    STRATEGIES,
    TIED,
    Equations,
    Shards,
    T,
    clipped,
    gradients_everywhere,
    profile_in,
    sets_average,
    sets_in,
    stepped,
)
from cases.workers import TIMEOUT_S, Trained, User, bits_of, prepared, rank
from offbeat import WFBP, ByteScheduler, DiLoCo, DreamDDP, Members, PartialSync, Strategy


def nodes_of(replicas: int, ranks: int) -> Shards:
    """`replicas` nodes of `ranks` ranks."""
    return Shards(tuple(range(ranks * i, ranks * (i + 1))) for i in range(replicas))


def mesh_of(nodes: Sequence[Sequence[int]]) -> DeviceMesh:
    """The mesh of a job, (between, inside); joins the job before. Jobs of a process share it,
    because its groups take as long as a training."""
    torch.set_num_threads(1)
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    return _mesh_of(tuple(map(tuple, nodes)))


@cache
def _mesh_of(nodes: tuple[tuple[int, ...], ...]) -> DeviceMesh:
    return DeviceMesh("cpu", [*map(list, nodes)], mesh_dim_names=("between", "inside"))


def shard(net: nn.Module, mesh: DeviceMesh, **options: Any) -> nn.Module:
    """Apply `fully_shard` to each trained layer that shares no parameter, and to the rest."""
    uses = Counter(id(p) for layer in net.children() for p in layer.parameters())
    for layer in net.children():
        trained = [p for p in layer.parameters() if p.requires_grad]
        if trained and all(uses[id(p)] == 1 for p in trained):
            fully_shard(layer, mesh=mesh, **options)
    fully_shard(net, mesh=mesh, **options)
    return net


def local_of(tensor: Tensor) -> Tensor:
    """The elements that this rank holds."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def own_parameters(net: nn.Module) -> dict[str, Tensor]:
    """What this rank holds of all parameters, also after a forward that has left whole ones."""
    for module in net.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    return {name: local_of(p.detach()) for name, p in net.named_parameters()}


def whole(value: Any) -> Any:
    """Nested containers with whole tensors in place of shards. Every rank of a node must call."""
    if isinstance(value, Tensor):
        return (value.full_tensor() if hasattr(value, "full_tensor") else value).detach().clone()
    if isinstance(value, dict):
        return {k: whole(v) for k, v in value.items()}
    return [whole(v) for v in value] if isinstance(value, (list, tuple)) else value


@contextmanager
def job(
    case: Case,
    strategy: Strategy | str,
    nodes: Sequence[Sequence[int]],
    before: Callable[[nn.Module], None] = lambda _: None,
    **options: Any,
) -> Iterator[tuple[Any, Any]]:
    """A prepared model whose replicas begin with different weights, and its optimizer. `before`
    gets the model before it is prepared."""
    mesh = mesh_of(nodes)
    net = build_model(case, seed=rank() // len(nodes[0]))
    if isinstance(nodes, Shards):
        shard(net, mesh["inside"])
        mesh = mesh["between"]
    before(net)
    options = {"profile": profile_in(case, nodes), "compare_every": 2} | options
    optimizer = build_optimizer(case, net)
    with prepared(net, optimizer, strategy, mesh=mesh, **options) as pair:
        yield pair


# ---- the equations --------------------------------------------------------------------------


def columns_of(world: list[Replica], nodes: Any) -> list[list[Replica]]:
    return [[world[rank] for rank in ranks] for ranks in zip(*nodes, strict=True)]


def gradients_in_columns(world: list[Replica], _: Any, nodes: Any) -> None:
    """As DDP; before a forward each rank takes the buffers of its place in the first node."""
    columns = columns_of(world, nodes)
    for t in T:
        for column in columns:
            copy_buffers(column)
        bsp(world, [t])
    for column in columns:
        copy_buffers(column)


def parameters_in_columns(world: list[Replica], plan: Any, nodes: Any) -> None:
    """Sets are averaged before the step. Ranks of one place average their buffers; their parameters
    are those of their nodes."""
    columns, sets = columns_of(world, nodes), sets_in(world[0].case, nodes, plan)
    for r, t in enumerate(T):
        for replica in world:
            replica.gradients(t)
        for column in columns:
            for piece in sets[r % len(sets)]:
                average_parameters(column, piece)
        for replica in world:
            replica.step()
            replica.end()


MOMENTUM = Case("mlp", "nesterov")  # torch plans each step of AdamW on shards anew
# One of each kind of average. How a strategy uses it is tested with whole replicas.
CASES: dict[str, tuple[Strategy, Equations, Case, Loop]] = {
    # Gradients, and the running statistics of each rank's place in the first node.
    "wfbp": (WFBP(), gradients_in_columns, NORMED, USUAL),
    # Slices of gradients, which cut across shards, also of a weight of two modules.
    "slices by priority": (
        ByteScheduler(update="at_step", partition_elements=5),
        gradients_everywhere,
        TIED,
        Loop(micro=2, clip=0.05),
    ),
    # A reduce-scatter and an all-gather.
    "halves": (*STRATEGIES["halves"], MOMENTUM, Loop(clear="none")),
    # Gradients of several iterations, in two copies.
    "deft": (*STRATEGIES["deft"], MOMENTUM, USUAL),
    # Slices of parameters, and norms of gradients of which each rank has a part.
    "slices": (DreamDDP(period=3, split=True, clip=0.3), clipped, MOMENTUM, USUAL),
    # Averages that are due in a later iteration.
    "dreamddp delayed": (*STRATEGIES["dreamddp delayed"], MOMENTUM, USUAL),
    # Parameters and state of the optimizer, before the step.
    "partial": (*STRATEGIES["partial"], ADAM, USUAL),
    # Parameters, and the running statistics of ranks of one place.
    "sets": (PartialSync(period=2), parameters_in_columns, NORMED, USUAL),
    # An outer step, in the next forward.
    "fragments": (
        DiLoCo(period=4, fragments=2, due="forward"), sets_average(outer=stepped()), MOMENTUM,
        USUAL,
    ),
    # An average after a vote.
    "selsync": (*STRATEGIES["selsync"], MOMENTUM, USUAL),
    # Codes of shards and of padding. Those of gradients: `SPOILT` in test_sharded.py.
    "int4 of layers": (*CODES["int4 of layers"], CODED, USUAL),
}  # fmt: skip


def train(name: str, nodes: Shards) -> Trained:
    """Train, and give back whole tensors of this rank's replica."""
    strategy, _, case, loop = CASES[name]
    with job(case, strategy, nodes) as (model, optimizer):
        scheduler = build_scheduler(case, optimizer)
        user = User(case, model, optimizer, loop)
        for t in T:
            user.iterate(t)
            if scheduler is not None:
                scheduler.step()
        return Trained(whole(model.state_dict()), whole(optimizer.state_dict()))


# ---- options of FSDP ------------------------------------------------------------------------

SINGLE = Case("mlp", "adamw", dtype=torch.float32)
MIXED = {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)}
VARIANTS: dict[str, dict[str, Any]] = {
    "mixed precision in micro-batches under wfbp": {
        "mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    },
    # One node, because torch creates groups of pairs on a mesh of all ranks only.
    "in pairs after forward": {"reshard_after_forward": 2},
    "offloaded from one processor to the same": {"offload_policy": CPUOffloadPolicy(False)},
    "evaluation and activation checkpoints": {"reshard_after_forward": False},
    "compiled blocks": {},  # as the same blocks as they are
    # Gradients of one rank of each node, in an iteration without a backward.
    "measured, with written gradients": {},
}


def train_variant(name: str, averaged_by_us: bool, mesh: DeviceMesh) -> str:  # noqa: C901
    """Hash of this rank's shards after local SGD of period 3, or after averages of gradients, by
    offbeat or by all-reduces of this function."""
    options = VARIANTS[name]
    name, _, gradients = name.partition(" under ")
    nodes = nodes_of(*mesh.shape)
    net = build_model(SINGLE)
    if name == "compiled blocks" and averaged_by_us:
        for layer in (net.get_submodule("1"), net.get_submodule("6")):  # the first and last trained
            layer.compile(backend="aot_eager")
    shard(net, mesh["inside"], **options)
    optimizer: Any = build_optimizer(SINGLE, net)
    model: Any = net
    if name.startswith("evaluation"):  # leaves whole parameters in the modules
        with torch.no_grad():
            net(batch(SINGLE, rank(), 99)[0])
    observed = 2 if name.startswith("measured") else 0
    if averaged_by_us:
        given: dict[str, Any] = {"profile": profile_in(SINGLE, nodes)}
        if observed:
            given = {"observe": observed, "min_bucket_bytes": 1}
        strategy = WFBP() if gradients else offbeat.LocalSGD(period=3)
        given |= {"mesh": mesh["between"], "timeout_s": TIMEOUT_S}
        model, optimizer = offbeat.prepare(net, optimizer, strategy, **given)
    for t in range(observed + 4):
        if name.endswith("written gradients") and t == observed + 1:
            optimizer.zero_grad(set_to_none=False)
            for p in net.parameters():
                if p.grad is not None:
                    local_of(p.grad).fill_(0.1 * (rank() % 2))
        else:
            backward(name, t, net, model, optimizer)
        if not averaged_by_us and (gradients or t < observed):
            average(mesh, (p.grad for p in net.parameters() if p.grad is not None))
        optimizer.step()
        if not (averaged_by_us or gradients) and t >= observed and (t - observed) % 3 == 2:
            average(mesh, (p for p in net.parameters() if p.requires_grad))
        if name.startswith("evaluation"):
            with torch.no_grad():
                model(batch(SINGLE, rank(), t)[0])
    if averaged_by_us:
        model.close()
    return bits_of(own_parameters(net).values())


def backward(name: str, t: int, net: Any, model: Any, optimizer: Any) -> None:
    optimizer.zero_grad()
    parts = 2 if name.endswith("micro-batches") else 1
    for part in range(parts):
        x, y = batch(SINGLE, rank(), 10 * part + t)
        net.set_requires_gradient_sync(part == parts - 1)
        if name.endswith("activation checkpoints"):
            x = checkpoint(model, x, use_reentrant=False)
        else:
            x = model(x)
        nn.functional.mse_loss(x, y).backward()


def average(mesh: DeviceMesh, tensors: Any) -> None:
    """Average shards between nodes; some ranks hold no elements of some parameters."""
    for tensor in tensors:
        own = local_of(tensor.detach())
        if own.numel():
            dist.all_reduce(own, op=dist.ReduceOp.SUM, group=mesh["between"].get_group())
            own /= mesh["between"].size()


def train_variants(names: Sequence[str]) -> dict[str, tuple[str, str]]:
    """By variant the hashes of `train_variant` with and without offbeat."""
    one, two, found = mesh_of(nodes_of(1, 4)), mesh_of(SHARDED), {}
    for name in names:
        mesh = one if name.startswith("in pairs") else two
        found[name] = train_variant(name, True, mesh), train_variant(name, False, mesh)
    return found


# ---- guards ---------------------------------------------------------------------------------


def spoil(strategy: str, case: Case, nodes: Shards) -> str:
    """The error if the shards of rank 3 have NaN in iteration 1. Those of rank 2 are finite."""
    now = list[int]()

    def spoil_shard(p: Tensor) -> None:
        if (now[-1], rank()) == (1, 3):
            assert p.grad is not None
            local_of(p.grad).fill_(math.nan)

    def prepare_to_spoil(net: nn.Module) -> None:  # earlier than the hooks that send
        for p in net.parameters():
            if p.requires_grad:
                p.register_post_accumulate_grad_hook(spoil_shard)

    with job(case, strategy, nodes, prepare_to_spoil) as (model, optimizer):
        try:
            for t in range(3):
                now.append(t)
                optimizer.zero_grad()
                loss_of(model, *batch(case, rank(), t)).backward()
                optimizer.step()
        except RuntimeError as error:
            return str(error)
        return ""


def diverge(consolidating: bool) -> str:
    """Rank 3 changes its shards, although only gradients are averaged."""
    compared = {"compare_every": 0 if consolidating else 1}
    with job(ADAM, "wfbp", nodes_of(2, 2), **compared) as (model, optimizer):
        try:
            for t in range(3):
                User(ADAM, model, optimizer, USUAL).iterate(t)
                if (t, rank()) == (1, 3):
                    with torch.no_grad():
                        own_parameters(model)["6.weight"].mul_(1.5)
            model.consolidate()
        except RuntimeError as error:
            return str(error)
    return "nothing"


def repair() -> tuple[dict[str, Tensor], dict[str, Tensor], str]:
    """Weights and optimizer state of rank 2 differ; `consolidate(repair=True)` averages both.
    Whole tensors before and after, and a hash of all that this rank holds after."""
    with job(ADAM, "wfbp", nodes_of(2, 2), compare_every=0) as (model, optimizer):
        User(ADAM, model, optimizer, USUAL).iterate(0)
        if rank() == 2:
            for one in (p for p in model.parameters() if p.requires_grad):
                local_of(one.detach()).add_(1.0)
                local_of(optimizer.state[one]["exp_avg"]).add_(1.0)
        before = whole([model.state_dict(), optimizer.state_dict()["state"]])
        model.consolidate(repair=True)
        after = whole([model.state_dict(), optimizer.state_dict()["state"]])
        state = [t for s in after[1].values() for t in s.values()]
    return before, after, bits_of([*after[0].values(), *state])


# ---- unification and checkpoints ------------------------------------------------------------


def unite(nodes: Shards) -> tuple[dict[str, Tensor], dict[str, Tensor], str]:
    """Local training with other running statistics on every rank, then `consolidate`. Whole
    parameters and own buffers before, after, and the hash of all after."""
    with job(NORMED, "local-sgd:period=100", nodes) as (model, optimizer):
        for t in range(3):
            User(NORMED, model, optimizer, USUAL).iterate(t)
        before = whole(model.state_dict())
        model.consolidate()
        after = whole(model.state_dict())
    return before, after, bits_of(after.values(), "".join(after))


SHARDED, REPLICATED = nodes_of(2, 2), ((0, 1), (2, 3))
# An outer optimizer of shards, and slices of whole replicas: `KILLED`.
SAVED: dict[str, tuple[str, Sequence[Sequence[int]]]] = {
    "merged gradients": ("deft", SHARDED),
    "slices": ("dreamddp:period=3:split=true", SHARDED),
}


def train_saved(
    path: str, strategy: str, nodes: Sequence[Sequence[int]], *, saves: bool = True
) -> tuple[str, str]:
    """Hashes of this rank's weights and optimizer state after 7 iterations: without a pause, and
    resumed from a checkpoint, which is saved in iteration 4 unless there is one."""
    hashes = []
    for resumed in (False, True):
        with job(ADAM, strategy, nodes) as (model, optimizer):
            first = offbeat.load(path, model, optimizer).iteration if resumed else 0
            for t in range(first, 7):
                User(ADAM, model, optimizer, USUAL).iterate(t)
                if t == 3 and saves and not resumed:
                    offbeat.save(path, model, optimizer).wait()
            model.flush()
            kept = [*own_parameters(model).values()]
            kept += [local_of(t) for s in optimizer.state.values() for t in s.values()]
            hashes.append(bits_of(kept))
    return hashes[0], hashes[1]


def train_all_saved(path: str) -> dict[str, tuple[str, str]]:
    return {name: train_saved(f"{path}/{name}", *how) for name, how in SAVED.items()}


SHAPED = Case("mlp", "adamw")


def reshape(path: str) -> dict[str, Tensor]:
    """Train two nodes of two ranks, unite them and save with torch; load into one node of four
    ranks, which trains one iteration more. Whole tensors of model and optimizer, before the save
    and after the load, and the weights after that iteration."""
    with job(SHAPED, "local-sgd:period=3", nodes_of(2, 2)) as (model, optimizer):
        net, inner = model.module, optimizer.inner
        for t in range(4):
            User(SHAPED, model, optimizer, USUAL).iterate(t)
        model.consolidate()
        saved = dict(zip(("model", "optimizer"), get_state_dict(net, inner), strict=True))
        dcp.save(saved, checkpoint_id=path)
        before = whole(saved["model"])
    mesh = mesh_of(nodes_of(1, 4))
    net = shard(build_model(SHAPED, seed=9), mesh["inside"])
    inner = build_optimizer(SHAPED, net)
    found = dict(zip(("model", "optimizer"), get_state_dict(net, inner), strict=True))
    dcp.load(found, checkpoint_id=path)
    set_state_dict(net, inner, model_state_dict=found["model"], optim_state_dict=found["optimizer"])
    after = whole(net.state_dict())
    options = {"profile": profile_in(SHAPED, nodes_of(1, 4)), "mesh": mesh["between"]}
    with prepared(net, inner, "wfbp", **options) as (model, optimizer):
        User(SHAPED, model, optimizer, USUAL).iterate(4)
    return {"before": before, "after": after, "trained": whole(net.state_dict())}


SHAPES: dict[str, Sequence[Sequence[int]]] = {
    "single ranks": ((0,), (1,), (2,), (3,)),
    "replicated": REPLICATED,
    "replicated crosswise": ((0, 2), (1, 3)),
    "sharded": SHARDED,
    "sharded crosswise": Shards(((0, 2), (1, 3))),
    "one sharded node": nodes_of(1, 4),
}
PARAMETERS, GRADIENTS = "local-sgd:period=2", "wfbp"
# Strategy, nodes of the saved job, nodes of the loading job: each kind of nodes saves for another
# one and loads from another one.
RESHAPED = (
    (PARAMETERS, "single ranks", "one sharded node"),
    (PARAMETERS, "replicated", "replicated crosswise"),
    (PARAMETERS, "sharded", "single ranks"),
    (GRADIENTS, "sharded", "sharded crosswise"),
    (GRADIENTS, "one sharded node", "replicated"),
)


def job_in(name: str, strategy: str) -> Any:
    """`job` in nodes of `SHAPES`."""
    nodes = SHAPES[name]
    profile = profile_of(SHAPED, 4) if name == "single ranks" else profile_in(SHAPED, nodes)
    return job(SHAPED, strategy, nodes, profile=profile)


def reshape_ours(path: str) -> dict[Any, Any]:
    """Save after three iterations, once as it is and once after `consolidate`, and load into other
    nodes, which train two iterations more. By (strategy, saved) the whole state of model and
    optimizer; by `RESHAPED` the error as it is, facts of the loaded checkpoint, the whole state
    after the load, and the weights after those iterations."""
    found: dict[Any, Any] = {}
    for strategy, saved in dict.fromkeys(key[:2] for key in RESHAPED):
        with job_in(saved, strategy) as (model, optimizer):
            for t in range(3):
                User(SHAPED, model, optimizer, USUAL).iterate(t)
            offbeat.save(f"{path}/{strategy}/{saved}/apart", model, optimizer).wait()
            if strategy == PARAMETERS:
                model.consolidate()
                offbeat.save(f"{path}/{strategy}/{saved}/one", model, optimizer).wait()
            found[strategy, saved] = whole([model.state_dict(), optimizer.state_dict()])
    for key in RESHAPED:
        strategy, saved, loaded = key
        with job_in(loaded, strategy) as (model, optimizer):
            where, error = f"{path}/{strategy}/{saved}/apart", ""
            if strategy == PARAMETERS:
                with pytest.raises(ValueError) as info:
                    offbeat.load(where, model, optimizer)
                where, error = f"{path}/{strategy}/{saved}/one", str(info.value)
            facts = offbeat.load(where, model, optimizer)
            state = whole([model.state_dict(), optimizer.state_dict()])
            for t in range(3, 5):
                User(SHAPED, model, optimizer, USUAL).iterate(t)
            model.flush()
            found[key] = error, facts.exact, facts.iteration, state, whole(model.state_dict())
    return found


# ---- refusals -------------------------------------------------------------------------------


def _fully(mesh: DeviceMesh, **options: Any) -> nn.Module:
    return shard(build_model(ADAM), mesh, **options)


def _partly(mesh: DeviceMesh) -> nn.Module:
    """Only the last layer."""
    net = build_model(ADAM)
    fully_shard(net[-1], mesh=mesh)  # type: ignore[index]
    return net


def _otherwise(mesh: DeviceMesh) -> nn.Module:
    """Node 1 shards the model as a whole, node 0 layer by layer."""
    net = build_model(ADAM)
    return fully_shard(net, mesh=mesh) if rank() > 1 else shard(net, mesh)


def _across(mesh: DeviceMesh) -> nn.Module:
    """Node 1 cuts a weight along its second dimension."""

    def place(p: nn.Parameter) -> Shard | None:
        return Shard(1) if rank() > 1 and p.shape == (8, 6) else None

    return shard(build_model(ADAM), mesh, shard_placement_fn=place)


def _tensor_parallel(mesh: DeviceMesh) -> nn.Module:
    net = build_model(ADAM)
    parallelize_module(net, mesh, {"1": ColwiseParallel()})
    return net


class Packed(Tensor):
    """As tensors in fp8, it holds another tensor, and states what FSDP gathers."""

    held: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> Packed:
        made = Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)  # type: ignore[attr-defined]
        made.held = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map_only(cls, lambda t: t.held, (args, kwargs or {}))
        return tree_map_only(Tensor, cls, func(*args, **kwargs))

    def fsdp_pre_all_gather(self) -> None:
        raise AssertionError

    fsdp_post_all_gather = fsdp_pre_all_gather


def _packed(mesh: DeviceMesh) -> nn.Module:
    net = build_model(ADAM)
    layer: Any = net[1]  # type: ignore[index]
    layer.weight = nn.Parameter(Packed(layer.weight.detach()))
    return shard(net, mesh)


def _uneven() -> dict[str, Any]:
    parts = [DeviceMesh("cpu", ranks) for ranks in ([0, 1, 2], [3])]
    return {"model": _fully(parts[rank() // 3]), "mesh": None, "nodes": [[0, 1, 2], [3]]}


def _crossed() -> dict[str, Any]:
    columns = [DeviceMesh("cpu", ranks) for ranks in ([0, 3], [1, 2])]
    return {"mesh": columns[rank() in (1, 2)]}


MESHES: dict[str, DeviceMesh] = {}

# What is refused, and how the error names it.
REFUSED: dict[str, tuple[Callable[[], dict[str, Any]], str]] = {
    "HSDP": (
        lambda: {"model": _fully(MESHES["both"])},
        "HSDP averages gradients between nodes itself",
    ),
    "HSDP in node 1 alone": (
        lambda: {"model": _fully(MESHES["both"] if rank() > 1 else MESHES["inside"])},
        "rank 2: parameter '0.weight' is a DTensor with placements (Replicate, Shard)",
    ),
    "shards over the dimension between": (
        lambda: {"model": _fully(MESHES["between"])},
        "over which the parameters are sharded or replicated already",
    ),
    "both dimensions": (lambda: {"mesh": MESHES["both"]}, "mesh (2 x 2 ranks)"),
    "no mesh": (lambda: {"mesh": None}, "mesh (None)"),
    "members that change": (
        lambda: {"mesh": None, "members": Members("127.0.0.1:1", first=2)},
        "must be whole on every rank where members change",
    ),
    "nodes of other ranks": (
        lambda: {"mesh": None, "nodes": [[0, 2], [1, 3]]},
        "the model is sharded over ranks 0, 1, not 0, 2",
    ),
    "nodes of unequal size": (_uneven, "sharded nodes must have equally many ranks, not 3, 1"),
    "columns of other members": (
        _crossed,
        "rank 0 must average with one rank of every node, in the same place of each, not with 0, 3",
    ),
    "other groups in node 1": (
        lambda: {"model": _otherwise(MESHES["inside"])},
        "rank 2 has \"cut along dimension 0 and gathered with '0.weight' to '6.bias' (10)\"",
    ),
    "another dimension in node 1": (
        lambda: {"model": _across(MESHES["inside"])},
        "rank 2 has \"cut along dimension 1 and gathered with '1.weight' to '1.bias' (2)\"",
    ),
    "a part of the model": (
        lambda: {"model": _partly(MESHES["inside"])},
        "parameter '1.weight' is trained and not sharded",
    ),
    "tensor parallelism": (
        lambda: {"model": _tensor_parallel(MESHES["inside"])},
        "parameter '1.weight' is a DTensor that fully_shard does not manage",
    ),
    "weights that are gathered in another format": (
        lambda: {"model": _packed(MESHES["inside"])},
        "parameter '1.weight' (Packed)",
    ),
    "updates in backward": (
        lambda: {"strategy": "dreamddp:average=after_update"},
        "strategy (dreamddp(average=after_update))",
    ),
    "sums that pass from rank to rank": (lambda: {"strategy": "cyclic"}, "strategy (cyclic)"),
    "a strategy without a plan": (lambda: {"strategy": "ad-psgd"}, "strategy (ad-psgd)"),
    "a profile of replicated nodes": (
        lambda: {"profile": profile_in(ADAM, ((0, 1), (2, 3)))},
        "the profile does not match",
    ),
}


def refuse_all() -> dict[str, str]:
    """The error of each case on this rank."""
    both = mesh_of(SHARDED)
    MESHES.update(both=both, between=both["between"], inside=both["inside"])
    found = {}
    for name, (options, _) in REFUSED.items():
        given = {"mesh": both["between"], "profile": profile_in(ADAM, nodes_of(2, 2))} | options()
        model = given.pop("model", None) or _fully(both["inside"])
        strategy = given.pop("strategy", "local-sgd")
        optimizer = build_optimizer(ADAM, model)
        try:
            offbeat.prepare(model, optimizer, strategy, timeout_s=TIMEOUT_S, **given)[0].close()
        except ValueError as error:
            found[name] = str(error)
    return found


# ---- deaths ---------------------------------------------------------------------------------


KILLED: tuple[tuple[str, Sequence[Sequence[int]], int], ...] = (
    ("diloco:period=3", SHARDED, 0),  # hosts the store
    ("dreamddp:period=3", REPLICATED, 3),
)


def continue_killed(paths: Sequence[str]) -> list[tuple[str, str]]:
    """By jobs of `KILLED` the hashes of `train_saved`."""
    return [
        train_saved(path, strategy, nodes, saves=False)
        for path, (strategy, nodes, _) in zip(paths, KILLED, strict=True)
    ]


def train_until_killed(strategy: str, nodes: Sequence[Sequence[int]], who: int, path: str) -> None:
    """Rank `who` ends in iteration 2, after a save into `path`. The others raise what they have
    said until their end."""
    said = io.StringIO()
    with job(ADAM, strategy, nodes) as (model, optimizer):
        try:
            for t in range(20):
                if (rank(), t) == (who, 2):
                    os._exit(1)
                User(ADAM, model, optimizer, USUAL).iterate(t)
                if t == 1:
                    offbeat.save(path, model, optimizer).wait()
        except RuntimeError as error:
            sys.last_value = error  # as in a script that does not catch it
            with contextlib.redirect_stderr(said), pytest.MonkeyPatch.context() as patch:
                patch.setattr(os, "_exit", sys.exit)  # this process has to report
                atexit._run_exitfuncs()
            raise RuntimeError(" ".join(f"{error} {said.getvalue()}".split())) from error
