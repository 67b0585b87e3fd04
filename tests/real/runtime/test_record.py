"""Every iteration in a record: written in lines, read up to the last whole one, bounded memory."""

from __future__ import annotations

import math
import random
import tracemalloc
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from offbeat.core.runtime.iteration import Iteration, Timestamps
from offbeat.core.runtime.recording import Recorder
from offbeat.core.transport.device import CPU
from offbeat.experiments.compare import iterations_so_far
from offbeat.experiments.record.run_directory import RankRecord, load_rank
from offbeat.jobs import iteration_columns, iteration_log
from offbeat.jobs.iteration_log import IterationLog
from offbeat.jobs.record_lines import LineWriter, rank_file, rank_files

RANK = 3
MARKS = ("forward", "forward_end", "backward_end", "waited", "step", "stepped")


@dataclass
class Recorded:
    """A rank that trains and records."""

    writer: LineWriter
    log: IterationLog

    def train(self, iterations: int, first: int = 0) -> None:
        """Iteration i ends at second i + 1 with the loss 1 / (i + 1)."""
        for i in range(first, first + iterations):
            self.log.begin_step(i, torch.tensor(1 / (i + 1)))
            marks = Timestamps(**dict.fromkeys(MARKS, i + 0.5), begin=float(i), end=i + 1.0)
            self.log.add(Iteration(i, marks, []))

    def end(self) -> None:
        self.log.end()
        self.writer.line("end", how="ended", bytes={"net": 7})


def begin(folder: Path, strategy: str = "x", observed: int = 0) -> Recorded:
    recorder, writer = Recorder(), LineWriter(folder, RANK)
    recorder.origin_s = 0.0
    writer.line("head", rank=RANK)
    log = IterationLog(recorder, writer.line, RANK, CPU())
    log.start(strategy, observed)
    return Recorded(writer, log)


@pytest.fixture
def recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Recorded:
    """One of rank 3 with lines of ten iterations."""
    monkeypatch.setattr(iteration_log, "LINE_ITERATIONS", 10)
    monkeypatch.setattr(iteration_log, "LINE_S", math.inf)
    return begin(tmp_path, "x(period=1)", 2)


def path_of(folder: Path) -> Path:
    return rank_file(folder, RANK)


def read(path: Path) -> RankRecord:
    found = load_rank(path)
    assert found is not None
    return found


def test_a_record_that_was_closed(recorded: Recorded, tmp_path: Path) -> None:
    """Of three lines; what is known at the end is in it once."""
    recorded.train(15)
    recorded.writer.line("event", iteration=14, event="decision", text="planned again")
    recorded.train(10, 15)
    recorded.end()
    path = path_of(tmp_path)
    assert path.read_text().count('"kind":"iterations"') == 3
    found = read(path)
    assert found.cut == ""
    assert found.trace.ends_s == (tuple(i + 1.0 for i in range(25)),)
    assert [(i, end) for i, end, _ in found.losses] == [(i, i + 1.0) for i in range(25)]
    assert [loss for *_, loss in found.losses] == pytest.approx([1 / (i + 1) for i in range(25)])
    assert found.decisions == ((14, "planned again"),)
    assert found.sent_bytes == {"net": 7}
    assert (found.rank, found.observed, found.strategy) == (3, 2, "x(period=1)")
    assert {span.iteration for span in found.trace.spans} == {22, 23, 24}


def test_a_record_that_an_error_ended(recorded: Recorded, tmp_path: Path) -> None:
    recorded.train(10)
    recorded.log.end()
    recorded.writer.line("end", how="raised", text="KeyError: 'x'", bytes={}, pace=None)
    assert read(path_of(tmp_path)).cut == "ends after 10 iterations: KeyError: 'x'"


def test_what_a_kill_leaves(recorded: Recorded, tmp_path: Path) -> None:
    """Every length of the file can be read: whole lines count, the torn one does not."""
    recorded.train(30)
    path = path_of(tmp_path)
    lines = path.read_bytes().splitlines(keepends=True)
    ends = [sum(map(len, lines[: n + 1])) for n in range(len(lines))]
    counted = [b'"kind":"iterations"' in line for line in lines]
    assert sum(counted) == 3
    for size in [*ends, *random.Random(0).sample(range(len(path.read_bytes())), 40)]:
        path.write_bytes(b"".join(lines)[:size])
        whole = sum(end <= size for end in ends)
        left = 10 * sum(counted[:whole])
        assert iterations_so_far(path) == left
        if not left:
            assert load_rank(path) is None
            continue
        found = read(path)
        assert len(found.trace.ends_s[0]) == len(found.losses) == left
        assert f"ends after {left} iterations" in found.cut
        assert ("middle of a line" in found.cut) == (size not in ends)
    path.write_bytes(b"".join(lines))


