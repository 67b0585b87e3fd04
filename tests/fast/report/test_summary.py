"""Summary numbers against values computed by hand."""

from __future__ import annotations

import json
import math
import random
from itertools import accumulate

import pytest
from cases.tiny_runs import dump, record, steady, write_tiny

from offbeat.core.sim.trace import COMPUTE, Span, Trace, whole_periods
from offbeat.experiments.report import Row, load, rank_rows, summarize, words, write
from offbeat.experiments.report.losses import Curve, rank_mean, target_loss
from offbeat.experiments.report.table import render, render_details


def rows_of(path, records, **run):
    write_tiny(path, records, **run)
    return {row.label: row for row in summarize(load(path))}


def test_seconds_per_iteration_skip_the_beginning_and_the_slowest_rank_counts(tmp_path):
    fast = record(0, [5.0, 6.0, 7.0, 8.0])
    slow = record(1, [5.0, 6.5, 8.0, 9.5])
    row = rows_of(tmp_path, {"a": [[fast, slow]]}, skip=1)["a"]
    assert row.iteration_s == pytest.approx(1.5)
    assert row.spread_of == "periods"
    assert row.spread_s == pytest.approx((1.5, 1.5))


def test_observed_iterations_are_skipped_as_well(tmp_path):
    ends = [10.0, 20.0, 30.0, 31.0, 32.0]
    row = rows_of(tmp_path, {"a": [[record(0, ends, observed=2)]]}, skip=1)["a"]
    assert row.iteration_s == pytest.approx(1.0)


def test_a_period_counts_as_a_whole(tmp_path):
    ends = [1.0, 2.0, 5.0, 6.0, 7.0, 10.0]  # 1, 1, 3, 1, 1, 3
    row = rows_of(tmp_path, {"a": [[record(0, ends, period=3)]]})["a"]
    assert row.iteration_s == pytest.approx(5 / 3)


def test_spread_is_over_repetitions_if_there_are_two(tmp_path):
    reps = [[record(0, steady(seconds, 8))] for seconds in (1.0, 1.2, 1.1)]
    row = rows_of(tmp_path, {"a": reps})["a"]
    assert row.iteration_s == pytest.approx(1.1)
    assert row.spread_s == pytest.approx((1.0, 1.2))
    assert (row.spread_of, row.repetitions) == ("repetitions", 3)


def test_quartiles_of_the_periods_of_one_repetition(tmp_path):
    ends = [1.0, 3.0, 6.0, 10.0, 15.0]  # 1, 2, 3, 4, 5
    row = rows_of(tmp_path, {"a": [[record(0, ends)]]})["a"]
    assert row.iteration_s == pytest.approx(3.0)
    assert row.spread_s == pytest.approx((2.0, 4.0))


def test_no_whole_period_gives_no_seconds(tmp_path):
    row = rows_of(tmp_path, {"a": [[record(0, [1.0, 2.0], period=5)]]})["a"]
    assert row.iteration_s is None
    assert row.repetitions == 1


def test_bytes_from_the_counters(tmp_path):
    ranks = [record(r, steady(1, 10), bytes={"net": 600, "wan": 400 * r}) for r in (0, 1)]
    assert rows_of(tmp_path, {"a": [ranks]})["a"].sent_bytes == pytest.approx((60 + 100) / 2)


def test_bytes_are_medians_over_repetitions_as_times_are(tmp_path):
    reps = [[record(0, steady(1, 10), bytes={"net": size})] for size in (100, 200, 900)]
    assert rows_of(tmp_path, {"a": reps})["a"].sent_bytes == pytest.approx(20)


def test_how_evenly_links_are_loaded_is_that_of_the_worst_one(tmp_path):
    # Of eight steps of an iteration rank 0 sends in one, rank 1 in two; the first does not count.
    ranks = []
    for rank, last_s in ((0, 9.0), (1, 10.0)):
        sends = [
            Span(r, "net", "grad", i, 8.0 * i, 8.0 * i + s, (0, 1), 8, None, (r, 1 - r))
            for i in (0, 1)
            for r, s in ((rank, last_s - 8.0),)
        ]
        ranks.append(record(rank, [8.0, 16.0], spans=sends))
    row = rows_of(tmp_path, {"a": [ranks]}, skip=1)["a"]
    assert row.unevenness == pytest.approx(4.0)
    assert rows_of(tmp_path, {"b": [[record(0, steady(1, 4))]]})["b"].unevenness is None


