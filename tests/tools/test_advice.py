"""Advice: nearly the fastest, and no more change to the mathematics than that needs."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from offbeat import Plan
from offbeat.cli import entry as cli
from offbeat.core.guards.script_usage import conflict_with
from offbeat.core.guards.suitable_strategy import strategy_that_runs
from offbeat.core.sim.trace import Trace
from offbeat.core.strategy.parsing import parse, text_of
from offbeat.core.strategy.registry import BUILT_IN, find, module_names
from offbeat.experiments.advice.selection import CHANGES, advise, candidates, predict_option
from offbeat.profile import Bucket, CodecSpeed, Link, Profile, ScriptUsage
from offbeat.sim import predict
from offbeat.strategies import DDP, P3, WFBP, Cyclic, DeFT, DreamDDP, FedAvg, LocalSGD, create
from offbeat.strategies.methods.demo import DeMo
from offbeat.strategies.methods.des_loc import DESLOC
from offbeat.strategies.methods.eager import Eager
from offbeat.strategies.methods.noloco import NoLoCo
from offbeat.strategies.methods.sparseloco import SparseLoCo

STALENESS = 4
WITHIN = 1.03  # of the fastest strategy of an exhaustive search


def profile_of(seed: int) -> Profile:
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


def with_link(bytes_per_s: float, latency_s: float = 1e-3) -> Profile:
    return replace(profile_of(0), links=(Link("net", latency_s, bytes_per_s),))


SLOW = with_link(1e6)


def best_s(profile: Profile) -> float:
    """Seconds of the fastest of all periods and delays that are allowed, and of what computes the
    same as DDP, in the variants that the script needs."""
    tried = [create(name) for name in ("ddp", "wfbp", "bsp", "us-byte", "dear")]
    for period in range(2, STALENESS + 2):
        tried += [LocalSGD(period), DreamDDP(period), DreamDDP(period, due="forward")]
        delays = range(1, min(period, STALENESS + 2 - period))
        tried += [DreamDDP(period, due="delayed", delay=delay) for delay in delays]
    wired = [one for one in tried if isinstance(one, (WFBP, LocalSGD, DreamDDP))]
    tried += [replace(one, wire=wire) for one in wired for wire in ("int8", "int4")]
    runs = [strategy_that_runs(strategy, profile) for strategy in tried]
    return min(predict(strategy, profile).iteration_s for strategy in runs)


@pytest.mark.parametrize("clips", [False, True], ids=["plain", "clips"])
@pytest.mark.parametrize("seed", range(3))
def test_the_first_choice_is_nearly_the_fastest(seed: int, clips: bool) -> None:
    profile = replace(profile_of(seed), usage=ScriptUsage(changes=clips, reads=clips))
    advice = advise(profile, max_staleness=STALENESS)
    assert advice.chosen.update_s <= WITHIN * best_s(profile)
    times_s = [option.update_s for option in advice.options]
    assert times_s == sorted(times_s)
    assert advice.chosen in advice.compared
    assert 1 <= len(advice.compared) <= 3
    assert any(option.change == CHANGES[0] for option in advice.compared)
    texts = [text_of(option.strategy) for option in advice.options]
    assert len({*texts}) == len(texts)
    for option in advice.options:
        assert option.staleness <= STALENESS
        assert predict(option.strategy, profile).iteration_s == option.iteration_s
        assert option.update_s >= option.iteration_s * (1 - 1e-9)
        assert option.strategy.plan(profile) == option.plan
        assert not conflict_with(profile.usage, option.plan)


@pytest.mark.parametrize(
    ("message_s", "period", "delay"), [(0.2, 2, 1), (0.24, 3, 2), (0.4, 3, 2), (0.55, 5, 4)]
)
def test_what_only_just_hides_messages_is_not_chosen(
    message_s: float, period: int, delay: int
) -> None:
    """An iteration computes for .3 s. That hides .2 s even if they take half as long again, but
    not .24 s."""
    profile = Profile((Bucket("b", 0.1, 0.2, 1000),), (Link("net", message_s, 1e12),), 2)
    chosen = advise(profile).chosen
    assert chosen.strategy == DreamDDP(period, due="delayed", delay=delay)
    assert chosen.iteration_s == pytest.approx(0.3)


def test_nothing_is_changed_where_nothing_is_gained() -> None:
    advice = advise(with_link(1e12, 1e-7))
    assert advice.chosen.change == "same numbers"
    assert isinstance(advice.chosen.strategy, DDP)


def test_slow_links_ask_for_the_longest_period_that_is_allowed() -> None:
    """A codec is far faster there, but does not compute the numbers of DDP."""
    fresh = advise(SLOW, max_staleness=0)
    assert {option.change for option in fresh.options} == {"same numbers"}
    assert not any(t.wire for o in fresh.options for t in o.strategy.plan(SLOW).transfers)
    stale = advise(SLOW, max_staleness=1)
    assert any(option.change == "lossy" for option in stale.options)
    few, many = (advise(with_link(1e5), max_staleness=n).chosen for n in (1, 5))
    assert few.change != "same numbers"
    assert few.staleness <= 1
    assert many.update_s < few.update_s
    with pytest.raises(ValueError, match="max_staleness"):
        advise(SLOW, max_staleness=-1)


def test_scripts_that_clip_get_the_variant_that_updates_at_the_step() -> None:
    """Cyclic has none, and is no option. Scaled gradients cannot be merged by DeFT."""
    profile = profile_of(3)
    clips, scales, drives = (
        replace(profile, usage=usage)
        for usage in (ScriptUsage(changes=True), ScriptUsage(scales=True), ScriptUsage(drives=True))
    )
    at_step = P3().at_step()
    assert at_step is not None
    assert predict_option(P3(), clips) == predict_option(at_step, clips)
    assert predict_option(P3(), scales) == predict_option(at_step, scales)
    assert predict_option(P3(), clips).iteration_s > predict_option(P3(), profile).iteration_s
    for strategy, allowed in ((Cyclic(), profile), (DeFT(), clips), (DreamDDP(), drives)):
        assert predict_option(strategy, allowed) is not None
    for strategy, refused in ((Cyclic(), clips), (DeFT(), scales), (DeFT(), drives)):
        assert predict_option(strategy, refused) is None


def test_facts_of_the_profile_are_noted() -> None:
    """Codecs that were not measured, ranks of different speed, a script that clips."""
    speeds = tuple(CodecSpeed(name, 1e-9, 1e-9) for name in ("int8", "int4"))
    plain = replace(SLOW, world_size=4, codecs=speeds)
    notes = [
        len(advise(profile, max_staleness=1).notes)
        for profile in (
            plain,
            replace(plain, codecs=()),
            replace(plain, rank_scale=(1.0, 1.0, 1.0, 2.0)),
            replace(plain, usage=ScriptUsage(changes=True, reads=True)),
        )
    ]
    assert notes == [0, 1, 1, 1]


@pytest.mark.parametrize(
    ("strategy", "change", "staleness"),
    [
        (WFBP(), "same numbers", 0),
        (WFBP(wire="int8"), "lossy", 0),
        (LocalSGD(5), "averaged", 4),
        (DreamDDP(5), "averaged", 4),
        (DreamDDP(5, due="delayed", delay=2), "late", 6),
        (DreamDDP(5, due="delayed", delay=2, wire="int4"), "lossy", 6),
        (DESLOC(4), "averaged", 3),
        (NoLoCo(4), "averaged", 3),
        (Eager(4), "late", 7),
        (SparseLoCo(4), "lossy", 3),
        (DeMo(), "lossy", 0),
    ],
    ids=str,
)
def test_what_options_do_to_the_mathematics(strategy, change: str, staleness: int) -> None:
    """The last bucket of a period is averaged period - 1 iterations later, and lands later yet."""
    option = predict_option(strategy, replace(SLOW, world_size=2))
    assert (option.change, option.staleness) == (change, staleness)


@pytest.mark.parametrize("name", ["sparseloco", "eager", "dreamddp", "local-sgd"])
def test_a_method_is_a_candidate_if_its_staleness_is_allowed(name: str) -> None:
    cls = find(name)
    shortest = min(cls.suggestions(SLOW, 999), key=lambda one: one.period)
    staleness = predict_option(shortest, SLOW).staleness
    assert shortest in candidates(SLOW, staleness)
    assert shortest not in candidates(SLOW, staleness - 1)


def test_merged_updates_are_fewer_and_as_late_as_their_oldest_gradient() -> None:
    """Two iterations are merged, because the link needs two to carry the gradients of one."""
    buckets = tuple(Bucket(f"b{i}", 0.01, 0.02, 1000) for i in range(3))
    profile = Profile(buckets, (Link("net", 1e-3, 2e4),), 2, update_s=0.001)
    option, merges = predict_option(DeFT(), profile), DeFT().plan(profile).fact("merges")
    assert max(merges) > 1
    assert option.update_s == pytest.approx(option.iteration_s * sum(merges) / len(merges))
    # The gradients of one window are applied when the next one closes.
    pairs = zip(merges, [*merges[1:], merges[0]], strict=True)
    assert (option.change, option.staleness) == ("late", max(a + b - 1 for a, b in pairs))


def test_every_strategy_has_suggestions_or_a_reason_against_them() -> None:
    profile, found = profile_of(0), set()
    for name in (*BUILT_IN, *module_names()):
        cls = find(name)
        suggested = {one.name for one in cls.suggestions(profile, 999)}
        assert suggested <= {name}
        assert bool(suggested) != bool(cls.unadvised), name
        found |= suggested
    assert {one.name for one in candidates(profile, 999)} == found


@pytest.mark.parametrize(
    "strategy",
    [
        WFBP(),
        DreamDDP(period=7, fill=False, due="delayed", delay=3),
        FedAvg(local_steps=(2, 5), samples=(100.0, 2.5)),
        Cyclic(split=(3, 2), table=((False, True), (True, True))),
    ],
    ids=str,
)
def test_texts_are_read_again(strategy) -> None:
    assert parse(text_of(strategy)) == strategy
    with pytest.raises(ValueError, match="period=4,wire=int4"):
        parse("dreamddp:period=4,wire=int4")


# --- comparisons of what is advised --------------------------------------------------------------


@pytest.mark.usefixtures("forked_ranks")
@pytest.mark.parametrize("argv", ["", "--hosts 3"])
def test_the_advised_command_predicts_what_the_advice_does(
    argv: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The script fails at once: the predictions of the comparison are made before it runs."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("import sys; sys.exit(3)")
    replace(SLOW, buckets=SLOW.buckets[:3], world_size=2).save("p.json")
    options = ["--max-staleness", "1", *argv.split(), "--json"]
    assert cli.main(["advise", "--profile", "p.json", *options]) == 0
    found = json.loads(capsys.readouterr().out)
    _, compare, *words, script = shlex.split(found["command"])
    assert cli.main([compare, *words, "--lab", "none", "--repeat", "1", "--out", "a", script]) == 1
    run = json.loads((tmp_path / "a" / "run.json").read_text())
    names = [text_of(create(one["strategy"], one["settings"])) for one in run["contestants"]]
    assert names == found["compared"]
    expected = {option["strategy"]: option["iteration_s"] for option in found["options"]}
    for name, contestant in zip(names, run["contestants"], strict=True):
        folder = tmp_path / "a" / contestant["label"]
        predicted = Trace.load(folder / "predicted.json")
        assert predicted.notes["iteration_s"] == pytest.approx(expected[name])
        if name.startswith("dreamddp"):  # one period, without jitter
            assert predicted.iteration_s() == pytest.approx(expected[name])
        plan = Plan.from_dict(json.loads((folder / "plan.json").read_text()))
        assert plan.strategy == contestant["strategy"]
    if not argv:  # as one word
        again = [compare, *words[: words.index("--strategies")], "--strategies"]
        again += ["advised:max_staleness=1", "--lab", "none", "--repeat", "1", "--out", "b", script]
        assert cli.main(again) == 1
        other = json.loads((tmp_path / "b" / "run.json").read_text())
        assert other["contestants"] == run["contestants"]
        again[again.index("b")] = "c"
        again[again.index("advised:max_staleness=1")] = "advised:staleness=1"
        capsys.readouterr()
        assert cli.main(again) == 2
        assert "staleness" in capsys.readouterr().err
