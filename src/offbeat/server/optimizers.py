"""The user's optimizer on servers: which can be cut, its settings on the way, its state."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from offbeat.core.buckets.coupling import couples, shield_parameters, trial_copy
from offbeat.core.buckets.random_states import generator, normal, preserve_random_states
from offbeat.frames.frames import WireError
from offbeat.server.layout import Piece, in_order_of

Settings = list[dict[str, Any]]
"""Plain settings of every param group, as they are at one moment."""

_PLAIN = (bool, int, float, type(None))
_SHAPE, _CUT = (4, 6), 11  # of a made-up parameter, and where it is cut
COUNTER = "step"  # torch's optimizers count steps in it, as a tensor without dimensions


def require_elementwise(optimizer: torch.optim.Optimizer, rule: str) -> None:
    """ValueError for an optimizer whose step of one element depends on others, or without a
    learning rate where the rule divides it."""
    reason = couples(optimizer) or _couples_elements(optimizer)
    if reason is not None:
        raise ValueError(
            f"{reason}, but servers hold pieces of parameters and step them apart; use an "
            "optimizer that works element by element (SGD, Adam, AdamW), and clip on the workers"
        )
    if rule == "push" and not all("lr" in group for group in optimizer.param_groups):
        raise ValueError(
            f"apply ('push') divides the learning rate, and {type(optimizer).__name__} has none; "
            "use apply='clock'"
        )


def _couples_elements(optimizer: torch.optim.Optimizer) -> str | None:
    """Why a parameter cannot be stepped in pieces; None if it can. Made-up parameters tell."""
    for group in optimizer.param_groups:
        if group["params"]:
            whole, cut = _stepped(optimizer, group, False), _stepped(optimizer, group, True)
            if not torch.allclose(whole, cut, rtol=1e-9, atol=1e-12):
                name = type(optimizer).__name__
                return f"{name} steps an element otherwise when others are stepped with it"
    return None


def _stepped(optimizer: torch.optim.Optimizer, group: dict[str, Any], cut: bool) -> Tensor:
    """A made-up parameter after two steps, whole or as two flat pieces."""
    random = generator()
    value, gradient = (normal(_SHAPE, random).double() for _ in range(2))
    edges = [0, _CUT, value.numel()] if cut else [0, value.numel()]
    pieces: list[nn.Parameter] = []
    for start, stop in pairwise(edges):
        shape = (stop - start,) if cut else _SHAPE
        mine = nn.Parameter(value.flatten()[start:stop].reshape(shape).clone())
        mine.grad = gradient.flatten()[start:stop].reshape(shape).clone()
        pieces.append(mine)
    settings = {k: v.clone() if isinstance(v, Tensor) else v for k, v in group.items()}
    if isinstance(settings.get("lr"), (int, float, Tensor)):
        settings["lr"] = 0.1  # a warm-up may have it at 0
    trial = trial_copy(optimizer, [{**settings, "params": pieces}])
    with preserve_random_states(), shield_parameters(optimizer):
        for _ in range(2):
            trial.step()
    return torch.cat([piece.detach().flatten() for piece in pieces])


# ---- settings -------------------------------------------------------------------------------


def settings_of(optimizer: torch.optim.Optimizer) -> Settings:
    """What a scheduler may have changed: every plain number of every group."""
    return [
        {
            name: _plain(value)
            for name, value in group.items()
            if name != "params" and _is_plain(value)
        }
        for group in optimizer.param_groups
    ]


def checked_settings(given: Any, optimizer: torch.optim.Optimizer) -> Settings:
    """Settings as they arrived; WireError unless they are plain, finite, and the optimizer's."""
    groups = optimizer.param_groups
    if not isinstance(given, list) or len(given) != len(groups):
        raise WireError(f"settings must be those of {len(groups)} param groups")
    for theirs, mine in zip(given, groups, strict=True):
        if not isinstance(theirs, dict):
            raise WireError("settings of a param group must be an object")
        for name, value in theirs.items():
            known = name in mine and name != "params" and _is_plain(mine[name])
            if not known or not _is_plain(value) or not _finite(value):
                raise WireError(f"setting {name[:40]!r} is not one of the optimizer's")
            if isinstance(value, (list, tuple)) != isinstance(mine[name], (list, tuple)):
                raise WireError(f"setting {name[:40]!r} has another form")
    return given


