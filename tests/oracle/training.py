"""Slow, readable twins of data-parallel training: all replicas in one process, plain torch.

Every function transcribes the equations of `algorithms.md`, sections 1 and 2, and leaves the
replicas as the real ranks must be.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

import torch
from cases.models import (
    USUAL,
    Case,
    Loop,
    batch,
    build_model,
    build_optimizer,
    build_scheduler,
    loss_of,
)
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from offbeat.plan import Transfer

Names = Collection[str]
Kept = dict[str, list[Tensor]]  # by name: what each replica had

torch.set_num_threads(1)  # the tensors are tiny; a second thread would only spin


@dataclass(frozen=True)
class Piece:
    """Tensors that are averaged together, or `width` of equal slices of them laid end to end."""

    names: tuple[str, ...]
    part: int = 0
    parts: int = 1
    width: int = 1

    def elements(self, tensors: Sequence[Tensor]) -> slice | Tensor:
        """Which elements of its tensors, laid end to end."""
        size, stop = sum(t.numel() for t in tensors), self.part + self.width
        return slice(size * self.part // self.parts, size * stop // self.parts)


@dataclass
class Replica:
    """One worker: a plain model with a plain optimizer."""

    case: Case
    rank: int
    model: nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: LRScheduler | None
    loop: Loop = USUAL
    iteration: int = -1
    again: bool = False  # a second backward of the same iteration

    # Gradients of the window that closed last, and of the one that is added to, if any; None for
    # a parameter that was not used in it.
    closed: list[Tensor | None] = field(default_factory=list)
    opened: list[Tensor | None] = field(default_factory=list)
    closed_size: int = 0
    merged: int = 0

    def __post_init__(self) -> None:
        self.tensors: dict[str, Tensor] = {
            **dict(self.model.named_parameters()),
            **dict(self.model.named_buffers()),
        }

    def gradients(self, iteration: int) -> None:
        """Local gradients at the local weights; the second ones of an iteration are added."""
        self.again, self.iteration = iteration == self.iteration, iteration
        if self.loop.clear != "never" and not self.again:
            self.optimizer.zero_grad()
        if (self.rank, iteration) not in self.loop.idle:
            loss_of(self.model, *batch(self.case, self.rank, iteration), self.loop).backward()

    def step(self) -> None:
        """The local update, with whatever gradients there are; none if they overflowed, or if the
        loop leaves it out."""
        if self.iteration in self.loop.dropped or self._unfinished:
            return
        if (self.rank, self.iteration) in self.loop.skipped:
            return
        if self.loop.clip is not None and self.iteration >= self.loop.since:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.loop.clip)
        self.loop.alter(self.model, self.optimizer, self.iteration)
        if (self.rank, self.iteration) not in self.loop.overflow:
            self.optimizer.step()

    def end(self) -> None:
        if self.scheduler is not None and not self._unfinished:
            self.scheduler.step()

    @property
    def _unfinished(self) -> bool:
        return self.iteration in self.loop.twice and not self.again


def passes(iterations: range, loop: Loop) -> list[int]:
    """The iteration of every backward: some have two, each of which counts in a period."""
    return [t for t in iterations for _ in range(1 + (t in loop.twice))]


def replicas(case: Case, world_size: int, loop: Loop = USUAL) -> list[Replica]:
    """Replicas that start equal, as after rank 0's broadcast."""
    world = []
    for rank in range(world_size):
        model = build_model(case)
        optimizer = build_optimizer(case, model)
        scheduler = build_scheduler(case, optimizer)
        world.append(Replica(case, rank, model, optimizer, scheduler, loop))
    return world


def bsp(
    world: list[Replica],
    iterations: Sequence[int],
    *,
    broadcast_buffers: bool = False,
) -> None:
    """g <- mean_k(g_k), then every replica steps. DDP also takes rank 0's buffers first.

    A parameter that no replica has used keeps no gradient, so its step leaves it alone.
    """
    for t in iterations:
        if broadcast_buffers:
            copy_buffers(world)
        for replica in world:
            replica.gradients(t)
        average_gradients(world)
        for replica in world:
            replica.step()
            replica.end()


