"""The figure of the README: seconds to DDP's loss, split into computing and the network.

    python benchmarks/hero.py

Writes docs/hero.svg and docs/hero-dark.svg from `results/front.json`, the table of the small GPT on
4 hosts, and the text that the README gives in place of the picture. Windows of less than 560 pixels
show a narrow form.
"""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RESULT = Path(__file__).parent / "results" / "front.json"
ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
README = ROOT / "README.md"
RATES = (10, 25, 100)
STEP_S = 0.030  # emulated compute of an iteration
NAMES = {  # label in the result: name and note in the figure
    "ddp": ("DDP", "torch"),
    "ddp fp16": ("DDP, fp16 hook", "torch"),
    "post-local-sgd": ("Post-local SGD", "torch"),
    "ddp powersgd": ("DDP, PowerSGD", "torch"),
    "dear": ("offbeat, exact", "DeAR"),
    "dreamddp:due=delayed:wire=int4": ("offbeat", "DreamDDP, int4, delayed"),
}
OURS = "dreamddp:due=delayed:wire=int4"
THEMES = {
    "hero.svg": {
        "ground": "#ffffff",
        "text": "#1a1e24",
        "muted": "#59636e",
        "line": "#d5dae1",
        "compute": "#175a94",
        "network": "#c24e00",
        "best": "#eef4fb",
    },
    "hero-dark.svg": {
        "ground": "#0d1117",
        "text": "#e6edf3",
        "muted": "#9aa6b2",
        "line": "#30363d",
        "compute": "#5aa2dd",
        "network": "#f0843d",
        "best": "#15202e",
    },
}
STYLE = """
text{{font-family:-apple-system,"Segoe UI",Helvetica,Arial,"DejaVu Sans",sans-serif;fill:{text}}}
.h1{{font-size:21px;font-weight:700}}.h2,.key{{font-size:13px;fill:{muted}}}
.col{{font-size:13px;font-weight:600}}.name,.num{{font-size:14px}}
.note{{font-size:10.5px;fill:{muted}}}.ours{{font-weight:700}}.foot{{font-size:11px;fill:{muted}}}
.axis{{stroke:{line}}}.compute{{fill:{compute}}}.network{{fill:{network}}}.gap{{fill:{ground}}}
.best{{fill:{best}}}.n1{{font-size:32px;font-weight:700}}.n2{{font-size:23px;fill:{muted}}}
.nk{{font-size:21px;fill:{muted}}}.nc{{font-size:24px;font-weight:600}}.nn{{font-size:26px}}
.narrow{{display:none}}
@media(max-width:560px){{.wide{{display:none}}.narrow{{display:inline}}}}
"""


@dataclass(frozen=True)
class Row:
    """One strategy: iterations to the loss, seconds to the loss by rate, loss at the end."""

    label: str
    iterations: float
    seconds: tuple[float, ...]
    predicted: tuple[float | None, ...]
    last: float

    @property
    def computing_s(self) -> float:
        return self.iterations * STEP_S

    @property
    def weight(self) -> str:
        return " ours" if self.label == OURS else ""


def rows() -> list[Row]:
    """The rows of the figure that the result has, in the order of `NAMES`."""
    [table] = [t for t in json.loads(RESULT.read_text())["tables"] if t["name"] == "gpt-4"]
    known = {line[0]: dict(zip(table["columns"], line, strict=True)) for line in table["rows"]}
    return [_row(label, known[label]) for label in NAMES if label in known]


def middle(cell: Any) -> float:
    """The median of a cell, with or without its spread."""
    return cell[0] if isinstance(cell, list) else cell


def _row(label: str, cells: dict[str, Any]) -> Row:
    iterations = middle(cells["iterations"])
    each = [middle(cells[f"ms at {rate} Mbit/s"]) / 1e3 for rate in RATES]
    off = [cells[f"prediction off by, %, {rate} Mbit/s"] for rate in RATES]
    return Row(
        label,
        iterations,
        tuple(iterations * s for s in each),
        tuple(
            None if o is None else iterations * s * (1 + o / 100)
            for s, o in zip(each, off, strict=True)
        ),
        middle(cells["last loss"]),
    )


def text(x: float, y: float, words: str, kind: str, anchor: str = "start") -> str:
    return (
        f'<text class="{kind}" x="{x:g}" y="{y:g}" text-anchor="{anchor}">'
        f"{html.escape(words)}</text>"
    )


def rect(kind: str, x: float, y: float, width: float, height: float, more: str = "") -> str:
    return (
        f'<rect class="{kind}" x="{x:g}" y="{y:g}" width="{width:.1f}" height="{height:g}"{more}/>'
    )


def bar(x: float, y: float, height: float, scale: float, row: Row, at: int) -> str:
    """One bar: computing, then the network, with a gap of ground between."""
    whole, own = row.seconds[at] * scale, min(row.seconds[at], row.computing_s) * scale
    parts = rect("network", x, y, whole, height) + rect("gap", x, y, min(whole, own + 1.3), height)
    return parts + rect("compute", x, y, own, height)


