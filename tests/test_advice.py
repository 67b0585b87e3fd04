"""Advice: nearly the fastest, and no more change to the mathematics than that needs."""

import json
import re
import shlex
from dataclasses import replace
from itertools import product
from pathlib import Path
from random import Random

import numpy as np
import pytest

from offbeat.cli import commands
from offbeat.cli import entry as cli
from offbeat.core.guards.script_usage import conflict_with, strategy_that_runs
from offbeat.core.profile.elsewhere import with_device_speed
from offbeat.core.strategy.parsing import parse, text_of
from offbeat.core.strategy.registry import BUILT_IN, find, module_names
from offbeat.core.strategy.suggestions import periods
from offbeat.experiments.advice import (
    CHANGES,
    advise,
    describe_change,
    predict_option,
)
from offbeat.experiments.advice import selection as advising
from offbeat.experiments.advice.methods import _planned_seconds, of_strategy
from offbeat.experiments.advice.place import place_of
from offbeat.experiments.advice.question import Question, answer
from offbeat.experiments.advice.selection import candidates, excluded_strategies
from offbeat.experiments.advice.work import Work
from offbeat.experiments.compare import given_profile
from offbeat.experiments.predictions import predict as predict_files
from offbeat.plan import Plan
from offbeat.profile import Bucket, CodecSpeed, Link, Profile, ScriptUsage
from offbeat.sim import predict, predict_plan
from offbeat.strategies import DDP, P3, WFBP, Cyclic, DeFT, DreamDDP, FedAvg, LocalSGD, create
from offbeat.strategies.compressible import SUGGESTED_WIRES as WIRES
from offbeat.strategies.methods.demo import DeMo
from offbeat.strategies.methods.des_loc import DESLOC
from offbeat.strategies.methods.eager import Eager
from offbeat.strategies.methods.noloco import NoLoCo, draw_pairs, rounds_to_all
from offbeat.strategies.methods.sparseloco import SparseLoCo

STALENESS = 4
WITHIN = 1.03


def profile_of(seed):
    """A model of some layers, its messages a twentieth to ten times its compute."""
    rng = Random(seed)
    sizes = [rng.randrange(1, 40) * 25_000 for _ in range(rng.randrange(3, 9))]
    backward_s = [rng.uniform(0.002, 0.03) for _ in sizes]
    compute_s, ratio = 1.5 * sum(backward_s), 10 ** rng.uniform(-1.3, 1)
    latency_s = rng.choice((1e-4, 1e-3, 2e-2))
    return Profile(
        tuple(
            Bucket(f"b{i}", s / 2, s, size)
            for i, (s, size) in enumerate(zip(backward_s, sizes, strict=True))
        ),
        (Link("net", latency_s, sum(sizes) / (ratio * compute_s)),),
        world_size=rng.choice((2, 4, 8)),
        update_s=0.1 * compute_s,
    )


def best_s(profile):
    """Of all periods and delays that are allowed, and of what computes the same as DDP; over the
    wires that advice knows, too. With the variants that the script needs."""
    tried = [create(name) for name in ("ddp", "wfbp", "bsp", "us-byte", "dear")]
    for period in range(2, STALENESS + 2):
        tried += [LocalSGD(period), DreamDDP(period), DreamDDP(period, due="forward")]
        delays = range(1, min(period, STALENESS + 2 - period))
        tried += [DreamDDP(period, due="delayed", delay=delay) for delay in delays]
    wired = [one for one in tried if isinstance(one, (WFBP, LocalSGD, DreamDDP))]
    tried += [replace(one, wire=wire) for one in wired for wire in WIRES]
    run = [strategy_that_runs(strategy, profile) for strategy in tried]
    return min(predict(strategy, profile).iteration_s for strategy in run)


def test_codecs_that_were_not_measured_are_said_to_count_as_free():
    profile = replace(profile_of(0), world_size=2)
    lossy = advise(replace(profile, links=(Link("net", 1e-3, 1e6),)), max_staleness=1)
    assert any(option.change == "lossy" for option in lossy.options)
    assert any("codecs" in note for note in lossy.notes)
    speeds = tuple(CodecSpeed(name, 1e-9, 1e-9) for name in ("int8", "int4"))
    measured = advise(
        replace(profile, links=(Link("net", 1e-3, 1e6),), codecs=speeds), max_staleness=1
    )
    assert not any("codecs" in note for note in measured.notes)


