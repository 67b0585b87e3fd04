"""Trial steps of a copy of the user's optimizer, and whether its step of one parameter depends on
other parameters (coupling)."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from offbeat.core.buckets.random_states import (
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
    groups = [g for g, group in enumerate(optimizer.param_groups) if group["params"]]
    for g, scale in ((g, scale) for g in groups for scale in _SCALES):
        try:
            alone = _step_stand_in(optimizer, g, scale, others=0)
            together = _step_stand_in(optimizer, g, scale, others=2)
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


class _RefuseCollectives(TorchDispatchMode):
    refused: str | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            self.refused = str(func)
            raise RuntimeError(f"{func} is refused in a trial step")
        return func(*args, **(kwargs or {}))


def find_collective(optimizer: torch.optim.Optimizer) -> str | None:
    """Return which collective the step of an optimizer, or of one that it holds, calls; None if it
    calls none.

    An example is an optimizer of which each rank updates a part of the parameters. Trial steps of
    stand-ins find it, and the collective does not run.
    """
    for held in _held_optimizers(optimizer) or [optimizer]:
        # Any error of a user's optimizer on stand-ins shows nothing.
        with suppress(Exception), trial_steps(held), _RefuseCollectives() as calls:
            trial = stand_in(held)
            trial.step()
            trial.step()
        if calls.refused:
            name = type(held).__name__
            return f"{name} communicates with other ranks in its step ({calls.refused})"
    return None


def reaches_stand_ins(optimizer: torch.optim.Optimizer) -> bool | None:
    """Whether the steps of a copy change a small stand-in parameter of each group; None if a copy
    cannot step, so that it is unknown.

    They do not if the optimizer steps tensors of its own attributes, or reads gradients from there.
    """
    if is_wrapper(optimizer):  # a copy would step the parameters of the inner optimizer
        return None
    groups = [g for g, group in enumerate(optimizer.param_groups) if group["params"]]
    try:
        ends = [_step_stand_in(optimizer, g, 1.0, others=2, steps=_SELDOM) for g in groups]
    except Exception:  # of a user's optimizer
        return None
    return all(end is not None for end in ends)


def stand_in(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return a copy of the optimizer with one small stand-in parameter per group."""
    random = generator()
    groups = optimizer.param_groups
    return trial_copy(optimizer, [trial_group(g, _stand_ins(g, 1, 1.0, random)) for g in groups])


def trial_copy(optimizer: torch.optim.Optimizer, groups: Iterable[Group]) -> torch.optim.Optimizer:
    """Return a copy of the optimizer with other groups and without state.

    Tensors in other attributes of the optimizer are copied too; parameters are not. Call `step` of
    the copy only within `trial_steps`.
    """
    trial = object.__new__(type(optimizer))
    own = {k: v for k, v in vars(optimizer).items() if k not in ("state", "param_groups")}
    vars(trial).update(tree_map_only(Tensor, _copy, own))
    vars(trial).pop("step", None)  # a scheduler replaces `step` by a function of the original
    trial._optimizer_step_pre_hooks = OrderedDict()
    trial._optimizer_step_post_hooks = OrderedDict()
    trial.state = defaultdict(dict)
    trial.param_groups = [group for group in groups if group["params"]]
    return trial


def trial_group(group: Group, parameters: list[nn.Parameter]) -> Group:
    """Return a copy of a group with other parameters, and a learning rate that changes them."""
    made = {k: v.clone() if isinstance(v, Tensor) else v for k, v in group.items()}
    rate = group.get("lr")
    if isinstance(rate, Tensor):
        made["lr"] = torch.full_like(rate, _RATE)
    elif isinstance(rate, (int, float)):
        made["lr"] = _RATE
    return {**made, "params": parameters}


def _copy(tensor: Tensor) -> Tensor:
    return tensor if isinstance(tensor, nn.Parameter) else tensor.detach().clone()


@contextmanager
def trial_steps(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Protect random states, and the parameters and gradients of an optimizer, from steps of its
    trial copies.

    A copy may reach the real parameters through other attributes. Within the block their gradients
    are None, and all their elements share one memory location, to which torch refuses to write.
    """
    kept = [(p, p.data, p.grad) for group in optimizer.param_groups for p in group["params"]]
    with preserve_random_states({p.device for p, _, _ in kept}):
        try:
            for p, data, _ in kept:
                p.grad = None
                p.data = data.new_zeros(()).expand(data.shape)
            yield
        finally:
            for p, data, grad in kept:
                p.data, p.grad = data, grad


def is_wrapper(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer holds other optimizers, as a wrapper does."""
    return bool(_held_optimizers(optimizer))


def _held_optimizers(optimizer: torch.optim.Optimizer) -> list[torch.optim.Optimizer]:
    held = [one for v in vars(optimizer).values() for one in (v if isinstance(v, list) else [v])]
    return [value for value in held if isinstance(value, torch.optim.Optimizer)]


def _step_stand_in(
    optimizer: torch.optim.Optimizer, g: int, scale: float, *, others: int, steps: int = 2
) -> Tensor | None:
    """Return a stand-in parameter of param group `g` after the steps of a trial optimizer.

    The trial optimizer also holds `others` further stand-ins of each group. Return None if the
    steps neither change the stand-in nor create optimizer state for it.
    """
    random, groups = generator(), optimizer.param_groups
    [first] = _stand_ins(groups[g], 1, scale, random)
    begin, devices = first.detach().clone(), {p.device for own in groups for p in own["params"]}
    members = [
        trial_group(group, [first] * (i == g) + _stand_ins(group, others, scale, random))
        for i, group in enumerate(groups)
    ]
    trial = trial_copy(optimizer, members)
    with trial_steps(optimizer):
        for seed in range(steps):
            seed_all(seed, devices)  # some optimizers round stochastically
            trial.step()
    end = first.detach()
    if end.numel() and torch.equal(begin, end) and not trial.state.get(first):
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
