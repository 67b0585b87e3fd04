"""Summary numbers against values computed by hand."""

from __future__ import annotations

import json
import math
import random
from itertools import accumulate

import pytest
from cases.report_runs import nodes_run, voting_run
from cases.tiny_runs import dump, record, steady, write_tiny

from offbeat.core.sim.trace import COMPUTE, Span, Trace
from offbeat.experiments.report import Row, headline, load, rank_rows, summarize
from offbeat.experiments.report.table import render, render_details


def rows_of(path, records, **run):
    write_tiny(path, records, **run)
    return {row.label: row for row in summarize(load(path))}


def row_of(path, *repetitions, **run):
    return rows_of(path, {"a": repetitions}, **run)["a"]


def test_the_slowest_rank_counts_without_observed_and_skipped_iterations(tmp_path):
    fast, slow = record(0, [5.0, 6.0, 7.0, 8.0]), record(1, [5.0, 6.5, 8.0, 9.5])
    row = row_of(tmp_path / "a", [fast, slow], skip=1)
    assert (row.iteration_s, row.spread_s) == (1.5, pytest.approx((1.5, 1.5)))
    ends = [10.0, 20.0, 30.0, 31.0, 32.0]
    assert row_of(tmp_path / "b", [record(0, ends, observed=2)], skip=1).iteration_s == 1.0


def test_whole_periods_count_and_the_spread_is_over_repetitions_if_there_are_some(tmp_path):
    ends = [1.0, 2.0, 5.0, 6.0, 7.0, 10.0]  # 1, 1, 3, 1, 1, 3
    assert row_of(tmp_path / "a", [record(0, ends, period=3)]).iteration_s == pytest.approx(5 / 3)
    reps = [[record(0, steady(seconds, 8))] for seconds in (1.0, 1.2, 1.1)]
    row = row_of(tmp_path / "b", *reps)
    assert (row.iteration_s, row.spread_s) == (pytest.approx(1.1), pytest.approx((1.0, 1.2)))
    assert (row.spread_of, row.repetitions) == ("repetitions", 3)
    row = row_of(tmp_path / "c", [record(0, [1.0, 3.0, 6.0, 10.0, 15.0])])  # 1, 2, 3, 4, 5
    assert (row.iteration_s, row.spread_s) == (3.0, pytest.approx((2.0, 4.0)))
    assert row.spread_of == "periods"
    assert row_of(tmp_path / "d", [record(0, [1.0, 2.0], period=5)]).iteration_s is None


def test_whole_first_periods_are_skipped_and_starting_up_is_no_merit(tmp_path):
    """Averages of 3, 2, 2, ... s every fifth iteration, others of .5 s; 9 s to start up. The row
    counts the periods from the second on, the target all but the first iteration."""
    each = [0.5 if (i + 1) % 5 else 2.0 for i in range(40)]
    each[0], each[4] = 9.0, 3.0
    losses = [float(40 - i) for i in range(40)]  # the mean of ten ending at i is 44.5 - i
    made = record(0, [*accumulate(each)], losses, period=5)
    row = row_of(tmp_path, [made], target_loss=20.0, skip=2)
    assert (row.iteration_s, row.iterations_per_s) == pytest.approx((0.8, 1 / 0.8))
    assert (row.target_iterations, row.target_s) == (26, pytest.approx(sum(each[1:26])))


def test_updates_per_second(tmp_path):
    """Of iterations 2 to 7 every third does not update; the first two are skipped."""
    ends = steady(0.5, 8)
    merged = [[record(r, ends, without_update=[0, 1, 3, 6]) for r in (0, 1)]]
    rows = rows_of(tmp_path, {"m": merged, "w": [[record(0, ends), record(1, ends)]]}, skip=2)
    assert [row.iterations_per_s for row in rows.values()] == pytest.approx([2.0, 2.0])
    assert [row.updates_per_s for row in rows.values()] == pytest.approx([4 / 3, 2.0])


