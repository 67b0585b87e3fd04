"""Comparison of settings, weights and optimizer state between ranks during training."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor, nn

from offbeat.core.buckets.checksum import checksum
from offbeat.core.guards.replicas import (
    REPAIR,
    are_equal,
    digest_of,
    dissenters,
    find_difference,
    hash_text,
    optimizer_state,
    weights,
)
from offbeat.core.plan import Groups
from offbeat.core.transport.control import Control

EVERY = 100  # iterations; a comparison reads weights and state once, less work than one step
ALIKE = 1e-6  # relative tolerance: libraries may compute settings with different last digits

Settings = dict[str, Any]
"""Values of settings by name and group, such as `lr of param group 0`."""


class ReplicaGuard:
    """Compares param-group settings, weights and optimizer state of all ranks every `every` steps.

    It is used with plans that send gradients only, because there every rank makes the same
    updates. A comparison is one collective of four numbers before the update of a step, after
    `settle` has completed delayed updates. So all ranks compare the same version. Loading a
    checkpoint sends nothing, because one rank may do it alone.

    With `holders`, the groups of ranks that hold the same shards, weights and optimizer state are
    compared within these groups.

    `written` names parameters that a forward has written, which is then named as the cause.

    An optimizer may divide its parameters among ranks and send updated ones in its step. Then each
    rank has the state of its own parameters, and only weights and settings are compared.
    """

    def __init__(
        self,
        control: Control,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        every: int,
        settle: Callable[[], None],
        holders: Groups = (),
        written: Collection[str] = (),
    ):
        self._control, self._model, self._optimizer = control, model, optimizer
        self._settle, self._holders, self._written = settle, holders, written
        self._every, self._steps = every, 0
        self._divides_state = False  # whether ranks have the state of different parameters
        self.skipped = 0  # updates that the script has skipped

    def count_step(self) -> bool:
        """Count an update that is about to run. Return whether `compare` must be called before."""
        self._steps += 1
        return (self._steps - 1) % self._every == 0

    def compare(self) -> None:
        """Compare the replicas.

        Raises:
            RuntimeError: on every rank, if replicas differ; names rank and setting or tensor.
        """
        self._settle()
        settings = settings_of(self._optimizer, self._model)
        state = {} if self._divides_state else optimizer_state(self._optimizer, self._model)
        common = [hash_text(repr(settings)) >> 2, self.skipped]
        held = [checksum(*weights(self._model).values()) >> 2, digest_of(state)]
        if self._holders:
            is_same = self._control.is_same(held, self._holders) & self._control.is_same(common)
        else:
            is_same = self._control.is_same([*common, *held])
        if not is_same:
            self._require_rounding_only(settings, state)

    def _require_rounding_only(self, settings: Settings, state: dict[str, Tensor]) -> None:
        """Raise RuntimeError with the causes, unless replicas differ by rounding only."""
        causes = [self._describe_skips(), describe_difference(self._control.gather(settings))]
        self._divides_state |= not are_equal(self._control.gather([*state]))
        compared = {"weight": weights(self._model)}
        if not self._divides_state:
            compared["optimizer state"] = state
        for what, tensors in compared.items():
            found = find_difference(tensors, self._control, self._holders)
            if found is not None:
                causes.append(f"{what} {found}{self._describe_write(found.tensor)}")
        named = [cause for cause in causes if cause]
        if named:
            raise RuntimeError(
                "replicas have diverged, although only gradients are averaged, which keeps them "
                f"equal: {'; '.join(named)}; {REPAIR}"
            )

    def _describe_write(self, name: str) -> str:
        """Return that a forward has written the weight on any rank, if so."""
        if not any(self._control.gather(name in self._written)):
            return ""
        return (
            " (forward has written it, as nn.Embedding(max_norm=...) does: keep what forward "
            "writes in a buffer, or write the same values on all ranks)"
        )

    def _describe_skips(self) -> str | None:
        """Return which ranks have skipped different numbers of steps; None if all are equal."""
        counts = self._control.gather(self.skipped)
        for rank, other in dissenters(counts):
            return (
                f"rank {rank} has skipped {counts[rank]} steps, rank {other} {counts[other]}: call "
                "skip_step() on all ranks or on none"
            )
        return None


class SettingsGuard:
    """Compares settings and written weights of ranks, with plans that average parameters.

    Settings are those of param groups and the set of frozen parameters. `written` has the names of
    weights that the script has changed between a step and the next forward, since the last
    comparison. Weights and optimizer state themselves differ between two averages, so they are not
    compared.

    A comparison is one collective of two numbers before the update of an iteration that averages,
    in which ranks wait for each other anyway. It takes place in the first two such iterations.
    After that it takes place in the first such iteration at least `every` steps after the first
    comparison, or after the last one that `every` has caused.

    `warn` is called on every rank if some ranks have written weights and others have not. Such
    a difference is not an error, because a script may have a reason, such as a norm above a limit.

    With `nodes`, every comparison also compares weights and optimizer state of the ranks that share
    a replica.
    """

    def __init__(
        self,
        control: Control,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        every: int,
        averages: Callable[[], bool],
        warn: Callable[[str], None],
        written: dict[str, None],
        nodes: Groups = (),
    ):
        self._control, self._model, self._optimizer = control, model, optimizer
        self._averages, self._warn, self._written = averages, warn, written
        self._every, self._warned = every, False
        self._nodes = nodes  # ranks that share a replica, so that their weights must be equal
        self._compared = self._left = 0  # number of comparisons; steps until the next comparison

    def count_step(self) -> bool:
        """Count an update that is about to run. Return whether `compare` must be called before."""
        self._left -= 1
        second = self._compared == 1
        if not ((self._left < 0 or second) and self._averages()):
            return False
        self._left = self._left if second else self._every - 1
        self._compared += 1
        return True

    def compare(self) -> None:
        """Compare settings, written weights, and the replicas of nodes.

        Raises:
            RuntimeError: on every rank, if ranks differ; names rank and setting or tensor.
        """
        if self._nodes:
            self._compare_nodes()
        settings, written = settings_of(self._optimizer, self._model), [*self._written]
        self._written.clear()
        if self._control.is_same([hash_text(repr(settings)) >> 2, bool(written)]):
            return
        everyone = self._control.gather((settings, written))
        found = describe_difference([other_settings for other_settings, _ in everyone])
        if found is not None:
            raise RuntimeError(
                "ranks whose parameters are averaged must train with the same settings: "
                f"{found}; give every rank the same optimizer and scheduler, freeze the same "
                "parameters everywhere, or pass compare_every=0 to offbeat.prepare"
            )
        writers = [rank for rank, (_, names) in enumerate(everyone) if names]
        if 0 < len(writers) < len(everyone) and not self._warned:
            self._warned = True
            names = everyone[writers[0]][1]
            self._warn(
                f"parameter {names[0]!r} ({len(names)} in all) was written between "
                f"optimizer.step() and the next forward by ranks {writers} alone; unless they have "
                "restored it, it enters the averages of all ranks. Change weights on all ranks "
                "alike, or load them with model.load_state_dict"
            )

    def _compare_nodes(self) -> None:
        """Raise RuntimeError on every rank if ranks that share a replica have other weights or
        optimizer state."""
        compared = {
            "weight": weights(self._model),
            "optimizer state": optimizer_state(self._optimizer, self._model),
        }
        everyone = self._control.gather([digest_of(tensors) for tensors in compared.values()])
        for i, (what, tensors) in enumerate(compared.items()):
            if not dissenters([digests[i] for digests in everyone], self._nodes):
                continue
            found = find_difference(tensors, self._control, self._nodes)
            if found is not None:
                raise RuntimeError(
                    "ranks that share a replica have diverged, although they apply the same "
                    f"gradients: {what} {found}; {REPAIR}"
                )


def agree_on_optimizer(
    control: Control, optimizer: torch.optim.Optimizer, model: nn.Module
) -> None:
    """Require the same optimizer with the same param groups on all ranks.

    Raises:
        ValueError: on every rank, if optimizers differ, or if some ranks have optimizer state and
            others have none; names rank and setting or tensor.
    """
    defaults = {k: v for k, v in sorted(optimizer.defaults.items()) if _is_plain(v)}
    sizes = [len(group["params"]) for group in optimizer.param_groups]
    setup = f"{type(optimizer).__name__} {defaults} for groups of {sizes} parameters"
    control.agree("the optimizer", setup, "build the same one everywhere")
    state = optimizer_state(optimizer, model)
    everyone = control.gather((settings_of(optimizer, model), next(iter(state), None)))
    found = describe_difference([settings for settings, _ in everyone])
    if found is not None:
        raise ValueError(
            f"the optimizer's param groups must be the same on all ranks: {found}; build the same "
            "one everywhere"
        )
    first = [name for _, name in everyone]
    for rank, other in dissenters([name is None for name in first]):
        with_state, without = (rank, other) if first[other] is None else (other, rank)
        raise ValueError(
            f"optimizer state must be on all ranks or on none: rank {with_state} has "
            f"{first[with_state]!r}, rank {without} has none; load the same checkpoint on all ranks"
        )


def settings_of(optimizer: torch.optim.Optimizer, model: nn.Module) -> Settings:
    """Return the plain settings and parameter names of each param group, and the names of frozen
    parameters."""
    names = {id(p): name for name, p in model.named_parameters()}
    settings: Settings = {}
    for g, group in enumerate(optimizer.param_groups):
        for key, value in sorted(group.items()):
            if key == "params":
                value = tuple(names.get(id(p), "?") for p in value)
            elif isinstance(value, Tensor) and value.numel() == 1:
                value = float(value)
            elif isinstance(value, list):
                value = tuple(value)
            if _is_plain(value):
                settings[f"{key} of param group {g}"] = value
    frozen = tuple(name for name, p in model.named_parameters() if not p.requires_grad)
    return settings | {"frozen parameters": frozen}


def _is_plain(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(map(_is_plain, value))
    return isinstance(value, (bool, int, float, str, type(None)))


def describe_difference(everyone: list[Settings]) -> str | None:
    """Return a description of the first setting in which a rank differs from most ranks."""
    if are_equal(everyone):
        return None
    for name in dict.fromkeys(name for settings in everyone for name in settings):
        values = [settings.get(name) for settings in everyone]
        for rank, other in dissenters(values):
            if not _is_close(values[rank], values[other]):
                here, there = _differing_texts(values[rank], values[other])
                return f"rank {rank} has {here} as {name}, rank {other} has {there}"
    return None


def _is_close(a: Any, b: Any) -> bool:
    if isinstance(a, tuple) and isinstance(b, tuple) and len(a) == len(b):
        return all(_is_close(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, float) and isinstance(b, float):
        return math.isclose(a, b, rel_tol=ALIKE) or (math.isnan(a) and math.isnan(b))
    return a == b


def _differing_texts(a: Any, b: Any) -> tuple[str, str]:
    """Return two values as text; for long tuples, their first entries that differ."""
    if isinstance(a, tuple) and isinstance(b, tuple) and max(len(a), len(b)) > 4:
        first = next(i for i in range(max(len(a), len(b))) if a[i : i + 1] != b[i : i + 1])
        return tuple(repr(x[first]) if first < len(x) else "nothing" for x in (a, b))  # type: ignore[return-value]
    return repr(a), repr(b)
