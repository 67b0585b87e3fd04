"""The replica guard: notices replicas that drift apart though only gradients move."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from offbeat.core.buckets.checksum import checksum
from offbeat.core.guards.replicas import (
    REPAIR,
    Difference,
    dissenters,
    find_difference,
    hash_text,
    optimizer_state,
    weights,
)
from offbeat.core.transport.control import Control

EVERY = 100  # iterations; one pass over weights and optimizer state, less than a step's own
FIRST = 3  # iterations whose weights are compared bit by bit, and then every `EVERY`th
ALIKE = 1e-6  # relative: settings that two libraries compute may differ in their last digit

Settings = dict[str, Any]
"""Values by (group, name), as `lr of param group 0`."""


class Comparison(ABC):
    """Compares what ranks must have in common, at places that all ranks reach."""

    def __init__(
        self,
        control: Control,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        every: int,
    ):
        self._control, self._model, self._optimizer = control, model, optimizer
        self._every = every
        self._steps = 0

    @abstractmethod
    def step(self) -> None:
        """Before an update: compare if it is time. RuntimeError on every rank on a difference."""

    def note_step(self, *, landed: bool) -> None:  # noqa: B027 - nothing to do by default
        """After a step. `landed`: whether no message writes weights before the next forward."""

    def forward_begins(self) -> None:  # noqa: B027 - nothing to do by default
        """Before the first forward of an iteration."""

    def forget(self) -> None:  # noqa: B027 - nothing to do by default
        """Weights are about to be replaced on behalf of the session."""


class ReplicaGuard(Comparison):
    """Compares the ranks' param-group settings, weights and optimizer state now and then.

    For plans that move nothing but gradients: there every rank makes the same updates. A look is
    one collective of three numbers and happens on all ranks at the same place, before the update
    of a step, when `settle` has done the updates that are still to come. So every rank compares
    the same version. Nothing is ever sent by a load, which one rank may do alone.
    """

    def __init__(
        self,
        control: Control,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        every: int,
        settle: Callable[[], None],
    ):
        super().__init__(control, model, optimizer, every)
        self._settle = settle
        self.skipped = 0  # updates that the script has left out
        self._asked = False

    def ask(self) -> None:
        """Look before the next update. On all ranks in the same iteration, or on none: after a
        load that all ranks know of."""
        self._asked = True

    def step(self) -> None:
        if self._asked or self._steps % self._every == 0:
            self.look()
        self._steps += 1

    def look(self) -> None:
        """RuntimeError on every rank, naming rank and setting or tensor, if replicas differ."""
        self._asked = False
        if self._control.world_size == 1:
            return
        self._settle()
        settings = settings_of(self._optimizer, self._model)
        state = optimizer_state(self._optimizer, self._model)
        digests = (
            hash_text(repr(settings)) >> 2,
            checksum(*weights(self._model).values()) >> 2,
            (checksum(*state.values()) ^ hash_text("\n".join(state))) >> 2,
            self.skipped,
        )
        if not self._control.is_same(digests):
            self._explain(settings, state)

    def _explain(self, settings: Settings, state: dict[str, Tensor]) -> None:
        """Raise, unless only last digits differ."""
        everyone = self._control.gather(settings)
        causes: list[str | None] = [self._skips(), _difference_of(everyone)]
        causes += [
            f"{what} {found}" if found is not None else None
            for what, found in (
                ("weight", self._find(weights(self._model))),
                ("optimizer state", self._find(state)),
            )
        ]
        named = [cause for cause in causes if cause]
        if named:
            raise RuntimeError(
                "replicas have diverged, although only gradients are averaged, which keeps them "
                f"equal: {'; '.join(named)}; {REPAIR}"
            )

    def _skips(self) -> str | None:
        """Who has skipped other steps than the others."""
        counts = self._control.gather(self.skipped)
        for rank, other in dissenters(counts):
            return (
                f"rank {rank} has skipped {counts[rank]} steps, rank {other} {counts[other]}: call "
                "skip_step() on all ranks or on none"
            )
        return None

    def _find(self, tensors: dict[str, Tensor]) -> Difference | None:
        return find_difference(tensors, self._control)


class SettingsGuard(Comparison):
    """Compares the ranks' param-group settings and frozen parameters where parameters are averaged,
    and whether their scripts write weights between a step and the next forward.

    Weights and optimizer state differ between two averages, so they are not compared. The
    comparison is one collective of two numbers before the update of an iteration that averages,
    where ranks wait for each other anyway: of the first two, and of the next one that is at least
    `every` steps after the first or after such a later one. `warn` is called on every rank with a
    description of the ranks that alone have written weights. That is no error, because a script
    may have a reason, such as a norm above a limit.
    """

    def __init__(
        self,
        control: Control,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        every: int,
        averages: Callable[[], bool],
        warn: Callable[[str], None],
    ):
        super().__init__(control, model, optimizer, every)
        self._averages, self._warn = averages, warn
        self._edits = Edits(model)
        self._warned = False
        self._compared = self._left = 0  # comparisons so far; steps until the next one is due

    def step(self) -> None:
        self._left -= 1
        second = self._compared == 1
        if (self._left < 0 or second) and self._averages() and self._control.world_size > 1:
            self._left = self._left if second else self._every - 1
            self._compared += 1
            self._compare()

    def note_step(self, *, landed: bool) -> None:
        rare = self._steps < FIRST or self._steps % self._every == 0
        self._edits.note(contents=landed and rare)
        self._steps += 1

    def forward_begins(self) -> None:
        self._edits.collect()

    def forget(self) -> None:
        self._edits.forget()

    def _compare(self) -> None:
        settings, edited = settings_of(self._optimizer, self._model), self._edits.take()
        if self._control.is_same([hash_text(repr(settings)) >> 2, bool(edited)]):
            return
        everyone = self._control.gather((settings, edited))
        found = _difference_of([theirs for theirs, _ in everyone])
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


class Edits:
    """Names of trained parameters that were written between a step and the next forward.

    A write in place is seen by the version counter of the parameter, which writes through
    `parameter.data` do not change; checksums of all parameters show those. Where checksums were
    noted they decide, so weights that are written and restored (an evaluation with averaged
    weights) do not count.
    """

    def __init__(self, model: nn.Module):
        self._named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
        self._noted: list[int] = []  # by parameter: version or checksum
        self._contents = False  # which of the two
        self._names: dict[str, None] = {}

    def note(self, *, contents: bool) -> None:
        """From here on weights must stay as they are until `collect`."""
        self._contents = contents
        self._noted = self._values()

    def forget(self) -> None:
        """Until the next `note` weights may change."""
        self._noted = []

    def collect(self) -> None:
        """Keep the names of parameters that have changed since `note`, and forget it."""
        if not self._noted:
            return
        for (name, _), before, now in zip(self._named, self._noted, self._values(), strict=True):
            if now != before:
                self._names[name] = None
        self._noted = []

    def take(self) -> list[str]:
        """Return the names that were kept, and drop them."""
        names, self._names = list(self._names), {}
        return names

    def _values(self) -> list[int]:
        if self._contents:
            return [checksum(p) for _, p in self._named]
        return [p._version for _, p in self._named]


def agree_on_optimizer(
    control: Control, optimizer: torch.optim.Optimizer, model: nn.Module
) -> None:
    """ValueError on every rank, naming rank and setting, unless all have the same optimizer with
    the same param groups."""
    plain = (bool, int, float, str, tuple, type(None))
    defaults = {k: v for k, v in sorted(optimizer.defaults.items()) if isinstance(v, plain)}
    sizes = [len(group["params"]) for group in optimizer.param_groups]
    setup = f"{type(optimizer).__name__} {defaults} for groups of {sizes} parameters"
    control.agree("the optimizer", setup, "build the same one everywhere")
    found = _difference_of(control.gather(settings_of(optimizer, model)))
    if found is not None:
        raise ValueError(
            f"the optimizer's param groups must be the same on all ranks: {found}; build the same "
            "one everywhere"
        )


def settings_of(optimizer: torch.optim.Optimizer, model: nn.Module) -> Settings:
    """Every plain setting of every param group, which parameters are in it, and which parameters
    of the model are frozen."""
    names = {id(p): name for name, p in model.named_parameters()}
    found: Settings = {}
    for g, group in enumerate(optimizer.param_groups):
        for key, value in sorted(group.items()):
            if key == "params":
                value = tuple(names.get(id(p), "?") for p in value)
            elif isinstance(value, Tensor) and value.numel() == 1:
                value = float(value)
            elif isinstance(value, list):
                value = tuple(value)
            if _plain(value):
                found[f"{key} of param group {g}"] = value
    frozen = tuple(name for name, p in model.named_parameters() if not p.requires_grad)
    return found | {"frozen parameters": frozen}


def _plain(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(map(_plain, value))
    return isinstance(value, (bool, int, float, str, type(None)))


def _difference_of(everyone: list[Settings]) -> str | None:
    """The first setting in which a rank differs from most."""
    for name in dict.fromkeys(name for theirs in everyone for name in theirs):
        values = [theirs.get(name) for theirs in everyone]
        for rank, other in dissenters(values):
            if not _alike(values[rank], values[other]):
                here, there = _shown(values[rank], values[other])
                return f"rank {rank} has {here} as {name}, rank {other} has {there}"
    return None


def _alike(a: Any, b: Any) -> bool:
    if isinstance(a, tuple) and isinstance(b, tuple) and len(a) == len(b):
        return all(_alike(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, float) and isinstance(b, float):
        return math.isclose(a, b, rel_tol=ALIKE) or (math.isnan(a) and math.isnan(b))
    return a == b


def _shown(a: Any, b: Any) -> tuple[str, str]:
    """Two values; of long tuples the first entries that differ."""
    if isinstance(a, tuple) and isinstance(b, tuple) and max(len(a), len(b)) > 4:
        first = next(_first_apart(a, b))
        return tuple(repr(x[first]) if first < len(x) else "nothing" for x in (a, b))  # type: ignore[return-value]
    return repr(a), repr(b)


def _first_apart(a: tuple[Any, ...], b: tuple[Any, ...]) -> Iterator[int]:
    yield from (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y)
    yield min(len(a), len(b))