@pytest.mark.parametrize(
    ("message_s", "period", "delay"), [(0.2, 2, 1), (0.24, 3, 2), (0.4, 3, 2), (0.55, 5, 4)]
)
def test_what_only_just_hides_messages_is_not_chosen(message_s, period, delay):
    """An iteration computes for .3 s. That hides .2 s even if they take half as long again, but
    not .24 s."""
    profile = Profile((Bucket("b", 0.1, 0.2, 1000),), (Link("net", message_s, 1e12),), 2)
    chosen = advise(profile).chosen
    assert chosen.strategy == DreamDDP(period, due="delayed", delay=delay)
    assert chosen.iteration_s == pytest.approx(0.3)


@pytest.mark.parametrize("seed", range(6))
def test_the_first_choice_is_nearly_the_fastest(seed):
    profile = profile_of(seed)
    advice = advise(profile, max_staleness=STALENESS)
    assert advice.chosen.update_s <= WITHIN * best_s(profile)
    assert advice.chosen.staleness <= STALENESS
    times_s = [option.update_s for option in advice.options]
    assert times_s == sorted(times_s)
    assert advice.chosen in advice.compared
    assert 1 <= len(advice.compared) <= 3
    assert any(option.change == CHANGES[0] for option in advice.compared)
    for option in advice.options:
        assert predict(option.strategy, profile).iteration_s == option.iteration_s
        assert describe_change(option)
        assert option.update_s >= option.iteration_s * (1 - 1e-9)


@pytest.mark.parametrize("seed", range(3))
def test_scripts_that_clip_are_advised_the_variants_that_run(seed):
    """Plain, some of the options would apply gradients before the script has clipped them."""
    plain, usage = profile_of(seed), ScriptUsage(changes=True, reads=True)
    clips = replace(plain, usage=usage)
    assert any(conflict_with(usage, option.plan) for option in advise(plain).options)
    said = "the script changes gradients before the step (clipping?), so strategies"
    assert not any(said in note for note in advise(plain).notes)
    advice = advise(clips, max_staleness=STALENESS)
    assert not any(conflict_with(usage, option.plan) for option in advice.options)
    assert advice.chosen.update_s <= WITHIN * best_s(clips)
    assert any(said in note for note in advice.notes)
    texts = [text_of(option.strategy) for option in advice.options]
    assert len(set(texts)) == len(texts)
    for option in advice.options:
        assert option.strategy.plan(clips) == option.plan
        assert strategy_that_runs(option.strategy, clips) is option.strategy


def test_methods_of_scripts_that_clip(tmp_path):
    """The method of P3 is its variant, in another place too; Cyclic has none, and is left out."""
    usage = ScriptUsage(changes=True)
    place = place_of(replace(profile_of(3), usage=usage), None, None)
    at_step = P3().at_step()
    method = of_strategy(P3(), place)
    assert method == of_strategy(at_step, place)
    assert method.label == text_of(at_step)
    with_plain = replace(place, profile=replace(place.profile, usage=ScriptUsage()))
    assert method.iteration_s > of_strategy(P3(), with_plain).iteration_s
    assert of_strategy(Cyclic(), place) is None
    assert of_strategy(Cyclic(), with_plain) is not None
    scales = replace(place, profile=replace(place.profile, usage=ScriptUsage(scales=True)))
    assert of_strategy(DeFT(), place) is not None
    assert of_strategy(DeFT(), scales) is None, "its gradients have several scales"
    assert of_strategy(P3(), scales) == of_strategy(at_step, scales)
    drives = replace(place, profile=replace(place.profile, usage=ScriptUsage(drives=True)))
    assert of_strategy(DeFT(), drives) is None, "it updates at other steps"
    assert of_strategy(DreamDDP(due="delayed"), drives) is not None
    # So is the prediction of a comparison, before its run.
    seconds = predict_files(P3(), place.profile, tmp_path)
    assert seconds == method.iteration_s
    kept = Plan.from_dict(json.loads((tmp_path / "plan.json").read_text()))
    assert kept == at_step.plan(place.profile)


