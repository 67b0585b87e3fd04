"""The page in a real browser: it draws, without a script error."""

from __future__ import annotations

import re
import shutil
import subprocess

import pytest
from report.test_votes import ranks as voting_ranks
from support.gossip_runs import THREE
from support.synthetic_runs import NEAR_AND_FAR, late, profile, three, write_run
from support.tiny_runs import record, steady, write_tiny

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


def dom(page, tmp_path):
    """The document after its scripts ran; fails on any error or refused resource."""
    assert CHROMIUM is not None
    profile_dir = f"--user-data-dir={tmp_path / 'chromium'}"
    command = [CHROMIUM, *QUIET, profile_dir, "--dump-dom", page.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=140, check=False)
    said = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    assert said == []
    assert done.returncode == 0
    return done.stdout


def test_charts_are_drawn_and_keys_move_from_span_to_span(tmp_path):
    facts = profile(6, 2)
    run = write_run(tmp_path / "run", facts, three(facts), iterations=24, recorded=20)
    page = write(run)
    text = page.read_text()
    press = """<script>
      const rank = document.getElementById("rank");
      const figure = document.querySelector("[data-timeline]");
      const key = (name) => figure.querySelector("svg").dispatchEvent(
        new KeyboardEvent("keydown", { key: name }));
      key("ArrowRight"); key("ArrowRight");
      document.body.dataset.first = tip.textContent;
      const svg = figure.querySelector("svg"), box = svg.getBoundingClientRect();
      const at = { clientX: box.left + 60, clientY: box.top + 40 };
      svg.dispatchEvent(new PointerEvent("pointermove", at));
      document.body.dataset.pointed = tip.textContent;
      svg.dispatchEvent(new PointerEvent("pointerleave"));
      document.body.dataset.left = tip.hidden;
      rank.value = "all"; rank.dispatchEvent(new Event("change", { bubbles: true }));
      key("ArrowDown"); key("ArrowDown");
      document.body.dataset.second = tip.textContent;
      const table = document.querySelector(".box"), sides = [];
      const seen = (width, left) => {
        table.style.maxWidth = table.style.width = width;
        table.scrollLeft = left;
        table.dispatchEvent(new Event("scroll"));
        sides.push([...table.classList].sort().join(" ") + (table.nextSibling.hidden ? "" : "!"));
      };
      seen("300px", 0); seen("300px", 50); seen("300px", 9999); seen("9999px", 0);
      document.body.dataset.sides = sides.join("; ");
      document.querySelector("#series button").click();
      document.body.dataset.lines = document.querySelectorAll(".chart .line").length;
    </script></body>"""
    text = re.sub(r"<meta http-equiv[^>]*>", "", text).replace("</body>", press)
    (run / "pressed.html").write_text(text)
    drawn = dom(page, tmp_path)
    assert drawn.count('class="lane"') == 3 * 2 * 2  # strategies, panels, lanes
    for kind in ("forward", "backward", "wait", "grad", "param"):
        assert re.search(rf'<path class="{kind}" d="M[^"]+z"', drawn)
    assert len(re.findall(r'<path class="series line s\d d0" d="M[^"]+"', drawn)) == 6
    pressed = dom(run / "pressed.html", tmp_path)
    assert re.search(r'data-first="forward 5 · predicted\s+rank 0, compute, iteration', pressed)
    assert re.search(r'data-pointed="[a-z]+ \d+ · predicted\s+rank 0, compute, iteration', pressed)
    assert 'data-left="true"' in pressed
    assert re.search(r'data-second="\w+ [\d–]+ · predicted\s+rank [01], ', pressed)
    assert 'data-lines="4"' in pressed
    sides = "box more-right!; box more-left more-right!; box more-left!; box"
    assert f'data-sides="{sides}"' in pressed