def test_bytes_from_recorded_messages_leave_out_what_was_skipped(tmp_path):
    sizes = [1000, 1000, 10, 0, 10, 0]  # two profiled iterations, then period 2
    spans = [
        span
        for i, size in enumerate(sizes)
        for span in (
            Span(0, COMPUTE, "forward", i, i, i + 0.5),
            Span(0, "net", "param", i, i + 0.5, i + 0.6, (0, 1), size),
        )
    ]
    data = record(0, steady(1, 6), spans=spans, period=2, observed=2, bytes={"net": 2020})
    assert rows_of(tmp_path, {"a": [[data]]})["a"].sent_bytes == pytest.approx(5.0)


def test_prediction_bound_and_error(tmp_path):
    write_tiny(tmp_path, {"a": [[record(0, steady(2.0, 8))]]})
    trace = Trace("simulated", "x", ((1.9,),), (0.0,), notes={"bound_s": 1.5, "exposed_s": 0.4})
    dump(tmp_path / "a/predicted.json", trace.to_dict())
    (row,) = summarize(load(tmp_path))
    assert row.predicted_s == pytest.approx(1.9)
    assert row.predicted_error == pytest.approx(-0.05)
    assert (row.bound_s, row.exposed_s) == (1.5, 0.4)


def test_the_predictions_own_number_and_fields_beside_the_trace_count(tmp_path):
    write_tiny(tmp_path, {"a": [[record(0, steady(2.0, 8))]]})
    trace = Trace("simulated", "x", ((1.9,),), (0.0,))
    dump(tmp_path / "a/predicted.json", {**trace.to_dict(), "iteration_s": 2.2, "bound_s": None})
    (row,) = summarize(load(tmp_path))
    assert row.predicted_s == 2.2
    assert row.bound_s is None


def test_speedup_is_over_the_fastest_ddp(tmp_path):
    seconds = {"ddp": 4.0, "ddp-cap-1": 3.0, "wfbp": 2.0}
    rows = rows_of(
        tmp_path,
        {label: [[record(0, steady(s, 8))]] for label, s in seconds.items()},
        strategies={"ddp-cap-1": "ddp"},
    )
    assert {label: row.speedup for label, row in rows.items()} == pytest.approx(
        {"ddp": 0.75, "ddp-cap-1": 1.0, "wfbp": 1.5}
    )


def test_no_speedup_without_ddp(tmp_path):
    assert rows_of(tmp_path, {"wfbp": [[record(0, steady(1, 8))]]})["wfbp"].speedup is None


def test_final_loss_is_over_ranks_and_repetitions_of_the_last_tenth_at_least_five(tmp_path):
    down = [float(x) for x in range(20, 0, -1)]  # last five: 5 4 3 2 1
    reps = [
        [record(r, steady(1, 20), [x + 1 * r + 4 * rep for x in down]) for r in (0, 1)]
        for rep in (0, 1)
    ]
    assert rows_of(tmp_path, {"a": reps})["a"].final_loss == pytest.approx(3 + 0.5 + 2)
    long = [100.0] * 90 + [1.0] * 10
    row = rows_of(tmp_path / "b", {"a": [[record(0, steady(1, 100), long)]]})["a"]
    assert row.final_loss == pytest.approx(1.0)


def test_seconds_to_the_given_target(tmp_path):
    # 40, 39, ..., 1; the mean of ten ending at iteration i is 40 - i + 4.5
    down = [float(40 - i) for i in range(40)]
    row = rows_of(tmp_path, {"a": [[record(0, steady(0.5, 40), down)]]}, target_loss=20.0)["a"]
    assert row.target_iterations == 26  # i = 25: 19.5
    assert row.target_s == pytest.approx(25 * 0.5)  # from the end of the first iteration


def test_whole_first_periods_are_skipped_and_starting_up_is_no_merit(tmp_path):
    """Averages of 3, 2, 2, ... s every fifth iteration, others of .5 s; 9 s to start up. The row
    counts the periods from the second on, the target all but the first iteration."""
    each = [0.5 if (i + 1) % 5 else 2.0 for i in range(40)]
    each[0], each[4] = 9.0, 3.0
    losses = [float(40 - i) for i in range(40)]
    made = record(0, [*accumulate(each)], losses, period=5)
    row = rows_of(tmp_path, {"a": [[made]]}, target_loss=20.0, skip=2)["a"]
    assert row.iteration_s == pytest.approx(0.8)
    assert row.iterations_per_s == pytest.approx(1 / 0.8)
    assert row.target_iterations == 26
    assert row.target_s == pytest.approx(sum(each[1:26]))


@pytest.mark.parametrize(
    ("skip", "period", "iterations", "expected"),
    [(2, 1, 12, 2), (2, 5, 12, 5), (2, 5, 9, 2), (2, 5, 10, 5), (6, 5, 20, 10), (0, 5, 12, 0)],
)
def test_whole_periods(skip, period, iterations, expected):
    assert whole_periods(skip, period, iterations) == expected


