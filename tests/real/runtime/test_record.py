"""Records: written in blocks, read up to the last whole one, and no larger in memory."""

from __future__ import annotations

import json
import math
import random
import subprocess
import sys
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from offbeat import BSP, Profile
from offbeat.core.runtime.iteration import Iteration, Timestamps
from offbeat.core.transport.device import CPU
from offbeat.experiments.record import record_file as blocks
from offbeat.experiments.record import recorder as record
from offbeat.experiments.record.record_file import RecordWriter, iterations_so_far, path_of, read
from offbeat.experiments.record.recorder import RunRecorder
from offbeat.profile import Bucket, Link


@pytest.fixture
def recorder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RunRecorder]:
    """One of rank 3 with blocks of ten iterations."""
    monkeypatch.setattr(record, "BLOCK_ITERATIONS", 10)
    monkeypatch.setattr(record, "BLOCK_S", math.inf)
    made = RunRecorder(tmp_path, 3, CPU())
    made.origin_s = 0.0
    yield made
    made._tap.close()


def train(recorder: RunRecorder, iterations: int, first: int = 0) -> None:
    """Iteration i ends at second i + 1 with the loss 1 / (i + 1)."""
    for i in range(first, first + iterations):
        recorder._tap._loss = torch.tensor(1 / (i + 1))
        recorder.on_step_begin(i)
        marks = Timestamps(**dict.fromkeys(MARKS, i + 0.5), begin=float(i), end=i + 1.0)
        recorder.ended(Iteration(i, marks, []))


MARKS = ("forward", "forward_end", "backward_end", "waited", "step", "stepped")


def test_a_record_that_was_closed(recorder: RunRecorder, tmp_path: Path) -> None:
    """Of three blocks; decisions, warnings and what else is known at the end are in it once."""
    recorder.start("x(period=1)", None, observed=2)
    train(recorder, 15)
    recorder.decide(14, "planned again", "careful")
    train(recorder, 10, 15)
    recorder.write({"net": 7})
    path = path_of(tmp_path, 3)
    assert len(path.read_text().splitlines()) == 3
    found = read(path)
    assert found["cut"] is None
    assert found["trace"]["ends_s"] == [[i + 1.0 for i in range(25)]]
    assert [(i, end) for i, end, _ in found["losses"]] == [(i, i + 1.0) for i in range(25)]
    assert [loss for *_, loss in found["losses"]] == pytest.approx([1 / (i + 1) for i in range(25)])
    assert found["decisions"] == [{"iteration": 14, "what": "planned again"}]
    assert (found["warnings"], found["bytes"]) == (["careful"], {"net": 7})
    assert (found["rank"], found["observed"], found["strategy"]) == (3, 2, "x(period=1)")
    rows = found["trace"]["spans"]["rows"]
    at = found["trace"]["spans"]["fields"].index("iteration")
    assert {row[at] for row in rows} == {22, 23, 24}


def test_what_a_kill_leaves(recorder: RunRecorder, tmp_path: Path) -> None:
    """Every length of the file can be read: whole blocks count, the torn one does not."""
    recorder.start("x", None, observed=0)
    train(recorder, 30)
    path = path_of(tmp_path, 3)
    whole = path.read_bytes()
    ends = [i + 1 for i, byte in enumerate(whole) if byte == ord("\n")]
    assert len(ends) == 3
    for size in [*ends, *random.Random(0).sample(range(len(whole)), 40)]:
        path.write_bytes(whole[:size])
        blocks_left = sum(end <= size for end in ends)
        assert iterations_so_far(path) == 10 * blocks_left
        if not blocks_left:
            with pytest.raises(ValueError, match="no whole block"):
                read(path)
            continue
        found = read(path)
        assert len(found["trace"]["ends_s"][0]) == len(found["losses"]) == 10 * blocks_left
        assert f"ends after {10 * blocks_left} iterations" in found["cut"]
        assert ("middle of a block" in found["cut"]) == (size not in ends)


def test_blocks_that_do_not_belong_together_are_refused(
    recorder: RunRecorder, tmp_path: Path
) -> None:
    recorder.start("x", None, observed=0)
    train(recorder, 30)
    path = path_of(tmp_path, 3)
    one, two, three = path.read_bytes().splitlines(keepends=True)
    for data, words in (
        (one + three, "must follow the others"),
        (one + two[:-9] + b"\n" + three, "in its middle"),
        (one.replace(b'"schema":2', b'"schema":3'), "schema"),
    ):
        path.write_bytes(data)
        with pytest.raises(ValueError, match=words):
            read(path)


def test_a_disk_that_is_full_warns_once(recorder: RunRecorder, monkeypatch: Any) -> None:
    """And training goes on."""

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(RecordWriter, "append", full)
    recorder.start("x", None, observed=0)
    with pytest.warns(UserWarning, match="No space left on device"):
        train(recorder, 10)
    train(recorder, 40, 10)  # a second warning would be an error
    recorder.write({})


def test_a_record_goes_on_after_a_full_disk(recorder: RunRecorder, tmp_path: Path) -> None:
    """With the blocks that could not be written, and none of them torn."""
    recorder.start("x", None, observed=0)
    path = path_of(tmp_path, 3)
    path.symlink_to("/dev/full")
    with pytest.warns(UserWarning, match="No space left on device"):
        train(recorder, 20)
    path.unlink()
    train(recorder, 10, 20)
    recorder.write({"net": 7})
    found = read(path)
    assert (found["cut"], len(found["trace"]["ends_s"][0])) == (None, 30)