def test_a_plan_keeps_no_bound_in_a_faster_place():
    jittery = replace(fast(), jitter=0.1)
    plan = DDP().plan(with_device_speed(jittery, 0.25))
    expected_s = predict_plan(replace(plan, bound_s=None), jittery).iteration_s
    assert expected_s < plan.bound_s
    assert _planned_seconds(DDP(), plan, jittery) == expected_s


def fast():
    """Everything hides behind backward."""
    profile = profile_of(0)
    return replace(profile, links=(Link("net", 1e-7, 1e12),))


def slow(bytes_per_s=1e6):
    profile = profile_of(0)
    return replace(profile, links=(Link("net", 1e-3, bytes_per_s),))


def test_nothing_is_changed_where_nothing_is_gained():
    advice = advise(fast())
    assert advice.chosen.change == "same numbers"
    assert isinstance(advice.chosen.strategy, DDP)


def test_slow_links_ask_for_the_longest_period_that_is_allowed(monkeypatch):
    # A codec would be far faster here, but it does not compute the numbers of DDP.
    fresh = advise(slow(), max_staleness=0)
    assert {option.change for option in fresh.options} == {"same numbers"}
    assert not any(t.wire for o in fresh.options for t in o.strategy.plan(slow()).transfers)
    assert any(option.change == "lossy" for option in advise(slow(), max_staleness=1).options)
    # By what an option changes, whatever is considered.
    monkeypatch.setattr(advising, "candidates", lambda *_: iter((DDP(), WFBP(wire="int4"))))
    assert [o.strategy for o in advise(slow(), max_staleness=0).options] == [DDP()]
    monkeypatch.undo()
    few, many = (advise(slow(1e5), max_staleness=n).chosen for n in (1, 5))
    assert few.change != "same numbers"
    assert few.staleness <= 1
    assert many.update_s < few.update_s
    with pytest.raises(ValueError, match=r"max_staleness \(-1\) must be at least 0"):
        advise(slow(), max_staleness=-1)


def test_uneven_ranks_are_noted():
    profile = replace(slow(), world_size=4, rank_scale=(1.0, 1.0, 1.0, 2.0))
    assert any("gossip" in note for note in advise(profile, max_staleness=1).notes)
    assert not any("gossip" in note for note in advise(slow(), max_staleness=1).notes)


MERGING = DeFT(forward=0, backward=1)


def merging():
    """MERGING merges three iterations there: one bucket leaves per backward, of three."""
    buckets = tuple(Bucket(f"b{i}", 0.01, 0.02, 1000) for i in range(3))
    return Profile(buckets, (Link("net", 1e-3, 1e5),), 2, update_s=0.001)


@pytest.mark.parametrize(
    ("strategy", "change", "staleness"),
    [
        (WFBP(), "same numbers", 0),
        (WFBP(wire="int8"), "lossy", 0),
        (LocalSGD(5), "averaged", 4),
        (DreamDDP(5), "averaged", 4),
        (DreamDDP(5, due="delayed", delay=2), "late", 6),
        (DreamDDP(5, due="delayed", delay=2, wire="int4"), "lossy", 6),
    ],
    ids=str,
)
def test_what_options_do_to_the_mathematics(strategy, change, staleness):
    """The last bucket of a period is averaged period - 1 iterations later, and lands later yet."""
    option = predict_option(strategy, slow())
    assert (option.change, option.staleness) == (change, staleness)


def test_merged_updates_are_fewer_and_as_late_as_their_oldest_gradient():
    option, plan = predict_option(MERGING, merging()), MERGING.plan(merging())
    merges = plan.fact("merges")
    assert max(merges) > 1
    assert option.update_s == pytest.approx(option.iteration_s * sum(merges) / len(merges))
    # The gradients of one window are applied when the next one closes.
    pairs = zip(merges, [*merges[1:], merges[0]], strict=True)
    assert (option.change, option.staleness) == ("late", max(a + b - 1 for a, b in pairs))


