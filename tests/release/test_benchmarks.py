"""Results of benchmarks: the page, the index and the scripts agree with the files."""

import ast
import json
import re
from itertools import combinations, product
from pathlib import Path

import pytest
import torch
from cases.scripts import ROOT, benchmark

tables = benchmark("tables")
claims = benchmark("papers/claims")
BENCHMARKS = ROOT / "benchmarks"
INDEX = (BENCHMARKS / "README.md").read_text()
KEYS = {"title", "what", "how", "date", "machine", "command", "tables", "misses", "notes"}
TABLE_KEYS = {"name", "title", "columns", "rows"}


def paths_in(command: str) -> list[Path]:
    return [ROOT / word for word in re.split(r"[\s;]+", command) if "/" in word]


def test_pages_equal_what_the_command_makes() -> None:
    for path in tables.PAGES:
        page = path.read_text()
        assert tables.page_text(page) == page, f"{path.name}: run `make tables`"


def test_figures_of_claims_are_those_of_the_results(tmp_path, monkeypatch) -> None:
    """Every row of the page of claims is filled, and names the result and its command."""
    made = claims.result()
    for table in made["tables"]:
        assert all(all(row) for row in table["rows"]), table["name"]
    text = (tables.RESULTS / "claims.json").read_text()
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    tables.save("claims", made)
    assert (tmp_path / "claims.json").read_text() == text, "run `make tables`"


def test_a_figure_is_a_cell_a_range_or_a_quotient() -> None:
    row = "vgg19|schedules|{}|simulated, ms"
    deft, ddp = row.format("DeFT, one link"), row.format("DDP-like: WFBP, one message per bucket")
    assert claims.figure(deft) == "130.3"
    assert claims.figure(f"{ddp} // {deft}") == "2.26"
    assert claims.figure("range:" + row.format("")) == "130.3 to 295.1"
    for wrong in (row.format("DeFT"), row.format(""), "vgg19|schedules|DeFT, one link|ms"):
        with pytest.raises(ValueError):
            claims.figure(wrong)


def test_the_figure_of_the_readme_shows_the_results() -> None:
    hero = benchmark("hero")
    for name, colours in hero.THEMES.items():
        text = (ROOT / "docs" / name).read_text()
        assert hero.figure(hero.rows(), colours) == text, "run benchmarks/hero.py"
    readme = (ROOT / "README.md").read_text()
    assert hero.alternative(hero.rows()) in readme, "run benchmarks/hero.py"
    assert hero.with_alternative(readme, hero.rows()) == readme


def test_profiles_of_the_questions_are_those_of_their_functions() -> None:
    import stories

    from offbeat.lab import Cluster
    from offbeat.profile import Profile

    for story in stories.STORIES:
        path = BENCHMARKS / "stories" / f"{story.name}.json"
        assert Profile.load(path) == story.profile()
        if story.cluster is not None:
            assert Cluster.load(path.with_suffix(".toml")) == Cluster.from_toml(story.cluster)
    parameters = [sum(b.size_bytes for b in story.profile().buckets) for story in stories.STORIES]
    sizes = [6.738e9 * 2, 124.44e6 * 4, 8.030e9 * 2, 5.289e6 * 4, 124.44e6 * 4]  # as published
    assert parameters == pytest.approx(sizes, rel=2e-3)


def test_every_result_is_complete() -> None:
    for name in tables.names():
        result = tables.load(name)  # compares the length of every row with the columns
        assert result.keys() in (KEYS, KEYS | {"commit"}), name
        assert result["how"], name
        for table in (result, *result["tables"]):
            hows = set(table.get("how", ()))
            assert hows <= {"measured", "emulated", "simulated", "predicted"}, name
        for table in result["tables"]:
            assert table.keys() >= TABLE_KEYS, name
            assert table.keys() <= TABLE_KEYS | {"spread", "how", "date", "page"}, name
        found = [table["name"] for table in result["tables"]]
        assert len(found) == len({*found}), name


