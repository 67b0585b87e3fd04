"""Timetables in unit time beside the closed forms of the paper's Table 1, and in measured time."""

from __future__ import annotations

import json

import pytest
from cases.scripts import benchmark

from offbeat.cyclic.timetable import PLACEMENTS, Placement, Timetable

SIZES = range(2, 12)
timetable_costs = benchmark("timetable_costs")
costs, ParallelTimetable = timetable_costs.costs, timetable_costs.ParallelTimetable


@pytest.mark.parametrize("n", SIZES)
def test_costs_are_those_of_the_paper(n: int) -> None:
    def of(placement: Placement, cyclic: bool = True):
        return costs((Timetable if cyclic else ParallelTimetable)(placement, n))

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
    facts = timetable_costs.StageFacts.unit(n, backward)
    run = timetable_costs.simulate(Timetable(placement, n), facts)
    assert run.iteration_s == pytest.approx(n * (1 + backward))


@pytest.mark.parametrize("n", SIZES)
def test_only_messages_between_two_devices_in_the_cyclic_order(n: int) -> None:
    for placement in PLACEMENTS:
        most = {"single": 0, "workers": 1, "pyramid": 2, "pipeline": 1, "zero": 1}[placement]
        assert costs(Timetable(placement, n)).messages == most
    for placement, most in (("workers", 2 * (n - 1)), ("pyramid", 2 * (n - 1) + 1)):
        assert costs(ParallelTimetable(placement, n)).messages == most
    assert costs(ParallelTimetable("zero", n)).messages == 2 * (n - 1)


def test_script_and_page(tmp_path, capsys) -> None:
    out = tmp_path / "t.html"
    benchmark("timetables").main(["--stages", "3", "--json", "--out", str(out)])
    rows = json.loads(capsys.readouterr().out)
    assert len({(row["placement"], row["order"]) for row in rows}) == len(rows) == 9
    assert out.read_text().count("<article>") == 9