def test_bytes_are_those_of_messages_else_of_counters_and_medians_over_repetitions(tmp_path):
    ranks = [record(r, steady(1, 10), bytes={"net": 600, "wan": 400 * r}) for r in (0, 1)]
    assert row_of(tmp_path / "a", ranks).sent_bytes == pytest.approx((60 + 100) / 2)
    reps = [[record(0, steady(1, 10), bytes={"net": size})] for size in (100, 200, 900)]
    assert row_of(tmp_path / "b", *reps).sent_bytes == pytest.approx(20)
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
    assert row_of(tmp_path / "c", [data]).sent_bytes == pytest.approx(5.0)


def test_a_host_sends_what_its_ranks_send_to_other_hosts(tmp_path):
    [row] = summarize(load(nodes_run(tmp_path / "a")))
    assert row.sent_bytes == pytest.approx(100)
    [row] = summarize(load(nodes_run(tmp_path / "b", messages=False)))
    assert row.sent_bytes == pytest.approx(200 * 2 / 4)


def test_votes(tmp_path):
    voted, plain = summarize(load(voting_run(tmp_path)))
    assert (voted.lssr, voted.spared_bytes) == (pytest.approx(0.6), 300)
    assert voted.sent_bytes == pytest.approx(200 / 5)
    assert voted.iteration_s == pytest.approx(9 / 5)  # uneven: the mean; the median is 1
    assert (plain.lssr, plain.spared_bytes, plain.iteration_s) == (None, None, 1.0)


def test_prediction_bound_and_error_fields_beside_the_trace_count(tmp_path):
    write_tiny(tmp_path, {"a": [[record(0, steady(2.0, 8))]]})
    trace = Trace("simulated", "x", ((1.9,),), (0.0,), notes={"bound_s": 1.5, "exposed_s": 0.4})
    dump(tmp_path / "a/predicted.json", trace.to_dict())
    [row] = summarize(load(tmp_path))
    assert (row.predicted_s, row.predicted_error) == pytest.approx((1.9, -0.05))
    assert (row.bound_s, row.exposed_s) == (1.5, 0.4)
    dump(tmp_path / "a/predicted.json", {**trace.to_dict(), "iteration_s": 2.2, "bound_s": None})
    [row] = summarize(load(tmp_path))
    assert (row.predicted_s, row.bound_s) == (2.2, None)


def test_speedup_is_over_the_fastest_ddp(tmp_path):
    seconds = {"ddp": 4.0, "ddp-cap-1": 3.0, "wfbp": 2.0}
    reps = {label: [[record(0, steady(s, 8))]] for label, s in seconds.items()}
    rows = rows_of(tmp_path / "a", reps, strategies={"ddp-cap-1": "ddp"})
    expected = {"ddp": 0.75, "ddp-cap-1": 1.0, "wfbp": 1.5}
    assert {label: row.speedup for label, row in rows.items()} == pytest.approx(expected)
    assert row_of(tmp_path / "b", [record(0, steady(1, 8))]).speedup is None


def test_final_loss_is_over_ranks_and_repetitions_of_the_last_tenth_at_least_five(tmp_path):
    down = [float(x) for x in range(20, 0, -1)]  # last five: 5 4 3 2 1
    reps = [
        [record(r, steady(1, 20), [x + r + 4 * rep for x in down]) for r in (0, 1)]
        for rep in (0, 1)
    ]
    assert row_of(tmp_path / "a", *reps).final_loss == pytest.approx(3 + 0.5 + 2)
    long = [100.0] * 90 + [1.0] * 10
    assert row_of(tmp_path / "b", [record(0, steady(1, 100), long)]).final_loss == 1.0


def test_the_target_is_a_median_over_repetitions_and_never_if_most_miss_it(tmp_path):
    down, flat = [float(40 - i) for i in range(40)], [30.0] * 40
    reps = [[record(0, steady(s, 40), down)] for s in (0.5, 1.0)]
    row = row_of(tmp_path / "a", *reps, target_loss=20.0)
    assert (row.target_s, row.target_spread_s) == (18.75, pytest.approx((12.5, 25)))
    reps = [[record(0, steady(0.5, 40), losses)] for losses in (down, flat)]
    row = row_of(tmp_path / "b", *reps, target_loss=20.0)
    assert (row.target_s, row.target_spread_s) == (None, None)


