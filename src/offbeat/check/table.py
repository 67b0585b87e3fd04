"""Text of the findings of a check, at most 80 columns wide."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from functools import partial
from statistics import median

from offbeat.check.facts import RankFacts
from offbeat.check.measure import CONNECTIONS, LinkFindings
from offbeat.core.words import digits

WIDTH = 80
MBIT, GBIT = 1e6, 1e9
GAIN = 1.1  # least gain by several connections for which the setting is named
CLOCK_MS = 0.1  # smaller differences are not resolved
_NAME, _CELL = 10, 7  # characters of a host's name, and of a number

number = partial(digits, count=2)


def wrap(level: str, text: str) -> list[str]:
    """Return the lines of a verdict."""
    head = f"{level + ':':<6} "
    later = " " * len(head)
    return textwrap.wrap(
        text, WIDTH, initial_indent=head, subsequent_indent=later, break_on_hyphens=False
    )


def facts_lines(facts: Sequence[RankFacts], place: str, met_s: float) -> list[str]:
    """Return one line per fact of all ranks."""
    first = facts[0].versions
    same = all(fact.versions == first for fact in facts)
    versions = ", ".join(f"{name} {version}" for name, version in first.items())
    mtus = {f"MTU {endpoint.mtu:,}" for fact in facts for endpoint in fact.endpoints}
    controls = {fact.congestion_control for fact in facts}
    return [
        f"  meeting    all {len(facts)} met at {place} within {number(met_s)} s",
        f"  versions   {versions} {'everywhere' if same else 'on rank 0'}",
        f"  files      {min(fact.open_files for fact in facts):,} may be open",
        f"  network    {', '.join([*sorted(mtus), *sorted(controls)])}",
    ]


def link_lines(facts: Sequence[RankFacts], found: LinkFindings) -> list[str]:
    """Return the tables of one link; none if nothing was measured."""
    if not found.rate_bps:
        return []
    clocks = found.clock_offsets().values()
    apart_ms = max(CLOCK_MS, 1e3 * (max(clocks) - min(clocks)))
    unit, name = (MBIT, "Mbit/s") if max(found.rate_bps.values()) < 1e4 * MBIT else (GBIT, "Gbit/s")
    rates = {pair: rate / unit for pair, rate in found.rate_bps.items()}
    delays = {pair: 1e3 * delay_s for pair, delay_s in found.delay_s.items()}
    delays |= {(b, a): ms for (a, b), ms in delays.items()}
    names = {rank: f"  {rank:<2} {facts[rank].host:<{_NAME}.{_NAME}}" for rank in found.hosts}
    lines = [f"  clocks     within {number(apart_ms)} ms"]
    if 5 + _NAME + _CELL * len(names) <= WIDTH:
        lines += _matrix(name, names, rates) + _matrix("ms, return", names, delays)
    else:
        lines.append(f"  {name:<{_NAME + 3}} median  lowest to    ms median  highest to")
        lines += [_row(names[rank], rank, rates, delays) for rank in names]
    for rate_bps in found.at_once_bps.values():
        lines.append(f"  at once    {number(rate_bps / unit)} {name} in a ring of all hosts")
    return lines + _parallel_lines(found)


def _matrix(
    name: str, names: Mapping[int, str], cells: Mapping[tuple[int, int], float]
) -> list[str]:
    """Return a table of values from the host of the row to that of the column."""
    lines = [f"  {name:<{_NAME + 3}}" + "".join(f"{f'to {rank}':>{_CELL}}" for rank in names)]
    for a in names:
        row = [number(cells[a, b]) if (a, b) in cells else "-" for b in names]
        lines.append(names[a] + "".join(f"{cell:>{_CELL}}" for cell in row))
    return lines


def _row(
    name: str,
    rank: int,
    rates: Mapping[tuple[int, int], float],
    delays: Mapping[tuple[int, int], float],
) -> str:
    """Return the row of a host where a table of all pairs is too wide."""
    rate, ms = ({b: x for (a, b), x in cells.items() if a == rank} for cells in (rates, delays))
    if not rate or not ms:
        return name.rstrip()
    slow, far = min(rate, key=rate.__getitem__), max(ms, key=ms.__getitem__)
    return (
        f"{name}{number(median(rate.values())):>7} {number(rate[slow]):>7} {slow:<5}"
        f"{number(median(ms.values())):>9} {number(ms[far]):>8} {far}"
    )


def _parallel_lines(found: LinkFindings) -> list[str]:
    """Return how much several connections carry compared with one, and the setting if they help."""
    if not found.parallel_bps:
        return []
    gains = {count: found.parallel_bps[count] / found.parallel_bps[1] for count in CONNECTIONS[1:]}
    best = max(gains, key=gains.__getitem__)
    carried = ", ".join(f"{count} carry {gain:.2f}" for count, gain in gains.items())
    lines = [f"  parallel   {carried} times what 1 carries"]
    if gains[best] > GAIN:
        setting = f"OFFBEAT_LINKS={found.endpoints[0].interface}*{best}"
        lines.append(f"             {setting} opens {best} connections")
    return lines