def wide(found: list[Row]) -> Iterator[str]:
    """The figure at 560 pixels and more: one panel for each rate, one scale for all."""
    base, ours = found[0], found[-1]
    first, last = base.seconds[0], ours.seconds[0]
    yield text(0, 25, f"At 10 Mbit/s: DDP’s loss in {last:.1f} s instead of {first:.0f} s", "h1")
    about = "Seconds until a small GPT reaches the held-out loss of DDP’s 120th iteration; 4 hosts"
    yield text(0, 50, f"{about}, one scale for all networks", "h2")
    scale, left = 300 / max(row.seconds[0] for row in found), 152
    panels = (left, 508, 702)
    yield rect("compute", left, 66, 13, 13) + text(left + 19, 77, "computing", "key")
    yield rect("network", left + 104, 66, 13, 13)
    yield text(left + 123, 77, "the network: all other time", "key")
    bottom = 112 + 46 * len(found)
    yield rect("best", -8, bottom - 54, 816, 46, ' rx="6"')
    for x, rate in zip(panels, RATES, strict=True):
        yield text(x, 102, f"{rate} Mbit/s", "col")
        yield f'<line class="axis" x1="{x}" x2="{x}" y1="108" y2="{bottom - 6}"/>'
    for number, row in enumerate(found):
        y = 112 + number * 46
        name, note = NAMES[row.label]
        yield text(0, y + 13, name, "name" + row.weight) + text(0, y + 29, note, "note")
        for at, x in enumerate(panels):
            yield bar(x, y + 1, 28, scale, row, at)
            shown = f"{row.seconds[at]:.1f} s"
            yield text(x + row.seconds[at] * scale + 7, y + 21, shown, "num" + row.weight)
    yield text(0, bottom + 20, _footnote(found), "foot")
    second = (
        f"offbeat needs {ours.iterations:g} iterations where DDP needs {base.iterations:g}; after "
        f"240 of each DDP’s loss is the lower one, {base.last:.3f} against {ours.last:.3f}."
    )
    yield text(0, bottom + 37, second, "foot")


def _footnote(found: list[Row]) -> str:
    base, ours = found[0], found[-1]
    words = "Compute is emulated (30 ms per iteration); messages and losses (3 seeds) are real."
    if base.predicted[0] is None or ours.predicted[0] is None:
        return words
    return (
        f"{words} Predicted at 10 Mbit/s: DDP {base.predicted[0]:.0f} s, offbeat "
        f"{ours.predicted[0]:.1f} s."
    )


def narrow(found: list[Row]) -> Iterator[str]:
    """The figure below 560 pixels: bars of the slowest network, numbers of the others."""
    first, last = found[0].seconds[0], found[-1].seconds[0]
    yield text(0, 33, f"DDP’s loss in {last:.1f} s instead of {first:.0f} s", "n1")
    yield text(0, 68, "Seconds to DDP’s loss, small GPT, 4 hosts", "n2")
    yield text(238, 108, "10 Mbit/s", "nc")
    yield text(690, 108, "25", "nc", "end") + text(790, 108, "100", "nc", "end")
    bottom, scale = 122 + 45 * len(found), 300 / max(row.seconds[0] for row in found)
    yield rect("best", -8, bottom - 50, 816, 44, ' rx="6"')
    for number, row in enumerate(found):
        y, kind = 122 + number * 45, "nn" + row.weight
        yield text(0, y + 25, NAMES[row.label][0], kind) + bar(238, y + 1, 32, scale, row, 0)
        yield text(247 + row.seconds[0] * scale, y + 26, f"{row.seconds[0]:.1f}", kind)
        yield text(690, y + 26, f"{row.seconds[1]:.1f}", kind, "end")
        yield text(790, y + 26, f"{row.seconds[2]:.1f}", kind, "end")
    yield rect("compute", 0, bottom + 9, 20, 20) + text(28, bottom + 27, "computing", "nk")
    yield rect("network", 170, bottom + 9, 20, 20) + text(198, bottom + 27, "the network", "nk")
    yield text(800, bottom + 27, "emulated compute, real messages", "nk", "end")


def figure(found: list[Row], colours: dict[str, str]) -> str:
    """The whole figure as SVG."""
    spoken = "; ".join(
        f"{NAMES[row.label][0]}: {', '.join(f'{s:.1f}' for s in row.seconds)}" for row in found
    )
    title = f"Seconds until a small GPT has DDP’s loss, at 10, 25 and 100 Mbit/s. {spoken}"
    height = 166 + 46 * len(found)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="-10 -4 822 {height}" role="img">'
        f"<title>{html.escape(title)}</title><style>{STYLE.format(**colours)}</style>"
        f'<rect x="-10" y="-4" width="822" height="{height}" fill="{colours["ground"]}"/>'
        f'<g class="wide">{"".join(wide(found))}</g>'
        f'<g class="narrow">{"".join(narrow(found))}</g></svg>\n'
    )


def alternative(found: list[Row]) -> str:
    """The figure at the slowest rate in one sentence."""
    seconds = "; ".join(f"{NAMES[row.label][0]} {row.seconds[0]:.3g}" for row in found)
    about = f"Seconds until a small GPT on 4 hosts at {RATES[0]} Mbit/s has the loss of DDP"
    return f"{about}: {seconds}"


def with_alternative(text: str, found: list[Row]) -> str:
    """The README with the sentence in place of the picture."""
    return re.sub(r'(<img src="docs/hero\.svg" alt=")[^"]*', rf"\g<1>{alternative(found)}", text)


def main() -> None:
    README.write_text(with_alternative(README.read_text(), rows()))
    for name, colours in THEMES.items():
        (DOCS / name).write_text(figure(rows(), colours))
        print(f"docs/{name}")


if __name__ == "__main__":
    main()