def test_target_is_the_median_over_repetitions_and_never_if_most_miss_it(tmp_path):
    down = [float(40 - i) for i in range(40)]
    flat = [30.0] * 40
    reps = [[record(0, steady(s, 40), down)] for s in (0.5, 1.0)]
    row = rows_of(tmp_path, {"a": reps}, target_loss=20.0)["a"]
    assert row.target_s == pytest.approx((12.5 + 25) / 2)
    assert row.target_spread_s == pytest.approx((12.5, 25))
    reps = [[record(0, steady(0.5, 40), down)], [record(0, steady(0.5, 40), flat)]]
    row = rows_of(tmp_path / "b", {"a": reps}, target_loss=20.0)["a"]
    assert row.target_s is None
    assert row.target_spread_s is None


def test_default_target_is_reached_by_everybody_that_kept_up(tmp_path):
    noise = [0.3 * (-1) ** i for i in range(60)]
    good = [3 - i / 30 + e for i, e in enumerate(noise)]
    worse = [3 - i / 35 + e for i, e in enumerate(noise)]
    lazy = [3 - i / 60 + e for i, e in enumerate(noise)]
    rising = [3 + i / 60 for i in range(60)]
    broken = [1.0] * 30 + [math.nan] * 30
    losses = {"good": good, "worse": worse, "lazy": lazy, "rising": rising, "broken": broken}
    rows = rows_of(tmp_path, {k: [[record(0, steady(1, 60), v)]] for k, v in losses.items()})
    reached = {label: row.target_s is not None for label, row in rows.items()}
    assert [label for label in reached if reached[label]] == ["good", "worse"]
    assert rows["worse"].target_loss == pytest.approx(min(smoothed_of(tmp_path, "worse")))
    assert rows["broken"].final_loss is None


def smoothed_of(path, label):
    (contestant,) = (c for c in load(path).contestants if c.label == label)
    return rank_mean(contestant.repetitions[0]).smooth().losses


def test_no_target_when_nobody_trains_or_compute_is_emulated(tmp_path):
    down = [float(40 - i) for i in range(40)]
    flat = write_tiny(tmp_path / "flat", {"a": [[record(0, steady(1, 40), [1.0] * 40)]]})
    slept = write_tiny(tmp_path / "slept", {"a": [[record(0, steady(1, 40), down, emulated=True)]]})
    assert target_loss(load(flat)) is None
    assert target_loss(load(slept)) is None
    assert load(slept).emulated
    assert summarize(load(slept))[0].emulated


def test_smoothing_needs_the_whole_window():
    curve = Curve(tuple(range(4)), (1.0, 2.0, 3.0, 4.0), (8.0, 6.0, 4.0, 2.0))
    assert curve.smooth(2) == Curve((1, 2, 3), (2.0, 3.0, 4.0), (7.0, 5.0, 3.0))
    assert curve.smooth(10) == Curve((3,), (4.0,), (5.0,))
    assert curve.smooth(2).reach(5.0) == (2, 3.0)
    assert curve.reach(1.0) is None


def test_rank_mean_uses_shared_iterations(tmp_path):
    ranks = [record(0, [1, 2, 3], [4.0, 3.0, 2.0]), record(1, [1, 4, 5], [2.0, 1.0])]
    (contestant,) = load(write_tiny(tmp_path, {"a": [ranks]})).contestants
    assert rank_mean(contestant.repetitions[0]) == Curve((0, 1), (1.0, 3.0), (3.0, 2.0))


def row(label, **fields):
    return Row(label=label, strategy=label, repetitions=1, failed=0, **fields)


def test_ranking_goes_by_seconds_to_the_target_then_by_seconds_per_iteration():
    rows = [row("a", iteration_s=1.0), row("b", iteration_s=3.0, target_s=9.0), row("c")]
    rows += [row("d", iteration_s=0.5), row("e", iteration_s=2.0, target_s=8.0)]
    assert [r.label for r in rank_rows(rows)] == ["e", "b", "d", "a", "c"]


def losses_of(shape, seed, count=200):
    rng = random.Random(seed)
    return [shape(i / count) + rng.gauss(0, 0.03) for i in range(count)]


@pytest.mark.parametrize(
    ("shape", "falling"),
    [
        (lambda x: 2.0 - x, True),
        (lambda x: 2.0 * math.exp(-2 * x), True),
        (lambda x: 2.0 * math.exp(-20 * x), False),  # has ended long before
        (lambda x: 1.0 + 0 * x, False),
        (lambda x: 1.0 + x, False),
        (lambda x: 2.0 - 2 * x if x < 0.5 else x, False),
    ],
)
def test_what_was_still_falling_is_marked(tmp_path, shape, falling):
    """Of thirty runs with noise at most one is judged otherwise."""
    wrong = 0
    for seed in range(30):
        losses = losses_of(shape, seed)
        reps = [[record(0, steady(1.0, len(losses)), losses)]]
        found = rows_of(tmp_path / str(seed), {"a": reps})["a"]
        wrong += found.falling != falling
    assert wrong <= 1