def test_what_is_no_record_is_refused_and_what_follows_a_gap_left_out(
    recorded: Recorded, tmp_path: Path
) -> None:
    recorded.train(30)
    path = path_of(tmp_path)
    head, *rest = path.read_bytes().splitlines(keepends=True)
    one, two, three = (line for line in rest if b'"kind":"iterations"' in line)
    for data in (head + one + two[:-9] + b"\n" + three, head + one.replace(b'"first":0', b"")):
        path.write_bytes(data)
        with pytest.raises(ValueError, match=r"1$"):
            read(path)
    path.write_bytes(head + one.replace(b'"schema":3', b'"schema":2'))
    with pytest.raises(ValueError, match="schema"):
        read(path)
    path.write_bytes(head + one + three)
    assert "ends after 10 iterations: later lines are missing" in read(path).cut


def test_a_record_goes_on_after_a_full_disk(recorded: Recorded, tmp_path: Path) -> None:
    """With the lines that could not be written, and none of them torn."""
    path = path_of(tmp_path)
    whole = path.read_bytes()
    path.unlink()
    path.symlink_to("/dev/full")
    with pytest.warns(RuntimeWarning, match=f"{path}.*No space left on device"):
        recorded.train(20)
    path.unlink()
    path.write_bytes(whole)
    recorded.train(10, 20)  # a second warning would be an error
    recorded.end()
    found = read(path)
    assert (found.cut, len(found.trace.ends_s[0])) == ("", 30)


def test_memory_stays_flat(recorded: Recorded, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three thousand iterations after the first thousand keep less than 20 bytes each."""
    monkeypatch.setattr(iteration_log, "LINE_ITERATIONS", 100)
    tracemalloc.start()
    try:
        recorded.train(1000)
        before = tracemalloc.get_traced_memory()[0]
        recorded.train(3000, 1000)
        after = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert after - before < 20 * 3000


def test_losses_of_long_runs_are_means(
    recorded: Recorded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over neighbours, so that no mean over many changes; a NaN stays one."""
    monkeypatch.setattr(iteration_columns, "MOST_LOSSES", 16)
    losses = [float(i * i) for i in range(100)]
    losses[90] = math.nan
    for i, loss in enumerate(losses):
        recorded.log.begin_step(i, torch.tensor(loss))
        marks = Timestamps(**dict.fromkeys(MARKS, i + 0.5), begin=float(i), end=i + 1.0)
        recorded.log.add(Iteration(i, marks, []))
    recorded.end()
    found = read(path_of(tmp_path))
    width = found.losses_of
    assert width == 8
    assert len(found.trace.ends_s[0]) == 100
    for last, end, loss in found.losses:
        own = losses[last // width * width : last + 1]
        assert end == last + 1.0
        expected = sum(own) / len(own)
        assert loss == expected or (math.isnan(loss) and math.isnan(expected))
    assert [last for last, *_ in found.losses] == [*range(7, 96, 8), 99]


def test_of_two_models_of_one_script_the_later_one_counts(tmp_path: Path) -> None:
    for name, iterations in (("one", 12), ("other", 5)):
        recorded = begin(tmp_path, name)
        recorded.train(iterations)
        recorded.end()
    found = read(path_of(tmp_path))
    assert (found.strategy, len(found.trace.ends_s[0])) == ("other", 5)


def test_a_line_longer_than_what_is_read_at_once(recorded: Recorded, tmp_path: Path) -> None:
    """It is not taken for a torn one."""
    ends_s = [0.5] * 40_000
    recorded.writer.line("iterations", first=0, ends_s=ends_s)
    with path_of(tmp_path).open("a") as file:
        file.write('{"kind":"iterations","first":40000,"ends_s":[')
    assert iterations_so_far(path_of(tmp_path)) == 40_000


def test_records_are_in_the_order_of_their_ranks(tmp_path: Path) -> None:
    for name in ("rank10.jsonl", "rank2.jsonl", "rank1.json", "rank1.jsonl"):
        (tmp_path / name).touch()
    assert [*rank_files(tmp_path)] == [1, 2, 10]


def test_a_loss_of_an_iteration_that_has_not_ended_is_left_out(
    recorded: Recorded, tmp_path: Path
) -> None:
    recorded.train(9)
    recorded.log.begin_step(10, torch.tensor(4.0))  # its end is not known
    recorded.train(1, 9)
    recorded.end()
    assert [i for i, *_ in read(path_of(tmp_path)).losses] == [*range(10)]
    assert path_of(tmp_path).read_text().count("4.0]") == 0, "it would be written twice"
