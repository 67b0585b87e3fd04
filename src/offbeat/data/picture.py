"""The picture of a partition for the terminal: workers down, classes across, shaded by samples."""

from __future__ import annotations

from rich.table import Table

from offbeat.data.summary import Reader, Summary

SHADES = "·░▒▓█"  # none, then quarters of the largest number
MOST_CHUNKS = 6  # that are named one by one
MOST_COLUMNS = 16  # with more classes a worker is one strip of shades


def draw(summary: Summary) -> Table:
    """One row per worker."""
    table = Table(
        title=f"{summary.split}: {summary.samples} samples, {summary.workers} workers",
        title_justify="left",
        caption="skew: 0 is the mix of all data, 1 has nothing in common with it",
        caption_justify="left",
        caption_style="dim",
    )
    for heading in ("worker", "reads chunks", "samples", "weight", "skew"):
        table.add_column(heading, justify="right")
    wide = len(summary.classes) > MOST_COLUMNS
    for heading in [f"{len(summary.classes)} classes"] if wide else summary.classes:
        table.add_column(heading, justify="left" if wide else "right", overflow="fold")
    most = max(max(reader.histogram) for reader in summary.per_worker)
    for reader in summary.per_worker:
        table.add_row(*_facts(reader), *_cells(reader, most, wide))
    return table


def shade(count: int, most: int) -> str:
    """Darker the more samples; only none at all is a dot."""
    return SHADES[-(-count * (len(SHADES) - 1) // most)]


def _facts(reader: Reader) -> list[str]:
    numbers = [str(chunk) for chunk in reader.reads]
    if len(numbers) > MOST_CHUNKS:
        numbers[2:-1] = [".."]
    facts = (str(reader.samples), f"{reader.weight:.3f}", f"{reader.skew:.2f}")
    return [str(reader.worker), " ".join(numbers), *facts]


def _cells(reader: Reader, most: int, wide: bool) -> list[str]:
    shades = [shade(count, most) for count in reader.histogram]
    if wide:
        return ["".join(shades)]
    return [f"{count} {s * 2}" for count, s in zip(reader.histogram, shades, strict=True)]
