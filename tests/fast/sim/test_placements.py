"""Timetables in unit time beside the closed forms of the paper's Table 1, and in measured time."""

from __future__ import annotations

from collections import Counter

import pytest
from cases.scripts import benchmark

from offbeat.cyclic.simulation import StageFacts, simulate
from offbeat.cyclic.timetable import PLACEMENTS, Placement, Timetable

SIZES = range(2, 12)
timetable_costs = benchmark("timetable_costs")
costs, total_activation_curve = timetable_costs.costs, timetable_costs.total_activation_curve


@pytest.mark.parametrize("n", SIZES)
def test_costs_are_those_of_the_paper(n: int) -> None:
    def of(placement: Placement, cyclic: bool = True):
        return costs(Timetable(placement, n, cyclic))

    assert of("single").activations == pytest.approx((n + 1) / 2)
    assert of("single", False).activations == n
    for cyclic in (True, False):
        assert of("workers", cyclic).activations == of("zero", cyclic).activations == 1
        assert of("pyramid", cyclic).activations == pytest.approx(1 / n)
        assert of("pyramid", cyclic).parameters == pytest.approx(1 / n)
        assert of("zero", cyclic).parameters == pytest.approx(2 / n)
        assert of("workers", cyclic).devices == of("zero", cyclic).devices == n
    assert of("pyramid").devices == n * (n + 1) // 2
    assert of("pyramid", False).devices == n * n
    assert of("pipeline").devices == n
    assert of("pipeline").activations == 1
    assert of("pipeline").parameters == pytest.approx(1 / n)


@pytest.mark.parametrize("n", SIZES)
def test_only_messages_between_two_devices_in_the_cyclic_order(n: int) -> None:
    for placement in PLACEMENTS:
        most = {"single": 0, "workers": 1, "pyramid": 2, "pipeline": 1, "zero": 1}[placement]
        assert costs(Timetable(placement, n)).messages == most
    for placement, most in (("workers", 2 * (n - 1)), ("pyramid", 2 * (n - 1) + 1)):
        assert costs(Timetable(placement, n, False)).messages == most
    assert costs(Timetable("zero", n, False)).messages == 2 * (n - 1)


@pytest.mark.parametrize("n", SIZES)
def test_volume_of_an_iteration(n: int) -> None:
    """N-1 messages bring a stage's sum together, and N-1 bring what it gives to all copies."""
    iterations = range(6)
    window = range(2 * n * 3, 2 * n * 4)
    for placement, copies in (
        ("workers", [n] * n),
        ("pyramid", [n - j for j in range(n)]),
        ("pipeline", [1] * n),
    ):
        table = Timetable(placement, n)
        sent = [m for time in range(2 * n * 6) for m in table.due_messages(time, iterations)]
        count = Counter(m.what for m in sent if m.sent in window)
        for m in sent:
            # The first that can use a total gets it at once, the others from the one before.
            first = (m.batch - (n - 1 - m.stage)) % n == 0
            assert m.what != "total" or m.due - m.sent == (1 if first else 2)
        assert count["total"] == sum(c - 1 for c in copies)
        # With one copy no sum leaves its device.
        assert count["sum"] == sum((n - 1) * (c > 1) for c in copies)
        between = 0 if placement == "workers" else n * (n - 1)
        assert count["activation"] == count["gradient"] == between


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("n", [1, 2, 3, 5])
def test_no_device_computes_two_works_in_a_step(placement: Placement, n: int) -> None:
    table = Timetable(placement, n)
    for time in range(6 * n, 12 * n):
        devices = [work.device for work in table.works(time)]
        assert len(devices) == n
        if placement != "single":
            assert len(set(devices)) == n
        # Every stage of every micro-batch is computed where its activations are.
        for work in table.works(time):
            assert work.device == table.device(work.batch, work.stage)


