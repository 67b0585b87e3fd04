"""Pictures of a graph for the terminal: workers in a circle or a grid, or a table of pairs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import networkx as nx

MOST_IN_A_CIRCLE = 32  # workers; more become a matrix
MOST_LINES = 72  # across a circle; more hide each other
MOST_COLUMNS = 14  # of a torus
MATRIX_COLUMNS = 64  # characters; a dot stands for several pairs if there are more

BLANK = 0x2800
DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))  # by row and column of a character

Point = tuple[float, float]


def draw(graph: nx.Graph, grid: tuple[int, int] | None = None) -> str:
    """A circle while its lines can be told apart, and else who exchanges with whom.

    `grid`: rows and columns of a torus.
    """
    if grid is not None and grid[1] <= MOST_COLUMNS:
        return torus(*grid)
    if len(graph) <= MOST_IN_A_CIRCLE:
        return circle(graph) if graph.number_of_edges() <= MOST_LINES else table(graph)
    return matrix(graph)


def torus(rows: int, columns: int) -> str:
    """A grid; lines that leave it come back on the other side."""
    wide = len(str(rows * columns - 1))
    leaves = "-" if columns > 2 else " "
    between = " " * 2 + " " * (wide - 1) + ("|" + " " * (wide + 2)) * columns
    outside = between.rstrip() if rows > 2 else ""
    lines = [outside]
    for row in range(rows):
        workers = (f"{row * columns + column:>{wide}}" for column in range(columns))
        lines += [f"{leaves} {' - '.join(workers)} {leaves}".rstrip(), between.rstrip()]
    return "\n".join([*lines[:-1], outside]).strip("\n")


def circle(graph: nx.Graph) -> str:
    """Workers clockwise from the top; one that is joined to all others is in the middle."""
    workers = sorted(graph)
    rows = max(11, min(4 + 2 * len(workers), 35) | 1)
    canvas = _Canvas(rows, 2 * rows)
    places = _places(graph, workers, canvas)
    for i, j in graph.edges:
        canvas.line(places[i], places[j])
    for worker, place in places.items():
        canvas.label(place, str(worker))
    return canvas.text()


def _places(graph: nx.Graph, workers: Sequence[int], canvas: _Canvas) -> dict[int, Point]:
    middle = (canvas.width - 1) / 2, (canvas.height - 1) / 2
    radius = middle[1] - 2
    joined = [worker for worker in workers if len(graph.adj[worker]) == len(workers) - 1]
    hub = joined if len(joined) == 1 and len(workers) > 3 else []
    around = [worker for worker in workers if worker not in hub]
    places = dict.fromkeys(hub, middle)
    for k, worker in enumerate(around):
        angle = 2 * math.pi * k / len(around)
        places[worker] = (
            middle[0] + radius * math.sin(angle),
            middle[1] - radius * math.cos(angle),
        )
    return places


def table(graph: nx.Graph) -> str:
    """Row i, column j: a square where i and j exchange."""
    workers = sorted(graph)
    wide = len(str(workers[-1]))
    head = [f"{worker:<4}" for worker in workers[::2]]
    rows = [
        f"{i:>{wide}}  {' '.join('■' if graph.has_edge(i, j) else '·' for j in workers)}"
        for i in workers
    ]
    return "\n".join([f"{' ' * wide}  {''.join(head)}".rstrip(), *rows])


def matrix(graph: nx.Graph) -> str:
    """The same in dots of Braille, for many workers; a dot may stand for a square of pairs."""
    n = len(graph)
    at = {worker: k for k, worker in enumerate(sorted(graph))}
    step = -(-n // (2 * MATRIX_COLUMNS))  # pairs along a dot's side
    size = -(-n // step)
    canvas = _Canvas(-(-size // 4), -(-size // 2))
    for i, j in graph.edges:
        x, y = at[i] // step, at[j] // step
        canvas.dot(x, y)
        canvas.dot(y, x)
    wide = len(str(n - 1))
    head = "".join(str(2 * column * step).ljust(8) for column in range(0, canvas.columns, 8))
    lines = [f"{' ' * wide}  {head}".rstrip()]
    for row, line in enumerate(canvas.lines()):
        mark = str(4 * row * step) if row % 4 == 0 else ""
        lines.append(f"{mark:>{wide}}  {line}")
    if step > 1:
        lines.append(f"{' ' * wide}  a dot is {step} x {step} pairs")
    return "\n".join(lines)


class _Canvas:
    """Characters of 2 x 4 dots of Braille, and labels over them."""

    def __init__(self, rows: int, columns: int) -> None:
        self.rows, self.columns = rows, columns
        self.width, self.height = 2 * columns, 4 * rows
        self._cells = [[BLANK] * columns for _ in range(rows)]
        self._letters: dict[tuple[int, int], str] = {}

    def dot(self, x: int, y: int) -> None:
        self._cells[y // 4][x // 2] |= DOTS[y % 4][x % 2]

    def line(self, start: Point, end: Point) -> None:
        steps = max(1, math.ceil(max(abs(end[0] - start[0]), abs(end[1] - start[1]))))
        for k in range(steps + 1):
            x = start[0] + (end[0] - start[0]) * k / steps
            y = start[1] + (end[1] - start[1]) * k / steps
            self.dot(round(x), round(y))

    def label(self, place: Point, text: str) -> None:
        """A text in the middle of a place, with room on both sides."""
        row, first = int(place[1] // 4), int(place[0] // 2) - len(text) // 2
        for k, letter in enumerate(f" {text} ", start=first - 1):
            if 0 <= k < self.columns and (letter != " " or (row, k) not in self._letters):
                self._letters[row, k] = letter

    def text(self) -> str:
        """Without blank lines at top and bottom."""
        return "\n".join(self.lines()).strip("\n")

    def lines(self) -> list[str]:
        return ["".join(self._row(row)).rstrip() for row in range(self.rows)]

    def _row(self, row: int) -> Iterable[str]:
        for column, cell in enumerate(self._cells[row]):
            letter = self._letters.get((row, column), chr(cell))
            yield " " if letter == chr(BLANK) else letter
