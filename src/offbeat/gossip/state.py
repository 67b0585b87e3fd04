"""State: x, x~ and the time of a worker's last event, shared by its gradients and its gossip.

Times are labels in the job's common unit. An exchange bears one label on both sides, and what it
takes off x_i, x~_i it gives to x_j, x~_j; mixing is the same linear map everywhere. So the mean
over workers, all mixed to one label, does not depend on how the clocks go, nor on when an exchange
that takes its time is carried out: a chunk that arrives dt after the label is moved on by dt. That
needs constants that all change at the same labels; the mean of (x + x~)/2 needs nothing.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from offbeat.core.codecs.pieces import pieces
from offbeat.gossip.chunks import Wire
from offbeat.gossip.mixing import exchange, follow, jump, mix


@dataclass(frozen=True)
class Mixing:
    """How fast x and x~ mix, and by which share of the difference an exchange moves them."""

    eta: float
    alpha: float
    alpha_tilde: float


AVERAGING = Mixing(0.0, 0.5, 0.5)
"""AD-PSGD's: an exchange leaves both partners at their mean."""

MOST_BACK = -1.0  # mixing is taken back up to here, by e^2; what rounding has lost does not return
REMEMBERED = 16  # changes of the constants; an exchange is not older than that


class Change(NamedTuple):
    """Other constants from a label on."""

    since: float
    eta: float
    alpha: float
    alpha_tilde: float


class Course:
    """Which constants hold from which label on. All workers must change them at the same labels, or
    the mean moves."""

    def __init__(self, mixing: Mixing):
        self._changes = [(0.0, mixing)]  # since which label

    def change(self, label: float, mixing: Mixing) -> None:
        """From this label on; what was to come after it does not."""
        kept = [change for change in self._changes if change[0] < label]
        self._changes = [*kept, (label, mixing)][-REMEMBERED:]

    @property
    def changes(self) -> list[Change]:
        """All that are remembered."""
        return [Change(since, m.eta, m.alpha, m.alpha_tilde) for since, m in self._changes]

    def follow(self, changes: Sequence[Change]) -> None:
        """Be another worker's."""
        self._changes = [(since, Mixing(*constants)) for since, *constants in changes]

    def at(self, label: float) -> Mixing:
        """What holds then."""
        return next((m for since, m in reversed(self._changes) if since <= label), self.last)

    @property
    def last(self) -> Mixing:
        """What will hold."""
        return self._changes[-1][1]

    def mixed(self, start: float, end: float) -> float:
        """The integral of eta."""
        total = 0.0
        for (since, mixing), (until, _) in pairwise([*self._changes, (math.inf, AVERAGING)]):
            total += mixing.eta * max(min(end, until) - max(start, since), 0.0)
        return total


