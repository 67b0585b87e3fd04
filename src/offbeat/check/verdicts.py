"""Verdicts of a check, the most serious first."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from statistics import median

from offbeat.check.facts import RankFacts, is_loopback
from offbeat.check.measure import LinkFindings
from offbeat.check.table import MBIT, number

LEVELS = FAILS, SLOW, BEWARE = "fails", "slow", "beware"  # the most serious first
SHOWN = 4  # pairs of one kind
SLOW_SHARE = 0.5  # a pair is slow below this share of the usual rate
SHARED = 0.7  # hosts share a link if their rates at once are below this share of those alone
CLOCK_S = 0.1
SCRIPT_FILES = 256  # files of a script: data, logs, libraries

Verdict = tuple[str, str]


def facts_verdicts(facts: Sequence[RankFacts]) -> Iterator[Verdict]:  # noqa: C901
    """Yield the verdicts that need no measurement."""
    for rank, fact in enumerate(facts):
        if fact.problem is not None:
            yield FAILS, f"{_at(facts, rank)}: {fact.problem}."
    for text in _differences(facts, "offbeat", [fact.versions["offbeat"] for fact in facts]):
        yield FAILS, f"{text}. Install one version."
    if len({len(fact.endpoints) for fact in facts if fact.problem is None}) > 1:
        yield FAILS, "OFFBEAT_LINKS must name the same number of links on every rank."
    if len({fact.host_key for fact in facts}) > 1:
        for rank, fact in enumerate(facts):
            for address in {point.gloo_address for point in fact.endpoints}:
                if is_loopback(address):
                    yield (
                        FAILS,
                        f"{_at(facts, rank)} listens on {address}, which no other host reaches. "
                        "Name its interface (OFFBEAT_LINKS=eth0), or remove that line from its "
                        "/etc/hosts.",
                    )
    for name in ("torch", "python"):
        for text in _differences(facts, name, [fact.versions[name] for fact in facts]):
            yield BEWARE, f"{text}. Install one version."
    controls = [fact.congestion_control for fact in facts]
    for text in _differences(facts, "congestion control", controls):
        yield BEWARE, f"{text}. They share a link unevenly."
    for rank, fact in enumerate(facts):
        # To every other rank, one connection for control and all those of each link.
        connections = 1 + sum(point.connections for point in fact.endpoints)
        needed = SCRIPT_FILES + connections * (len(facts) - 1)
        if fact.open_files < needed:
            yield (
                BEWARE,
                f"{fact.open_files:,} files may be open on {_at(facts, rank)}, about {needed:,} "
                "are needed. ulimit -n 65536",
            )


def link_verdicts(facts: Sequence[RankFacts], found: LinkFindings) -> Iterator[Verdict]:
    """Yield the verdicts of one link."""
    yield from _shorten(FAILS, [*_reach_texts(facts, found)])
    yield from _shorten(FAILS, [*_failure_texts(facts, found)])
    yield from _shorten(SLOW, [*_slow_texts(facts, found)])
    for at_once in found.at_once_bps.values():
        if at_once < SHARED * (alone := found.alone_bps()):
            yield (
                SLOW,
                f"at once {number(at_once / MBIT)} Mbit/s, alone {number(alone / MBIT)}: hosts "
                f"share a link. offbeat measures that before it plans; expect {at_once / alone:.0%}"
                " of the rate of one pair alone.",
            )
    for text in _differences(facts, "MTU", [point.mtu for point in found.endpoints]):
        yield BEWARE, f"{text}. Larger packets may be lost between them."
    for rank, offset_s in found.clock_offsets().items():
        if abs(offset_s) > CLOCK_S:
            yield (
                BEWARE,
                f"the clock of {_at(facts, rank)} is {number(abs(offset_s))} s "
                f"{'ahead' if offset_s > 0 else 'behind'}. Training is not affected; times in its "
                "record and logs are. Start chrony or ntpd.",
            )


def _at(facts: Sequence[RankFacts], rank: int) -> str:
    return f"rank {rank} ({facts[rank].host})"


def _differences(facts: Sequence[RankFacts], name: str, values: Sequence[object]) -> Iterator[str]:
    """Yield the ranks whose value differs from the most frequent one."""
    ((common, _),) = Counter(values).most_common(1)
    for odd in dict.fromkeys(values):
        if odd != common:
            ranks = ", ".join(_at(facts, rank) for rank, v in enumerate(values) if v == odd)
            verb = "has" if values.count(odd) == 1 else "have"
            yield f"{ranks} {verb} {name} {odd}, the others {common}"


def _shorten(level: str, texts: Sequence[str]) -> Iterator[Verdict]:
    for text in texts[:SHOWN]:
        yield level, text
    if len(texts) > SHOWN:
        yield level, f"{len(texts) - SHOWN} more pairs likewise."


def _reach_texts(facts: Sequence[RankFacts], found: LinkFindings) -> Iterator[str]:
    for (a, b), reason in sorted(found.unreachable.items()):
        back = (b, a) in found.unreachable
        if back and b < a:
            continue  # part of the text of the other direction
        own, there = found.endpoints[a], found.endpoints[b]
        other = "cannot reach" if back else "reaches"
        yield (
            f"{_at(facts, a)} cannot reach rank {b} ({facts[b].host}, {there.address}) on "
            f"{own.interface}: {reason}; rank {b} {other} rank {a}. Open TCP 1024-65535 from "
            f"{own.address} on {facts[b].host}, or name another interface (OFFBEAT_LINKS=...)."
        )


def _failure_texts(facts: Sequence[RankFacts], found: LinkFindings) -> Iterator[str]:
    for (a, b), reason in found.failures.items():
        if (b, a) not in found.failures or a < b:
            yield (
                f"{_at(facts, a)} connects to {_at(facts, b)}, but the transfer fails: {reason}. "
                "Compare the MTU of their interfaces and of tunnels between them."
            )


def _slow_texts(facts: Sequence[RankFacts], found: LinkFindings) -> Iterator[str]:
    """Yield the slow hosts, and the slow pairs of other hosts, the slowest first."""
    rates = found.rate_bps
    # The upper third: with three hosts of which one is slow, two of three pairs are slow.
    usual_bps = sorted(rates.values(), reverse=True)[(len(rates) - 1) // 3] if rates else 0.0
    slow = {pair: rate for pair, rate in rates.items() if rate < SLOW_SHARE * usual_bps}
    if not slow:
        return
    rest = number(median(rate for pair, rate in rates.items() if pair not in slow) / MBIT)
    lowest = {frozenset(pair): pair for pair in sorted(slow, key=slow.__getitem__, reverse=True)}
    hosts = list[int]()
    for rank in found.hosts:
        own = {frozenset(pair) for pair in rates if rank in pair}
        if len(own) > 1 and own <= lowest.keys():
            hosts.append(rank)
            rate = min(slow[lowest[pair]] for pair in own)
            yield (
                f"{_at(facts, rank)} {number(rate / MBIT)} Mbit/s to all other hosts, the others "
                f"{rest} (median). Every ring waits for it: look at its cable, duplex, VPN."
            )
    for a, b in sorted(lowest.values(), key=slow.__getitem__):
        if {a, b}.isdisjoint(hosts):
            yield (
                f"{_at(facts, a)} {'<->' if (b, a) in slow else '->'} {_at(facts, b)} "
                f"{number(slow[a, b] / MBIT)} Mbit/s, the others {rest} (median). A ring waits for "
                "its slowest pair: look at their cable, duplex, VPN; or order ranks so that they "
                "are no neighbours."
            )
