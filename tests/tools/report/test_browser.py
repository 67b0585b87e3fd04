"""The page in a real browser: three widths, tooltips, keys, zoom; without a script error."""

from __future__ import annotations

import re
import shutil
import subprocess

import pytest

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
    "--virtual-time-budget=3000",
]


def told_by(page, tmp_path, script):
    """What a script in the page has written into `told`; any error or refused resource fails."""
    assert CHROMIUM is not None
    text = re.sub(r"<meta http-equiv[^>]*>", "", page.read_text())
    copy = tmp_path / "copy.html"
    head = "<script>const told = document.body.dataset;"
    copy.write_text(text.replace("</body>", f"{head}{script}</script></body>"))
    place = [f"--user-data-dir={tmp_path / 'chromium'}", "--window-size=1000,800"]
    command = [CHROMIUM, *QUIET, *place, "--dump-dom", copy.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=140, check=False)
    assert [line for line in done.stderr.splitlines() if "CONSOLE" in line] == []
    assert done.returncode == 0
    [body] = re.findall(r"<body[^>]*>", done.stdout)
    return dict(re.findall(r'data-(\w+)="([^"]*)"', body))


# The least window of the browser is wider than a telephone; a frame is not.
WIDTHS = """
  const whole = "<!doctype html>" + document.documentElement.outerHTML;
  const source = whole.replace(/<script>const told.*/s, "");
  document.body.innerHTML = "";
  const wait = () => new Promise((go) => setTimeout(go, 50));
  (async () => {
    for (const width of [360, 800, 1600]) {
      const frame = document.createElement("iframe");
      frame.width = width; frame.height = 900;
      frame.srcdoc = source;
      document.body.append(frame);
      await new Promise((go) => { frame.onload = go; });
      const page = frame.contentDocument, all = (name) => [...page.querySelectorAll(name)];
      all("details").forEach((node) => { node.open = true; });
      await wait();
      const outside = [], overlapping = [];
      const shown = (box) => box.width > 0 && box.height > 0;
      for (const chart of all(".chart")) {
        const frame = chart.getBoundingClientRect();
        for (const label of chart.querySelectorAll("span")) {
          const box = label.getBoundingClientRect();
          if (shown(box) && (box.left < 0 || box.right > width))
            outside.push(label.textContent);
        }
        const ends = [...chart.querySelectorAll(".end")].map((one) => one.getBoundingClientRect());
        ends.forEach((a, i) => ends.slice(i + 1).forEach((b) => {
          if (a.left < b.right - 1 && b.left < a.right - 1 && a.top < b.bottom - 3
              && b.top < a.bottom - 3) overlapping.push(chart.ariaLabel);
        }));
      }
      for (const label of all(".lane > i > b, .lane > i > u")) {
        const box = label.getBoundingClientRect(), lane = label.closest(".lanes");
        if (shown(box) && box.left < lane.getBoundingClientRect().left - 1)
          outside.push(label.textContent);
      }
      told["over" + width] = page.documentElement.scrollWidth - width;
      told["outside" + width] = outside.join();
      told["overlapping" + width] = overlapping.join();
      told["charts" + width] = all(".chart").filter((c) => shown(c.getBoundingClientRect())).length;
    }
    told.ended = true;
  })();
"""


def test_nothing_leaves_the_window_and_no_names_overlap_at_three_widths(page_of, tmp_path):
    told = told_by(page_of("late"), tmp_path, WIDTHS)
    assert told["ended"] == "true"
    for width in (360, 800, 1600):
        assert int(told[f"over{width}"]) <= 0
        assert told[f"outside{width}"] == told[f"overlapping{width}"] == ""
        assert int(told[f"charts{width}"]) == 2


CHART = """
  const chart = document.querySelector(".chart"), box = chart.getBoundingClientRect();
  const press = (key) => chart.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true }));
  told.stops = [...document.querySelectorAll(".chart")].filter((one) => one.tabIndex === 0).length;
  press("ArrowRight");
  told.key = tip.textContent;
  press("Escape");
  told.hidden = tip.hidden && document.querySelector(".cursor").hidden;
  const at = { clientX: box.left + box.width / 2, clientY: box.top + 3, bubbles: true };
  chart.dispatchEvent(new PointerEvent("pointermove", at));
  told.pointed = tip.textContent;
  chart.dispatchEvent(new PointerEvent("pointerleave"));
  told.left = tip.hidden;
  told.titles = document.querySelectorAll(".lane i[title]").length;
"""


def test_values_of_a_chart_are_shown_to_pointer_and_keys(page_of, tmp_path):
    told = told_by(page_of("typical"), tmp_path, CHART)
    assert int(told["stops"]) == 2
    assert told["key"] != told["pointed"]
    for name in ("key", "pointed"):
        assert re.search(r"ddp: \d\.\d{3}", told[name])
    assert told["hidden"] == told["left"] == "true"
    assert int(told["titles"]) > 0, "the browser shows them"


@pytest.mark.parametrize("name", ["gossip", "votes", "troubled"])
def test_other_pages_run_without_an_error(page_of, tmp_path, name):
    assert told_by(page_of(name), tmp_path, "told.ran = 1;") == {"ran": "1"}