def test_default_target_is_reached_by_everybody_that_kept_up(tmp_path):
    noise = [0.3 * (-1) ** i for i in range(60)]
    losses = {
        name: [3 - i / slope + e for i, e in enumerate(noise)]
        for name, slope in {"good": 30, "worse": 35, "lazy": 60, "rising": -60}.items()
    }
    losses["broken"] = [1.0] * 30 + [math.nan] * 30
    rows = rows_of(tmp_path / "a", {k: [[record(0, steady(1, 60), v)]] for k, v in losses.items()})
    assert [name for name, row in rows.items() if row.target_s is not None] == ["good", "worse"]
    least = min(sum(losses["worse"][i - 10 : i]) / 10 for i in range(10, 61))
    assert rows["worse"].target_loss == pytest.approx(least)
    flat = row_of(tmp_path / "b", [record(0, steady(1, 40), [1.0] * 40)])
    down = [float(40 - i) for i in range(40)]
    slept = row_of(tmp_path / "c", [record(0, steady(1, 40), down, emulated=True)], emulated=False)
    assert (flat.target_loss, slept.target_loss, slept.emulated) == (None, None, True)


def losses_of(shape, seed, count=200):
    rng = random.Random(seed)
    return [shape(i / count) + rng.gauss(0, 0.03) for i in range(count)]


SHAPES = [  # loss by the share of the run that is over; whether it was falling, whether it rose
    (lambda x: 2.0 - x, True, False),
    (lambda x: 2.0 * math.exp(-2 * x), True, False),
    (lambda x: 2.0 * math.exp(-20 * x), False, False),  # has ended long before
    (lambda x: 0.5 + 0 * x, False, False),
    (lambda x: 1.0 + x, False, True),
    (lambda x: 2.0 - 2 * x if x < 0.5 else x, False, False),
]


@pytest.mark.parametrize(("shape", "falling", "rising"), SHAPES)
def test_what_fell_or_rose_is_marked(tmp_path, shape, falling, rising):
    """Of thirty runs with noise at most one is judged otherwise."""
    reps = {str(n): [[record(0, steady(1.0, 200), losses_of(shape, n))]] for n in range(30)}
    rows = rows_of(tmp_path, reps).values()
    assert sum(row.falling != falling for row in rows) <= 1
    assert sum(row.rising != rising for row in rows) <= 1


def test_losses_that_left_the_numbers_and_short_or_emulated_runs(tmp_path):
    losses = losses_of(lambda x: 2 - x, 0)
    lost = [[record(0, steady(1.0, 200), [*losses[:-1], math.nan])]]
    few = [[record(0, steady(1.0, 19), losses[::11])]]
    slept = [[record(0, steady(1.0, 200), losses, emulated=True)]]
    rows = rows_of(tmp_path / "a", {"lost": lost, "few": few})
    assert (rows["lost"].diverged, rows["lost"].falling, rows["lost"].final_loss) == (
        True, False, None
    )  # fmt: skip
    assert not rows["few"].falling
    assert not row_of(tmp_path / "b", *slept).falling


def test_the_spread_of_losses_is_over_seeds(tmp_path):
    """And marked where repetitions begin with equal losses."""

    def reps(seeds):
        return [
            [record(0, steady(1.0, 50), losses_of(lambda x: 2 - x, seed)[:50])] for seed in seeds
        ]

    runs = {"own": reps((1, 2, 3)), "same": reps((1, 1, 4))}
    own, same = rows_of(tmp_path, runs, seeds=[5, 6, 7]).values()
    assert own.seeds == same.seeds == (5, 6, 7)
    assert (own.same_losses, same.same_losses) == (False, True)
    assert own.final_spread[0] < own.final_loss < own.final_spread[1]


