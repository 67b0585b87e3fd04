"""The page in a real browser: tooltips, keys, zoom and narrow windows, without a script error."""

from __future__ import annotations

import re
import shutil
import subprocess

import pytest
from cases.gossip_runs import THREE
from cases.synthetic_runs import NEAR_AND_FAR, late, profile, three, write_run
from cases.tiny_runs import record, steady, write_tiny
from report.test_votes import ranks as voting_ranks

from offbeat import A2CiD2, sim
from offbeat.experiments.report import write

BROWSERS = ("chromium", "chromium-browser", "chromium-headless-shell")
CHROMIUM = next(filter(None, map(shutil.which, BROWSERS)), None)

pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed"),
    pytest.mark.timeout(300),  # a browser starts slowly on a busy machine
]

QUIET = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--enable-logging=stderr",
    "--virtual-time-budget=2000",
]


def dom(page, tmp_path, *options):
    """The document after its scripts ran; fails on any error or refused resource."""
    assert CHROMIUM is not None
    profile_dir = f"--user-data-dir={tmp_path / 'chromium'}"
    command = [CHROMIUM, *QUIET, *options, profile_dir, "--dump-dom", page.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=140, check=False)
    said = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    assert said == []
    assert done.returncode == 0
    return done.stdout


def pressed(page, tmp_path, script, *options):
    """Attributes `data-NAME` of the body after a script ran in the page."""
    text = re.sub(r"<meta http-equiv[^>]*>", "", page.read_text())
    copy = page.with_name("pressed.html")
    copy.write_text(text.replace("</body>", f"<script>{script}</script></body>"))
    (body,) = re.findall(r"<body[^>]*>", dom(copy, tmp_path, *options))
    return dict(re.findall(r'data-(\w+)="([^"]*)"', body))


KEYS = """
  const told = document.body.dataset;
  const press = (node, ...keys) => keys.forEach((key) =>
    node.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true })));
"""


def test_keys_move_between_boxes_and_lanes_and_the_zoom_shows_buckets(tmp_path):
    facts = profile(6, 2)
    run = write_run(tmp_path / "run", facts, three(facts), iterations=24, recorded=20)
    page = write(run)
    dom(page, tmp_path)
    told = pressed(
        page,
        tmp_path,
        KEYS
        + """
      const figures = [...document.querySelectorAll(".lanes")];
      told.stops = figures.filter((figure) => figure.tabIndex === 0).length;
      told.titles = document.querySelectorAll("main [title]").length;
      const first = figures[0];
      press(first, "ArrowRight");
      told.first = tip.textContent;
      press(first, "ArrowRight");
      told.second = tip.textContent;
      press(first, "ArrowDown");
      told.message = tip.textContent;
      told.same = [...figures].filter((figure) => figure.querySelector(".same")).length;
      press(first, "End");
      told.end = tip.textContent;
      press(first, "Home", "Escape");
      told.hidden = tip.hidden;
      const box = first.querySelector(".lane i").getBoundingClientRect();
      const at = { clientX: box.left + 3, clientY: box.top + 3, bubbles: true, movementX: 1 };
      first.querySelector(".lane i").dispatchEvent(new PointerEvent("pointermove", at));
      told.pointed = tip.textContent;
      document.body.dispatchEvent(new PointerEvent("pointermove", { bubbles: true, movementX: 1 }));
      told.left = tip.hidden;
      told.axis = document.querySelector(".axisrow").offsetHeight > 0;
      const count = () => visibleBoxes(first.querySelector(".lane")).length;
      const before = count(), width = first.scrollWidth;
      zoom.value = "4";
      zoom.dispatchEvent(new Event("change"));
      told.gone = document.querySelector(".axisrow").offsetHeight === 0;
      told.more = count() > before && first.scrollWidth > 3 * width;
      press(first, "ArrowRight");
      told.bucket = tip.textContent;
      const chart = document.querySelector(".chart");
      press(chart, "ArrowRight");
      told.chart = tip.textContent;
      press(chart, "Escape");
      told.away = document.querySelector(".cursor").hidden;
    """,
        "--window-size=1000,800",
    )
    assert told["stops"] == "3"
    assert told["titles"] == "0"
    assert re.match(r"forward, iteration \d+\n?.*starts at .*, takes .*, predicted ", told["first"])
    assert told["second"].startswith("backward, iteration")
    assert re.match(r"(gradients|parameters) of buckets? ", told["message"])
    assert " kB" in told["message"] or " MB" in told["message"]
    assert told["same"] == "3"
    assert told["end"] != told["message"]
    assert told["axis"] == told["gone"] == "true"
    assert told["hidden"] == told["left"] == told["more"] == told["away"] == "true"
    assert told["pointed"] == told["first"]
    assert re.match(r"forward of bucket 5 \(layers.0.linear\), iteration", told["bucket"])
    assert re.match(r"at \S+ s\s*\S+: \d\.\d{3}", told["chart"])