class State:
    """`weights` are the flat tensors that the model reads; x is in them, or beside them.

    With `snapshot` only the gradient thread changes the weights. What an exchange does goes to a
    copy of x beside them, until a gradient is applied or the next forward begins: so a gradient
    belongs to one point, and the numbers are those of changing x at once. Without it an exchange
    changes the weights themselves, at any time but during the optimizer's step. Without `momentum`
    there is no x~.

    The lock is held for arithmetic alone, the optimizer's step included; who waits for it waits for
    no network and for no forward or backward.
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
    ):
        self._weights = [flat.detach() for flat in weights]
        self._wire, self._course = wire, Course(mixing)
        self._snapshot, self._mixed = snapshot, mixed
        self._tilde = [w.clone() for w in self._weights] if momentum else None
        beside = momentum or snapshot
        self._beside = [torch.empty_like(w) for w in self._weights] if beside else []
        self._apart = False  # x is beside the weights
        self._lock = threading.Lock()
        self.t = 0.0

    # ---- the gradient thread ----------------------------------------------------------------

    def step(self, t: float, update: Callable[[], None]) -> None:
        """A gradient event: mix, let `update` (the optimizer) change x, and x~ by as much."""
        with self._lock:
            self._advance(t)
            self._land(keep=self._tilde is not None)
            update()
            if self._tilde is not None:
                for tilde, x, before in zip(self._tilde, self._weights, self._beside, strict=True):
                    follow(tilde, x, before)

    def refresh(self) -> None:
        """A forward begins: the weights are x."""
        with self._lock:
            self._land()

    def settle(self, t: float) -> None:
        """The weights are x, mixed up to `t`: for whoever reads them."""
        with self._lock:
            self._advance(t)
            self._land()

    def midpoint(self) -> None:
        """The weights, and x~, are (x + x~)/2: what they would be if they mixed for ever.

        Its mean over workers is exact. The mean of x is not: a worker that hears of other constants
        only after an exchange in which they should have held takes back more mixing than the
        exchange has seen.
        """
        with self._lock:
            self._mix(math.inf)
            self._land()

    def put(self, x: Sequence[Tensor], t: float) -> None:
        """Have x and x~ be this."""
        with self._lock:
            self._apart, self.t = False, max(t, self.t)
            for number, value in enumerate(x):
                self._weights[number].copy_(value)
                if self._tilde is not None:
                    self._tilde[number].copy_(value)

    def tune(self, t: float, mixing: Mixing) -> None:
        """Other constants from `t` on. If that is past, x and x~ become what they would be then:
        workers that hear of it at different times must not mix differently, or the mean moves."""
        with self._lock:
            wrong = self._course.mixed(t, self.t)
            self._course.change(t, mixing)
            self._mix(max(self._course.mixed(t, self.t) - wrong, MOST_BACK))

    # ---- the gossip thread ------------------------------------------------------------------

    @contextmanager
    def still(self, t: float) -> Iterator[list[Tensor]]:
        """x, mixed up to `t`, while no gradient is applied."""
        with self._lock:
            self._advance(t)
            yield self._x

    @property
    def course(self) -> list[Change]:
        """Constants since which labels."""
        return self._course.changes

    def follow(self, course: Sequence[Change]) -> None:
        """Begin with another worker's constants."""
        self._course.follow(course)

    @property
    def mixing(self) -> Mixing:
        """The newest constants."""
        return self._course.last

    def mixing_at(self, t: float) -> Mixing:
        """Those of an exchange then."""
        return self._course.at(t)

    def snapshot(self, t: float, into: Sequence[Tensor]) -> None:
        """An exchange at `t` begins: x as it is then (or before mixing, if so told), as it travels.

        A gradient may have been applied after `t` already, when the partner's agreement arrives.
        Then x is sent as it is: what both sides take for m is the same, and so is the mean.
        """
        with self._lock:
            if not self._mixed:
                self._copy(into)
            self._advance(t)
            if self._mixed:
                self._copy(into)

    def apply(
        self,
        number: int,
        mine: Sequence[Tensor],
        theirs: Sequence[Tensor],
        t: float,
        mixing: Mixing,
        *,
        undo: bool = False,
    ) -> None:
        """One chunk of an exchange at `t`, of what both have sent; or take it back."""
        chunk = self._wire.chunks[number]
        with self._lock:
            self._leave()
            x = self._x[chunk.flat][chunk.span]
            tilde = None if self._tilde is None else self._tilde[chunk.flat][chunk.span]
            sign = -1.0 if undo else 1.0
            since = self._course.mixed(t, self.t)
            a, a_tilde = jump(mixing.alpha, mixing.alpha_tilde, 1.0, since)
            for piece in pieces(x):
                m = _number(mine[chunk.flat][chunk.span][piece]) - _number(
                    theirs[chunk.flat][chunk.span][piece]
                )
                part = None if tilde is None else tilde[piece]
                exchange(x[piece], part, m.to(x.device), (sign * a, sign * a_tilde))

    # ---- inside the lock --------------------------------------------------------------------

    @property
    def _x(self) -> list[Tensor]:
        return self._beside if self._apart else self._weights

    def _advance(self, t: float) -> None:
        """Mix up to `t`; time does not go back."""
        eta_dt = self._course.mixed(self.t, t)
        self.t = max(t, self.t)
        self._mix(eta_dt)

    def _mix(self, eta_dt: float) -> None:
        """So much, or so much less if it is negative."""
        if self._tilde is None or eta_dt == 0:
            return
        self._leave()
        for x, tilde in zip(self._x, self._tilde, strict=True):
            mix(x, tilde, 1.0, eta_dt)

    def _leave(self) -> None:
        """From here on x is beside the weights, if they are to stay as they are."""
        if self._snapshot and not self._apart:
            self._apart = True
            for beside, w in zip(self._beside, self._weights, strict=True):
                beside.copy_(w)

    def _land(self, *, keep: bool = False) -> None:
        """The weights are x; with `keep` a copy of them is beside."""
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


def _number(values: Tensor) -> Tensor:
    """What is subtracted: exact differences of what has travelled, up to one rounding, which is the
    same on both sides but for the sign."""
    return values if values.dtype.itemsize > 2 else values.float()
