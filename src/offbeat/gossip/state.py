"""Parameters x, copy x~ and time of the last event of a worker, shared by its training and gossip
threads.

Times are labels of the common clock. An exchange has the same label on both workers: it adds to
x_j, x~_j what it subtracts from x_i, x~_i. Mixing is the same linear map on all workers. Therefore
the average over workers, all mixed to the same label, depends neither on clock errors nor on the
duration of an exchange: a chunk that arrives dt after the label is mixed forward by dt. This
requires that all workers change the constants at the same labels. The average of (x + x~)/2 is
exact without this condition.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from offbeat.core.codecs.pieces import pieces
from offbeat.core.transport.device import CPU, Device
from offbeat.gossip.chunks import Wire
from offbeat.gossip.mixing import exchange, follow, jump, mix


class Mixing(NamedTuple):
    """Constants of mixing and exchanges.

    Attributes:
        eta: mixing rate of x and x~ per unit of time.
        alpha: share of the difference that an exchange subtracts from x.
        alpha_tilde: share of the difference that an exchange subtracts from x~.
    """

    eta: float
    alpha: float
    alpha_tilde: float


AVERAGING = Mixing(0.0, 0.5, 0.5)
"""Constants of AD-PSGD: after an exchange both partners hold the average."""

# limit of reverted mixing, by a factor of e^2; digits lost to rounding do not return
MOST_BACK = -1.0
REMEMBERED = 16  # stored changes of the constants; an exchange is never older than these


class Change(NamedTuple):
    """Constants from label `since` on."""

    since: float
    mixing: Mixing


def changed(changes: Sequence[Change], label: float, mixing: Mixing) -> list[Change]:
    """Return the changes with other constants from a label on. Later changes are removed."""
    kept = [change for change in changes if change.since < label]
    return [*kept, Change(label, mixing)][-REMEMBERED:]


class Course:
    """History of the mixing constants. All workers must change them at the same labels, otherwise
    the average over workers changes.

    Attributes:
        changes: the last `REMEMBERED` changes, in order of labels.
    """

    def __init__(self, mixing: Mixing):
        self.changes: list[Change] = []
        self.change(0.0, mixing)

    def change(self, label: float, mixing: Mixing) -> None:
        """Use other constants from a label on. Later changes that were planned are removed."""
        self.changes = changed(self.changes, label, mixing)

    def mixing_at(self, label: float) -> Mixing:
        """Return the constants at a label."""
        past = [change for change in self.changes if change.since <= label]
        return past[-1].mixing if past else self.last

    @property
    def last(self) -> Mixing:
        """Return the constants of the last change."""
        return self.changes[-1].mixing

    def mixing_integral(self, start: float, end: float) -> float:
        """Return the integral of eta between two labels."""
        total = 0.0
        ends = [*(change.since for change in self.changes[1:]), math.inf]
        for change, until in zip(self.changes, ends, strict=True):
            total += change.mixing.eta * max(min(end, until) - max(start, change.since), 0.0)
        return total


class DeviceLock:
    """Lock that orders the work of its holders on the host and on the device."""

    def __init__(self, device: Device):
        self._device, self._lock = device, threading.Lock()
        self._released = device.mark()

    def __enter__(self) -> None:
        self._lock.acquire()
        self._device.follow(self._released)

    def __exit__(self, *_: object) -> None:
        self._released = self._device.mark()
        self._lock.release()


class State:
    """Parameters of a worker, shared by the training thread and the gossip thread.

    With `snapshot` only the training thread changes the weights. Exchanges change a copy of x until
    the next gradient event or the next forward. Each gradient therefore belongs to one point, and
    the results equal those of immediate changes. Without `snapshot` exchanges change the weights
    directly, at any time except during the optimizer step.

    The lock is held during arithmetic only, including the optimizer step. Threads that wait for the
    lock never wait for the network, a forward or a backward.

    Args:
        weights: flat tensors from which the model reads its parameters.
        wire: chunks of these tensors.
        mixing: constants at label 0.
        snapshot: whether exchanges leave the weights unchanged during forward and backward.
        momentum: whether there is a second copy x~.
        mixed: whether an exchange sends x after mixing; otherwise x before mixing.
        device: device of the weights.

    Attributes:
        course: history of the mixing constants.
        t: label of the last event.
    """

    def __init__(
        self,
        weights: Sequence[Tensor],
        wire: Wire,
        mixing: Mixing,
        *,
        snapshot: bool = True,
        momentum: bool = True,
        mixed: bool = True,
        device: Device | None = None,
    ):
        self._weights = [flat.detach() for flat in weights]
        self._wire, self.course = wire, Course(mixing)
        self._snapshot, self._mixed = snapshot, mixed
        self._tilde = [w.clone() for w in self._weights] if momentum else None
        beside = momentum or snapshot
        self._beside = [torch.empty_like(w) for w in self._weights] if beside else []
        self._apart = False  # whether x is in `_beside` instead of `_weights`
        self._lock = DeviceLock(CPU() if device is None else device)
        self.t = 0.0

    # ---- training thread --------------------------------------------------------------------

    def step(self, t: float, update: Callable[[], None]) -> None:
        """Apply a gradient event: mix up to `t`, call `update` (the optimizer step), which changes
        x, and change x~ by the same amount.
        """
        with self._lock:
            self._advance(t)
            self._write_weights(keep=self._tilde is not None)
            update()
            if self._tilde is not None:
                for tilde, x, before in zip(self._tilde, self._weights, self._beside, strict=True):
                    follow(tilde, x, before)

    def refresh(self) -> None:
        """Write x to the weights before a forward."""
        with self._lock:
            self._write_weights()

    def mix_until(self, t: float) -> None:
        """Mix x up to label `t` and write it to the weights, for code that reads them."""
        with self._lock:
            self._advance(t)
            self._write_weights()

    def midpoint(self) -> None:
        """Set the weights and x~ to (x + x~)/2, the limit of infinite mixing.

        The average of (x + x~)/2 over workers is exact. The average of x is not exact: a worker
        that receives new constants after an exchange to which they should have applied reverts more
        mixing than the exchange contains.
        """
        with self._lock:
            self._mix(math.inf)
            self._write_weights()

    def set_parameters(self, x: Sequence[Tensor], t: float) -> None:
        """Set x and x~ to given values at label `t`."""
        with self._lock:
            self._apart, self.t = False, max(t, self.t)
            for number, value in enumerate(x):
                self._weights[number].copy_(value)
                if self._tilde is not None:
                    self._tilde[number].copy_(value)

    def change_mixing(self, t: float, mixing: Mixing) -> None:
        """Use other constants from label `t` on.

        If `t` is in the past, set x and x~ to the values of a change in time. Workers receive a
        change at different times but must mix equally, otherwise the average changes.
        """
        with self._lock:
            wrong = self.course.mixing_integral(t, self.t)
            self.course.change(t, mixing)
            self._mix(max(self.course.mixing_integral(t, self.t) - wrong, MOST_BACK))

    # ---- gossip thread ----------------------------------------------------------------------

    @contextmanager
    def frozen_x(self, t: float) -> Iterator[list[Tensor]]:
        """Yield x, mixed up to `t`, for a joining worker, and block gradient events meanwhile."""
        with self._lock:
            self._advance(t)
            yield self._x

    def snapshot(self, t: float, into: Sequence[Tensor]) -> None:
        """Copy x at label `t` into the buffers of an exchange.

        If a gradient was applied after `t`, before the acceptance of the partner arrived, the
        current x is copied. Both partners compute the same difference, so the average is unchanged.

        Args:
            t: label of the exchange.
            into: buffers.
        """
        with self._lock:
            if not self._mixed:
                self._copy(into)
            self._advance(t)
            if self._mixed:
                self._copy(into)

    def apply(
        self, number: int, m: Tensor, t: float, mixing: Mixing, *, reverts: bool = False
    ) -> None:
        """Apply one chunk of an exchange at label `t`, or revert it.

        Args:
            number: number of the chunk.
            m: numbers that this worker has sent minus those that it has received, on the host.
            t: label of the exchange.
            mixing: constants of the exchange.
            reverts: whether the chunk was applied, and is reverted now.
        """
        with self._lock:
            self._separate_x()
            chunk, sign = self._wire.chunks[number], -1.0 if reverts else 1.0
            x = self._x[chunk.flat][chunk.span]
            tilde = None if self._tilde is None else self._tilde[chunk.flat][chunk.span]
            since = self.course.mixing_integral(t, self.t)
            a, a_tilde = jump(mixing.alpha, mixing.alpha_tilde, 1.0, since)
            for piece in pieces(x):
                part = None if tilde is None else tilde[piece]
                exchange(x[piece], part, m[piece].to(x.device), (sign * a, sign * a_tilde))

    # ---- with the lock held -----------------------------------------------------------------

    @property
    def _x(self) -> list[Tensor]:
        return self._beside if self._apart else self._weights

    def _advance(self, t: float) -> None:
        """Mix up to `t`. Labels never decrease."""
        eta_dt = self.course.mixing_integral(self.t, t)
        self.t = max(t, self.t)
        self._mix(eta_dt)

    def _mix(self, eta_dt: float) -> None:
        """Mix for an integral of eta; a negative integral reverts mixing."""
        if self._tilde is None or eta_dt == 0:
            return
        self._separate_x()
        for x, tilde in zip(self._x, self._tilde, strict=True):
            mix(x, tilde, 1.0, eta_dt)

    def _separate_x(self) -> None:
        """Copy x to `_beside` if the weights must not change."""
        if self._snapshot and not self._apart:
            self._apart = True
            for beside, w in zip(self._beside, self._weights, strict=True):
                beside.copy_(w)

    def _write_weights(self, *, keep: bool = False) -> None:
        """Copy x to the weights. With `keep`, also store a copy of it in `_beside`."""
        if self._apart:
            for w, beside in zip(self._weights, self._beside, strict=True):
                w.copy_(beside)
        elif keep:
            for w, beside in zip(self._weights, self._beside, strict=True):
                beside.copy_(w)
        self._apart = False

    def _copy(self, into: Sequence[Tensor]) -> None:
        for buffer, x in zip(into, self._x, strict=True):
            buffer.copy_(x)
