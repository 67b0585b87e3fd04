"""Checks of a script's model and optimizer: alone, then against those of all other ranks."""

from __future__ import annotations

import hashlib
import inspect
import warnings
from collections.abc import Sequence
from itertools import pairwise
from weakref import WeakKeyDictionary, ref

import torch
from torch import nn

from offbeat.core.buckets.flat import is_dense
from offbeat.core.buckets.shards import describe_shards, is_sharded, reshard
from offbeat.core.guards.comparison import Settings, agree_on_optimizer, describe_difference
from offbeat.core.runtime.joint_optimizer import JointOptimizer, require_disjoint
from offbeat.core.runtime.prepared import Model, Optimizer
from offbeat.core.start.launch_request import CHECKPOINT_VARIABLE, LaunchRequest
from offbeat.core.strategy.interface import Strategy
from offbeat.core.transport.cluster import Cluster
from offbeat.core.transport.control import Control

WRAPPERS = {
    *("DistributedDataParallel", "DataParallel", "FullyShardedDataParallel"),
    "DeepSpeedEngine",  # also of ZeRO, and the base of DeepSpeed's engine of pipelines
}
SAME_MODEL = "build it from the same configuration everywhere"

# Clusters by model, weak: sessions refer to the model, so a strong reference would keep both alive.
_prepared: WeakKeyDictionary[nn.Module, ref[Cluster]] = WeakKeyDictionary()


def note_prepared(model: nn.Module, cluster: Cluster) -> None:
    """Refuse to prepare the model again until its cluster is closed."""
    _prepared[model] = ref(cluster)


def _open_clusters() -> dict[nn.Module, Cluster]:
    """Return the clusters of prepared models that are not closed, by model."""
    clusters = ((model, known()) for model, known in _prepared.items())
    return {m: cluster for m, cluster in clusters if cluster is not None and not cluster.closed}


def require_one_model(job: LaunchRequest) -> None:
    """Raise ValueError if another model is prepared in this process, beside which this one cannot
    train."""
    others = _open_clusters().values()
    if any(cluster.served for cluster in others):
        raise ValueError(
            "another model is prepared with servers, which serve only that model; train both as "
            "one module with one optimizer, or use strategies without servers"
        )
    if others and job.checkpoint is not None:
        raise ValueError(
            f"a second model cannot be prepared where {CHECKPOINT_VARIABLE} or `offbeat run "
            "--checkpoint` names a folder: its checkpoints are of one model. Train both as one "
            "module with one optimizer, or call offbeat.save and offbeat.load for each of them"
        )
    if others and (job.record_dir or job.stop_after_profile):
        raise ValueError(
            "a second model cannot be prepared in a process that `offbeat run`, `compare` or "
            "`profile` has started: profile and record are of one model. Train both as one module "
            "with one optimizer, or start the script with torchrun"
        )


def unclosed_models_notice() -> str | None:
    """Return a notice for the third model that is prepared while the earlier ones are open, as in a
    sweep; otherwise None."""
    if len(_open_clusters()) != 2:
        return None
    return (
        "2 models that were prepared before are still open, each with its threads and connections; "
        "call model.close() where a training ends"
    )


def joined_optimizer(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    strategy: Strategy,
) -> tuple[torch.optim.Optimizer, bool]:
    """Return the optimizer that a session steps, and whether the script has passed a list.

    Raises:
        ValueError: the strategy cannot train the model with this optimizer.
    """
    is_list = isinstance(optimizer, Sequence)
    parts = list(optimizer) if isinstance(optimizer, Sequence) else [optimizer]
    for one in parts:
        if not hasattr(one, "param_groups"):
            raise ValueError(
                f"optimizer ({type(one).__name__}) must be a torch.optim.Optimizer, or a list of "
                "them, each with parameters of its own"
            )
        if not hasattr(one, "defaults"):
            raise ValueError(
                f"optimizer ({type(one).__name__}) must have the attributes of "
                "torch.optim.Optimizer, and lacks defaults; pass the optimizer that it wraps, and "
                "use a strategy such as local-sgd if it averages"
            )
        _require_unprepared(model, one)
        _require_dense_gradients(one, strategy)
    whole = _join_optimizers(model, parts, strategy) if is_list else parts[0]
    if hasattr(model, "_orig_mod"):  # a module that torch.compile has returned
        warnings.warn(
            "a model compiled as a whole yields all gradients at the end of backward, so nothing "
            "can be sent under it; compile its blocks instead",
            stacklevel=4,  # the caller of `prepare`, whose decorator is a frame of torch
        )
    _require_unwrapped(model)
    _require_none_ignored(model)
    reshard(model)  # a forward of FSDP may have left whole parameters in the place of shards
    require_supported(model)
    _require_own_parameters(model, whole)
    _require_one_backward(whole)
    return whole, is_list


