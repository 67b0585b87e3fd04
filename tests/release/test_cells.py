"""Stored cells of the predictions: what is stored of a measurement, and predictions from it."""

from __future__ import annotations

from collections import Counter

import pytest
from cases.scripts import benchmark
from cases.synthetic_runs import profile
from cases.tiny_runs import record, write_tiny

from offbeat.core.derive.broadcast import with_broadcast
from offbeat.core.strategy.interface import Planned
from offbeat.core.strategy.parsing import parse
from offbeat.experiments.predictions import predict

predictions = benchmark("predictions")
ENDS_S = tuple(i + 0.01 * (i % 4) for i in range(1, 23))
BYTES = {"sent_bytes": [8, 0] * 11, "spared_bytes": [0, 8] * 11}
BY_VOTE = {"sync": {"yes": [[0], []] * 11, "norm": [1.0] * 22}}
YES = {"iterations": [*range(22)], "by_vote": BY_VOTE, **BYTES}


def measured_run(cell, directory):
    """Write the run directory of a cell as `compare` does, with a plan that has a broadcast."""
    strategy, facts = parse(cell.strategy), profile(world_size=cell.hosts)
    plan = strategy.plan(facts) if isinstance(strategy, Planned) else None
    votes = YES if strategy.name == "selsync" else {}
    records = [record(rank, ENDS_S, votes=votes) for rank in range(cell.hosts)]
    write_tiny(
        directory, {strategy.name: [records]}, seeds=[3], skip=2, started="2026-01-02T03:04:05"
    )
    facts.save(directory / "profile.json")
    setup = predictions.setup_of(cell)
    return predict(
        strategy,
        facts,
        directory / strategy.name,
        plan and with_broadcast(plan, "net"),
        votes={"sync": [True, False] * 11} if votes else {},
        servers=setup.servers,
        ranks=None if plan else setup.ranks,
        iterations=22 if setup.servers else None,
    )


@pytest.mark.parametrize("strategy", ["wfbp", "selsync", "ssp", "ad-psgd"])
def test_a_measured_cell_is_predicted_anew_from_its_file(strategy, tmp_path):
    cell = predictions.Cell(strategy, "vit", 25, 4, 20)
    predicted_s = measured_run(cell, tmp_path / "run")
    path = tmp_path / f"{cell.name(7)}.json.xz"
    predictions.save_cell(path, predictions.stored_cell(cell, tmp_path / "run"))
    found = predictions.recomputed(path)
    assert found.stored_s == found.new_s == predicted_s
    assert (found.same_plan, found.is_planned) == (True, strategy in ("wfbp", "selsync"))
    row = predictions.stored_row(predictions.load_cell(path))
    measured_ms, predicted_ms = [1010.0, 1000.0, 1010.0], round(1e3 * predicted_s, 1)
    assert row[:7] == [*cell, measured_ms, predicted_ms]
    assert row[8:] == [1, 1, "2026-01-02", ""]


def test_stored_cells_are_predicted_as_when_they_were_measured():
    """A cell of each strategy, bit for bit; all are readable and of the plan of measurements."""
    cells = predictions.planned_cells()
    paths = {cell.strategy: [] for cell in cells}
    for path in predictions.STORED.glob("*.json.xz"):
        stored, number = predictions.load_cell(path), int(path.name[:3])
        cell = cells[number - 1]
        assert (tuple(stored["cell"]), path.name) == (cell, f"{cell.name(number)}.json.xz")
        assert len(predictions.stored_row(stored)) == len(predictions.COLUMNS)
        paths[cell.strategy].append(path)
    for path, *_ in filter(None, paths.values()):
        found = predictions.recomputed(path)
        assert (found.new_s, found.same_plan) == (found.stored_s, True), path.name


def cell_of(new_s, stored_s=1.0, *, planned=True, undisturbed=True, same_plan=True):
    return predictions.Recomputed("x", planned, undisturbed, 1.0, stored_s, new_s, same_plan)


@pytest.mark.parametrize(
    ("cells", "count"),
    [
        ([], 1),
        ([cell_of(1.01, 1.01)] * 3, 0),
        ([cell_of(1.01, 1.01)] * 2 + [cell_of(1.004)], 1),  # one is worse
        ([cell_of(0.996)] * 2 + [cell_of(1.01, 1.01)] * 3, 2),  # it is too short
        ([cell_of(1.002, 1.001)] * 3, 1),  # the median is worse
        ([cell_of(1.002, 1.001, undisturbed=False)] * 3, 0),
        ([cell_of(0.9, same_plan=False), cell_of(1, 1), cell_of(1, 1)], 0),  # a better plan
        ([cell_of(1.004, same_plan=False), cell_of(1, 1), cell_of(1, 1)], 1),
        ([cell_of(1.04, planned=False), cell_of(1.18, planned=False, undisturbed=True)], 1),
        ([cell_of(1.04, planned=False)] * 2 + [cell_of(1.18, planned=False)], 0),
        ([cell_of(1.14, planned=False)], 0),  # one cell has no median
        ([cell_of(1.04, planned=False)] * 2 + [cell_of(0.8, planned=False)], 1),
    ],
)
def test_worse_predictions_are_named(cells, count):
    assert len(predictions.complaints(cells)) == count


def test_the_first_cells_to_measure_are_a_fair_sample():
    """After 42 cells each of the 21 strategies has two."""
    cells = predictions.planned_cells()
    order = predictions.measuring_order(cells)
    assert sorted(order) == [*range(1, 151)]
    for count, each in ((21, 1), (42, 2), (126, 6)):
        found = Counter(cells[number - 1].strategy for number in order[:count])
        assert [*found.values()] == [each] * 21
