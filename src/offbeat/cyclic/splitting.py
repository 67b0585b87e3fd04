"""Split of a model into stages: modules that run one after the other."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from offbeat.core.buckets.random_states import preserve_random_states
from offbeat.strategies.solvers.stages import cut

REPEATS = 3  # measurements of a child, of which the least one is used


def split(
    model: nn.Module,
    stages: int,
    *example: Tensor,
    balance: Literal["time", "flops"] | Sequence[int] = "time",
    split_points: Sequence[str] | None = None,
) -> list[nn.Module]:
    """Split a model into a sequence of modules with about the same compute.

    An `nn.Sequential` is cut between its children. Any other model needs `split_points`: it is
    traced by torch.distributed.pipelining and cut before the named modules.

    Args:
        model: the model. The stages share its parameters.
        stages: number of stages.
        example: inputs of the model; with `split_points` those of one micro-batch.
        balance: costs of the children of an `nn.Sequential`: "time" measures forward and backward
            of `example`, "flops" counts those of its forward. A sequence gives the number of
            children of each stage instead.
        split_points: names of the modules at which all stages but the first one begin.

    Returns:
        The stages, in the order of the forward.

    Raises:
        ValueError: the model cannot be cut like this.
    """
    if split_points is not None:
        return _split_traced(model, stages, example, split_points)
    if not isinstance(model, nn.Sequential):
        raise ValueError(
            f"model ({type(model).__name__}) must be an nn.Sequential, or split_points must name "
            "the modules that begin a stage"
        )
    children = [*model.children()]
    if isinstance(balance, str):
        measure = _time_s if balance == "time" else _flops
        used = {x.device for x in (*example, *model.parameters())}
        inputs, costs = example, []
        with preserve_random_states(used):
            for child in children:
                measured = [measure(child, inputs) for _ in range(REPEATS)]
                costs.append(min(cost for cost, _ in measured))
                inputs = (measured[-1][1],)
        runs = [*cut(costs, stages)]
    else:
        if len(balance) != stages or sum(balance) != len(children) or min(balance) < 1:
            raise ValueError(
                f"balance ({list(balance)}) must be {stages} numbers of children, each at least 1 "
                f"and {len(children)} together"
            )
        runs = [range(a, z) for a, z in pairwise([0, *accumulate(balance)])]
    return [nn.Sequential(*(children[n] for n in run)) for run in runs]


def require_stages(stages: Sequence[nn.Module]) -> None:
    """Raise ValueError for a stage without own parameters or with running batch statistics."""
    homes: set[int] = set()
    for n, stage in enumerate(stages, 1):
        own = {id(p): name for name, p in stage.named_parameters()}
        if not any(p.requires_grad for p in stage.parameters()):
            raise ValueError(f"stage {n} has no parameters to train; join it to its neighbour")
        for key, name in own.items():
            if key in homes:
                raise ValueError(
                    f"stage {n} shares the parameter {name!r} with an earlier stage, so the edge "
                    "between them is crossed; keep both uses in one stage, or untie them"
                )
        homes.update(own)
        for name, module in stage.named_modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.track_running_stats:
                raise ValueError(
                    f"stage {n} has batch normalization ({name!r}), whose running statistics would "
                    "follow every micro-batch; use GroupNorm, or track_running_stats=False"
                )


def _time_s(child: nn.Module, inputs: Sequence[Tensor]) -> tuple[float, Tensor]:
    """Return the seconds of one forward and backward of a child, and its output.

    Gradients of its parameters stay as they are.
    """
    given = [x.detach().requires_grad_(x.is_floating_point()) for x in inputs]
    wanted = [x for x in (*given, *child.parameters()) if x.requires_grad]
    devices = {x.device for x in wanted}
    begin_s = end_of_work_s(devices)
    output = child(*given)
    if output.requires_grad:
        torch.autograd.grad(output, wanted, torch.ones_like(output), allow_unused=True)
    return end_of_work_s(devices) - begin_s, output.detach()


def _flops(child: nn.Module, inputs: Sequence[Tensor]) -> tuple[float, Tensor]:
    """Return the floating-point operations of a child's forward, and its output."""
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        output = child(*inputs)
    return float(counter.get_total_flops()), output


def end_of_work_s(devices: Iterable[torch.device]) -> float:
    """Return the time in seconds at which devices have ended their work."""
    for device in devices:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    return time.perf_counter()


def _split_traced(
    model: nn.Module, stages: int, example: tuple[Tensor, ...], points: Sequence[str]
) -> list[nn.Module]:
    from torch.distributed.pipelining import SplitPoint, pipeline

    known = dict(model.named_modules())
    for name in points:
        if name not in known:
            raise ValueError(f"split_points ({name!r}) must name a module of the model")
    if len(points) != stages - 1:
        raise ValueError(f"split_points ({len(points)}) must be one less than stages ({stages})")
    spec: dict[str, Any] = dict.fromkeys(points, SplitPoint.BEGINNING)
    try:
        with warnings.catch_warnings():  # torch.export warns about torch's own code
            warnings.simplefilter("ignore")
            pipe = pipeline(model, mb_args=example, split_spec=spec)
    except Exception as error:
        raise ValueError(
            f"the model cannot be cut before {', '.join(points)}: {error}; write it as an "
            "nn.Sequential, or cut it elsewhere"
        ) from error
    return [pipe.get_stage_module(n) for n in range(stages)]
