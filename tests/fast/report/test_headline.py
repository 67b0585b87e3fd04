"""The headline: the first sentence that holds, and at most three reservations."""

from __future__ import annotations

from dataclasses import replace

import pytest
from cases.tiny_runs import record, steady, write_tiny

from offbeat.experiments.record.disturbed import Disturbance
from offbeat.experiments.report import Row, headline, load, rank_rows
from offbeat.experiments.report.breakdown import Parts, Split
from offbeat.experiments.report.headline import display_names


def row(label, **fields):
    return Row(label=label, strategy=label, repetitions=1, failed=0, **fields)


DDP = row(
    "ddp",
    iteration_s=2.0,
    target_s=60.0,
    target_loss=2.5,
    target_iterations=30,
    speedup=1.0,
    is_yardstick=True,
    iterations=40,
)
FAST = row(
    "dreamddp",
    iteration_s=0.5,
    target_s=20.0,
    target_loss=2.5,
    target_iterations=40,
    speedup=4.0,
    iterations=40,
)


@pytest.fixture
def run(tmp_path):
    ends = steady(1.0, 8)
    return load(write_tiny(tmp_path, {name: [[record(0, ends)]] for name in ("ddp", "dreamddp")}))


def split(compute_s, messages_s, estimated=False):
    parts = Parts(compute_s, messages_s, 0.0, messages_s)
    return Split(parts, parts, 0.0, estimated)


SENTENCES = {
    "sooner": (
        [DDP, FAST],
        "dreamddp reaches loss 2.500 in 20.0 s, ddp in 60.0 s: 3.0 times sooner.",
    ),
    "ddp first": (
        [replace(DDP, target_s=10.0), FAST],
        "ddp reaches loss 2.500 first, in 10.0 s: nothing here is faster on this network.",
    ),
    "sooner, but disturbed": (
        [DDP, replace(FAST, disturbed=(Disturbance(0, foreign=0.3),))],
        "ddp reaches loss 2.500 in 60.0 s. dreamddp took less time, but that does not count.",
    ),
    "all disturbed": (
        [replace(one, disturbed=(Disturbance(0, foreign=0.3),)) for one in (DDP, FAST)],
        "Roughly, as every strategy was disturbed: dreamddp reaches loss 2.500 in 20.0 s, ddp in "
        "60.0 s: 3.0 times sooner.",
    ),
    "ddp never": (
        [replace(DDP, target_s=None), FAST, replace(FAST, label="deft", target_s=30.0)],
        "dreamddp reaches loss 2.500 in 20.0 s; ddp does not in 40 iterations.",
    ),
    "only one": (
        [DDP, replace(FAST, target_s=None)],
        "ddp is the only one to reach loss 2.500, in 60.0 s.",
    ),
    "draw": (
        [
            DDP,
            replace(FAST, target_spread_s=(19.0, 22.0)),
            replace(FAST, label="deft", target_s=21.0, target_spread_s=(20.0, 23.0)),
        ],
        "dreamddp and deft reach loss 2.500 in about 20.0 s, ddp in 60.0 s: 3.0 times sooner. "
        "Between the two it is a draw.",
    ),
    "no ddp": (
        [replace(FAST, label="deft", target_s=80.0), FAST],
        "dreamddp reaches loss 2.500 in 20.0 s, deft in 80.0 s: 4.0 times sooner.",
    ),
    "no target": (
        [row("a", iteration_s=0.4), row("b", iteration_s=1.0)],
        "a takes 400 ms per iteration, b 1.00 s: 2.5 times less. Losses do not compare: none fell.",
    ),
    "draw of iterations": (
        [
            row("a", iteration_s=1.0, spread_s=(0.9, 1.1), spread_of="repetitions"),
            row("b", iteration_s=1.05, spread_s=(1.0, 1.2), spread_of="repetitions"),
        ],
        "a takes 1.00 s per iteration, b 1.05 s: it is a draw. Losses do not compare: none fell.",
    ),
    "alone": (
        [row("a", iteration_s=0.25, split=split(0.2, 0.05, estimated=True))],
        "a takes 250 ms per iteration, ≈ 20 % of it waiting for the network.",
    ),
    "nothing": ([row("a")], "Nothing was measured: no strategy finished a repetition."),
}