def test_what_is_staler_than_allowed_is_no_option(monkeypatch):
    monkeypatch.setattr(advising, "candidates", lambda *_: iter((DDP(), MERGING)))
    stale = predict_option(MERGING, merging()).staleness
    for allowed, listed in ((stale, True), (stale - 1, False)):
        options = advise(merging(), max_staleness=allowed).options
        assert (MERGING in [option.strategy for option in options]) == listed


def test_every_strategy_has_suggestions_or_a_reason_against_them():
    profile, found, reasons = profile_of(0), set(), excluded_strategies()
    for name in (*BUILT_IN, *module_names()):
        cls = find(name)
        suggested = {one.name for one in cls.suggestions(profile, 999)}
        assert suggested <= {name}
        assert bool(suggested) != bool(cls.unadvised), name
        found |= suggested
    assert {one.name for one in candidates(profile, 999)} == found
    left_out = [name for names in reasons.values() for name in names]
    assert sorted([*found, *left_out]) == sorted([*BUILT_IN, *module_names()])
    asked = Question(Work.of(), everything=True, max_staleness=1)
    shown = answer(asked, slow(), None)
    text = " ".join(shown.text(80, verbose=True).split())
    for reason, names in reasons.items():
        assert f"{', '.join(names)}: never advised; {reason}" in text
        assert all(shown.data["never_advised"][name] == reason for name in names)


@pytest.mark.parametrize("name", ["sparseloco", "eager"])
def test_published_methods_are_candidates_with_their_periods_if_staleness_allows_it(name):
    cls, profile = find(name), slow()
    shortest = min(cls.suggestions(profile, 999), key=lambda one: one.period)
    option = predict_option(shortest, profile)
    assert option.change == {"sparseloco": "lossy", "eager": "late"}[name]
    assert shortest in candidates(profile, option.staleness)
    assert not [*cls.suggestions(profile, option.staleness - 1)]


@pytest.mark.parametrize(
    ("strategy", "staleness", "text"),
    [
        (DESLOC(4), 3, "averaged: parameters, every 4 iterations"),
        (NoLoCo(4), 3, "averaged: random pairs, every 4 iterations, and replicas differ"),
        (Eager(4), 7, "averaged: parameters, every 4 iterations, which land 4 later, applied by"),
        (SparseLoCo(4), 3, "averaged: parameters, every 4 iterations, lossy: sent as topk2"),
        (DeMo(), 0, "lossy: the optimizer steps on signs of the largest components"),
    ],
    ids=str,
)
def test_published_methods_state_what_they_change(strategy, staleness, text):
    option = predict_option(strategy, replace(slow(), world_size=2))
    assert option.staleness == staleness
    assert describe_change(option).startswith(text)


def test_rounds_of_pairs_until_a_change_has_reached_all():
    """Against products of the averaging matrices: the first one without a zero."""
    for ranks, count, seed in ((2, 3, 0), (4, 5, 1), (5, 4, 2), (8, 16, 3)):
        rounds = [draw_pairs(ranks, seed, done) for done in range(count)]
        needed = []
        for first in range(count):
            product, done = np.eye(ranks), 0
            while (product == 0).any() and done < ranks**2:
                matrix = np.zeros((ranks, ranks))
                for pair in rounds[(first + done) % count]:
                    matrix[np.ix_(pair, pair)] = 1 / len(pair)
                product, done = matrix @ product, done + 1
            needed.append(done)
        assert rounds_to_all(rounds, ranks) == max(needed)
    assert rounds_to_all([[(0, 1), (2, 3)]], 4) == 16  # never


def test_periods_end_with_the_longest():
    assert periods(1) == []
    assert periods(2) == [2]
    assert periods(10) == [2, 3, 5, 8, 10]