def test_losses_that_rose_or_left_the_numbers_are_marked(tmp_path):
    shapes = {
        "rose": lambda x: 1.0 + x,
        "fell": lambda x: 2.0 - x,
        "flat": lambda x: 1.0 + 0 * x,
        "back": lambda x: 2.0 - 2 * x if x < 0.5 else 2 * x,  # as high as at first
    }
    reps = {
        label: [[record(0, steady(1.0, 200), losses_of(shape, 0))]]
        for label, shape in shapes.items()
    }
    noisy = [  # flat, with noise of 6 %
        rows_of(tmp_path / str(seed), {"a": [[record(0, steady(1.0, 200), losses)]]})["a"].rising
        for seed, losses in enumerate(losses_of(lambda x: 0.5 + 0 * x, seed) for seed in range(30))
    ]
    assert sum(noisy) <= 1
    lost = [*losses_of(shapes["fell"], 0)[:-1], math.nan]
    reps["lost"] = [[record(0, steady(1.0, 200), lost)]]
    path = write_tiny(tmp_path, reps)
    rows = {row.label: row for row in summarize(load(path))}
    assert [label for label, row in rows.items() if row.rising] == ["rose"]
    assert [label for label, row in rows.items() if row.diverged] == ["lost"]
    write(path)
    (kept,) = [r for r in json.loads((path / "summary.json").read_text())["rows"] if r["rising"]]
    assert kept["label"] == "rose"
    lines = render(load(path), list(rows.values()), 120).splitlines()[3 : 3 + len(rows)]
    ends = {line.split()[0]: line.rpartition("   ")[2] for line in lines}
    assert ends["rose"].endswith("↑")
    assert ends["fell"].endswith("↓")
    assert ends["lost"] == "not finite"


def test_the_spread_of_losses_is_over_seeds(tmp_path):
    """And marked where repetitions begin with equal losses."""

    def reps(seeds):
        return [
            [record(0, steady(1.0, 50), losses_of(lambda x: 2 - x, seed)[:50])] for seed in seeds
        ]

    path = write_tiny(tmp_path, {"own": reps((1, 2, 3)), "same": reps((1, 1, 4))})
    dump(path / "run.json", {**json.loads((path / "run.json").read_text()), "seeds": [5, 6, 7]})
    own, same = summarize(load(path))
    assert own.seeds == same.seeds == (5, 6, 7)
    assert (own.same_losses, same.same_losses) == (False, True)
    assert own.final_spread[0] < own.final_loss < own.final_spread[1]
    assert "ignored OFFBEAT_SEED" in render(load(path), [own, same], 100)
    assert "seeds 5, 6, 7" in render(load(path), [own], 100)


def test_falling_is_said_on_the_page_and_in_the_table(tmp_path):
    losses = losses_of(lambda x: 2 - x, 0)
    whole = [[record(0, steady(1.0, 200), losses)]]
    few = [[record(0, steady(1.0, 19), losses[::11])]]
    broken = [[record(0, steady(1.0, 200), [*losses[:-1], math.nan])]]
    path = write_tiny(tmp_path, {"whole": whole, "few": few, "broken": broken})
    rows = summarize(load(path))
    assert [row.falling for row in rows] == [True, False, False]
    assert write(path).read_text().count("<small>still falling</small>") == 1
    dump(path / "run.json", {**json.loads((path / "run.json").read_text()), "emulated": True})
    assert not any(row.falling for row in summarize(load(path)))


def test_updates_per_second(tmp_path):
    """Of iterations 2 to 7 every third does not update; the first two are skipped."""
    ends = steady(0.5, 8)
    merged = [[record(r, ends, without_update=[0, 1, 3, 6]) for r in (0, 1)]]
    path = write_tiny(tmp_path, {"m": merged, "w": [[record(0, ends), record(1, ends)]]}, skip=2)
    rows = summarize(load(path))
    assert [row.iterations_per_s for row in rows] == pytest.approx([2.0, 2.0])
    assert [row.updates_per_s for row in rows] == pytest.approx([4 / 3, 2.0])
    page = write(path).read_text()
    assert "<small>1.33 updates/s</small>" in page
    assert words.NO_PROGRESS in page
    assert "1.33 updates per second" in render_details(rows, 100)
    assert "updates" not in render_details(rows[1:], 100)
