"""The cells of the predictions, drawn before they are measured, and their models."""

from __future__ import annotations

import signal
import threading
from collections import Counter
from contextlib import suppress
from decimal import Decimal
from itertools import combinations

import pytest
import torch
from support.scripts import benchmark

from offbeat.core.strategy.parsing import parse

predictions = benchmark("predictions")
zoo = benchmark("zoo")


def test_every_pair_of_values_is_in_a_cell_but_some_of_strategy_and_model():
    """150 cells contain 150 of the 189 pairs of strategy and model."""
    cells = predictions.planned_cells()
    values = [{cell[i] for cell in cells} for i in range(5)]
    assert len({str(parse(text)) for text in values[0]}) == 21
    assert values[1:] == [{*zoo.MODELS}, {25, 50, 100, 200}, {4, 8}, {0, 20}]
    for i, j in combinations(range(5), 2):
        found = {(cell[i], cell[j]) for cell in cells}
        assert len(found) == (150 if (i, j) == (0, 1) else len(values[i]) * len(values[j]))


def test_the_first_cells_to_measure_are_a_fair_sample():
    """After 42 cells each of the 21 strategies has two."""
    cells = predictions.planned_cells()
    order = predictions.measuring_order(cells)
    assert sorted(order) == [*range(1, 151)]
    for count, each in ((21, 1), (42, 2), (126, 6)):
        found = Counter(cells[number - 1].strategy for number in order[:count])
        assert [*found.values()] == [each] * 21


def test_folders_of_cells_are_their_own():
    cells = predictions.planned_cells()
    names = {cell.name(number) for number, cell in enumerate(cells, 1)}
    assert len(names) == len(cells)
    assert not any(set(name) & set(":=/ ") for name in names)


def test_the_summary_leaves_out_cells_with_a_disturbed_launch():
    easy, hard = ("ddp", "vit", 25, 4, 0), ("cyclic", "vit", 25, 4, 0)
    rows = [
        [*easy, [1, 1, 1], 1, -1.0, 3, 3, "", ""],
        [*easy, [1, 1, 1], 1, 4.0, 1, 1, "", "1 repeated"],
        [*easy, [1, 1, 1], 1, 9.0, 3, 2, "", "other programs used 40 % of the processors"],
        [*hard, [1, 1, 1], 1, 8.0, 3, 3, "", ""],
        [*hard, None, None, None, 0, 0, "", "not measured"],
    ]
    assert all(len(row) == len(predictions.COLUMNS) for row in rows)
    assert [*predictions.summary_rows(rows)] == [
        ["4 hosts without delay", "2 of 3", 2.5, 4.0, 50, 100, "2 and 5"],
        ["others", "1 of 2", 8.0, 8.0, 0, 0, "3 and 7"],
        ["all", "3 of 5", 4.0, 8.0, 33, 67, "2 and 5, or 3 and 7"],
    ]
    nothing = [[*easy, None, None, None, 0, 0, "", "not measured"]]
    assert [row[1:6] for row in predictions.summary_rows(nothing)] == [
        [f"0 of {count}", None, None, None, None] for count in (1, 0, 1)
    ]


@pytest.fixture
def start(tmp_path, monkeypatch):
    """A function that starts a measurement of five cells and returns those that it has measured.

    Its argument stands in for the launches of a cell: it returns failures or raises an error.
    """
    monkeypatch.setattr(predictions, "STORED", tmp_path / "cells")
    monkeypatch.setattr(predictions, "published_rows", dict)
    monkeypatch.setattr(predictions, "missing_package", lambda _: None)
    monkeypatch.setattr(predictions, "stored_cell", stored)

    def begin(launch=lambda _: []):
        tried = []

        def measure(cell, directory, *_):
            tried.append(cell)
            directory.mkdir(parents=True, exist_ok=True)
            failures = launch(cell)
            if failures:
                (directory / predictions.FAILED).touch()
            return failures

        monkeypatch.setattr(predictions, "measure", measure)
        with suppress(KeyboardInterrupt), predictions.time_limit(None):
            predictions.measure_all(tmp_path, range(1, 6), 1, 22)
        return tried

    return begin


