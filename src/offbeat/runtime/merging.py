"""Merging: gradients added up over the iterations of a generation, and applied when it is due."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from offbeat.plan import Moment, Payload, Plan, Transfer
from offbeat.runtime.copies import Copies
from offbeat.runtime.flat import Flat
from offbeat.runtime.landing import Landing
from offbeat.runtime.schedulers import SchedulerGate
from offbeat.transport.link import Link


class Merging:
    """What a plan with generations does between its iterations; source: DeFT, Section III.

    `planned` counts the plan's iterations from 0. Backward adds to the open copy of the gradients
    while the closed one is averaged; the optimizer and its schedulers step when one is applied.
    """

    def __init__(
        self,
        plan: Plan,
        optimizer: torch.optim.Optimizer,
        flat: Flat,
        copies: Copies,
        links: Mapping[str, Link],
        landing: Landing,
    ):
        self._plan, self._optimizer, self._flat, self._copies = plan, optimizer, flat, copies
        self._links, self._landing = links, landing
        self._gate = SchedulerGate(optimizer)
        self._version = flat.grad_version()

    def close(self) -> None:
        """Let schedulers go on as usual."""
        self._gate.close()

    def require_unchanged(self) -> None:
        """Merged gradients must survive from one iteration to the next; else ValueError."""
        if self._flat.grad_version() != self._version:
            raise ValueError(
                "gradients were changed between iterations (zeroed in place?), but this strategy "
                "merges them over several; use zero_grad() of the prepared model or optimizer, "
                "which leaves them alone"
            )

    def step(self, planned: int) -> None:
        """`optimizer.step()`: update if a generation is due, close one if this iteration does."""
        applied = self._plan.applied(planned)
        if applied:
            self._update()
        if self._plan.closing(planned):
            self._copies.swap()
        else:
            self._copies.open(self._copies.opened)
        self._version = self._flat.grad_version()
        self._gate.iteration(bool(applied))

    def discard(self) -> None:
        """Forget every gradient; the plan begins anew."""
        for copy in range(self._copies.count):
            self._flat.scale_grads(0.0, copy)
        self._begin_anew()

    def drain(self, iteration: int, planned: int) -> None:
        """Average and apply what earlier iterations left behind, before this one (`planned` in the
        plan); the plan begins anew. Every rank must call it."""
        closed, opened = self._plan.generation(planned, age=1), self._plan.generation(planned)
        if closed:
            self._send_rest(iteration, planned, closed)
            self._apply(closed)
        if opened.start < planned:
            self._copies.swap()
            everything = Payload("grad", range(len(self._flat.buckets)))
            self._send(iteration, everything, next(iter(self._links)))
            self._apply(range(opened.start, planned))
        self._begin_anew()

    def _begin_anew(self) -> None:
        self._copies.open(0)
        self._version = self._flat.grad_version()

    def _send_rest(self, iteration: int, planned: int, generation: range) -> None:
        """What the plan would send of the closed generation in iterations to come."""
        while True:
            for t in self._plan.at(planned):
                if t.payload.age:
                    self._send(iteration, t.payload, t.link)
            if self._plan.applied(planned) == generation:
                return
            planned += 1

    def _send(self, iteration: int, payload: Payload, link: str) -> None:
        """Average some of the closed copy now."""
        end = Moment("end")
        t = Transfer(payload, end, end, frozenset(), link)
        tensors = self._flat.tensors(payload, self._copies.closed)
        flight = self._links[link].book(t, iteration, tensors)
        self._links[link].release(flight)
        self._landing.wait(flight, self._flat)

    def _apply(self, generation: range) -> None:
        self._copies.show(generation, self._plan.merge)
        self._update()

    def _update(self) -> None:
        self._optimizer.step()
        self._copies.discard()