def test_generations_are_coloured_named_and_explained(tmp_path):
    facts = profile(6, 2, NEAR_AND_FAR)
    run = write_run(tmp_path / "run", facts, late(facts), iterations=24, recorded=20)
    text = write(run).read_text()
    press = """<script>
      const seen = (label, panel) => {
        const window = timelines[data.labels.indexOf(label)][panel];
        const row = { panel, window, rank: 0, name: "lane" };
        return window.ranks.get(0).spans.map((s) => describe(row, s).split("\\n")[2]);
      };
      document.body.dataset.deft = seen("deft", "predicted").join("; ");
      document.body.dataset.ddp = seen("ddp", "predicted").join("; ");
    </script></body>"""
    text = re.sub(r"<meta http-equiv[^>]*>", "", text).replace("</body>", press)
    (run / "pressed.html").write_text(text)
    drawn = dom(run / "pressed.html", tmp_path)
    deft, ddp = (re.search(rf'data-{label}="([^"]*)"', drawn) for label in ("deft", "ddp"))
    assert deft is not None
    assert ddp is not None
    said = deft[1].split("; ")
    assert said.count("holds the gradients of iterations 3–4") == 2
    assert said.count("applies the gradients of iteration 2") == 1
    assert said.count("applies the gradients of iterations 3–4") == 1
    assert "gradients" not in ddp[1]
    figures = dict(re.findall(r'aria-label="Timeline of (\w+),.*?(<svg.*?</svg>)', drawn))
    for look in ("grad g0", "grad g1", "grad g3"):
        assert re.search(rf'<path class="{look}" d="M', figures["deft"])
    assert re.search(r">(grad )?\d–\d of it\. 3–4<", figures["deft"])
    assert re.search(r'<path class="reduce_scatter g0" d="M', figures["dear"])
    assert re.search(r'<path class="all_gather g3" d="M', figures["dear"])
    assert re.search(r'<path class="grad" d="M', figures["ddp"])
    assert not re.search(r'class="[^"]*g\d', figures["ddp"])
    assert "net, channel 2" in drawn
    legend = re.search(r'id="kinds">(.*?)</ul>', drawn)
    assert legend is not None
    words = re.sub(r"<[^>]*>", "|", legend[1])
    for item in ("reduce-scatter of gradients", "gradients in the colour of the bar above"):
        assert item in words


def test_votes_are_marked_under_the_loss(tmp_path):
    run = write_tiny(tmp_path / "run", {"selsync": [voting_ranks()]})
    drawn = dom(write(run), tmp_path)
    marks = re.findall(r'<path class="vote s0" d="([^"]*)"', drawn)
    assert [mark.count("M") for mark in marks] == [1, 2] * 2  # ranks, charts
    assert drawn.count(">rank 1</text>") == 2
    assert drawn.count(">votes to synchronize, selsync</text>") == 2


def test_gossip_is_drawn_between_partners(tmp_path):
    run = write_tiny(tmp_path / "run", {"a2cid2": [THREE]})
    facts = profile(2, 3)
    sim.predict(A2CiD2(rate=0.5), facts).trace.save(run / "a2cid2" / "predicted.json")
    text = write(run).read_text()
    press = """<script>
      const [own] = gossips, svg = document.querySelector("[data-gossip] svg");
      const told = own.measured.exchanges.map((one) => describeExchange("measured", one));
      document.body.dataset.told = told.join("; ");
      svg.dispatchEvent(new KeyboardEvent("keydown", { key: "ArrowRight" }));
      document.body.dataset.chosen = document.querySelector(".chosen").dataset.pair;
      const zoom = document.getElementById("zoom"), before = svg.clientWidth;
      zoom.value = "4";
      zoom.dispatchEvent(new Event("change", { bubbles: true }));
      const wide = document.querySelector("[data-gossip] svg").clientWidth;
      document.body.dataset.zoomed = (wide / before).toFixed(2);
      zoom.value = "1";
      zoom.dispatchEvent(new Event("change", { bubbles: true }));
    </script></body>"""
    text = re.sub(r"<meta http-equiv[^>]*>", "", text).replace("</body>", press)
    (run / "pressed.html").write_text(text)
    drawn = dom(run / "pressed.html", tmp_path)
    assert "exchange of workers 0 and 1 · measured" in drawn
    assert "400 B in each direction, 800 B/s" in drawn
    assert re.search(r'data-chosen="\d-\d"', drawn)
    assert 'data-zoomed="4.00"' in drawn
    (figure,) = re.findall(r"<figure[^>]*data-gossip.*?</figure>", drawn, re.DOTALL)
    assert figure.count("worker 2") == 2  # a lane in each panel
    lanes = [float(y) for y in re.findall(r'class="lane" x="1" y="([\d.]+)"', figure)]
    ends = re.findall(r'data-pair="(\d-\d)".*?M([\d.]+) ([\d.]+)L([\d.]+) ([\d.]+)"', figure)
    for pair, _, y0, _, y1 in ends[-2:]:  # the measured ones: in the lanes of their workers
        for worker, y in zip(map(int, pair.split("-")), (y0, y1), strict=True):
            assert lanes[3 + worker] < float(y) < lanes[3 + worker] + 20
    assert [pair for pair, *_ in ends[-2:]] == ["0-1", "1-2"]
    assert all(x0 == x1 for _, x0, _, x1, _ in ends[-2:])
    maps = re.findall(r'<div class="map".*?</div>', drawn, re.DOTALL)
    assert len(maps) == 2
    assert maps[1].count('class="cell"') == 4  # two pairs, both ways


def test_a_run_with_nothing_in_it_has_no_error(tmp_path):
    run = write_tiny(tmp_path / "run", {"a": [[record(0, steady(1, 8), [2.0] * 8)]], "b": []})
    drawn = dom(write(run), tmp_path)
    assert "No timeline was predicted or recorded." in drawn
    assert drawn.count('class="series line') == 2