def adopt(
    optimizer: torch.optim.Optimizer, groups: Sequence[int], settings: Settings, rate: float
) -> None:
    """Give an optimizer of some of the groups these settings, its learning rates times `rate`."""
    for number, group in zip(groups, optimizer.param_groups, strict=True):
        for name, value in settings[number].items():
            group[name] = tuple(value) if isinstance(value, list) else value
        if rate != 1.0:
            group["lr"] = group["lr"] * rate


def _is_plain(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.numel() == 1
    if isinstance(value, (tuple, list)):
        return all(isinstance(item, _PLAIN) for item in value)
    return isinstance(value, _PLAIN)


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, Tensor) else value


def _finite(value: Any) -> bool:
    values = value if isinstance(value, (list, tuple)) else [value]
    return all(not isinstance(item, float) or math.isfinite(item) for item in values)


# ---- state ----------------------------------------------------------------------------------


def piece_state(state: Mapping[str, Any], whole: Tensor, piece: Piece) -> dict[str, Any]:
    """What a parameter's state is for a piece of it: slices of what has its shape, copies of the
    rest (counters)."""
    return {
        name: in_order_of(value.detach(), whole)[piece.start : piece.stop].cpu().clone()
        if _of_shape(value, whole) and name != COUNTER
        else copy.deepcopy(value)
        for name, value in state.items()
    }


def put_state(
    state: dict[str, Any], whole: Tensor, piece: Piece, name: str, value: Tensor | float | None
) -> None:
    """The inverse, for one value of one piece."""
    count = piece.stop - piece.start
    if not isinstance(value, Tensor) or value.shape != (count,):
        state[name] = value
        return
    if not _of_shape(state.get(name), whole):
        state[name] = torch.zeros_like(whole, dtype=value.dtype)
    in_order_of(state[name], whole)[piece.start : piece.stop] = value


def _of_shape(value: Any, whole: Tensor) -> bool:
    return isinstance(value, Tensor) and value.shape == whole.shape


def packed_state(
    optimizer: torch.optim.Optimizer, pieces: Sequence[nn.Parameter]
) -> tuple[list[dict[str, Any]], list[Tensor]]:
    """The state of pieces as plain descriptions, in order, and the numbers of those that are runs
    of elements."""
    described: list[dict[str, Any]] = []
    runs: list[Tensor] = []
    for number, piece in enumerate(pieces):
        for name, value in optimizer.state.get(piece, {}).items():
            about: dict[str, Any] = {"piece": number, "name": name}
            if isinstance(value, Tensor):
                about["dtype"] = str(value.dtype).removeprefix("torch.")
            if isinstance(value, Tensor) and value.dim():
                about["elements"] = value.numel()
                runs.append(value.detach().reshape(-1))
            else:
                about["value"] = _plain(value)
            described.append(about)
    return described, runs


def unpacked_state(
    described: Sequence[Mapping[str, Any]], body: Tensor
) -> list[tuple[int, str, Any]]:
    """(piece, name, value) of `packed_state`; `body` are the bytes of its numbers."""
    found: list[tuple[int, str, Any]] = []
    at = 0
    for about in described:
        value = about.get("value")
        if "dtype" in about:
            dtype = getattr(torch, about["dtype"])
            if "elements" in about:
                size = about["elements"] * dtype.itemsize
                value = body[at : at + size].clone().view(dtype)
                at += size
            else:
                value = torch.tensor(value, dtype=dtype, device="cpu")
        found.append((about["piece"], about["name"], value))
    return found