def on_time(world: list[Replica], iterations: Sequence[int]) -> None:
    """As DDP, whose last broadcast comes with the next forward: ours is over when weights are
    read."""
    bsp(world, iterations, broadcast_buffers=True)
    copy_buffers(world)


def local_sgd(
    world: list[Replica],
    iterations: Sequence[int],
    *,
    period: int,
    warmup: int = 0,
    state: str = "local",
    outer: Outer | None = None,
) -> None:
    """Local steps; w <- mean_k(w_k) after every `period`-th, and an outer step on it. The first
    `warmup` are BSP."""
    bsp(world, iterations[:warmup])
    if outer is not None:
        if warmup:
            average_parameters(world, Piece(tuple(names_of(world))))
        outer.start(world)
    for done, t in enumerate(iterations[warmup:], start=1):
        for replica in world:
            replica.gradients(t)
            replica.step()
        if done % period == 0:
            everything = Piece(tuple(names_of(world)))
            average_parameters(world, everything)
            if outer is not None:
                outer(world, everything.names)
            treat_state(world, everything, state)
        for replica in world:
            replica.end()


def partial_sync(  # noqa: C901
    world: list[Replica],
    iterations: Sequence[int],
    *,
    sets: Sequence[Collection[Piece]],
    average: str,
    state: str = "local",
    clip: Clipping | None = None,
    outer: Outer | None = None,
) -> None:
    """In iteration r the pieces in sets[r mod H] are averaged, the others stay local. Gradients may
    be clipped before. An outer step may come on each average.

    after_update: w_l <- mean_k(w_l^k - eta * g_l^k); before_update: w_l <- mean_k(w_l) - eta * g_k.
    """
    if outer is not None:
        outer.start(world)
    for r, t in enumerate(iterations):
        for replica in world:
            replica.gradients(t)
            if clip is not None:
                clip(replica)
        if average == "after_update":
            for replica in world:
                replica.step()
        for piece in sets[r % len(sets)]:
            average_parameters(world, piece)
            if outer is not None:
                outer(world, piece.names)
            treat_state(world, piece, state)
        if average == "before_update":
            for replica in world:
                replica.step()
        for replica in world:
            replica.end()


def delayed_sync(
    world: list[Replica],
    iterations: Sequence[int],
    *,
    sets: Sequence[Collection[Piece]],
    delay: int,
    average: str,
    clip: Clipping | None = None,
    outer: Outer | None = None,
    gain: float = 1.0,
) -> None:
    """In iteration r snapshots s_l^k of the pieces in sets[r mod H] are taken, after the local step
    or before it; after the step of iteration r + delay, w_l^k += gain (mean_k(s_l^k) - s_l^k). With
    an outer optimizer what lands is its step on the mean."""
    taken: list[Kept] = []
    if outer is not None:
        outer.start(world)
    for r, t in enumerate(iterations):
        for replica in world:
            replica.gradients(t)
            if clip is not None:
                clip(replica)
        if average == "before_update":
            taken.append(kept(world, names_of(world)))
        _step(world)
        if average == "after_update":
            taken.append(kept(world, names_of(world)))
        for piece in sets[(r - delay) % len(sets)] if r >= delay else []:
            if outer is None:
                shift(world, piece.names, taken[r - delay], gain)
            else:
                outer.land(world, piece.names, taken[r - delay])
        for replica in world:
            replica.end()