def stored(cell, _):
    launch = {"iteration_s": 1.0, "period_s": [1.0] * 20, "disturbed": "", "repeated": False}
    predicted = {"predicted_s": 1.1, "predicted_by_run_s": 1.1, "profile_disturbed": ""}
    return {"cell": cell, "launches": [launch], "date": "2026-01-02", **predicted}


def test_a_further_start_continues(start):
    """Stored cells are kept, an interrupted one is continued, and failed ones come last."""
    first, failing, raising, interrupted, last = cells = predictions.planned_cells()[:5]

    def launch(cell):
        if cell == interrupted:
            raise KeyboardInterrupt
        if cell == raising:
            raise RuntimeError("the lab")
        return ["rank 1 ended"] if cell == failing else []

    assert start(launch) == cells[:4]
    rows = predictions.result()["tables"][1]["rows"][:5]
    assert [row[predictions.LAUNCHED] for row in rows] == [1, 0, 0, 0, 0]
    assert rows[0] == [*first, [1e3] * 3, 1100.0, 10.0, 1, 1, "2026-01-02", ""]
    assert start() == [raising, interrupted, last, failing]
    assert start() == []


def test_published_rows_stay_until_a_cell_is_stored(start, monkeypatch):
    first, second, *_ = predictions.planned_cells()
    row = [[1.0, 1.0, 1.0], Decimal("1.1"), Decimal("10.0"), 1, 1, "2026-01-01", ""]
    start(lambda cell: ["failed"] if cell == first else [])
    published = {cell: [*cell, *row] for cell in (first, second)}
    monkeypatch.setattr(predictions, "published_rows", lambda: published)
    found = predictions.result()["tables"][1]["rows"]
    assert found[0] == published[first]
    assert found[1] == predictions.stored_row(stored(second, None))


def test_rows_of_the_result(tmp_path, monkeypatch):
    """Only rows with a launch count, and errors with as many digits as the file has."""
    cell, other = predictions.planned_cells()[:2]
    monkeypatch.setattr(predictions.tables, "RESULTS", tmp_path)
    assert predictions.published_rows() == {}
    measured = [*cell, [2.0, 1.9, 2.1], 2.2, 10.0, 1, 1, "2026-01-02", ""]
    rows = [measured, [*other, None, None, None, 0, 0, "", "not measured"]]
    table = {"name": "cells", "columns": predictions.COLUMNS, "rows": rows}
    predictions.tables.save(predictions.RESULT, {"tables": [table]})
    assert predictions.published_rows() == {
        cell: [
            *cell,
            [2, Decimal("1.9"), Decimal("2.1")],
            Decimal("2.2"),
            10,
            1,
            1,
            "2026-01-02",
            "",
        ]
    }
    both = [*predictions.published_rows().values(), [*measured[:7], -3.0, *measured[8:]]]
    assert [*predictions.summary_rows(both)][-1][2] == 6.5


def test_the_time_limit_interrupts_as_ctrl_c_does():
    with pytest.raises(KeyboardInterrupt), predictions.time_limit(1e-4):
        threading.Event().wait(30)
    with predictions.time_limit(None):
        assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


@pytest.mark.parametrize("name", zoo.MODELS)
def test_every_model_trains(name):
    """A step changes all parameters; 8 cyclic hosts need as many modules with parameters."""
    if package := predictions.missing_package(name):
        pytest.skip(f"{package} is not installed")
    entry = zoo.MODELS[name]
    torch.manual_seed(0)
    model, rng = entry.make(), torch.Generator().manual_seed(0)
    optimizer = zoo.optimizer_of(model)
    before = [p.detach().clone() for p in model.parameters()]
    loss = entry.loss(model, entry.batch(rng))
    loss.backward()
    optimizer.step()
    assert torch.isfinite(loss)
    assert not any(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    modules = [m for m in model.modules() if any(True for _ in m.parameters(recurse=False))]
    assert len(modules) >= 8
    assert 0.5e6 < sum(p.nbytes for p in model.parameters()) < 6e6
