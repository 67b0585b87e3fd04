"""The cells of the predictions, drawn before they are measured, and their models."""

from __future__ import annotations

import shutil
import signal
import threading
import types
from decimal import Decimal
from itertools import combinations, product

import pytest
import torch
from support.scripts import benchmark

from offbeat.core.strategy.parsing import parse

predictions = benchmark("predictions")
zoo = benchmark("zoo")


def test_cells_are_those_of_the_draw():
    cells = predictions.planned_cells()
    assert cells == predictions.draw()
    assert len(cells) <= 150
    assert len(set(cells)) == len(cells)


def test_every_pair_of_values_is_in_a_cell_but_some_of_strategy_and_model():
    """Counted anew: 150 cells contain 150 of the 189 pairs of strategy and model."""
    cells = predictions.planned_cells()
    for i, j in combinations(range(5), 2):
        found = {(cell[i], cell[j]) for cell in cells}
        every = set(product(predictions.FACTORS[i], predictions.FACTORS[j]))
        assert found <= every
        assert len(every - found) == (len(every) - len(cells) if (i, j) == (0, 1) else 0)
    whole = predictions.draw(189)
    assert {cell[:2] for cell in whole} == {*product(predictions.STRATEGIES, predictions.MODELS)}


def test_a_draw_that_leaves_pairs_out_is_refused():
    with pytest.raises(ValueError, match=r"count \(40\) leaves \d+ pairs out"):
        predictions.draw(40)
    with pytest.raises(ValueError, match=r"count \(190\) must be at least 1 and at most 189"):
        predictions.draw(190)


def test_factors_are_21_strategies_and_the_models_of_the_zoo():
    assert len({str(parse(text)) for text in predictions.STRATEGIES}) == 21
    assert set(predictions.MODELS) == set(zoo.MODELS)
    assert len(predictions.MODELS) == 9


def test_folders_of_cells_are_their_own():
    cells = predictions.planned_cells()
    names = {cell.name(number) for number, cell in enumerate(cells, 1)}
    assert len(names) == len(cells)
    assert not any(set(name) & set(":=/ ") for name in names)


def test_a_cell_without_a_run_is_not_measured(tmp_path):
    cell = predictions.Cell("ddp", "vit", 25, 4, 0)
    nothing = [*cell, None, None, None, 0, 0, ""]
    assert predictions.row_of(cell, tmp_path, {}) == [*nothing, "not measured"]
    (tmp_path / predictions.FAILED).write_text("rank 1 ended\nrank 2 ended\n")
    assert predictions.row_of(cell, tmp_path, {}) == [*nothing, "rank 1 ended; rank 2 ended"]


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


def measured_cells(tmp_path, monkeypatch, measure, published=types.MappingProxyType({})):
    """Cells that a start measures, with a stand-in for the launches."""
    tried = []

    def measure_cell(cell, directory, *_):
        tried.append(cell)
        directory.mkdir(parents=True, exist_ok=True)
        return measure(cell, directory)

    def measured_row(cell, directory):
        launched = 1 if (directory / "done").exists() else 0
        numbers = [[1.0, 1.0, 1.0], 1.0, 0.0] if launched else [None] * 3
        return [*cell, *numbers, launched, launched, "", ""]

    monkeypatch.setattr(predictions, "measure", measure_cell)
    monkeypatch.setattr(predictions, "measured_row", measured_row)
    monkeypatch.setattr(predictions, "published_rows", lambda: published)
    monkeypatch.setattr(predictions, "missing_package", lambda _: None)
    with predictions.time_limit(None):
        predictions.measure_all(tmp_path, range(1, 6), 1, 22)
    return tried


def test_a_further_start_continues(tmp_path, monkeypatch):
    """Complete cells and failed ones are kept; an interrupted one is continued."""
    cells, stops = predictions.planned_cells()[:5], [False, True]

    def measure(cell, directory):
        if cell == cells[1]:
            (directory / predictions.FAILED).write_text("rank 1 ended\n")
            return True
        if cell == cells[2] and not stops.pop(0):
            return False
        (directory / "done").touch()
        return True

    assert measured_cells(tmp_path, monkeypatch, measure) == cells[:3]
    assert measured_cells(tmp_path, monkeypatch, measure) == cells[2:]
    assert measured_cells(tmp_path, monkeypatch, measure) == []


def test_another_machine_continues(tmp_path, monkeypatch):
    """Cells of the result are kept if they have as many launches; their rows stay in the result."""
    first, second, third, *_ = cells = predictions.planned_cells()[:5]
    row = [[1.0, 1.0, 1.0], Decimal("1.1"), Decimal("10.0"), 1, 1, "2026-01-02", ""]
    published = {first: [*first, *row], second: [*second, *row[:3], 0, 0, "", "not measured"]}

    def measure(_, directory):
        (directory / "done").touch()
        return True

    assert measured_cells(tmp_path, monkeypatch, measure, published) == cells[1:]
    found = predictions.result(tmp_path)["tables"][1]["rows"]
    assert found[0] == published[first]
    assert [row[predictions.LAUNCHED] for row in found[:6]] == [1, 1, 1, 1, 1, 0]
    shutil.rmtree(tmp_path / third.name(3))
    assert measured_cells(tmp_path, monkeypatch, measure, published) == [third]


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


@pytest.mark.parametrize(("text", "numbers"), [("7", range(7, 8)), ("2-4", range(2, 5))])
def test_numbers_of_cells(text, numbers):
    assert predictions.numbers_of(text, 9) == numbers
    with pytest.raises(ValueError, match=r"cells \(0-3\) must be numbers from 1 to 9"):
        predictions.numbers_of("0-3", 9)


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
    assert len(modules) >= max(predictions.HOSTS)
    assert 0.5e6 < sum(p.nbytes for p in model.parameters()) < 6e6