@pytest.mark.parametrize(
    "strategy",
    [
        WFBP(),
        DreamDDP(),
        DreamDDP(period=7, fill=False, due="delayed", delay=3),
        LocalSGD(9),
        FedAvg(local_steps=(2, 5), samples=(100.0, 2.5)),
        Cyclic(split=(3, 2), table=((False, True), (True, True))),
    ],
    ids=str,
)
def test_texts_are_read_again(strategy):
    assert parse(text_of(strategy)) == strategy


def test_settings_are_not_separated_by_commas():
    words = r"'period=4,wire=int4'\) must have ':' .* dreamddp:period=4:wire=int4"
    with pytest.raises(ValueError, match=words):
        parse("dreamddp:period=4,wire=int4")


def test_lines_are_at_most_as_wide_as_columns():
    profile = replace(slow(), world_size=3)
    asked = Question(Work.of(), max_staleness=1, device_memory=8e9, price=2.0)
    full = answer(asked, profile, Path("p.json"))
    plain = replace(full, verdict=replace(full.verdict, device_memory=None, price=None))
    for columns in (72, 80, 100):
        for one, verbose in product((full, plain), (False, True)):
            printed = one.text(columns, verbose=verbose).splitlines()
            long = [line for line in printed if len(line) > columns]
            assert all(line.startswith("    --strategies ") for line in long)  # of the command
            assert max(map(len, printed)) > columns - 15


def test_the_command(tmp_path, capsys):
    path = tmp_path / "profile.json"
    slow().save(path)
    argv = ["advise", "--profile", str(path), "--max-staleness", "2", "--rate", "10mbit"]
    assert cli.main([*argv, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["advised"] in found["compared"]
    assert cli.main(argv) == 0
    said = capsys.readouterr().out
    assert found["command"] in re.sub(r" \\\n +", " ", said)
    assert re.search(r"^\* .*^\* the method to take", said, re.MULTILINE | re.DOTALL)
    assert "+ also worth comparing" in " ".join(said.split())
    names, hosts = ",".join(found["compared"]), str(slow().world_size)
    assert shlex.split(found["command"]) == [
        *("offbeat", "compare", "--hosts", hosts, "--rate", "10mbit", "--profile", str(path)),
        *("--strategies", names, "train.py"),
    ]
    assert max(option["staleness"] for option in found["options"]) <= 2
    assert cli.main([*argv[:3], "--max-staleness", "-1"]) == 2
    assert "max_staleness (-1)" in capsys.readouterr().err


@pytest.mark.parametrize("argv", [[], ["--hosts", "3"], ["--hosts", "3", "--rate", "20mbit"]])
def test_the_advised_command_compares_for_the_same_cluster(argv, tmp_path, monkeypatch, capsys):
    """Its profile, rate and hosts give the predictions of the advice."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    slow().save("p.json")
    assert cli.main(["advise", "--profile", "p.json", *argv, "--json"]) == 0
    found, asked = json.loads(capsys.readouterr().out), []
    monkeypatch.setattr(commands, "_compare", lambda one, *_, **__: asked.append(one) or 0)
    assert cli.main(shlex.split(found["command"])[1:]) == 0
    made = given_profile(asked[0].setup, asked[0].profile).profile
    predicted = {o["strategy"]: o["iteration_s"] for o in found["options"]}
    for contestant in asked[0].contestants:
        expected_s = predicted[text_of(contestant.strategy)]
        assert predict(contestant.strategy, made).iteration_s == pytest.approx(expected_s)


def test_compare_runs_what_is_advised(tmp_path, monkeypatch):
    path, asked = tmp_path / "profile.json", []
    slow().save(path)
    monkeypatch.setattr(commands, "_compare", lambda one, *_, **__: asked.append(one) or 0)
    script = tmp_path / "train.py"
    script.write_text("")
    hosts = str(slow().world_size)
    argv = ["--lab", "none", "--hosts", hosts, "--profile", str(path), str(script)]
    assert cli.main(["compare", "--strategies", "advised:max_staleness=2", *argv]) == 0
    advice = advise(slow(), max_staleness=2)
    ran = [contestant.strategy for contestant in asked[0].contestants]
    assert ran == [option.strategy for option in advice.compared]
    assert cli.main(["compare", "--strategies", "advised:staleness=2", *argv]) == 2
