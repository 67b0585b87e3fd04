"""What gradients and exchanges do to a worker's state, against slow equations in float64."""

from __future__ import annotations

import math
import threading

import numpy as np
import pytest
import torch
from torch import Tensor

from offbeat.gossip.chunks import Wire
from offbeat.gossip.state import AVERAGING, Mixing, State

SIZE = 11
MOMENTUM = Mixing(0.3, 0.5, 1.4)


class Slow:
    """One worker's x and x~, event by event, as the equations have it."""

    def __init__(self, x: np.ndarray, constants: Mixing):
        self.x, self.tilde, self.t, self.c = x.copy(), x.copy(), 0.0, constants

    def to(self, t: float) -> None:
        s, d = (self.x + self.tilde) / 2, (self.x - self.tilde) / 2
        d = d * math.exp(-2 * self.c.eta * (t - self.t))
        self.x, self.tilde, self.t = s + d, s - d, t

    def gradient(self, t: float, u: np.ndarray) -> None:
        self.to(t)
        self.x, self.tilde = self.x + u, self.tilde + u

    @staticmethod
    def exchange(i: Slow, j: Slow, t: float, mixed: bool) -> None:
        early = i.x - j.x
        i.to(t)
        j.to(t)
        m = i.x - j.x if mixed else early
        for one, sign in ((i, 1), (j, -1)):
            one.x = one.x - sign * one.c.alpha * m
            one.tilde = one.tilde - sign * one.c.alpha_tilde * m


def states(constants: Mixing, **options: object) -> tuple[list[State], list[Slow], list[Tensor]]:
    random = np.random.default_rng(5)
    flats = [torch.from_numpy(random.standard_normal(SIZE)) for _ in range(2)]
    made = [State([flat], Wire([flat], chunk_bytes=32), constants, **options) for flat in flats]  # type: ignore[arg-type]
    return made, [Slow(flat.numpy(), constants) for flat in flats], flats


def exchange(a: State, b: State, t: float, wire: Wire, between: object = None) -> None:
    """One whole exchange; `between` happens when it has begun."""
    buffers = [wire.buffers() for _ in range(2)]
    for state, buffer in zip((a, b), buffers, strict=True):
        state.snapshot(t, buffer)
    if callable(between):
        between()
    for number in range(len(wire.chunks)):
        one, other = (wire.view(buffer, number).double() for buffer in buffers)
        a.apply(number, one - other, t, a.course.mixing_at(t))
        b.apply(number, other - one, t, b.course.mixing_at(t))


