"""Checks, settings and state of the user's optimizer on servers."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from offbeat.core.buckets.coupling import find_coupling, trial_copy, trial_group, trial_steps
from offbeat.core.buckets.random_states import generator, normal
from offbeat.frames.frames import WireError
from offbeat.server.layout import Piece, in_order_of

Settings = list[dict[str, Any]]
"""Settings of every param group that are numbers, booleans, None, or sequences of them."""

_PLAIN = (bool, int, float, type(None))
_SHAPE, _CUT = (4, 6), 11  # shape of a trial parameter, and the element at which it is cut
COUNTER = "step"  # name of the step counter in torch's optimizers, a zero-dimensional tensor


def require_elementwise(optimizer: torch.optim.Optimizer, rule: str) -> None:
    """Raise ValueError for an optimizer that servers cannot step in pieces.

    The step of one element must not depend on other elements. The rule "push" also requires a
    learning rate, which it divides by the number of workers.
    """
    reason = find_coupling(optimizer) or _couples_elements(optimizer)
    if reason is not None:
        raise ValueError(
            f"{reason}, but servers hold pieces of parameters and step each of them; use an "
            "optimizer that works element by element (SGD, Adam, AdamW), and clip on the workers"
        )
    if rule == "push" and not all("lr" in group for group in optimizer.param_groups):
        raise ValueError(
            f"apply ('push') divides the learning rate, and {type(optimizer).__name__} has none; "
            "use apply='clock'"
        )


def _couples_elements(optimizer: torch.optim.Optimizer) -> str | None:
    """Return why parameters cannot be stepped in pieces, or None, by steps of trial parameters."""
    for group in optimizer.param_groups:
        if group["params"]:
            whole, cut = (
                _trial_after_steps(optimizer, group, False),
                _trial_after_steps(optimizer, group, True),
            )
            if not torch.allclose(whole, cut, rtol=1e-9, atol=1e-12):
                name = type(optimizer).__name__
                return f"the step of {name} for one element depends on other elements"
    return None


def _trial_after_steps(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], cut: bool
) -> Tensor:
    """Return a trial parameter, flat, after two steps as a whole or as two pieces (`cut`)."""
    random = generator()
    value, gradient = (normal(_SHAPE, random).double() for _ in range(2))
    edges = [0, _CUT, value.numel()] if cut else [0, value.numel()]
    pieces: list[nn.Parameter] = []
    for start, stop in pairwise(edges):
        shape = (stop - start,) if cut else _SHAPE
        parameter = nn.Parameter(value.flatten()[start:stop].reshape(shape).clone())
        parameter.grad = gradient.flatten()[start:stop].reshape(shape).clone()
        pieces.append(parameter)
    trial = trial_copy(optimizer, [trial_group(group, pieces)])
    with trial_steps(optimizer):
        for _ in range(2):
            trial.step()
    return torch.cat([piece.detach().flatten() for piece in pieces])


# ---- settings -------------------------------------------------------------------------------


def settings_of(optimizer: torch.optim.Optimizer) -> Settings:
    """Return the current settings of every param group, which a scheduler may change."""
    return [
        {
            name: _as_number(value)
            for name, value in group.items()
            if name != "params" and _is_plain(value)
        }
        for group in optimizer.param_groups
    ]


def checked_settings(given: Any, optimizer: torch.optim.Optimizer) -> Settings:
    """Return received settings; WireError unless the optimizer has them and they are finite."""
    groups = optimizer.param_groups
    if not isinstance(given, list) or len(given) != len(groups):
        raise WireError(f"settings must be those of {len(groups)} param groups")
    for received, group in zip(given, groups, strict=True):
        if not isinstance(received, dict):
            raise WireError("settings of a param group must be an object")
        for name, value in received.items():
            known = name in group and name != "params" and _is_plain(group[name])
            if not known or not _is_plain(value) or not _is_finite(value):
                raise WireError(f"setting {name[:40]!r} is not one of the optimizer's")
            if isinstance(value, (list, tuple)) != isinstance(group[name], (list, tuple)):
                raise WireError(
                    f"setting {name[:40]!r} must be a sequence on both sides or on none"
                )
    return given


def apply_settings(
    optimizer: torch.optim.Optimizer, groups: Sequence[int], settings: Settings, rate: float
) -> None:
    """Write settings to a shard's optimizer and multiply its learning rates by `rate`.

    `groups` are the numbers of the shard's param groups in `settings`.
    """
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


def _as_number(value: Any) -> Any:
    return value.item() if isinstance(value, Tensor) else value


def _is_finite(value: Any) -> bool:
    values = value if isinstance(value, (list, tuple)) else [value]
    return all(not isinstance(item, float) or math.isfinite(item) for item in values)


# ---- state ----------------------------------------------------------------------------------


def piece_state(state: Mapping[str, Any], whole: Tensor, piece: Piece) -> dict[str, Any]:
    """Return the optimizer state of a piece from the state of its whole parameter.

    Tensors of the parameter's shape are sliced; other values, such as counters, are copied.
    """
    return {
        name: in_order_of(value.detach(), whole)[piece.start : piece.stop].cpu().clone()
        if _has_shape(value, whole) and name != COUNTER
        else copy.deepcopy(value)
        for name, value in state.items()
    }


def put_state(
    state: dict[str, Any], whole: Tensor, piece: Piece, name: str, value: Tensor | float | None
) -> None:
    """Write one state value of a piece into the `state` of its whole parameter."""
    count = piece.stop - piece.start
    if not isinstance(value, Tensor) or value.shape != (count,):
        state[name] = value
        return
    if not _has_shape(state.get(name), whole):
        state[name] = torch.zeros_like(whole, dtype=value.dtype)
    in_order_of(state[name], whole)[piece.start : piece.stop] = value


def _has_shape(value: Any, whole: Tensor) -> bool:
    return isinstance(value, Tensor) and value.shape == whole.shape


def packed_state(
    optimizer: torch.optim.Optimizer, pieces: Sequence[nn.Parameter]
) -> tuple[list[dict[str, Any]], list[Tensor]]:
    """Return the state of pieces as JSON-ready descriptions and the flat tensors among its values.

    Each description with `elements` stands for one flat tensor. The tensors are in the order of
    these descriptions.
    """
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
                about["value"] = _as_number(value)
            described.append(about)
    return described, runs


def unpacked_state(
    described: Sequence[Mapping[str, Any]], body: Tensor
) -> list[tuple[int, str, Any]]:
    """Return (piece, name, value) for each description of `packed_state`.

    `body` holds the bytes of its flat tensors, one after the other.
    """
    values: list[tuple[int, str, Any]] = []
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
        values.append((about["piece"], about["name"], value))
    return values
