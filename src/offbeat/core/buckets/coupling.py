"""Test whether an optimizer's step of one parameter depends on other parameters (coupling)."""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from offbeat.core.buckets.random_states import (
    CPU,
    generator,
    normal,
    preserve_random_states,
    seed_all,
)

Group = dict[str, Any]

_SCALES = (1.0, 1e4)  # factors of trial gradients; clipping acts above its threshold only
_RATE = 0.1  # learning rate of trials: the current rate may be 0 in a warm-up
_SELDOM = 64  # steps of an optimizer that may not write in each of them
_LARGEST = 3  # largest size of each dimension of a stand-in


def find_coupling(optimizer: torch.optim.Optimizer) -> str | None:
    """Return why the step of one parameter depends on other parameters; None if it does not.

    An example is a norm of all gradients. A copy of the optimizer steps a small stand-in parameter
    alone, and again together with stand-ins of all groups. The user's tensors and state are not
    changed. The result is the same on all ranks.
    """
    name = type(optimizer).__name__
    if is_wrapper(optimizer):
        return f"{name} calls the step of another optimizer"
    if (collective := find_collective(optimizer)) is not None:
        return collective
    for g, _ in enumerate(optimizer.param_groups):
        for scale in _SCALES:
            try:
                alone = _step_stand_in(optimizer, g, scale, alone=True)
                together = _step_stand_in(optimizer, g, scale, alone=False)
            except Exception as error:
                return f"{name} failed in a trial step on synthetic parameters ({error})"
            if alone is None or together is None:
                return (
                    f"{name} does not step the parameters of its param groups (does it keep "
                    "parameters, or views of them, in attributes of its own?)"
                )
            if not torch.equal(alone, together):
                return (
                    f"{name} steps a parameter differently if it steps others as well (does it "
                    "clip by the norm of all gradients?)"
                )
    return None


class _CollectiveError(Exception):
    """A collective that was about to run."""


