"""Results of benchmarks: the page, the index and the scripts agree with the files."""

import ast
import dataclasses
import json
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
from support.scripts import ROOT, benchmark

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
        with pytest.raises(ValueError, match=r"match|no such"):
            claims.figure(wrong)


def test_the_figure_of_the_readme_shows_the_results() -> None:
    hero = benchmark("hero")
    for name, colours in hero.THEMES.items():
        text = (ROOT / "docs" / name).read_text()
        assert hero.figure(hero.rows(), colours) == text, "run benchmarks/hero.py"
    readme = (ROOT / "README.md").read_text()
    assert hero.alternative(hero.rows()) in readme, "run benchmarks/hero.py"
    assert hero.with_alternative(readme, hero.rows()) == readme


def runs_of(iteration_s: dict[int, list[float]]) -> dict[int, list[dict[str, float]]]:
    """Launches by rate; each prediction is 2 % too short."""
    return {
        rate: [{"iteration_s": s, "predicted_s": 0.98 * s, "sent_bytes": 5e3} for s in each]
        for rate, each in iteration_s.items()
    }


def test_a_further_row_of_the_race() -> None:
    """It has the columns of the table, stands behind torch's rows, and comes with DDP's time."""
    front_row, result = benchmark("front_row"), tables.load("front")
    columns = next(t["columns"] for t in result["tables"] if t["name"] == "gpt-4")
    new = front_row.row(
        "dear",
        [120, 119, 122],
        [2.5501, 2.5449, 2.5631],
        runs_of({10: [0.7, 0.6, 0.71], 25: [0.3], 100: [0.05]}),
    )
    cells = dict(zip(columns, new, strict=True))
    assert cells["iterations"] == [120, 119, 122]
    assert [*map(str, cells["last loss"])] == ["2.550", "2.545", "2.563"]
    assert (cells["KB per iteration"], cells["prediction off by, %, 25 Mbit/s"]) == (5.0, -2.0)
    assert (cells["ms at 10 Mbit/s"], cells["ms at 25 Mbit/s"]) == ([700, 600, 710], 300)
    assert (cells["s at 10 Mbit/s"], cells["s at 100 Mbit/s"]) == (84.0, 6.0)
    never = front_row.row("x", [120, None], [2.0, 3.0], runs_of({10: [1], 25: [1], 100: [1]}))
    assert dict(zip(columns, never, strict=True))["s at 25 Mbit/s"] == "never"

    as_before = front_row.row(
        "ddp", [120], [2.55], runs_of({10: [0.75], 25: [0.313], 100: [0.0999]})
    )
    front_row.add(result, "gpt-4", as_before, new)
    front_row.add(result, "gpt-4", as_before, new)  # replaces the row
    [table] = [t for t in result["tables"] if t["name"] == "gpt-4"]
    labels = [line[0] for line in table["rows"]]
    assert labels[labels.index("dear") - 1 :][:3] == ["post-local-sgd", "dear", "local-sgd"]
    assert len({*labels}) == len(labels)
    assert "dear" in table["page"]["rows"]
    assert sum("`dear` of gpt-4" in note for note in result["notes"]) == 1
    loaded = front_row.row("ddp", [120], [2.55], runs_of({10: [0.9], 25: [0.313], 100: [0.1]}))
    with pytest.raises(SystemExit, match=r"DDP takes 900.0 ms per iteration at 10 Mbit/s"):
        front_row.add(result, "gpt-4", loaded, new)


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


@pytest.fixture
def methods() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of torch's PowerSGD
        return benchmark("methods")


