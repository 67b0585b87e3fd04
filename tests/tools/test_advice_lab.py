"""Advice in the lab: its settings are drawn before they are measured, and its shares are right."""

from __future__ import annotations

from collections import Counter

import pytest
from cases.scripts import benchmark

from offbeat.experiments.advice.selection import advise

advice_lab = benchmark("advice_lab")


def test_settings_follow_from_the_seed():
    assert advice_lab.draw() == advice_lab.draw()
    assert advice_lab.draw(12, 1) != advice_lab.draw(12, 2)
    for count in (0, 49):
        with pytest.raises(ValueError, match="count"):
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


@pytest.mark.parametrize(("text", "numbers"), [("7", range(7, 8)), ("2-4", range(2, 5))])
def test_numbers_of_settings(text, numbers):
    assert advice_lab.numbers_of(text, 9) == numbers
    with pytest.raises(ValueError):
        advice_lab.numbers_of("0-3", 9)
