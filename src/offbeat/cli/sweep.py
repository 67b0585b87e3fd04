"""Sweep of `offbeat simulate` over hosts, rates, jitters, periods and strategies."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Any

from cyclopts import Parameter

from offbeat.core.profile import Profile
from offbeat.core.profile.elsewhere import extrapolate
from offbeat.core.units import format_rate, parse_deviation, parse_given_rate_bps, parse_whole

if TYPE_CHECKING:
    from offbeat.core.sim import Prediction
    from offbeat.strategies import Strategy

    Predict = Callable[[Profile], Prediction]

MEASURES = ("iteration_s", "bound_s", "exposed_s")  # last columns
NONE = "-"


@Parameter(name="*")
@dataclass(frozen=True)
class Axes:
    """Options with values of the places, separated by commas; by default that of the profile.

    Attributes:
        rate: Rates of the links instead of the measured ones: 10mbit,100mbit.
        hosts: Numbers of replicas instead of the profile's: 4,32.
        per_node: Numbers of ranks that share a replica: 1,4,8.
        inside: Rate between the ranks of a node, instead of the measured one.
        jitter: Relative deviations of compute instead of the measured one: 0,.1.
    """

    rate: str | None = None
    hosts: str | None = None
    per_node: str | None = None
    inside: str | None = None
    jitter: str | None = None

    def profiles(self, measured: Profile) -> Iterator[tuple[dict[str, Any], Profile]]:
        """Yield for each combination its columns of the table, and the profile for it."""
        from offbeat.experiments.elsewhere import with_nodes

        if self.inside is not None and self.per_node is None:
            raise ValueError(f"--inside ({self.inside}) needs --per-node, the ranks of a node")
        inside_bps = parse_given_rate_bps(self.inside, "--inside")
        axes = (
            _each("--hosts", self.hosts, partial(parse_whole, least=2)),
            _each("--per-node", self.per_node, partial(parse_whole, least=1)),
            _each("--rate", self.rate, parse_given_rate_bps),
            _each("--jitter", self.jitter, parse_deviation),
        )
        for hosts, per_node, rate_bps, jitter in product(*axes):
            there = extrapolate(measured, hosts=hosts, rate_bps=rate_bps, jitter=jitter)
            place: dict[str, Any] = {"hosts": there.world_size}
            if per_node is not None:
                place["per_node"] = per_node
            place["rate"] = None if rate_bps is None else format_rate(rate_bps)
            place["jitter"] = there.jitter
            yield place, there if per_node is None else with_nodes(there, per_node, inside_bps)


def _each(name: str, text: str | None, parse: Callable[[str, str], Any]) -> list[Any]:
    return [None] if text is None else [parse(item.strip(), name) for item in text.split(",")]


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
    return [
        strategy if text is None else with_setting(strategy, "period", text)
        for strategy in strategies
        for text in (period.split(",") if hasattr(strategy, "period") else [None])
    ]


def cells(found: Sequence[dict[str, Any]]) -> list[list[str]]:
    """Return the names of the columns of the rows, and their cells."""
    names = [name for name in found[0] if name != "prediction"]
    values = (
        [*(row[name] for name in names), *(getattr(row["prediction"], name) for name in MEASURES)]
        for row in found
    )
    return [[*names, *MEASURES], *([_cell(value) for value in row] for row in values)]


def _cell(value: Any) -> str:
    if value is None:
        return NONE
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def align_columns(lines: Sequence[Sequence[str]]) -> str:
    """Return the lines with columns of equal width, the first column left-aligned."""
    first, *rest = ([*column] for column in zip(*lines, strict=True))
    columns = [[cell.ljust(max(map(len, first))) for cell in first]]
    columns += [[cell.rjust(max(map(len, column))) for cell in column] for column in rest]
    return "\n".join("  ".join(line) for line in zip(*columns, strict=True))


def csv_text(lines: Sequence[Sequence[str]]) -> str:
    """Return the lines as CSV. Unknown and unset cells are empty."""
    out = io.StringIO()
    rows = [["" if cell == NONE else cell for cell in line] for line in lines]
    csv.writer(out, lineterminator="\n").writerows(rows)
    return out.getvalue().rstrip("\n")