def _join_optimizers(
    model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], strategy: Strategy
) -> JointOptimizer:
    """Return one optimizer that joins several."""
    if not optimizers or strategy.needs.one_optimizer:
        raise ValueError(
            f"optimizer (a list of {len(optimizers)}) must be one torch.optim.Optimizer under "
            f"{strategy}, or a list of at least one under other strategies, such as WFBP()"
        )
    require_disjoint(model, optimizers)
    for one in optimizers:
        _require_one_backward(one)
    return JointOptimizer(optimizers)


def _require_unprepared(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    if isinstance(optimizer, Optimizer):
        raise ValueError(
            "the optimizer is prepared already; call prepare once, or call model.close() and "
            "prepare model.module with optimizer.inner"
        )
    if isinstance(model, Model) or model in _open_clusters():
        raise ValueError(
            "the model is prepared already; call prepare once, or call model.close() and prepare "
            "model.module"
        )


def _require_unwrapped(model: nn.Module) -> None:
    """Raise ValueError if the model contains a ScriptModule, or a wrapper of DDP, DataParallel,
    FSDP or DeepSpeed.

    The check compares class names, because most of these modules take long to import.
    """
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise ValueError(
                f"the model ({name or type(module).__name__}) must not be a ScriptModule of "
                "torch.jit, which offbeat cannot follow; prepare the module that was scripted, and "
                "compile its blocks with torch.compile"
            )
        wrapper = WRAPPERS & {cls.__name__ for cls in type(module).__mro__}
        if wrapper:
            raise ValueError(
                f"the model ({name or type(module).__name__}) must not be wrapped in "
                f"{wrapper.pop()}, which sends gradients or weights between processes itself; pass "
                "the wrapped module to offbeat.prepare"
            )


def _require_none_ignored(model: nn.Module) -> None:
    """Raise ValueError if the script tells DDP to leave out tensors of the model, which every rank
    would keep for itself (`_set_params_and_buffers_to_ignore_for_model`)."""
    listed = getattr(model, "_ddp_params_and_buffers_to_ignore", ())
    ignored = [
        name
        for name, tensor in (*model.named_parameters(), *model.named_buffers())
        if name in listed or getattr(tensor, "_ddp_ignored", False)
    ]
    if ignored:
        raise ValueError(
            f"the model's _ddp_params_and_buffers_to_ignore ({', '.join(ignored)}) must be empty, "
            "because all ranks train the same tensors; keep what belongs to one rank in a module "
            "of its own with an optimizer of its own, or average it"
        )


def _require_one_backward(optimizer: torch.optim.Optimizer) -> None:
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is closure.empty:
        raise ValueError(
            f"optimizer ({type(optimizer).__name__}) must have a step() that needs no closure, as "
            "an iteration has one backward; use one such as SGD or AdamW"
        )


def _require_dense_gradients(optimizer: torch.optim.Optimizer, strategy: Strategy) -> None:
    if isinstance(optimizer, torch.optim.SparseAdam) and not strategy.needs.sparse_gradients:
        raise ValueError(
            f"optimizer ({type(optimizer).__name__}) must accept dense gradients, because sparse "
            "ones become dense in offbeat's buckets; use Adam or SGD, or the strategy ddp"
        )


def _require_own_parameters(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model_ids = {id(p) for p in model.parameters()}
    for g, group in enumerate(optimizer.param_groups):
        for i, p in enumerate(group["params"]):
            if id(p) not in model_ids:
                raise ValueError(
                    f"parameter {i} of the optimizer's group {g} must belong to the model; build "
                    "the optimizer from model.parameters() after the model is final"
                )


def require_supported(model: nn.Module) -> None:
    """Raise ValueError for a model that cannot be moved into flat storage."""
    trainable = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    if not trainable:
        raise ValueError("the model has no parameter that requires a gradient; nothing to train")
    for name, p in trainable:
        if isinstance(p, nn.parameter.UninitializedParameter):
            raise ValueError(f"parameter {name!r} is lazy; run one forward pass before prepare")
        if not p.is_floating_point():
            raise ValueError(
                f"parameter {name!r} has dtype {p.dtype}; only real floats are supported"
            )
    for name, buffer in model.named_buffers():
        if buffer.layout != torch.strided:
            raise ValueError(
                f"buffer {name!r} ({buffer.layout}) must be dense; keep it in an attribute that is "
                "no buffer"
            )
    _require_one_device(trainable)
    _require_own_memory([(n, p) for n, p in trainable if not is_sharded(p)])


def _require_one_device(named: Sequence[tuple[str, nn.Parameter]]) -> None:
    """Raise ValueError if parameters are on several devices, because messages and updates would
    follow the work of one device only."""
    first, where = named[0][0], named[0][1].device
    for name, p in named:
        if p.device != where:
            raise ValueError(
                f"parameter {name!r} (on {p.device}) must be on the device of {first!r} ({where}): "
                "all trainable parameters of a rank are on one device; move the model with "
                "model.to(...) before prepare, or freeze the parameters on other devices"
            )


def _require_own_memory(named: Sequence[tuple[str, nn.Parameter]]) -> None:
    """Raise ValueError if parameters overlap. Of a parameter with gaps only the start is checked,
    because the elements of another parameter may be in its gaps."""
    places: list[tuple[str, int, int, str]] = []
    for name, p in named:
        size = p.nbytes if is_dense(p) else p.element_size()
        if p.numel():
            places.append((str(p.device), p.data_ptr(), p.data_ptr() + size, name))
    for (device, _, end, one), (other_device, start, _, other) in pairwise(sorted(places)):
        if device == other_device and start < end:
            raise ValueError(
                f"parameters {one!r} and {other!r} share memory but are two objects; "
                "tie them by assigning the same Parameter"
            )


# ---- agreement ------------------------------------------------------------------------------


def agree_on_model(
    model: nn.Module, optimizer: torch.optim.Optimizer, strategy: Strategy, control: Control
) -> str:
    """Return the fingerprint of the model. Raise ValueError if strategy, model or optimizer differ
    between ranks."""
    settings = f"{strategy.name} {strategy.settings()}"
    control.agree("the strategy", settings, "start every rank with the same settings")
    layout: Settings = {
        f"parameter {i}": f"{name} {list(shape)} {dtype} {'trainable' if trained else 'frozen'} "
        f"with strides {list(strides)}"
        for i, (name, shape, dtype, trained, strides) in enumerate(_layout_of(model))
    }
    layout |= describe_shards(model)
    layout |= {f"buffer {n!r}": f"{list(b.shape)} {b.dtype}" for n, b in model.named_buffers()}
    difference = describe_difference(control.gather(layout))
    if difference is not None:
        raise ValueError(f"the model must be the same on all ranks: {difference}; {SAME_MODEL}")
    agree_on_optimizer(control, optimizer, model)
    return fingerprint_of(model)


def fingerprint_of(model: nn.Module) -> str:
    """Return a digest of names, shapes, types and strides of all parameters."""
    return hashlib.sha256(repr(_layout_of(model)).encode()).hexdigest()[:16]


def _layout_of(model: nn.Module) -> list[tuple[str, tuple[int, ...], str, bool, tuple[int, ...]]]:
    return [
        (name, tuple(p.shape), str(p.dtype), p.requires_grad, p.stride())
        for name, p in model.named_parameters()
    ]
