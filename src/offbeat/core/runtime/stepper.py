"""Stepper that applies the user's optimizer to the parameters of single buckets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from offbeat.core.buckets.coupling import is_wrapper
from offbeat.core.guards.step_hooks import StepHooks, has_hooks, has_pre_hooks

Group = dict[str, Any]
Settings = dict[int, Group]
"""Settings of param groups, such as learning rates, by the group's id."""


class BucketStepper:
    """Stepper that calls the optimizer bucket by bucket with the user's own state, settings and
    hooks.

    `remedy` is the advice in errors for optimizers that cannot step single buckets.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        buckets: Sequence[Sequence[nn.Parameter]],
        remedy: str,
    ):
        self._optimizer, self._remedy = optimizer, remedy
        self._hooks = StepHooks(optimizer, [p for bucket in buckets for p in bucket])
        self._members, self._groups = _members(optimizer, buckets), len(optimizer.param_groups)
        self._joined: dict[tuple[int, ...], list[tuple[Group, list[nn.Parameter]]]] = {}

    def require_independent(self) -> None:
        """Raise ValueError if the optimizer cannot step a single bucket."""
        if is_wrapper(self._optimizer):
            raise ValueError(
                f"{type(self._optimizer).__name__} calls the step of another optimizer, so it "
                f"cannot step bucket by bucket; {self._remedy}"
            )

    def settings(self) -> Settings:
        """Return a copy of the groups' current settings, for steps that run later."""
        return {id(group): _settings(group) for group in self._optimizer.param_groups}

    def as_list(self, settings: Settings) -> list[Group]:
        """Return settings in the order of the groups. Another process cannot use the ids of the
        groups."""
        return [settings[id(group)] for group in self._optimizer.param_groups]

    def from_list(self, listed: Sequence[Group]) -> Settings:
        """Return settings from a list that `as_list` has returned."""
        groups = self._optimizer.param_groups
        return {id(group): mine for group, mine in zip(groups, listed, strict=True)}

    def step(self, run: Sequence[int], settings: Settings | None, *, compare: bool) -> None:
        """Step some buckets.

        Args:
            run: buckets.
            settings: settings of the groups; None: their current settings.
            compare: check that the step changes neither the settings nor numbers that the
                optimizer keeps itself, such as a count of its steps.

        Raises:
            ValueError: a hook before the step does more than `StepHooks` allows, or the step
                changes what is compared. Such an optimizer does not treat parameters
                independently. Or the optimizer has further groups.
        """
        if len(self._optimizer.param_groups) != self._groups:
            raise ValueError("param groups must be added before offbeat.prepare")
        members = self._members_of(run)
        if not members:
            return
        narrowed = [
            {**(group if settings is None else settings[id(group)]), "params": parameters}
            for group, parameters in members
        ]
        before = self._kept_values(narrowed) if compare else None
        whole = self._optimizer.param_groups
        # Assigned to the instance: load_state_dict and schedulers keep the same group objects.
        self._optimizer.param_groups = narrowed
        try:
            if has_pre_hooks(self._optimizer):
                groups = [*narrowed, *whole]
                with self._hooks.watch(lambda: [*map(_settings, groups)], self._remedy):
                    self._optimizer.step()
            else:
                step_directly(self._optimizer)
        finally:
            self._optimizer.param_groups = whole
        if before is not None and (after := self._kept_values(narrowed)) != before:
            what = "param groups" if before[0] != after[0] else "own attributes"
            raise ValueError(
                f"{type(self._optimizer).__name__} changes its {what} in step(), so it does not "
                f"treat parameters independently and cannot step bucket by bucket; {self._remedy}"
            )

    def _kept_values(self, groups: Sequence[Group]) -> tuple[list[Group], Group]:
        """Return the settings of groups, and the numbers among the optimizer's attributes."""
        own = vars(self._optimizer).items()
        numbers = {name: value for name, value in own if type(value) in (int, float)}
        return [_settings(group) for group in groups], numbers

    def _members_of(self, run: Sequence[int]) -> list[tuple[Group, list[nn.Parameter]]]:
        """Return (param group, its parameters in these buckets) for each group."""
        if len(run) == 1:
            return self._members[run[0]]
        key = tuple(run)
        if key not in self._joined:
            joined: dict[int, tuple[Group, list[nn.Parameter]]] = {}
            for group, parameters in (member for b in run for member in self._members[b]):
                joined.setdefault(id(group), (group, []))[1].extend(parameters)
            self._joined[key] = list(joined.values())
        return self._joined[key]


def step_directly(optimizer: torch.optim.Optimizer) -> None:
    """Call `optimizer.step()`, if possible without the wrapper that torch adds for its profiler.

    The wrapper costs 10 microseconds and more, as much as the update of a small bucket.
    """
    step = type(optimizer).step
    bare = getattr(step, "__wrapped__", None)  # torch wraps every class's step
    own = vars(optimizer).get("step")  # a wrapper of this instance; schedulers add one
    of_scheduler = hasattr(own, "_wrapped_by_lr_sched") and getattr(own, "__wrapped__", 0) is step
    if (
        bare is None
        or not (own is None or of_scheduler)
        or not hasattr(step, "hooked")
        or has_hooks(optimizer)
        or torch.autograd._profiler_enabled()  # type: ignore[attr-defined]
    ):
        optimizer.step()
        return
    optimizer._opt_called = True  # type: ignore[attr-defined] # schedulers check it
    bare(optimizer)


def _members(
    optimizer: torch.optim.Optimizer, buckets: Sequence[Sequence[nn.Parameter]]
) -> list[list[tuple[Group, list[nn.Parameter]]]]:
    """Return by bucket (param group, its parameters in this bucket) for each group."""
    group_of = {id(p): g for g in optimizer.param_groups for p in g["params"]}
    members = []
    for parameters in buckets:
        parameters_of: dict[int, tuple[Group, list[nn.Parameter]]] = {}
        for p in parameters:
            group = group_of.get(id(p))
            if group is not None:  # a parameter without a group is averaged and never updated
                parameters_of.setdefault(id(group), (group, []))[1].append(p)
        members.append(list(parameters_of.values()))
    return members


def _settings(group: Group) -> Group:
    """Return a copy of a group without its parameters. Tensors, such as a learning rate, are
    copied, too."""
    return {
        key: value.clone() if isinstance(value, Tensor) else value
        for key, value in group.items()
        if key != "params"
    }
