"""Sweep of `offbeat simulate` over hosts, rates, jitters, periods and strategies."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Any

from offbeat.cli.texts import number_or_nan
from offbeat.core.profile import Profile
from offbeat.core.profile.elsewhere import extrapolate

if TYPE_CHECKING:
    from offbeat.core.sim import Prediction
    from offbeat.strategies import Strategy

COLUMNS = ("strategy", "period", "hosts", "rate", "jitter", "iteration_s", "bound_s", "exposed_s")
PER_NODE = "per_node"  # column after "hosts" if the option is given
NONE = "-"


@dataclass(frozen=True)
class Axes:
    """Values of rate, hosts, jitter and ranks per node, and the rate inside nodes. The value None
    stands for the profile's."""

    rates: Sequence[str | None]
    hosts: Sequence[int | None]
    jitters: Sequence[float | None]
    per_node: Sequence[int | None] = (None,)
    inside: str | None = None

    @classmethod
    def of(
        cls,
        rate: str | None,
        hosts: str | None,
        jitter: str | None,
        per_node: str | None = None,
        inside: str | None = None,
    ) -> Axes:
        """Parse the options, values separated by commas. ValueError names the wrong option."""
        return cls(
            _parse_list("rate", rate, _parse_rate),
            _parse_list("hosts", hosts, partial(_parse_count, least=2, example="4,32")),
            _parse_list("jitter", jitter, _parse_jitter),
            _parse_list("per_node", per_node, partial(_parse_count, least=1, example="2,4")),
            None if inside is None else _parse_rate("inside", inside),
        )

    def profiles(self, measured: Profile) -> Iterator[tuple[dict[str, Any], Profile]]:
        """Yield for each combination its columns of the table, and the profile for it."""
        from offbeat.experiments.advice.other_networks import with_nodes
        from offbeat.lab.units import parse_rate_bps

        axes = self.hosts, self.per_node, self.rates, self.jitters
        for hosts, per_node, rate, jitter in product(*axes):
            rate_bps = None if rate is None else parse_rate_bps(rate)
            there = extrapolate(measured, hosts=hosts, rate_bps=rate_bps, jitter=jitter)
            place = {"hosts": there.world_size, "rate": rate, "jitter": there.jitter}
            if per_node is not None:
                there = with_nodes(there, per_node, parse_rate_bps(self.inside))
                place[PER_NODE] = per_node
            yield place, there


Predict = Callable[[Profile], "Prediction"]


def rows(
    axes: Axes, measured: Profile, contestants: Sequence[tuple[dict[str, Any], Predict]]
) -> list[dict[str, Any]]:
    """Return one row per combination and contestant, with the prediction in "prediction"."""
    return [
        {**columns, **place, "prediction": predict(profile)}
        for (place, profile), (columns, predict) in product(axes.profiles(measured), contestants)
    ]


def with_periods(strategies: Sequence[Strategy], period: str | None) -> list[Strategy]:
    """Return each strategy with each period. Strategies without a period occur once.

    Raises ValueError if no strategy has a period.
    """
    from offbeat.core.strategy.parsing import with_setting

    if period is None:
        return list(strategies)
    if not any(hasattr(strategy, "period") for strategy in strategies):
        names = ", ".join(strategy.name for strategy in strategies)
        raise ValueError(f"period ({period}) is no setting of {names}; leave it out")
    combined: list[Strategy] = []
    for strategy in strategies:
        if hasattr(strategy, "period"):
            combined += [with_setting(strategy, "period", text) for text in period.split(",")]
        else:
            combined.append(strategy)
    return combined


def columns_of(found: Sequence[dict[str, Any]]) -> list[str]:
    """Return the names of the columns of the rows."""
    names: list[str] = [*COLUMNS]
    if any(PER_NODE in row for row in found):
        names.insert(names.index("hosts") + 1, PER_NODE)
    return names


def cells(row: dict[str, Any]) -> list[str]:
    """Return the cells of a row as text, in the order of `columns_of`."""
    prediction = row["prediction"]
    values = {**row, **{name: getattr(prediction, name) for name in COLUMNS[-3:]}}
    return [_cell(values[name]) for name in columns_of([row])]


def table(found: Sequence[dict[str, Any]]) -> str:
    """Return a table of the rows with aligned columns."""
    return align_columns([columns_of(found), *map(cells, found)])


def align_columns(lines: Sequence[Sequence[str]]) -> str:
    """Return the lines with columns of equal width, the first column left-aligned."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(_align_line(line, widths) for line in lines)


def csv_text(found: Sequence[dict[str, Any]]) -> str:
    """Return the rows as CSV. Unknown and unset cells are empty."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(columns_of(found))
    writer.writerows([["" if cell == NONE else cell for cell in cells(row)] for row in found])
    return out.getvalue().rstrip("\n")


def _align_line(line: Sequence[str], widths: Sequence[int]) -> str:
    first, *rest = zip(line, widths, strict=True)
    return "  ".join([first[0].ljust(first[1]), *(cell.rjust(width) for cell, width in rest)])


def _cell(value: Any) -> str:
    if value is None:
        return NONE
    return f"{value:.6g}" if isinstance(value, float) else str(value)


# --- parsing of options --------------------------------------------------------------------------


def _parse_list(name: str, text: str | None, parse: Callable[[str, str], Any]) -> list[Any]:
    return [None] if text is None else [parse(name, item.strip()) for item in text.split(",")]


def _parse_rate(_name: str, text: str) -> str:
    from offbeat.lab.units import format_rate, parse_rate_bps

    rate_bps = parse_rate_bps(text)
    if rate_bps is None:
        raise ValueError(f"rate ({text!r}) must be a number with a unit; see --help")
    return format_rate(rate_bps)


def _parse_count(name: str, text: str, *, least: int, example: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) < least:
        raise ValueError(f"{name} ({text!r}) must be integers of at least {least}, as in {example}")
    return int(text)


def _parse_jitter(name: str, text: str) -> float:
    value = number_or_nan(text)
    if not 0 <= value <= 2:
        raise ValueError(f"{name} ({text!r}) must be numbers from 0 to 2, as in 0,0.1")
    return value