class _RefuseCollectives(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            raise _CollectiveError(str(func))
        return func(*args, **(kwargs or {}))


def find_collective(optimizer: torch.optim.Optimizer) -> str | None:
    """Return which collective the step of an optimizer, or of one that it holds, calls; None if it
    calls none.

    An example is an optimizer of which each rank updates a part of the parameters. Trial steps of
    stand-ins find it, and the collective does not run.
    """
    for held in _held_optimizers(optimizer) or [optimizer]:
        try:
            with _RefuseCollectives():
                for g, _ in enumerate(held.param_groups):
                    _step_stand_in(held, g, 1.0, alone=False)
        except _CollectiveError as error:
            return f"{type(held).__name__} communicates with other ranks in its step ({error})"
        except Exception:  # of the stand-ins
            continue
    return None


def reaches_stand_ins(optimizer: torch.optim.Optimizer) -> bool | None:
    """Whether the steps of a copy change a small stand-in parameter of each group; None if a copy
    cannot step, so that it is unknown.

    They do not if the optimizer steps tensors of its own attributes, or reads gradients from there.
    """
    if is_wrapper(optimizer):  # a copy would step the parameters of the inner optimizer
        return None
    try:
        ends = [
            _step_stand_in(optimizer, g, 1.0, alone=False, steps=_SELDOM)
            for g, _ in enumerate(optimizer.param_groups)
        ]
    except Exception:  # of a user's optimizer
        return None
    return all(end is not None for end in ends)


def trial_copy(optimizer: torch.optim.Optimizer, groups: Sequence[Group]) -> torch.optim.Optimizer:
    """Return a copy of the optimizer with other groups and without state.

    Tensors in other attributes of the optimizer are copied too; parameters are not. Call `step` of
    the copy only within `shield_parameters`.
    """
    trial = object.__new__(type(optimizer))
    own = {k: v for k, v in optimizer.__dict__.items() if k not in ("state", "param_groups")}
    trial.__dict__.update(_copy_tensors(own))
    trial.__dict__.pop("step", None)  # a scheduler replaces `step` by a function of the original
    trial._optimizer_step_pre_hooks = OrderedDict()
    trial._optimizer_step_post_hooks = OrderedDict()
    trial.state = defaultdict(dict)
    trial.param_groups = list(groups)
    return trial


def _copy_tensors(value: Any) -> Any:
    """Return `value` with all tensors copied, also those in dicts, lists and tuples.

    Parameters and other objects are not copied.
    """
    if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
        return value.detach().clone()
    if isinstance(value, dict):
        made = copy.copy(value)
        made.update((key, _copy_tensors(item)) for key, item in value.items())
        return made
    make: Any = type(value)
    if make in (list, tuple):
        return make(_copy_tensors(item) for item in value)
    return value


@contextmanager
def shield_parameters(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Protect the parameters and gradients of an optimizer from steps of its trial copies.

    A copy may reach the real parameters through other attributes. Within the block their gradients
    are None, and all their elements share one memory location, to which torch refuses to write.
    """
    kept = [(p, p.data, p.grad) for group in optimizer.param_groups for p in group["params"]]
    try:
        for p, data, _ in kept:
            p.grad = None
            p.data = data.new_zeros(()).expand(data.shape)
        yield
    finally:
        for p, data, grad in kept:
            p.data, p.grad = data, grad


def stand_in(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return a copy of the optimizer with one small stand-in parameter per group."""
    random = generator()
    groups = [_trial_group(g, _stand_ins(g, 1, 1.0, random)) for g in optimizer.param_groups]
    return trial_copy(optimizer, [group for group in groups if group["params"]])


def is_wrapper(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer holds other optimizers, as a wrapper does."""
    return bool(_held_optimizers(optimizer))


def _held_optimizers(optimizer: torch.optim.Optimizer) -> list[torch.optim.Optimizer]:
    held = [value for value in vars(optimizer).values() if not isinstance(value, list)]
    held += [one for value in vars(optimizer).values() if isinstance(value, list) for one in value]
    return [value for value in held if isinstance(value, torch.optim.Optimizer)]


def devices_of(optimizer: torch.optim.Optimizer) -> set[torch.device]:
    """Return the devices of the optimizer's parameters."""
    return {p.device for group in optimizer.param_groups for p in group["params"]}


def _step_stand_in(
    optimizer: torch.optim.Optimizer, g: int, scale: float, *, alone: bool, steps: int = 2
) -> Tensor | None:
    """Return a stand-in parameter of param group `g` after the steps of a trial optimizer.

    The trial optimizer holds only this stand-in if `alone`, otherwise also further stand-ins of
    this and all other groups. Return None if the steps neither change the stand-in nor create
    optimizer state for it.
    """
    random = generator()
    first = _stand_ins(optimizer.param_groups[g], 1, scale, random)
    if not first:
        return torch.zeros(0, device=CPU, dtype=torch.float32)
    begin = first[0].detach().clone()
    groups = [_trial_group(optimizer.param_groups[g], first)]
    if not alone:
        groups[0]["params"] = first + _stand_ins(optimizer.param_groups[g], 2, scale, random)
        groups += [
            _trial_group(group, _stand_ins(group, 1, scale, random))
            for other, group in enumerate(optimizer.param_groups)
            if other != g
        ]
    trial = trial_copy(optimizer, [group for group in groups if group["params"]])
    devices = devices_of(trial)
    with preserve_random_states(devices), shield_parameters(optimizer):
        for seed in range(steps):
            seed_all(seed, devices)  # some optimizers round stochastically
            trial.step()
    end = first[0].detach()
    if end.numel() and torch.equal(begin, end) and not trial.state.get(first[0]):
        return None
    return end


def _stand_ins(
    group: Group, count: int, scale: float, random: torch.Generator
) -> list[nn.Parameter]:
    """Return `count` small parameters with gradients, of the dtype of the group's first one."""
    made: list[nn.Parameter] = []
    for like in group["params"][:1] * count:
        shape = [min(size, _LARGEST) for size in like.shape]
        p = nn.Parameter(normal(shape, random).to(like))
        p.grad = (scale * normal(shape, random)).to(like)
        made.append(p)
    return made


def _trial_group(group: Group, params: list[nn.Parameter]) -> Group:
    made = {**group, "params": params}
    rate = group.get("lr")
    if isinstance(rate, Tensor):
        made["lr"] = torch.full_like(rate, _RATE)
    elif isinstance(rate, (int, float)):
        made["lr"] = _RATE
    return {k: v.clone() if isinstance(v, Tensor) else v for k, v in made.items()}