def test_blocks_of_a_disk_that_stays_full_are_dropped(
    recorder: RunRecorder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the limit on, so that the record has no gap."""
    monkeypatch.setattr(blocks, "MOST_UNWRITTEN_BYTES", 0)
    recorder.start("x", None, observed=0)
    path = path_of(tmp_path, 3)
    path.symlink_to("/dev/full")
    with pytest.warns(UserWarning, match="No space left on device"):
        train(recorder, 20)
    path.unlink()
    train(recorder, 10, 20)
    recorder.write({"net": 7})
    found = read(path)
    assert "ends after 10 iterations" in found["cut"]


def test_a_write_that_ends_early_leaves_whole_blocks(tmp_path: Path) -> None:
    """A limit on the size of a file ends writes as a full disk does."""
    script = f"""
import resource, signal
from pathlib import Path
from offbeat.experiments.record.record_file import RecordWriter
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
writer = RecordWriter(Path({str(tmp_path / "rank0.jsonl")!r}))
head = {{"rank": 0, "strategy": "x", "period": 1, "uneven": False}}
writer.append({{**head, "first": 0, "ends_s": [1.0]}})
size, most = writer.path.stat().st_size, resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (size + 9, most[1]))
try:
    writer.append({{**head, "first": 1, "ends_s": [2.0]}})
except OSError:
    assert writer.path.stat().st_size == size
resource.setrlimit(resource.RLIMIT_FSIZE, most)
writer.append({{**head, "first": 2, "ends_s": [3.0]}})
"""
    subprocess.run([sys.executable, "-c", script], check=True)
    assert read(tmp_path / "rank0.jsonl")["trace"]["ends_s"] == [[1.0, 2.0, 3.0]]


def test_a_plan_on_a_full_disk_is_a_warning_that_names_it(tmp_path: Path) -> None:
    recorder = RunRecorder(tmp_path, 0, CPU())
    (tmp_path / "plan.json").symlink_to("/dev/full")
    plan = BSP().plan(Profile((Bucket("a", 0.1, 0.2, 4000),), (Link("net", 0.0, 1e5),), 2))
    with pytest.warns(UserWarning, match=rf"{tmp_path}/plan.json.*No space left"):
        recorder.start("bsp", plan, observed=0)
    assert recorder.plan is plan
    recorder._tap.close()


def test_memory_stays_flat(recorder: RunRecorder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three thousand iterations after the first thousand keep less than 20 bytes each."""
    monkeypatch.setattr(record, "BLOCK_ITERATIONS", 100)
    recorder.start("x", None, observed=0)
    tracemalloc.start()
    try:
        train(recorder, 1000)
        before = tracemalloc.get_traced_memory()[0]
        train(recorder, 3000, 1000)
        after = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert after - before < 20 * 3000


def test_losses_of_long_runs_are_means(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over neighbours, so that no mean over many changes; a NaN stays one."""
    monkeypatch.setattr(blocks, "MOST_LOSSES", 16)
    losses = [float(i * i) for i in range(100)]
    losses[90] = math.nan
    head = {"rank": 0, "strategy": "x", "period": 1, "uneven": False}
    written = RecordWriter(path_of(tmp_path, 0))
    for first in range(0, 100, 20):
        those = range(first, first + 20)
        ends = [i + 1.0 for i in those]
        written.append(
            {**head, "first": first, "ends_s": ends, "losses": [[i, losses[i]] for i in those]}
        )
    found = read(path_of(tmp_path, 0))
    width = found["losses_of"]
    assert width == 8
    assert len(found["trace"]["ends_s"][0]) == 100
    for last, end, loss in found["losses"]:
        own = losses[last // width * width : last + 1]
        assert end == last + 1.0
        expected = sum(own) / len(own)
        assert loss == expected or (math.isnan(loss) and math.isnan(expected))
    assert [last for last, *_ in found["losses"]] == [*range(7, 96, 8), 99]


def test_two_models_of_one_script_do_not_mix(tmp_path: Path) -> None:
    """The record is that of the one that began later, whoever writes last."""
    path = path_of(tmp_path, 0)
    one, other = RecordWriter(path), RecordWriter(path)
    head = {"rank": 0, "period": 1, "uneven": False}
    for i, (writer, name) in enumerate([(one, "one"), (other, "other"), (one, "one")]):
        first = 0 if writer is other else i // 2
        writer.append({**head, "strategy": name, "first": first, "ends_s": [1.0]})
    assert read(path)["strategy"] == "other"
    other.append({**head, "strategy": "other", "first": 1, "ends_s": [2.0], "closed": True})
    assert read(path)["trace"]["ends_s"] == [[1.0, 2.0]]


def test_a_line_longer_than_what_is_read_at_once(tmp_path: Path) -> None:
    """It is not taken for a torn one."""
    path = path_of(tmp_path, 0)
    whole = json.dumps({"first": 0, "ends_s": [0.5] * 40_000})
    path.write_text(f'{whole}\n{{"first": 40000, "ends_s": [')
    assert iterations_so_far(path) == 40_000


def test_records_are_in_the_order_of_their_ranks(tmp_path: Path) -> None:
    for name in ("rank10.jsonl", "rank2.jsonl", "rank1.json", "rank1.jsonl"):
        (tmp_path / name).touch()
    found = [path.name for path in blocks.records_in(tmp_path)]
    assert found == ["rank1.jsonl", "rank2.jsonl", "rank10.jsonl"]


def test_a_loss_of_an_iteration_that_has_not_ended_is_left_out(tmp_path: Path) -> None:
    head = {"rank": 0, "strategy": "x", "period": 1, "uneven": False, "first": 0}
    RecordWriter(path_of(tmp_path, 0)).append(
        {**head, "ends_s": [1.0], "losses": [[0, 5.0], [1, 4.0]]}
    )
    assert read(path_of(tmp_path, 0))["losses"] == [[0, 1.0, 5.0]]