def test_a_target_metric_is_reached_from_either_side(tmp_path):
    def run(name, *courses):
        reps = []
        for values in courses:
            points = [[i, float(i + 1), x] for i, x in enumerate(values)]
            reps.append([record(0, steady(1.0, len(values)), metrics={"m": points})])
        return row_of(tmp_path / name, *reps, target={"name": "m", "value": 0.5})

    assert run("up", (0.1, 0.5, 0.9)).target_iterations == 2
    assert run("down", (0.9, 0.5, 0.4)).target_iterations == 2
    assert run("never", (0.1, 0.2)).target_iterations is None
    assert run("at once", (0.502, 0.6), (0.45, 0.51)).target_iterations == 1.5
    assert run("both", (0.1, 0.9), (0.2, 0.8)).target_s == pytest.approx(1.0)
    assert dict(run("last", (0.1, 0.9), (0.2, 0.8)).metrics) == {"m": pytest.approx(0.85)}


# ---- what is best, and how it is printed -------------------------------------------------------


def row(label, **fields):
    return Row(label=label, strategy=label, repetitions=1, failed=0, **fields)


def test_rows_are_ranked_by_seconds_to_the_target_then_by_seconds_per_iteration():
    rows = [row("a", iteration_s=1.0), row("b", iteration_s=3.0, target_s=9.0), row("c")]
    rows += [row("d", iteration_s=0.5), row("e", iteration_s=2.0, target_s=8.0)]
    assert [r.label for r in rank_rows(rows)] == ["e", "b", "d", "a", "c"]


@pytest.mark.parametrize("trouble", ["disturbed", "rising", "diverged", "failed"])
def test_a_row_in_trouble_never_wins_and_is_the_first_reservation(tmp_path, trouble):
    down, up = [3 - i / 50 for i in range(60)], [1 + i / 50 for i in range(60)]
    fast = record(0, steady(0.5, 60), up if trouble == "rising" else down)
    if trouble == "diverged":
        fast["losses"][-1][2] = None
    path = write_tiny(tmp_path, {"ddp": [[record(0, steady(1.0, 60), down)]], "fast": [[fast]]})
    if trouble == "disturbed":
        dump(path / "fast/rep0/load.json", {"disturbed": 1.0, "foreign": 0.6})
    if trouble == "failed":
        (path / "fast/rep0/rank0.jsonl").write_text("{")
    run = load(path)
    found = headline(run, summarize(run))
    assert found.best.label == "ddp"
    assert "fast" in found.reservations[0]


def test_of_disturbed_strategies_none_wins(tmp_path):
    down = [3 - i / 50 for i in range(60)]
    reps = {name: [[record(0, steady(s, 60), down)]] for name, s in (("ddp", 3.0), ("x", 1.0))}
    path = write_tiny(tmp_path, reps, target_loss=2.5)
    for name in reps:
        dump(path / name / "rep0/load.json", {"disturbed": 1.0, "foreign": 0.6})
    run = load(path)
    found = headline(run, summarize(run))
    assert (found.best, found.reservations) == (None, ())
    assert "3.0" not in found.sentence
    assert "60 %" in found.sentence


def test_the_sentence_names_the_winner_with_its_ratio(tmp_path):
    down = [3 - i / 50 for i in range(60)]
    reps = {name: [[record(0, steady(s, 60), down)]] for name, s in (("ddp", 3.0), ("x", 1.0))}
    run = load(write_tiny(tmp_path, reps, target_loss=2.5))
    found = headline(run, summarize(run))
    assert found.best.label == "x"
    assert {"x", "ddp", "3.0"} <= {*found.sentence.replace(",", " ").split()}
    assert len(found.reservations) <= 3
    assert headline(run, [row("a")]).best is None


@pytest.mark.parametrize("width", [60, 80, 100, 140])
def test_no_line_is_too_wide_and_every_strategy_has_one(page_of, width):
    path = page_of("troubled").parent
    run, data = load(path), json.loads((path / "summary.json").read_text())
    text = render(run, summarize(run), width)
    assert max(map(len, text.splitlines())) <= width
    begins = [line.split()[0] for line in text.splitlines() if line]
    assert {entry["label"] for entry in data["rows"]} <= {*begins}
    assert max(map(len, render_details(summarize(run), width).splitlines())) <= width