def assert_same(flat: Tensor, slow: Slow) -> None:
    np.testing.assert_allclose(flat.numpy(), slow.x, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("snapshot", [True, False])
@pytest.mark.parametrize("mixed", [True, False])
def test_events_in_their_order(snapshot: bool, mixed: bool) -> None:
    (a, b), (i, j), (x, y) = states(MOMENTUM, snapshot=snapshot, mixed=mixed)
    wire = Wire([x], chunk_bytes=32)
    u = np.arange(SIZE, dtype=float)
    a.step(0.7, lambda: x.add_(torch.from_numpy(u)))
    i.gradient(0.7, u)
    exchange(a, b, 1.5, wire)
    Slow.exchange(i, j, 1.5, mixed)
    b.step(1.9, lambda: y.mul_(0.5))
    j.to(1.9)
    j.gradient(1.9, -j.x / 2)
    exchange(a, b, 2.5, wire)
    Slow.exchange(i, j, 2.5, mixed)
    for state, slow in ((a, i), (b, j)):
        state.mix_until(4.0)
        slow.to(4.0)
    assert_same(x, i)
    assert_same(y, j)


@pytest.mark.parametrize("momentum", [True, False])
def test_a_gradient_sees_one_point_and_the_exchange_counts(momentum: bool) -> None:
    """The weights of a forward stay; the update is made of what gossip has left meanwhile."""
    constants = MOMENTUM if momentum else AVERAGING
    (a, b), (i, j), (x, _) = states(constants, momentum=momentum)
    a.refresh()
    seen = x.clone()
    exchange(a, b, 1.0, Wire([x], chunk_bytes=32))
    assert torch.equal(x, seen)
    a.step(1.4, lambda: x.sub_(0.1 * seen))
    Slow.exchange(i, j, 1.0, True)
    i.gradient(1.4, -0.1 * seen.numpy())
    assert_same(x, i)


def test_live_weights_change_at_once() -> None:
    (a, b), (i, j), (x, y) = states(AVERAGING, snapshot=False, momentum=False)
    exchange(a, b, 1.0, Wire([x], chunk_bytes=32))
    mean = (i.x + j.x) / 2
    np.testing.assert_allclose(x.numpy(), mean, rtol=1e-12)
    np.testing.assert_allclose(y.numpy(), mean, rtol=1e-12)


def test_a_gradient_in_the_middle_of_an_exchange_does_not_touch_the_mean() -> None:
    """What it adds is added; the exchange moves on what was sent, not what is there now."""
    (a, b), (i, j), (x, y) = states(MOMENTUM)
    u = np.linspace(-1, 1, SIZE)
    exchange(
        a,
        b,
        1.0,
        Wire([x], chunk_bytes=32),
        lambda: a.step(1.6, lambda: x.add_(torch.from_numpy(u))),
    )
    Slow.exchange(i, j, 1.0, True)
    i.gradient(1.6, u)
    for state, slow in ((a, i), (b, j)):
        state.mix_until(2.0)
        slow.to(2.0)
    assert_same(x, i)
    assert_same(y, j)


def test_a_gradient_before_the_exchange_begins_here_but_after_its_time() -> None:
    """m is another one then; the mean is not."""
    (a, b), (i, j), (x, y) = states(MOMENTUM)
    u = np.linspace(-1, 1, SIZE)
    a.step(1.6, lambda: x.add_(torch.from_numpy(u)))
    exchange(a, b, 1.0, Wire([x], chunk_bytes=32))
    a.mix_until(3.0)
    b.mix_until(3.0)
    np.testing.assert_allclose((x + y).numpy(), i.x + j.x + u, rtol=1e-12)


def test_an_exchange_with_an_earlier_label_does_not_set_the_time_back() -> None:
    (a, b), (i, j), (x, y) = states(MOMENTUM)
    wire = Wire([x], chunk_bytes=32)
    exchange(a, b, 1.0, wire)
    a.step(2.0, int)
    exchange(a, b, 1.5, wire)
    assert (a.t, b.t) == (2.0, 1.5)
    a.mix_until(3.0)
    b.mix_until(3.0)
    np.testing.assert_allclose((x + y).numpy(), i.x + j.x, rtol=1e-12, atol=1e-13)


def test_an_exchange_that_is_undone_leaves_nothing() -> None:
    (a, b), (i, _), (x, _) = states(MOMENTUM)
    wire = Wire([x], chunk_bytes=32)
    buffers = [wire.buffers() for _ in range(2)]
    for state, buffer in zip((a, b), buffers, strict=True):
        state.snapshot(1.0, buffer)
    one, other = (wire.view(buffer, 0) for buffer in buffers)
    a.apply(0, one - other, 1.0, a.course.last)
    a.step(1.6, lambda: None)
    a.apply(0, one - other, 1.0, a.course.last, reverts=True)
    a.mix_until(2.0)
    i.to(2.0)
    assert_same(x, i)


def test_who_hears_late_of_other_constants_mixes_as_the_others() -> None:
    x = [torch.tensor([1.0, -3.0], dtype=torch.float64) for _ in range(2)]
    early, late = (State([one], Wire([one]), MOMENTUM) for one in x)
    later = Mixing(0.9 * MOMENTUM.eta, 0.5, 0.6)
    for state, hears in (early, 1.0), (late, 4.0):
        state._tilde[0].add_(2.0)  # type: ignore[index]
        for t in (1.0, 4.0, 5.0):
            state.mix_until(t)
            if t == hears:
                state.change_mixing(2.0, later)
    torch.testing.assert_close(x[0], x[1], rtol=0, atol=1e-12)


def test_constants_change_at_a_label_wherever_the_word_arrives_when() -> None:
    """One hears of it in time, the other while an exchange of before is on its way."""
    (a, b), (i, j), (x, y) = states(MOMENTUM)
    later = Mixing(0.9, 0.5, 2.0)
    a.change_mixing(2.0, later)
    exchange(
        a,
        b,
        1.0,
        Wire([x], chunk_bytes=32),
        lambda: (b.change_mixing(2.0, later), b.step(3.0, int)),
    )
    assert a.course.mixing_at(1.9) == MOMENTUM
    assert a.course.mixing_at(2.0) == later
    Slow.exchange(i, j, 1.0, True)
    for state, slow in ((a, i), (b, j)):
        state.mix_until(4.0)
        slow.to(2.0)
        slow.c = later
        slow.to(4.0)
    assert_same(x, i)
    assert_same(y, j)


def test_who_hears_of_constants_after_an_exchange_does_not_touch_the_mean() -> None:
    (a, b), (i, j), (x, y) = states(MOMENTUM)
    wire, later, total = Wire([x], chunk_bytes=32), Mixing(0.9, 0.5, 1.4), i.x + j.x
    exchange(a, b, 0.5, wire)
    a.change_mixing(1.0, later)
    exchange(a, b, 2.0, wire)
    for state in (a, b):
        state.step(3.0, lambda: None)
    b.change_mixing(1.0, later)
    for state in (a, b):
        state.mix_until(4.0)
    assert np.abs((x + y).numpy() - total).max() > 1e-3  # x alone is too late
    for state, flat in ((a, x), (b, y)):
        state.midpoint()
        torch.testing.assert_close(flat, state._tilde[0], rtol=1e-12, atol=1e-12)  # type: ignore[index]
    np.testing.assert_allclose((x + y).numpy(), total, rtol=1e-12, atol=1e-12)


def test_the_midpoint_waits_for_arithmetic_under_way() -> None:
    (a, _), _, _ = states(MOMENTUM)
    thread = threading.Thread(target=a.midpoint)
    with a.frozen_x(0.0):
        thread.start()
        thread.join(0.1)
        assert thread.is_alive()
    thread.join(10)
    assert not thread.is_alive()


def test_rounded_on_the_wire_the_mean_is_kept() -> None:
    """Both take the same rounded numbers for m, so what one loses the other gets."""
    random = torch.Generator().manual_seed(1)
    x, y = (torch.randn(5000, generator=random) for _ in range(2))
    before = x.double() + y.double()
    wire = Wire([x], "bf16")
    assert wire.bytes == 2 * 5000
    a, b = (State([flat], wire, AVERAGING, momentum=False) for flat in (x, y))
    exchange(a, b, 1.0, wire)
    a.refresh()
    b.refresh()
    assert (x.double() + y.double() - before).abs().max() < 1e-6
    assert (x - y).abs().max() < 0.04  # what bfloat16 does not tell apart
    assert not torch.equal(x, y)


def test_the_mean_of_four_threads_of_gradients_and_exchanges() -> None:
    """Hundreds of events in no order: the mean is the start's and what the gradients have added."""
    random = torch.Generator().manual_seed(2)
    flats = [torch.randn(300, generator=random) for _ in range(4)]
    start = torch.stack(flats).double().mean(0)
    wire = Wire(flats[:1], chunk_bytes=256)
    all_ = [State([flat], wire, MOMENTUM, snapshot=n % 2 == 0) for n, flat in enumerate(flats)]
    steps = 60
    pairs = threading.Lock()  # one exchange at a time: who meets whom is not tested here

    def work(n: int) -> None:
        mine = np.random.default_rng(n)
        for k in range(steps):
            t = k * (1.0 + 0.4 * n) / 10
            all_[n].refresh()
            all_[n].step(t, lambda: flats[n].add_(0.01))
            with pairs:
                partner = all_[(n + 1 + int(mine.integers(3))) % 4]
                exchange(all_[n], partner, max(t, partner.t), wire)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    end = max(state.t for state in all_)
    for state in all_:
        state.mix_until(end)
    found = torch.stack(flats).double().mean(0)
    assert (found - (start + 0.01 * steps)).abs().max() < 2e-6
    assert torch.stack(flats).std(0).max() < 0.1  # and they agree better than they did


def test_a_restart_keeps_the_mean_and_goes_on_agreeing() -> None:
    """Workers on a ring save x at times of their own, one of them between the two sides of an
    exchange, and begin again with x~ = x: the mean is that of what they load."""
    random, flats = np.random.default_rng(3), []
    flats = [torch.from_numpy(random.standard_normal(SIZE)) for _ in range(6)]
    wire, pairs = Wire([flats[0]], chunk_bytes=32), [(n, (n + 1) % 6) for n in range(6)]

    def begun() -> list[State]:
        return [State([flat], Wire([flat], chunk_bytes=32), MOMENTUM) for flat in flats]

    def gossip(made: list[State], rounds: int) -> None:
        for t in range(rounds):
            for i, j in pairs[t % 2 :: 2]:
                exchange(made[i], made[j], float(t), wire)

    def apart() -> float:
        numbers = torch.stack(flats)
        return float((numbers - numbers.mean(0)).square().sum())

    first = begun()
    gossip(first, 3)
    for n, state in enumerate(first):
        state.mix_until(3.0 + 0.3 * n)
    flats[0].add_(0.25)  # of an exchange whose other side is not saved
    loaded, before = torch.stack(flats).mean(0), apart()
    again = begun()
    gossip(again, 12)
    for state in again:
        state.mix_until(12.0)
    torch.testing.assert_close(torch.stack(flats).mean(0), loaded, rtol=0, atol=1e-13)
    assert apart() < before / 50
    # With x~ as it was, the mean of x would go towards that of x~.
    tilde = torch.stack([state._tilde[0] for state in first])  # type: ignore[index]
    assert (tilde.mean(0) - loaded).abs().max() > 1e-3