def test_each_of_many_hosts_can_be_shown(tmp_path):
    facts = profile(4, 9)
    run = write_run(
        tmp_path / "run", facts, three(facts), iterations=12, recorded=10, repetitions=1
    )
    told = pressed(
        write(run),
        tmp_path,
        KEYS
        + """
      const lanes = () => [...document.querySelectorAll(".own .lane.big")];
      const names = () => lanes().map((lane) => lane.dataset.n).join();
      const wait = () => new Promise((go) => setTimeout(go, 20));
      const choice = document.getElementById("host");
      told.before = names();
      told.options = choice.options.length;
      const chosen = async (value) => {
        choice.value = value;
        choice.dispatchEvent(new Event("change"));
        for (let n = 0; n < 50 && names() === told.before; n++) await wait();
      };
      (async () => {
        await chosen("7");
        told.after = names();
        told.titles = document.querySelectorAll("main [title]").length;
        const bars = [...document.querySelector(".hosts").children];
        told.marked = bars.findIndex((bar) => bar.matches(".chosen"));
        press(document.querySelector(".lanes"), "ArrowRight");
        told.first = tip.textContent;
        await chosen("");
        await wait();
        told.back = names();
      })();
    """,
    )
    assert told["before"] == told["back"] == ",".join(["slowest", "median", "fastest"] * 3)
    assert told["after"] == ",".join(["host 7"] * 3)
    assert told["options"] == "10"
    assert told["titles"] == "0"
    assert told["marked"] == "7"
    assert re.match(r"\w+ward, iteration \d", told["first"])


@pytest.mark.parametrize("width", [400, 1000])
def test_nothing_is_wider_than_the_window(tmp_path, width):
    facts = profile(6, 2, NEAR_AND_FAR)
    page = write(write_run(tmp_path / "run", facts, late(facts), iterations=24, recorded=20))
    script = """
      document.querySelectorAll("details").forEach((node) => { node.open = true; });
      document.body.dataset.over = document.documentElement.scrollWidth - innerWidth;
    """
    # The browser's least window is wider than a telephone; a frame is not.
    inner = pressed(page, tmp_path, script, f"--window-size={width},900")
    assert int(inner["over"]) <= 0


def test_generations_are_numbers_in_the_tooltips(tmp_path):
    facts = profile(6, 2, NEAR_AND_FAR)
    run = write_run(tmp_path / "run", facts, late(facts), iterations=24, recorded=20)
    text = write(run).read_text()
    pictures = dict(
        re.findall(r'aria-label="(\w+): [\d.]+ iterations(.*?)</div></div>', text, re.DOTALL)
    )
    assert "holds the gradients of iterations 3–4" in pictures["deft"]
    assert "applies the gradients of iteration" in pictures["deft"]
    for label in ("ddp", "dear"):
        assert "the gradients of iteration" not in pictures[label]
    assert "reduce-scatter of gradients of bucket" in pictures["dear"]
    assert "all-gather of gradients of bucket" in pictures["dear"]
    assert 'data-n="net, channel 2"' in text


def test_votes_and_gossip_are_drawn_without_an_error(tmp_path):
    run = write_tiny(tmp_path / "run", {"selsync": [voting_ranks()]})
    drawn = dom(write(run), tmp_path)
    assert drawn.count('data-n="rank 1"') == 1
    run = write_tiny(tmp_path / "gossip", {"a2cid2": [THREE]})
    sim.predict(A2CiD2(rate=0.5), profile(2, 3)).trace.save(run / "a2cid2" / "predicted.json")
    page = write(run)
    told = pressed(
        page,
        tmp_path,
        KEYS
        + """
      const figure = document.querySelector(".lanes");
      press(figure, "ArrowDown", "ArrowDown");
      told.exchange = tip.textContent;
    """,
    )
    assert "exchange of workers 0 and 1" in told["exchange"]
    text = page.read_text()
    assert len(re.findall(r'class="tie"', text)) == 2
    measured = re.search(r"<caption>measured</caption>.*?</table>", text, re.DOTALL)
    assert measured is not None
    assert measured[0].count("--s:") == 4  # two pairs, both ways


def test_a_run_with_nothing_in_it_has_no_error(tmp_path):
    run = write_tiny(tmp_path / "run", {"a": [[record(0, steady(1, 8), [2.0] * 8)]], "b": []})
    drawn = dom(write(run), tmp_path)
    assert drawn.count('class="line best') == 2
    assert "under each strategy" not in drawn