def test_every_script_and_result_is_in_the_index() -> None:
    scripts = {path.relative_to(BENCHMARKS).as_posix() for path in BENCHMARKS.rglob("*.py")}
    assert scripts == {*re.findall(r"`((?:papers/)?\w+\.py)`", INDEX)}
    rows = dict(re.findall(r"^\| `([\w/]+\.py)` \|[^|]*\|([^|]*)\|", INDEX, re.MULTILINE))
    for name in tables.names():
        commands = paths_in(tables.load(name)["command"])
        assert commands, name
        for path in commands:
            assert path.exists(), (name, path)
            script = path.relative_to(ROOT).as_posix().removeprefix("benchmarks/")
            if path.is_relative_to(BENCHMARKS) and name != "published":
                assert f"`{name}`" in rows[script], (name, script)
        assert f"`{name}`" in INDEX, name
    results = {name for row in rows.values() for name in re.findall(r"`(\w+)`", row)}
    assert results <= {*tables.names()}


def test_a_result_is_written_as_it_is_read(tmp_path, monkeypatch) -> None:
    """Digits, spreads and missing cells survive; a row takes one line."""
    text = (tables.RESULTS / "demo.json").read_text()
    result = tables.load("demo")
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    tables.save("demo", result)
    assert (tmp_path / "demo.json").read_text() == text
    assert json.loads(text)["tables"][0]["rows"][0] == ["DDP", 2.138, 2.137, 2.144]


def test_a_table_selects_rows_and_columns() -> None:
    table = {
        "name": "a",
        "title": "Seconds",
        "spread": "median [least, greatest]",
        "columns": ["strategy", "s", "loss"],
        "rows": [["ddp", [2, 1, 3], None], ["wfbp", 1, 0.5]],
        "page": {"rows": ["ddp"], "columns": ["strategy", "s"]},
    }
    result = {"how": ["emulated"], "date": "2026-11-24"}
    caption = "Seconds (*emulated*; median [least, greatest]; 2026-11-24):\n\n"
    whole = "| strategy | s | loss |\n|---|---|---|\n| ddp | 2 [1, 3] | – |\n| wfbp | 1 | 0.5 |\n"
    assert tables.table_text(result, table, selected=False) == caption + whole
    part = "| strategy | s |\n|---|---|\n| ddp | 2 [1, 3] |\n"
    assert tables.table_text(result, table, selected=True) == caption + part


def test_scripts_import_names_that_exist() -> None:
    for path in BENCHMARKS.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("offbeat"):
                try:
                    exec(ast.unparse(node))
                except ImportError as error:
                    pytest.fail(f"{path.name}, line {node.lineno}: {error}")


def test_the_cells_of_the_predictions_are_those_of_the_draw() -> None:
    """Each pair of values of two factors is in a cell, but for some of strategy and model. The
    errors are those of the cells."""
    predictions = benchmark("predictions")
    errors, measured = (table["rows"] for table in tables.load("predictions")["tables"])
    assert [[*map(str, row)] for row in predictions.summary_rows(measured)] == [
        [*map(str, row)] for row in errors
    ]
    cells = predictions.planned_cells()
    assert cells == [predictions.Cell(*row[:5]) for row in measured]
    assert len({*cells}) == len(cells) == 150
    factors = [{*values} for values in zip(*cells, strict=True)]
    for i, j in combinations(range(5), 2):
        pairs = {*product(factors[i], factors[j])}
        found = {(cell[i], cell[j]) for cell in cells}
        assert found == pairs or ((i, j) == (0, 1) and len(found) == len(cells))


def test_the_models_of_the_predictions_train() -> None:
    """A step changes all parameters; 8 cyclic hosts need as many modules with parameters."""
    predictions, zoo = benchmark("predictions"), benchmark("zoo")
    cells = predictions.planned_cells()
    assert {cell.model for cell in cells} == {*zoo.MODELS}
    for name, entry in zoo.MODELS.items():
        torch.manual_seed(0)
        model, rng = entry.make(), torch.Generator().manual_seed(0)
        optimizer = zoo.optimizer_of(model)
        before = [p.detach().clone() for p in model.parameters()]
        loss = entry.loss(model, entry.batch(rng))
        loss.backward()
        optimizer.step()
        assert torch.isfinite(loss), name
        pairs = zip(before, model.parameters(), strict=True)
        assert not any(torch.equal(a, b) for a, b in pairs), name
        modules = [m for m in model.modules() if any(True for _ in m.parameters(recurse=False))]
        assert len(modules) >= max(cell.hosts for cell in cells), name
        assert 0.5e6 < sum(p.nbytes for p in model.parameters()) < 6e6, name