def test_a_table_of_methods_has_only_parts_of_todays_settings(methods, tmp_path) -> None:
    """Servers have predicted seconds and bytes; a part that was made with other defaults is left
    out."""
    from offbeat.profile import Bucket, Link, Profile

    labels = (*methods.CONTESTANTS, *methods.SERVED)

    def part(rate: float) -> dict[str, list[tuple[int, float]]]:
        return {label: [(i, 3 - rate * i) for i in range(10, 241, 10)] for label in labels}

    options = methods.options_of(["tables", "--tasks", "gpt", "--hosts", "4", "--rates", "25"])
    options.losses, options.times = tmp_path / "losses.json", tmp_path / "times.json"
    begin = methods.prefix_of("losses", "gpt", 4)
    other = "gpt, 4 hosts, settings 01234567, "
    losses = {f"{begin}seed 0": part(0.005), f"{other}seed 1": part(0.001)}
    options.losses.write_text(json.dumps(losses))
    launch = {label: {"iteration_s": 0.05, "sent_bytes": 2e4} for label in methods.CONTESTANTS}
    launch["ddp"]["sent_bytes"] = 4e5
    begin = methods.prefix_of("times", "gpt", 4)
    options.times.write_text(json.dumps({f"{begin}25 Mbit/s, 0": launch}))
    profile = Profile((Bucket("a", 0.01, 0.02, 500_000),), (Link("net", 1e-3, 3e6),), 4)
    (tmp_path / "times.profiles").mkdir()
    profile.save(tmp_path / "times.profiles" / "gpt-4-25.json")

    [table] = methods.result(options)["tables"]
    rows = {row[0]: dict(zip(table["columns"], row, strict=True)) for row in table["rows"]}
    assert [*rows] == [*labels]
    ddp, local = rows["ddp"], rows[methods.BUDGET]
    assert (ddp["iterations to DDP's loss"], float(ddp["last loss"])) == (120, 1.8)
    assert (float(ddp["ms at 25 Mbit/s"]), ddp["s to DDP's loss at 25 Mbit/s"]) == (50, 6.0)
    # Half of the bytes of local SGD are sent after 120 of its iterations, and after 6 of DDP.
    assert float(local["loss at equal bytes"]) == pytest.approx(2.4)
    assert float(ddp["loss at equal bytes"]) == pytest.approx(2.95)
    served = rows[f"ps-diloco:period={methods.PERIOD}"]
    assert (local["seconds and bytes"], served["seconds and bytes"]) == ("emulated", "predicted")
    assert served["KB per iteration"] == 500_000 / methods.PERIOD / 1e3
    compute_ms = 30.0
    assert float(served["ms at 25 Mbit/s"]) > compute_ms
    options.losses.write_text(json.dumps({f"{other}seed 1": part(0.001)}))
    with pytest.raises(SystemExit, match="has no part with the settings"):
        methods.result(options)


def test_the_name_of_a_part_changes_with_a_default(methods, monkeypatch) -> None:
    from offbeat.strategies.methods.eager import Eager
    from offbeat.strategies.outer_optimizer import OuterSGD

    before = methods.prefix_of("losses", "gpt", 4)
    assert before == methods.prefix_of("losses", "gpt", 4)
    assert before != methods.prefix_of("losses", "gpt", 8)
    places = [field.name for field in dataclasses.fields(Eager)]
    defaults = list(Eager.__init__.__defaults__ or ())
    defaults[places.index("outer")] = OuterSGD(0.25, 0.0)
    monkeypatch.setattr(Eager.__init__, "__defaults__", tuple(defaults))
    assert methods.strategy_of("eager:period=10", 4).outer.lr == 0.25
    assert before != methods.prefix_of("losses", "gpt", 4)


def test_pairs_of_a_ranking_and_times_of_processes() -> None:
    rehearsal = benchmark("rehearsal")
    real = {"a": 1.0, "b": 2.0, "c": None}
    assert rehearsal.agreement(real, {"a": 2.0, "b": 1.0, "c": None}) == (2, 3)
    assert rehearsal.agreement(real, {"a": 2.0, "b": None, "c": None}) == (2, 2)
    assert rehearsal.makespan([3.0, 4.0, 2.0, 2.0], 2) == 6.0


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


def test_every_result_names_a_script_that_exists() -> None:
    for name in tables.names():
        scripts = paths_in(tables.load(name)["command"])
        assert scripts, name
        assert all(path.exists() for path in scripts), name


def test_every_script_and_result_is_in_the_index() -> None:
    scripts = {path.relative_to(BENCHMARKS).as_posix() for path in BENCHMARKS.rglob("*.py")}
    assert scripts == {*re.findall(r"`((?:papers/)?\w+\.py)`", INDEX)}
    rows = dict(re.findall(r"^\| `([\w/]+\.py)` \|[^|]*\|([^|]*)\|", INDEX, re.MULTILINE))
    for name in tables.names():
        scripts = paths_in(tables.load(name)["command"])
        for path in scripts:
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


@pytest.mark.parametrize("path", sorted(BENCHMARKS.rglob("*.py")), ids=lambda path: path.stem)
def test_a_script_imports_names_that_exist(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("offbeat"):
            exec(ast.unparse(node))


@pytest.mark.parametrize("seed", [0, 3])
def test_the_best_strategy_is_found_without_simulating_all(seed, monkeypatch) -> None:
    """Against all simulations, with the tolerances of bounds; one profile has jitter."""
    advice = benchmark("advice")
    from offbeat.experiments.advice import predict_option

    strategies = [one for one in advice.everything(2) if one.name != "p3"]  # many slices: slow
    monkeypatch.setattr(advice, "everything", lambda _: strategies)
    profile = advice.profile_of(seed)
    found = [predict_option(one, profile) for one in strategies]
    best_s = min(one.update_s for one in found if one is not None and one.staleness <= 2)
    seconds, strategy = advice.best(profile, 2)
    assert seconds == predict_option(strategy, profile).update_s
    assert best_s <= seconds <= best_s / (1 - advice.MERITED)
