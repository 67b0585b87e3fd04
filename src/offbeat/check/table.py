"""Text of the findings of a check, at most 80 columns wide."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from statistics import median

from offbeat.check.facts import RankFacts
from offbeat.check.link_check import CONNECTIONS, LinkFindings

WIDTH = 80
MBIT, GBIT = 1e6, 1e9
GAIN = 1.1  # least gain by several connections for which the setting is named
CLOCK_MS = 0.1  # smaller differences are not resolved
_NAME, _CELL = 10, 7  # characters of a host's name, and of a number

Cells = Mapping[tuple[int, int], str]


def number(value: float) -> str:
    """Return a number with two digits, or all digits before the decimal point."""
    if value >= 10:
        return f"{value:,.0f}"
    return f"{value:.2g}".removeprefix("0") if value >= 1e-3 else "0"


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
    lines = [f"  clocks     within {number(apart_ms)} ms"]
    unit, name = (MBIT, "Mbit/s") if max(found.rate_bps.values()) < 1e4 * MBIT else (GBIT, "Gbit/s")
    labels = {rank: f"  {rank:<2} {facts[rank].host:<{_NAME}.{_NAME}}" for rank in found.hosts}
    rates = {pair: number(rate / unit) for pair, rate in found.rate_bps.items()}
    delays = {pair: number(1e3 * delay) for pair, delay in found.delay_s.items()}
    title = "ms there and back, lowest"
    columns = "".join(f"{f'to {rank}':>{_CELL}}" for rank in found.hosts)
    head = f"  {name:<{_NAME + 3}}{columns}"
    left = [labels[rank] + row for rank, row in _rows(found.hosts, rates).items()]
    right = _rows(found.hosts, delays)
    if len(head) > WIDTH:
        lines += _summary(found, labels, name, unit)
    elif len(head) + 6 + _CELL * len(found.hosts) <= WIDTH:
        rows = zip(left, right.items(), strict=True)
        lines += [f"{head}    {title}", *(f"{a}    {rank:<2}{b}" for a, (rank, b) in rows)]
    else:
        lines += [head, *left, f"  {title}", *(labels[rank] + row for rank, row in right.items())]
    if found.at_once_bps:
        rates_bps = found.at_once_bps.values()
        low, high = number(min(rates_bps) / unit), number(max(rates_bps) / unit)
        span = low if low == high else f"{low} to {high}"
        lines.append(f"  at once    {span} {name} in the ring of all hosts")
    return lines + _parallel_lines(found)


def _rows(ranks: Sequence[int], cells: Cells) -> dict[int, str]:
    """Return the cells of each row."""
    return {
        a: "".join(f"{'-' if a == b else cells.get((a, b), ''):>{_CELL}}" for b in ranks).rstrip()
        for a in ranks
    }


def _summary(found: LinkFindings, labels: Mapping[int, str], name: str, unit: float) -> list[str]:
    """Return one row per host, where a table of all pairs is too wide."""
    lines = [f"  {name:<{_NAME + 3}} median  lowest to    ms median  highest to"]
    for rank in found.hosts:
        rates = {b: rate for (a, b), rate in found.rate_bps.items() if a == rank}
        delays = {sum(pair) - rank: s for pair, s in found.delay_s.items() if rank in pair}
        if not rates or not delays:
            lines.append(labels[rank].rstrip())
            continue
        slow, far = min(rates, key=rates.__getitem__), max(delays, key=delays.__getitem__)
        lines.append(
            f"{labels[rank]}{number(median(rates.values()) / unit):>7} "
            f"{number(rates[slow] / unit):>7} {slow:<5}"
            f"{number(1e3 * median(delays.values())):>9} {number(1e3 * delays[far]):>8} {far}"
        )
    return lines


def _parallel_lines(found: LinkFindings) -> list[str]:
    """Return how much several connections carry compared with one, and the setting if they help."""
    if found.parallel_bps.keys() != {*CONNECTIONS}:
        return []
    single_bps = found.parallel_bps[1]
    if not single_bps:
        return []
    gains = {count: found.parallel_bps[count] / single_bps for count in CONNECTIONS[1:]}
    best = max(gains, key=gains.__getitem__)
    carried = ", ".join(f"{count} carry {gain:.2f}" for count, gain in gains.items())
    lines = [f"  parallel   {carried} times what 1 carries after a pause"]
    if gains[best] > GAIN:
        setting = f"OFFBEAT_LINKS={found.endpoints[0].interface}*{best}"
        lines.append(f"             {setting} opens {best} connections")
    return lines