@pytest.mark.parametrize("case", SENTENCES)
def test_the_first_sentence_that_holds(run, case):
    rows, expected = SENTENCES[case]
    losses = [record(0, steady(1.0, 8), [1.0] * 8)]
    if "Losses" in expected:
        run = replace(run, contestants=(replace_losses(run, losses),))
    assert headline(run, rows).sentence == expected


def replace_losses(run, records):
    return write_and_load(run.path / "again", records).contestants[0]


def write_and_load(path, records):
    return load(write_tiny(path, {"a": [records]}))


def test_losses_that_do_not_compare_say_why(run, tmp_path):
    rows = [row("a", iteration_s=0.4), row("b", iteration_s=1.0)]
    assert headline(run, rows).sentence.endswith("the script reports none.")
    asleep = replace(run, emulated=True)
    assert headline(asleep, rows).sentence.endswith("layers sleep instead of computing.")
    asked = write_and_load(tmp_path / "b", [record(0, steady(1.0, 8), [1.0] * 8)])
    asked = replace(asked, target_loss=0.5)
    assert headline(asked, rows).sentence.endswith("No strategy reached loss 0.5000.")


@pytest.mark.parametrize(
    "fields",
    [
        {"disturbed": (Disturbance(0, foreign=0.3),)},
        {"rising": True},
        {"diverged": True},
    ],
)
def test_a_disturbed_or_rising_row_never_wins(run, fields):
    rows = [DDP, replace(FAST, **fields)]
    assert headline(run, rows).best is DDP
    assert [one.label for one in rank_rows(rows)] == ["ddp", "dreamddp"]
    assert "dreamddp" in headline(run, rows).reservations[0]


def test_disturbances_of_all_strategies_are_one_reservation(run):
    rows = [
        replace(one, disturbed=(Disturbance(0, foreign=share),))
        for one, share in ((DDP, 0.3), (FAST, 0.4))
    ]
    first, *others = headline(run, rows).reservations
    assert first == (
        "Each was disturbed: other programs used 40 % of the processors. Nothing compares; run "
        "again."
    )
    assert "disturbed" not in " ".join(others)


def test_reservations_in_their_order(run):
    ddp = replace(DDP, split=split(1.6, 0.4), predicted_s=2.0)
    fast = replace(FAST, split=split(0.45, 0.05), predicted_s=0.5)
    found = headline(run, [ddp, fast]).reservations
    assert found == (
        "ddp waits for the network 20 % of the time, dreamddp 10 %.",
        "At most 1.2 times is possible: computing alone takes 1.60 s.",
        "It needs 40 iterations, ddp 30.",
    )
    failed = row("deft", problem="rank 2 ended with exit code 1")
    missing = row("selsync")
    found = headline(run, [ddp, fast, failed, missing]).reservations
    assert found[:2] == ("deft failed.", "selsync was not run.")


def test_the_prediction_of_the_ratio(run):
    ddp, fast = replace(DDP, predicted_s=2.0), replace(FAST, predicted_s=0.5)
    even = replace(ddp, target_iterations=40)
    assert headline(run, [even, fast]).reservations == ("Predicted: 4.0 times.",)
    off = replace(fast, predicted_s=0.25)
    assert headline(run, [even, off]).reservations == (
        "The prediction was off by 100 %: 8.0 times.",
    )
    assert headline(run, [ddp, fast]).reservations[-1] == "Predicted: 3.0 times."


def test_iterations_without_an_update_are_no_progress(run):
    fast = replace(FAST, iterations_per_s=2.0, updates_per_s=0.5)
    slow = replace(DDP, iterations_per_s=0.5, updates_per_s=0.5)
    assert headline(run, [slow, fast]).reservations[0] == (
        "Not every iteration of dreamddp updates: 0.500 updates per second, ddp 0.500."
    )


def test_names_are_numbered_where_settings_make_them_long():
    rows = [row("ddp"), row("local-sgd-period=5-wire=int4"), row("local-sgd")]
    assert display_names(rows) == {
        "ddp": "ddp",
        "local-sgd-period=5-wire=int4": "local-sgd [1]",
        "local-sgd": "local-sgd",
    }
