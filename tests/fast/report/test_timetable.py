"""The picture of a timetable says what the timetable says."""

from __future__ import annotations

import json
import re

import pytest
from cases.scripts import benchmark

from offbeat.cyclic.simulation import StageFacts, simulate
from offbeat.cyclic.timetable import PLACEMENTS, Placement, Timetable

timetable_page = benchmark("timetable_page")
unit_time_run = benchmark("timetable_costs").unit_time_run
Panel, page = timetable_page.Panel, timetable_page.page


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_draws_every_work_of_two_iterations(placement: Placement) -> None:
    n = 3
    table = Timetable(placement, n)
    text = page(
        "a <title>", [Panel("drawn", "simulated", unit_time_run(table), StageFacts.unit(n))]
    )
    assert "a &lt;title&gt;" in text
    drawn = re.findall(r"(forward|backward) of stage (\d), micro-batch (\d) of iteration", text)
    # Two iterations of 2N steps with N works each.
    assert len(drawn) == 2 * 2 * n * n
    assert {(int(stage), int(i)) for _, stage, i in drawn} == {
        (stage, i) for stage in (1, 2, 3) for i in (1, 2, 3)
    }
    share = (n + 1) / (2 * n)
    assert f"{100 * share:.0f} %</text>" in text
    assert f"{table.devices} <small>device" in text


def test_curve_of_the_parallel_order_reaches_the_whole() -> None:
    n = 4
    run = simulate(Timetable("workers", n, cyclic=False), StageFacts.unit(n, 2.0))
    text = page("p", [Panel("drawn", "simulated", run, StageFacts.unit(n, 2.0))])
    assert "100 %</text>" in text
    assert "12 steps <small>per iteration" in text


def test_script(tmp_path, capsys) -> None:
    out = tmp_path / "t.html"
    benchmark("timetables").main(["--stages", "3", "--json", "--out", str(out)])
    rows = json.loads(capsys.readouterr().out)
    ways = [(row["placement"], row["order"]) for row in rows]
    assert len(ways) == len(set(ways)) == 9
    pyramid = next(row for row in rows if (row["placement"], row["order"]) == ("pyramid", "cyclic"))
    assert (pyramid["devices"], pyramid["messages"]) == (6, 2)
    assert out.read_text().count("<article>") == 9
