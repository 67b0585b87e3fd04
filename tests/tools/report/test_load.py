"""Reading run directories: what is missing, broken or malicious."""

from __future__ import annotations

import subprocess
import sys

import pytest
from cases.tiny_runs import dump, record, steady, write_tiny

from offbeat.experiments.report import load, summarize, write


def two_ranks(seconds=1.0, **fields):
    return [record(rank, steady(seconds, 8), **fields) for rank in (0, 1)]


def test_a_repetition_without_all_ranks_does_not_count(tmp_path):
    reps = [two_ranks(1.0), two_ranks(3.0)]
    write_tiny(tmp_path, {"a": reps, "b": []}, cluster={"hosts": 2}, repetitions=2)
    (tmp_path / "a/rep1/rank1.jsonl").unlink()
    (tmp_path / "a/rep1/rank1.log").write_text("\n".join(f"line {i}" for i in range(500)))
    run = load(tmp_path)
    rep = run.contestants[0].repetitions[1]
    assert (rep.complete, len(rep.problems)) == (False, 1)
    tail = rep.log_tails[1].splitlines()
    assert tail[-1] == "line 499"
    assert len(tail) < 100
    first, second = summarize(run)
    assert (first.repetitions, first.failed, first.iteration_s) == (1, 1, pytest.approx(1.0))
    assert (second.iteration_s, second.not_run) == (None, True)
    assert [text.partition(":")[0] for text in run.failures()] == [
        "a, repetition 1", "b, repetition 0", "b, repetition 1",
    ]  # fmt: skip


def test_ranks_that_failed_before_their_first_iteration_have_a_report(tmp_path):
    ranks = [record(rank, [], cut="no iteration has ended") for rank in (0, 1)]
    path = write_tiny(tmp_path, {"a": [ranks]})
    (path / "a/rep0/problem.txt").write_text("the script failed")
    assert write(path).exists()
    [row] = summarize(load(path))
    assert row.iteration_s is None


@pytest.mark.parametrize(
    "text", ["{", '{"schema": 7}\n', '{"schema": 2, "first": 0, "rank": 0}\n', "[]\n"]
)
def test_a_broken_record_is_a_problem_and_no_crash(tmp_path, text):
    write_tiny(tmp_path, {"a": [two_ranks()]})
    (tmp_path / "a/rep0/rank0.jsonl").write_text(text)
    rep = load(tmp_path).contestants[0].repetitions[0]
    assert (rep.complete, bool(rep.problems)) == (False, True)


def test_broken_plan_prediction_and_profile_are_problems(tmp_path):
    write_tiny(tmp_path, {"a": [two_ranks()]})
    for name in ("profile.json", "a/plan.json", "a/predicted.json"):
        (tmp_path / name).write_text('{"schema": 99}')
    run = load(tmp_path)
    assert (run.profile, len(run.failures())) == (None, 3)
    assert run.contestants[0].complete


def test_what_was_cut_short_counts_only_where_there_is_nothing_whole(tmp_path):
    """With the iterations that all ranks have."""
    short = record(0, steady(1.0, 8), [3.0] * 8)
    cut = record(1, steady(1.0, 6), [1.0] * 6, cut=True)
    whole = [record(rank, steady(2.0, 8)) for rank in (0, 1)]
    path = write_tiny(tmp_path, {"a": [[short, cut]], "b": [[short, cut], whole]})
    (tmp_path / "b/rep1/problem.txt").write_text("the script failed")
    a, b = load(path).contestants
    assert [len(rank.losses) for rank in a.complete[0].ranks] == [6, 6]
    assert [rep.index for rep in b.complete] == [0, 1]
    assert (a.cut, b.cut) == (True, True)
    (tmp_path / "b/rep1/problem.txt").unlink()
    b = load(path).contestants[1]
    assert ([rep.index for rep in b.complete], b.cut) == ([1], False)


def test_how_many_ranks_there_are(tmp_path):
    run = load(write_tiny(tmp_path / "a", {"a": [two_ranks()]}))
    assert (run.world_size, run.failures()) == (2, [])
    cluster = {"hosts": 2, "processes_per_host": 2}
    run = load(write_tiny(tmp_path / "b", {"a": [two_ranks()]}, cluster=cluster))
    assert (run.world_size, len(run.failures())) == (4, 1)


def test_a_null_loss_is_not_a_number(tmp_path):
    data = record(0, steady(1, 3), [1.0, None, 2.0])
    [rep] = load(write_tiny(tmp_path, {"a": [[data]]})).contestants[0].repetitions
    assert [x == x for _, _, x in rep.ranks[0].losses] == [True, False, True]


@pytest.mark.parametrize("schema", [None, 0, 2])
def test_another_schema(tmp_path, schema):
    with pytest.raises(ValueError, match=r"run\.json"):
        load(tmp_path)
    dump(tmp_path / "run.json", {"schema": schema, "contestants": []})
    with pytest.raises(ValueError, match="schema"):
        load(tmp_path)


@pytest.mark.parametrize("label", ["", "..", "../x", "a/b", "a\\b", None, 3, "twice"])
def test_a_label_cannot_leave_the_run_directory_and_is_unique(tmp_path, label):
    contestants = [{"label": label, "strategy": "ddp"}, {"label": "twice", "strategy": "ddp"}]
    dump(tmp_path / "run.json", {"schema": 1, "contestants": contestants})
    with pytest.raises(ValueError, match="label"):
        load(tmp_path)


def test_the_script_is_not_said_twice(tmp_path):
    script = ["gpt.py", "--steps", "5"]
    for command in (["offbeat", "compare", *script], ["offbeat", "compare"]):
        write_tiny(tmp_path, {"a": []}, script=script, command=command)
        assert load(tmp_path).command_line == ("offbeat", "compare", "gpt.py", "--steps", "5")


def test_importing_the_report_does_not_import_torch():
    room = "offbeat.experiments.report"
    code = f"import sys, {room}, {room}.table; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
