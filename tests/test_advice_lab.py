"""Advice in the lab: its settings are drawn before they are measured, and its shares are right."""

from __future__ import annotations

import json
from argparse import Namespace
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from support.scripts import benchmark

from offbeat.core.strategy.registry import create
from offbeat.experiments.advice import advise
from offbeat.experiments.comparison import Contestant
from offbeat.experiments.launcher import Outcome
from offbeat.experiments.report.summary import Row
from offbeat.lab import Cluster

advice_lab = benchmark("advice_lab")
stories_lab = benchmark("stories_lab")
zoo = benchmark("zoo")


def test_settings_follow_from_the_seed():
    assert advice_lab.draw() == advice_lab.draw()
    assert advice_lab.draw(12, 1) != advice_lab.draw(12, 2)
    for count in (0, 49):
        with pytest.raises(ValueError, match=rf"count \({count}\) must be at least 1 and"):
            advice_lab.draw(count)


@pytest.mark.parametrize(("count", "seed"), [(1, 0), (8, 3), (12, 42), (48, 5)])
def test_every_value_is_drawn_as_often_as_the_others(count, seed):
    settings = advice_lab.draw(count, seed)
    assert len({*settings}) == len(settings) == count
    for place, values in enumerate(advice_lab.FACTORS.values()):
        counts = Counter(setting[place] for setting in settings)
        assert {*counts} <= {*values}
        most = [counts[value] for value in values]
        assert max(most) - min(most) <= 1


def test_settings_are_clusters_of_models_of_the_zoo():
    assert {*advice_lab.FACTORS["model"]} == {*zoo.MODELS} - {"llama"}
    for hosts in advice_lab.FACTORS["hosts"]:
        found = {}
        for kind in advice_lab.FACTORS["kind"]:
            setting = advice_lab.Setting("gpt", hosts, 50, kind, 0)
            found[kind] = cluster = Cluster.from_toml(setting.cluster)
            assert (cluster.hosts, cluster.rate_bps(0, "net")) == (hosts, 50_000_000)
        last, first = hosts - 1, found["even"]
        assert [found["uplink"].uplink_bps(host, "net") for host in (0, last)] == [
            50_000_000,
            25_000_000,
        ]
        assert [found["unlike"].speed_of(host) for host in (0, last)] == [1.0, 0.667]
        assert [found["jitter"].jitter_of(host) for host in range(hosts)] == [0.1] * hosts
        assert found["delay"].links[0].latency == "20ms"
        assert not first.overrides


def test_contenders_are_the_fastest_of_their_families():
    advice = advise(benchmark("advice").profile_of(0), max_staleness=4)
    found = advice_lab.contenders(advice, 4)
    families = [advice_lab.family_of(option) for option in found]
    assert found[0] is advice.chosen
    assert len({*families}) == len(found) <= 4
    assert len(found) == min(4, len({advice_lab.family_of(option) for option in advice.options}))
    for option, family in zip(found[1:], families[1:], strict=True):
        alike = [one for one in advice.options if advice_lab.family_of(one) == family]
        assert option.update_s == min(one.update_s for one in alike)
    left_out = [one for one in advice.options if advice_lab.family_of(one) not in families]
    slowest_s = max((option.update_s for option in found[1:]), default=0.0)
    assert all(one.update_s >= slowest_s for one in left_out)


def part(advised: str, batch_ms: dict[str, float], remarks: str = ""):
    rows = [[label, [ms] * 3, 1.25 * ms, ms, 1, remarks] for label, ms in batch_ms.items()]
    return advice_lab.Part(advised, rows)


def test_shares_are_of_the_fastest_measured_method():
    first, second, third = advice_lab.draw(3, 1)
    slower = part("dreamddp", {"ddp": 40.0, "dreamddp": 25.0, "one machine": 20.0})
    best = part("wfbp", {"ddp": 40.0, "wfbp": 20.0})
    disturbed = part("wfbp", {"ddp": 10.0, "wfbp": 20.0}, "the host of rank 1 was late")
    rows = [
        advice_lab.setting_row(one, kept)
        for one, kept in ((first, slower), (second, best), (third, disturbed), (third, None))
    ]
    assert rows[0] == [*first, "dreamddp", "one machine", 25.0, ""]
    assert rows[1] == [*second, "wfbp", "wfbp", 0.0, ""]
    assert rows[2] == [*third, "wfbp", "ddp", 100.0, "disturbed"]
    assert rows[3] == [*third, None, None, None, "not measured"]
    parts = [slower, best, disturbed, None]
    assert advice_lab.summary_row(parts) == ["2 of 4", 12.5, 25.0, 1]
    assert advice_lab.summary_row(parts[3:]) == ["0 of 1", None, None, 0]
    [_, advised, _] = advice_lab.launch_rows(7, slower)
    assert advised == [7, "dreamddp (advised)", [25.0] * 3, 31.25, 25.0, 25.0, 1, ""]


