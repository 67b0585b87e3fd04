"""The picture of `front.py`: loss against bytes, one panel per model and number of hosts."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence

WIDTH, HEIGHT, LEFT, TOP, RIGHT, BOTTOM = 430, 300, 52, 34, 24, 40
LETTER, LINE = 6.1, 11  # width, height
HIGHEST = 1.25  # of the least loss: what is above is drawn at the top
STYLE = (
    "text{font:11px sans-serif;fill:#6b7280}.title{font-weight:600;font-size:12px}"
    "line,.front{stroke:#9ca3af;fill:none}.front{stroke-dasharray:4 3}"
    ".ours{fill:#2563eb}.torch{fill:#d97706}"
)
Point = tuple[float, float]  # bytes per iteration, loss


def picture(panels: Mapping[str, Mapping[str, Point]], ours: Sequence[str]) -> str:
    """An SVG, two panels in a row; `ours`: labels that are not torch's."""
    parts = []
    for n, (title, points) in enumerate(panels.items()):
        x, y = n % 2 * WIDTH, n // 2 * HEIGHT
        parts.append(f'<g transform="translate({x} {y})">{panel(title, points, ours)}</g>')
    rows = -(-len(panels) // 2)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {2 * WIDTH} {rows * HEIGHT}">'
        f"<style>{STYLE}</style>{''.join(parts)}</svg>\n"
    )


def panel(title: str, points: Mapping[str, Point], ours: Sequence[str]) -> str:
    """Dots, whose names appear under the pointer. Those that nobody beats in both are joined. They
    and torch's are named beside the dot, too, where there is room. Worse ones than `HIGHEST` are at
    the upper edge, without a name."""
    xs = [math.log10(sent) for sent, _ in points.values()]
    ys = [loss for _, loss in points.values()]
    low, high = math.floor(min(xs)), math.ceil(max(xs))
    least, most = 0.98 * min(ys), min(1.02 * max(ys), HIGHEST * min(ys))

    def at(point: Point) -> Point:
        x = (math.log10(point[0]) - low) / (high - low)
        y = (min(point[1], most) - least) / (most - least or 1)
        return LEFT + x * (WIDTH - LEFT - RIGHT), HEIGHT - BOTTOM - y * (HEIGHT - TOP - BOTTOM)

    parts = [f'<text class="title" x="{LEFT}" y="16">{html.escape(title)}</text>']
    for power in range(low, high + 1):
        x = at((10.0**power, least))[0]
        parts.append(f'<line x1="{x:.0f}" x2="{x:.0f}" y1="{HEIGHT - BOTTOM}" y2="{TOP}"/>')
        size = f"{10 ** (power - 3):g} KB" if power < 6 else f"{10 ** (power - 6):g} MB"
        parts.append(f'<text x="{x - 14:.0f}" y="{HEIGHT - 24}">{size}</text>')
    for k in range(5):
        loss = least + k / 4 * (most - least)
        y = at((10.0**low, loss))[1]
        parts.append(f'<text x="4" y="{y + 4:.0f}">{loss:.3f}</text>')
    parts.append(f'<text x="{LEFT}" y="{HEIGHT - 8}">sent per rank and iteration</text>')
    front = best(points)
    course = " ".join(f"{x:.1f},{y:.1f}" for x, y in (at(points[label]) for label in front))
    parts.append(f'<polyline class="front" points="{course}"/>')
    taken: list[tuple[float, float, float]] = []  # left, right, height of words
    for label, point in sorted(points.items(), key=lambda item: (item[0] in ours, item[1][1])):
        (x, y), kind = at(point), "ours" if label in ours else "torch"
        title = f"{label}: {point[0] / 1e3:.1f} KB, {point[1]:.3f}"
        parts.append(
            f'<circle class="{kind}" cx="{x:.1f}" cy="{y:.1f}" r="4"><title>{html.escape(title)}'
            "</title></circle>"
        )
        if point[1] >= most or (label not in front and kind == "ours"):
            continue
        width = LETTER * len(label)
        left = x + 7 if x + 7 + width < WIDTH else x - 7 - width
        for height in (y, y - LINE, y + LINE):
            near = [words for words in taken if abs(height - words[2]) < LINE]
            if not any(left < end and begin < left + width for begin, end, _ in near):
                taken.append((left, left + width, height))
                name = html.escape(label)
                parts.append(f'<text x="{left:.0f}" y="{height + 4:.0f}">{name}</text>')
                break
    return "".join(parts)


def best(points: Mapping[str, Point]) -> list[str]:
    """Those that nobody beats in bytes and in loss, by bytes."""
    found: list[str] = []
    for label, (_, loss) in sorted(points.items(), key=lambda item: item[1]):
        if not found or loss < points[found[-1]][1]:
            found.append(label)
    return found