class Outer:
    """torch's own SGD on common parameters, whose gradient is how far the workers' mean has gone
    the other way. Running statistics are only averaged.

    What was sent earlier lands as w_k = common + w_k - s_k, or with an alpha as
    w_k = alpha w_k + (1 - alpha) common.
    """

    def __init__(
        self, lr: float, momentum: float, nesterov: bool, alpha: float | None = None
    ) -> None:
        self._settings = {"lr": lr, "momentum": momentum, "nesterov": nesterov and momentum > 0}
        self._alpha = alpha
        self._common: dict[str, nn.Parameter] = {}
        self._optimizers: dict[str, torch.optim.SGD] = {}

    def start(self, world: list[Replica]) -> None:
        """From what all of them have."""
        for name, tensor in world[0].tensors.items():
            if isinstance(tensor, nn.Parameter):
                self._common[name] = nn.Parameter(tensor.detach().clone())
                self._optimizers[name] = torch.optim.SGD([self._common[name]], **self._settings)

    def __call__(self, world: list[Replica], names: Names) -> None:
        """After an average."""
        for name in names:
            if name in self._common:
                tensors = [_tensor(replica, name) for replica in world]
                _assign(tensors, self._stepped(name, tensors).detach())

    def land(self, world: list[Replica], names: Names, taken: Kept) -> None:
        for name in names:
            sent = taken[name]
            new = self._stepped(name, sent) if name in self._common else _mean(sent)
            for replica, own in zip(world, sent, strict=True):
                w = _tensor(replica, name).detach()
                kept = w + new - own
                if self._alpha is not None:
                    kept = self._alpha * w + (1 - self._alpha) * new
                _assign([_tensor(replica, name)], kept.detach())

    def _stepped(self, name: str, tensors: Sequence[Tensor]) -> Tensor:
        common = self._common[name]
        common.grad = common.detach() - _mean(tensors)
        self._optimizers[name].step()
        return common.detach()


class Clipping:
    """Every replica's own gradients, bounded by a norm: of all of them, or bucket by bucket by the
    norm of the iteration before; at first by that of the buckets so far."""

    def __init__(self, norm: float, tensors: Sequence[Names], early: bool) -> None:
        self._norm, self._tensors, self._early = norm, tensors, early
        self._last: dict[int, float] = {}

    def __call__(self, replica: Replica) -> None:
        pieces = [Piece(tuple(names)) for names in self._tensors]
        norms = [squared_norm(replica, piece) for piece in pieces]
        last, self._last[replica.rank] = self._last.get(replica.rank), sum(norms)
        for b, piece in enumerate(pieces):
            known = sum(norms[: b + 1]) if last is None else last
            length = (known if self._early else sum(norms)) ** 0.5
            for p in _parameters(replica, piece):
                if p.grad is not None:
                    p.grad *= min(1.0, self._norm / (length + 1e-6))