def test_a_method_that_has_failed_is_named_beside_the_others(tmp_path, monkeypatch):
    """Rows state which methods were measured; more failures than theirs are of the whole run."""
    contestants = {
        name: Contestant(name, create(name.partition("-")[0]))
        for name in ("dreamddp", "dreamddp-period=8", "ddp")
    }
    text = "dreamddp-period=8, repetition 1 of 1: rank 1 has failed"
    outcome = Outcome(tmp_path, [text], measured=2)
    rows = [Row(name, name, 1, 0, iteration_s=0.04) for name in ("dreamddp", "ddp")]
    monkeypatch.setattr(stories_lab, "compare", lambda *_, **__: outcome)
    monkeypatch.setattr(stories_lab, "load", lambda _: None)
    monkeypatch.setattr(stories_lab, "summarize", lambda _: rows)
    setup = stories_lab.SmallStory("a", "gpt", "hosts = 2").setup()
    found = stories_lab.run(setup, contestants, 1, tmp_path)
    assert found == ({"dreamddp": rows[0], "ddp": rows[1]}, [text])
    for failures, measured in (([text, "the lab: no namespaces"], 2), ([text], 0)):
        outcome.failures, outcome.measured = failures, measured
        with pytest.raises(SystemExit, match="rank 1 has failed"):
            stories_lab.run(setup, contestants, 1, tmp_path)

    [first] = advice_lab.draw(1)
    kept = replace(part("ddp", {"ddp": 24.0, "one machine": 20.0}), failed=[text])
    without = replace(part("dreamddp-period=8", {"ddp": 24.0}), failed=[text])
    rows = [advice_lab.setting_row(first, one) for one in (kept, without)]
    assert rows[0] == [*first, "ddp", "one machine", 20.0, text]
    assert rows[1] == [*first, "dreamddp-period=8", "ddp", None, text]
    assert advice_lab.summary_row([kept, without]) == ["1 of 2", 20.0, 20.0, 0]


def test_complete_and_failed_settings_are_kept(tmp_path, monkeypatch):
    options = Namespace(launches=1, seconds=8.0, contenders=4)
    first, second, third = advice_lab.draw(3, 1)
    measured: list[str] = []

    def measure(story, folder, *_):
        measured.append(story.name)
        assert folder == tmp_path / story.name
        if story.name == "2":
            raise SystemExit("rank 1 ended")
        if story.name == "3":
            raise KeyboardInterrupt

    monkeypatch.setattr(advice_lab, "measure", measure)
    monkeypatch.setattr(advice_lab, "part_of", lambda _: part("ddp", {"ddp": 1.0}))
    kept = failed = None
    for _ in range(2):
        kept = advice_lab.measure_setting(first, tmp_path / "1", options)
        failed = advice_lab.measure_setting(second, tmp_path / "2", options)
        with pytest.raises(KeyboardInterrupt):
            advice_lab.measure_setting(third, tmp_path / "3", options)
    assert measured == ["1", "2", "3", "3"]
    assert kept == part("ddp", {"ddp": 1.0}) == advice_lab.kept_part(tmp_path / "1")
    assert advice_lab.setting_row(second, failed) == [*second, None, None, None, "rank 1 ended"]
    assert json.loads(Path(tmp_path, "2", advice_lab.PART).read_text())["failure"] == "rank 1 ended"


@pytest.mark.parametrize(("text", "numbers"), [("7", range(7, 8)), ("2-4", range(2, 5))])
def test_numbers_of_settings(text, numbers):
    assert advice_lab.numbers_of(text, 9) == numbers
    with pytest.raises(ValueError):
        advice_lab.numbers_of("0-3", 9)
