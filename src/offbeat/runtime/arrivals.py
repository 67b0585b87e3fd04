"""Arrivals: updates bucket by bucket, each right before its bucket's next forward."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from offbeat.runtime.flat import Flat
from offbeat.runtime.marks import Arrival, Planned
from offbeat.runtime.stepper import BucketStepper, Settings
from offbeat.transport.device import Device

Wait = Callable[[Planned, Sequence[int]], None]


class Arrivals:
    """The updates of one iteration that are still to come, from the input side on.

    `wait` is the engine's, for flights of an iteration by their indices.
    """

    def __init__(self, flat: Flat, device: Device, wait: Wait, remedy: str):
        self._flat, self._device, self._wait, self._remedy = flat, device, wait, remedy
        self._iteration: Planned | None = None
        self._zero = False

    @property
    def pending(self) -> bool:
        return self._iteration is not None

    def expect(self, iteration: Planned, stepper: BucketStepper) -> None:
        """The user has asked for this iteration's update: it will be done with the settings
        (learning rate) of this moment, which a scheduler may change before it is."""
        self._iteration, self._stepper = iteration, stepper
        self._settings: Settings = stepper.settings()
        self._version = self._flat.grad_version()
        self._bucket = len(self._flat.buckets) - 1
        self._zero = False

    def until(self, first: int, into: list[Arrival], *, in_backward: bool = False) -> bool:
        """Update every bucket down to `first`; True if that ended the iteration's update.

        ValueError if gradients were changed meanwhile, except by the backward that has begun.
        """
        if self._iteration is None:
            return False
        if not in_backward and self._flat.grad_version() != self._version:
            raise ValueError(
                "gradients were changed while their update was still to come (zeroed in place?); "
                "use zero_grad() of the prepared model or optimizer, which waits for it, or "
                f"{self._remedy}"
            )
        while self._bucket >= first:
            into.append(self._apply(self._iteration, self._bucket))
            self._bucket -= 1
        self._version = self._flat.grad_version()
        if self._bucket >= 0:
            return False
        self._iteration = None
        return True

    def zero_grad(self) -> None:
        """Zero gradients in place: what is still needed as soon as it has been applied."""
        self._zero = True
        for bucket in self._flat.buckets[self._bucket + 1 :]:
            bucket.zero_grad()
        self._version = self._flat.grad_version()

    def _apply(self, iteration: Planned, b: int) -> Arrival:
        mark, bucket = self._device.mark, self._flat.buckets[b]
        begin = mark()
        self._wait(iteration, iteration.agenda.due_next_forward[b])
        landed = mark()
        cleared = bucket.attach()  # by the user's p.grad = None, before it was applied
        with _plainly(bucket.param.device.type):
            self._stepper.step(b, self._settings, self._remedy if iteration.planned == 0 else None)
        if self._zero:
            bucket.zero_grad()
        for view in cleared:
            view.zero_()
        return Arrival(b, begin, landed, mark())


@contextmanager
def _plainly(device_type: str) -> Iterator[None]:
    """As after backward, though a forward may have been entered in another mode."""
    if not (torch.is_inference_mode_enabled() or torch.is_autocast_enabled(device_type)):
        yield
        return
    with torch.inference_mode(False), torch.autocast(device_type, enabled=False):
        yield
