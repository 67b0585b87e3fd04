"""Reading run directories: what is missing, broken or malicious."""

from __future__ import annotations

import json

import pytest
from cases.tiny_runs import dump, record, steady, write_tiny

from offbeat.experiments.record.run_directory import LOG_TAIL_LINES
from offbeat.experiments.report import load, summarize


def two_ranks(seconds=1.0, **fields):
    return [record(rank, steady(seconds, 8), **fields) for rank in (0, 1)]


def test_a_repetition_without_all_ranks_does_not_count(tmp_path):
    write_tiny(tmp_path, {"a": [two_ranks(1.0), two_ranks(3.0)]}, cluster={"hosts": 2})
    (tmp_path / "a/rep1/rank1.json").unlink()
    (tmp_path / "a/rep1/rank1.log").write_text("\n".join(f"line {i}" for i in range(50)))
    run = load(tmp_path)
    rep = run.contestants[0].repetitions[1]
    assert not rep.complete
    assert rep.problems == ("rank 1 of 2 left no record",)
    assert rep.log_tails[1].splitlines()[-1] == "line 49"
    assert len(rep.log_tails[1].splitlines()) == LOG_TAIL_LINES
    (row,) = summarize(run)
    assert (row.repetitions, row.failed) == (1, 1)
    assert row.iteration_s == pytest.approx(1.0)
    assert run.failures() == ["a, repetition 1: rank 1 of 2 left no record"]


def test_a_repetition_that_was_not_run(tmp_path):
    write_tiny(tmp_path, {"a": [two_ranks()], "b": []}, repetitions=2)
    run = load(tmp_path)
    assert run.failures() == [
        "a, repetition 1: was not run",
        "b, repetition 0: was not run",
        "b, repetition 1: was not run",
    ]
    assert [row.iteration_s for row in summarize(run)] == [pytest.approx(1.0), None]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{", "rank0.json is not JSON"),
        (
            '{"schema": 7}',
            "schema (7) of the record must be at most 1: a later version of offbeat has",
        ),
        ('{"schema": 1, "rank": 0}', "lacks the field 'trace'"),
        ("[]", "rank0.json cannot be read"),
    ],
)
def test_a_broken_record_is_a_problem_and_no_crash(tmp_path, text, problem):
    write_tiny(tmp_path, {"a": [two_ranks()]})
    (tmp_path / "a/rep0/rank0.json").write_text(text)
    rep = load(tmp_path).contestants[0].repetitions[0]
    assert not rep.complete
    assert any(problem in text for text in rep.problems), rep.problems


def test_what_was_cut_short_counts_only_where_there_is_nothing_whole(tmp_path):
    """With the iterations that all ranks have."""
    short = record(0, steady(1.0, 8), [3.0] * 8)
    cut = record(1, steady(1.0, 6), [1.0] * 6, cut="ends after 6 iterations")
    whole = [record(rank, steady(2.0, 8)) for rank in (0, 1)]
    path = write_tiny(tmp_path, {"a": [[short, cut]], "b": [[short, cut], whole]})
    (tmp_path / "b/rep1/problem.txt").write_text("the script failed")
    run = load(path)
    a, b = run.contestants
    assert [len(rank.losses) for rank in a.complete[0].ranks] == [6, 6]
    assert [rep.index for rep in b.complete] == [0, 1]
    assert (a.cut, b.cut) == (True, True)
    assert "a, repetition 0: the record of rank 1 ends after 6 iterations" in run.failures()
    assert "b, repetition 1: the script failed" in run.failures()
    (tmp_path / "b/rep1/problem.txt").unlink()
    b = load(path).contestants[1]
    assert [rep.index for rep in b.complete] == [1]
    assert not b.cut
    assert [row.repetitions for row in summarize(load(path))] == [1, 1]


def test_broken_plan_prediction_and_profile_are_problems(tmp_path):
    write_tiny(tmp_path, {"a": [two_ranks()]})
    for name in ("profile.json", "a/plan.json", "a/predicted.json"):
        (tmp_path / name).write_text('{"schema": 99}')
    run = load(tmp_path)
    assert run.profile is None
    assert len(run.failures()) == 3
    assert run.contestants[0].complete


def test_ranks_come_from_the_records_if_nobody_says_how_many(tmp_path):
    run = load(write_tiny(tmp_path, {"a": [two_ranks()]}))
    assert run.world_size == 2
    assert run.failures() == []


def test_processes_per_host_count(tmp_path):
    cluster = {"hosts": 2, "processes_per_host": 2}
    run = load(write_tiny(tmp_path, {"a": [two_ranks()]}, cluster=cluster))
    assert run.failures() == ["a, repetition 0: ranks 2, 3 of 4 left no record"]


def test_a_null_loss_is_not_a_number(tmp_path):
    data = record(0, steady(1, 3), [1.0, None, 2.0])
    losses = load(write_tiny(tmp_path, {"a": [[data]]})).contestants[0].repetitions[0]
    assert [x == x for _, _, x in losses.ranks[0].losses] == [True, False, True]


def test_without_run_json(tmp_path):
    with pytest.raises(ValueError, match=r"must hold run.json; `offbeat compare` writes it"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("schema", "words"),
    [(None, "must be 1"), (0, "must be 1"), (2, "must be at most 1: a later version of offbeat")],
)
def test_another_schema(tmp_path, schema, words):
    dump(tmp_path / "run.json", {"schema": schema})
    with pytest.raises(ValueError, match=rf"schema \({schema}\) of .*run.json {words}"):
        load(tmp_path)


@pytest.mark.parametrize("label", ["", "..", "../x", "a/b", "a\\b", None, 3])
def test_a_label_cannot_leave_the_run_directory(tmp_path, label):
    contestants = [{"label": label, "strategy": "ddp"}]
    dump(tmp_path / "run.json", {"schema": 1, "contestants": contestants})
    with pytest.raises(ValueError, match="must be a plain folder name"):
        load(tmp_path)


def test_labels_are_unique(tmp_path):
    contestants = [{"label": "a"}, {"label": "a"}]
    dump(tmp_path / "run.json", {"schema": 1, "contestants": contestants})
    with pytest.raises(ValueError, match=r"label \('a'\) must be unique"):
        load(tmp_path)


def test_the_script_is_not_said_twice(tmp_path):
    script = ["gpt.py", "--steps", "5"]
    write_tiny(tmp_path, {"a": []}, script=script, command=["offbeat", "compare", *script])
    assert load(tmp_path).command_line == ("offbeat", "compare", "gpt.py", "--steps", "5")
    write_tiny(tmp_path, {"a": []}, script=script, command=["offbeat", "compare"])
    assert load(tmp_path).command_line == ("offbeat", "compare", "gpt.py", "--steps", "5")


def test_emulated_is_known_from_the_records_too(tmp_path):
    write_tiny(tmp_path, {"a": [two_ranks(emulated=True)]}, emulated=False)
    assert load(tmp_path).emulated


def test_importing_the_report_does_not_import_torch():
    import subprocess
    import sys

    room = "offbeat.experiments.report"
    code = f"import sys, {room}, {room}.table; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_the_summary_is_strict_json(tmp_path):
    from offbeat.experiments.report import write

    write(write_tiny(tmp_path, {"a": [[record(0, steady(1, 9), [float("nan")] * 9)]]}))

    def refuse(text):
        raise AssertionError(text)

    data = json.loads((tmp_path / "summary.json").read_text(), parse_constant=refuse)
    assert data["schema"] == 1
    assert data["winner"] == "a"
    assert data["rows"][0]["final_loss"] is None