def federated(
    world: list[Replica],
    iterations: Sequence[int],
    *,
    local_steps: Sequence[int],
    weights: Callable[[int], Sequence[float]],
    state: str = "local",
) -> None:
    """Replica k steps in the first local_steps[k] iterations of a round, which is as long as the
    largest of them; w <- sum_k(n_k w_k) / sum_k(n_k) after every round, with that round's n."""
    length = max(local_steps)
    for done, t in enumerate(iterations):
        for replica in world:
            replica.gradients(t)
            if done % length < local_steps[replica.rank]:
                replica.step()
        if (done + 1) % length == 0:
            everything = Piece(tuple(names_of(world)))
            counts = weights(done // length)
            average_parameters(world, everything, counts)
            treat_state(world, everything, state, counts)
        for replica in world:
            replica.end()


def selective(
    world: list[Replica],
    iterations: Sequence[int],
    *,
    pieces: Sequence[Piece],
    forced: Sequence[Collection[int]],
    change: Callable[[Sequence[float]], float],
    delta: float,
    lag: int,
    aggregate: str,
    state: str = "local",
) -> list[list[bool]]:
    """A piece is averaged if the change of any replica's squared norm of it is at least delta,
    `lag` iterations before; the first time always, and in r = h mod H if it is in forced[h].
    Returns by iteration and piece whether it has changed so much."""
    norms: dict[tuple[int, int], list[float]] = {}
    told: list[list[bool]] = []
    for r, t in enumerate(iterations):
        for replica in world:
            replica.gradients(t)
        told.append([False] * len(pieces))
        for i, piece in enumerate(pieces):
            for replica in world:
                seen = norms.setdefault((i, replica.rank), [])
                seen.append(squared_norm(replica, piece))
                told[r][i] |= len(seen) == 1 or change(seen) >= delta
        decisive = told[r - lag] if r >= lag else [True] * len(pieces)
        chosen = [
            piece for i, piece in enumerate(pieces) if decisive[i] or i in forced[r % len(forced)]
        ]
        if aggregate == "gradients" and chosen:
            average_gradients(world)
        _step(world)
        for piece in chosen if aggregate == "parameters" else []:
            average_parameters(world, piece)
            treat_state(world, piece, state)
        for replica in world:
            replica.end()
    return told


def squared_norm(replica: Replica, piece: Piece) -> float:
    """Of the gradients of a piece; a parameter without one counts as zero."""
    grads = [p.grad for p in _parameters(replica, piece) if p.grad is not None]
    return sum(float((grad.double() ** 2).sum()) for grad in grads)


def merged(
    world: list[Replica],
    iterations: Sequence[int],
    closes: Callable[[int], bool],
    merge: str = "sum",
) -> None:
    """w <- opt.step(sum_{i in g} mean_k(g_i)), one window late; nothing steps in between.

    Every replica adds its own gradients up; when `closes(r)`, the window closed before is
    averaged over replicas (over its iterations too if `merge` is "mean") and applied.
    """
    for r, t in enumerate(iterations):
        for replica in world:
            replica.gradients(t)
            replica.opened = _added(replica.opened, _own_gradients(replica))
            replica.merged += 1
        if closes(r):
            if world[0].closed:
                _apply_closed(world, merge)
                for replica in world:
                    replica.end()
            for replica in world:
                replica.closed, replica.opened = replica.opened, []
                replica.closed_size, replica.merged = replica.merged, 0


def apply_merged(world: list[Replica], merge: str) -> None:
    """What `consolidate` does first: apply both windows, however little they merge."""
    for _ in range(2):
        if world[0].closed:
            _apply_closed(world, merge)
        for replica in world:
            replica.closed, replica.opened = replica.opened, []
            replica.closed_size, replica.merged = replica.merged, 0


def _apply_closed(world: list[Replica], merge: str) -> None:
    divisor = world[0].closed_size if merge == "mean" else 1
    averages = [_mean_of_used(grads) for grads in zip(*(r.closed for r in world), strict=True)]
    for replica in world:
        for p, grad in zip(_trainable(replica), averages, strict=True):
            p.grad = None if grad is None else grad / divisor
        replica.step()


def _mean_of_used(grads: Sequence[Tensor | None]) -> Tensor | None:
    """Where a replica has no gradient it counts as zero; None if no replica has one."""
    used = [g for g in grads if g is not None]
    return torch.stack(used).sum(dim=0) / len(grads) if used else None


def _trainable(replica: Replica) -> list[nn.Parameter]:
    return [p for p in replica.model.parameters() if p.requires_grad]


def _own_gradients(replica: Replica) -> list[Tensor | None]:
    return [None if p.grad is None else p.grad.clone() for p in _trainable(replica)]


def _added(sums: list[Tensor | None], grads: list[Tensor | None]) -> list[Tensor | None]:
    if not sums:
        return grads
    pairs = zip(sums, grads, strict=True)
    return [b if a is None else a if b is None else a + b for a, b in pairs]


def goes(rule: Transfer, r: int, outcomes: dict[str, list[bool]]) -> bool:
    """Whether a message is sent in an iteration, as far as votes say."""
    return rule.when is None or r < rule.ago or outcomes[rule.when][r - rule.ago]


def _step(world: list[Replica]) -> None:
    for replica in world:
        replica.step()


def consolidate(world: list[Replica], merge: str = "sum") -> None:
    """Every floating-point tensor becomes the mean; integers are rank 0's."""
    apply_merged(world, merge)
    for name, first in world[0].tensors.items():
        tensors = [_tensor(replica, name) for replica in world]
        _assign(tensors, _mean(tensors) if first.is_floating_point() else first)


# ---- what is exchanged ----------------------------------------------------------------------


def names_of(world: list[Replica]) -> list[str]:
    """Trainable parameters and floating-point buffers."""
    model = world[0].model
    buffers = [n for n, b in model.named_buffers() if b.is_floating_point()]
    return [n for n, p in model.named_parameters() if p.requires_grad] + buffers


def average_gradients(world: list[Replica]) -> None:
    """A replica that has no gradient counts as zero, unless none has."""
    for parameters in zip(*(replica.model.parameters() for replica in world), strict=True):
        if any(p.grad is not None for p in parameters):
            grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
            for p in parameters:
                p.grad = _mean(grads)


def average_parameters(
    world: list[Replica], piece: Piece, weights: Sequence[float] | None = None
) -> None:
    """w <- mean_k(w_k) of a piece."""
    tensors = [[_tensor(replica, name) for name in piece.names] for replica in world]
    average(tensors, piece, weights)


def kept(world: list[Replica], names: Names) -> Kept:
    """What all replicas have of these."""
    return {n: [_tensor(replica, n).detach().clone() for replica in world] for n in names}


def shift(world: list[Replica], names: Names, taken: Kept, gain: float = 1.0) -> None:
    """w_k += gain (mean_k(s_k) - s_k) of what was taken."""
    for name in names:
        mean = _mean(taken[name])
        for replica, own in zip(world, taken[name], strict=True):
            _tensor(replica, name).detach().add_(gain * (mean - own))


def treat_state(
    world: list[Replica], piece: Piece, policy: str, weights: Sequence[float] | None = None
) -> None:
    """What becomes of the optimizer state of the parameters that were averaged. State that a
    replica does not have counts as zero."""
    if policy == "reset":
        for replica in world:
            for p in _parameters(replica, piece):
                replica.optimizer.state.pop(p, None)
    elif policy == "averaged":
        keys = _keys(world, piece)
        average([_state(replica, piece, keys) for replica in world], piece, weights)


def _keys(world: list[Replica], piece: Piece) -> list[tuple[int, str]]:
    """Of a piece's state: number of the parameter, name."""
    return sorted(
        {
            (i, key)
            for replica in world
            for i, p in enumerate(_parameters(replica, piece))
            for key, value in replica.optimizer.state.get(p, {}).items()
            if isinstance(value, Tensor) and value.shape == p.shape
        }
    )


def average(
    worlds_tensors: Sequence[Sequence[Tensor]],
    piece: Piece,
    weights: Sequence[float] | None = None,
) -> None:
    """Average the piece's slice of every replica's tensors, laid end to end."""
    if not worlds_tensors[0]:
        return
    flats = [torch.cat([t.detach().reshape(-1) for t in tensors]) for tensors in worlds_tensors]
    run = piece.elements(worlds_tensors[0])
    mean = _mean([flat[run] for flat in flats], weights)
    for flat, tensors in zip(flats, worlds_tensors, strict=True):
        flat[run] = mean
        for tensor, part in zip(tensors, flat.split([t.numel() for t in tensors]), strict=True):
            _assign([tensor], part.view(tensor.shape))


def _parameters(replica: Replica, piece: Piece) -> list[nn.Parameter]:
    tensors = [replica.tensors[name] for name in piece.names]
    return [t for t in tensors if isinstance(t, nn.Parameter)]


def _state(replica: Replica, piece: Piece, keys: Sequence[tuple[int, str]]) -> list[Tensor]:
    parameters, state = _parameters(replica, piece), replica.optimizer.state
    return [
        state.get(parameters[i], {}).get(key, torch.zeros_like(parameters[i])) for i, key in keys
    ]


def copy_buffers(world: list[Replica]) -> None:
    for name, first in world[0].model.named_buffers():
        _assign([_tensor(replica, name) for replica in world], first)


def _tensor(replica: Replica, name: str) -> Tensor:
    return replica.tensors[name]


def _mean(tensors: Sequence[Tensor], weights: Sequence[float] | None = None) -> Tensor:
    if weights is None:
        return torch.stack([t.detach() for t in tensors]).mean(dim=0)
    pairs = zip(weights, tensors, strict=True)
    return torch.stack([w * t.detach() for w, t in pairs]).sum(dim=0) / sum(weights)


def _assign(tensors: Sequence[Tensor], value: Tensor) -> None:
    with torch.no_grad():
        for tensor in tensors:
            tensor.copy_(value.clone())