@pytest.mark.parametrize("n", [2, 3, 4])
def test_a_travelling_stage_is_in_one_place(n: int) -> None:
    """Followed message by message, every stage is where it is computed with next."""
    table, iterations = Timetable("zero", n), range(3)
    place = {stage: table.home(stage) for stage in range(n)}
    for time in range(table.period * 5):
        for message in table.due_messages(time, iterations):
            assert place[message.stage] == message.source
            place[message.stage] = message.target
        for work in table.works(time):
            if work.batch // n in iterations:
                assert place[work.stage] == work.device
    assert place == {stage: table.home(stage) for stage in range(n)}


@pytest.mark.parametrize("placement", ["workers", "pyramid", "pipeline"])
@pytest.mark.parametrize("backward", [1.0, 2.0])
def test_nothing_waits_if_stages_are_even_and_messages_are_free(
    placement: Placement, backward: float
) -> None:
    n = 4
    run = simulate(Timetable(placement, n), StageFacts.unit(n, backward))
    assert run.iteration_s == pytest.approx(n * (1 + backward))


def test_one_device_computes_everything_one_after_the_other() -> None:
    for cyclic in (True, False):
        run = simulate(Timetable("single", 3, cyclic), StageFacts.unit(3, 2.0))
        assert run.iteration_s == pytest.approx(3 * 3 * (1 + 2))


def test_uneven_stages_and_a_slow_device() -> None:
    even = StageFacts.unit(3)
    uneven = StageFacts(
        [1.0, 1.0, 2.0], [1.0, 1.0, 2.0], *[even.activation_bytes] * 2, *[even.gradient_bytes] * 2
    )
    # The pipeline waits for its slowest stage, which three micro-batches pass.
    assert simulate(Timetable("pipeline", 3), uneven).iteration_s == pytest.approx(3 * 4)
    # Workers wait for the slowest of them.
    slow = simulate(Timetable("workers", 3), even, speeds={1: 0.5})
    assert slow.iteration_s == pytest.approx(3 * 2 / 0.5)


def test_a_collective_is_waited_for() -> None:
    n, rate, latency = 4, 0.5, 0.1
    run = simulate(Timetable("workers", n, cyclic=False), StageFacts.unit(n), 4, rate, latency)
    ring = 2 * (n - 1) * (latency + 1 / n / rate)
    assert run.iteration_s == pytest.approx(2 * n + ring)


def test_memory_and_load_of_a_run() -> None:
    n = 4
    facts = StageFacts.unit(n)
    run = simulate(Timetable("workers", n), facts)
    assert {
        max(level for _, level in curve)
        for curve in timetable_costs.activation_curves(run, facts).values()
    } == {1.0}
    # All workers together: about half of what all would hold at the same time.
    middle = [level for at, level in total_activation_curve(run, facts) if 2 * 8 <= at < 3 * 8]
    assert max(middle) <= (n + 1) / 2
    parallel = simulate(Timetable("workers", n, cyclic=False), facts)
    assert max(level for _, level in total_activation_curve(parallel, facts)) == n
    load: Counter[tuple[int, int, int]] = Counter()
    for m in run.moved:
        load[m.source, m.target, int(m.begin_s)] += m.bytes  # type: ignore[assignment]
    assert max(load.values()) <= 1 / n + 1e-9  # one stage at a time


def test_collectives_of_uneven_stages() -> None:
    """The all-reduce of each stage has that stage's bytes; only the first one's is waited for."""
    n, rate = 2, 1.0
    even, nothing = StageFacts.unit(n), [0.0] * n
    sizes = [3.0, 1.0]
    facts = StageFacts(
        even.forward_s, even.backward_s, even.activation_bytes, nothing, sizes, sizes
    )
    run = simulate(Timetable("pyramid", n, cyclic=False), facts, 4, rate)
    ring = 2 * (n - 1) / n * sizes[0] / rate
    assert run.iteration_s == pytest.approx(2 * n + ring)


@pytest.mark.parametrize(
    ("placement", "stages", "words"),
    [("cube", 3, r"placement \('cube'\) must be one of"), ("pyramid", 0, r"stages \(0\) must be")],
)
def test_timetables_that_cannot_be(placement: Placement, stages: int, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Timetable(placement, stages)
