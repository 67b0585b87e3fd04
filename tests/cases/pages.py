"""A page of the report as a tree, and what it shows: the comparison, lanes of boxes and charts."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path

VOID = ("meta", "wbr", "br", "img", "input", "link", "base", "embed")
PLACE = ("left", "width")
SCALES = {"s": 1.0, "ms": 1e-3, "µs": 1e-6, "%": 0.01, "×": 1.0, "": 1.0}
SCALES |= {"B": 1.0, "kB": 1e3, "MB": 1e6, "GB": 1e9}


@dataclass
class Node:
    """An element of a page."""

    tag: str
    attributes: dict[str, str]
    children: list[Node | str] = field(default_factory=list)

    def walk(self) -> Iterator[Node]:
        """Yield this element and all elements inside."""
        yield self
        for child in self.children:
            if isinstance(child, Node):
                yield from child.walk()

    def all(self, tag: str = "", look: str = "") -> list[Node]:
        """Return the elements inside with a tag and with classes."""
        return [
            node
            for node in self.walk()
            if tag in ("", node.tag)
            and {*look.split()} <= {*node.attributes.get("class", "").split()}
        ]

    @property
    def text(self) -> str:
        """Text inside without style and script, on one line."""
        parts = [
            child if isinstance(child, str) else child.text
            for child in self.children
            if isinstance(child, str) or child.tag not in ("style", "script")
        ]
        return " ".join(" ".join(parts).replace("\u00a0", " ").split())

    @property
    def place(self) -> tuple[float, float]:
        """Left and right side in percent of the element around it."""
        style = self.attributes["style"]
        left, width = (float(re.findall(rf"{name}:([-\d.]+)%", style)[0]) for name in PLACE)
        return left, left + width


class _Tree(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.open = [Node("", {})]
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        node = Node(tag, {name: value or "" for name, value in attrs})
        self.open[-1].children.append(node)
        if tag not in VOID:
            self.open.append(node)

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop().tag == tag, f"</{tag}> must close what it has opened"

    def handle_data(self, data: str) -> None:
        self.open[-1].children.append(data)


def read(page: Path | str) -> Node:
    """Return a page as a tree; every element must be closed."""
    tree = _Tree(page if isinstance(page, str) else page.read_text())
    [root] = tree.open
    return root


@dataclass
class Lane:
    """Boxes of a lane: class, left, right in percent, and text of the tooltip."""

    name: str
    boxes: list[tuple[str, float, float, str]]


def lanes_of(root: Node) -> list[Lane]:
    """Return the lanes of a page without the boxes that the zoom shows."""
    return [
        Lane(
            lane.attributes["data-n"],
            [
                (box.attributes["class"], *box.place, box.attributes.get("title", ""))
                for box in lane.children
                if isinstance(box, Node) and box.tag == "i"
            ],
        )
        for lane in root.all("div", "lane")
    ]


def comparison_of(root: Node) -> dict[str, dict[str, Node]]:
    """Return the cells of the contestants by class and by first word of the strategy's name."""
    return {
        row.all("th")[0].text.split()[0]: {
            cell.attributes["class"]: cell for cell in row.all("td")
        }
        for table in root.all("table", "cmp")
        for row in table.all("tbody")[0].all("tr")
        if row not in table.all("tr", "guess")
    }  # fmt: skip


def numbers_in(text: str) -> list[float]:
    """Return the numbers of a text, in seconds, bytes and shares."""
    units = "|".join(map(re.escape, sorted(SCALES, key=len, reverse=True)))
    found = re.findall(rf"([+−]?[\d,]*\.?\d+) ?({units})(?![\w/])", text)
    return [
        float(number.replace(",", "").replace("−", "-")) * SCALES[unit] for number, unit in found
    ]


def first_number(cell: Node) -> float | None:
    """Return the number at the begin of a cell without its small print; None for a dash."""
    texts = [child for child in cell.children if isinstance(child, str)]
    found = numbers_in(" ".join(texts).replace("\u00a0", " "))
    return found[0] if found else None
