"""Check of a job on one of its ranks: meeting, facts, reach, rates, verdicts."""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace

from offbeat.check.connections import listen
from offbeat.check.facts import Endpoint, RankFacts, find_endpoint, local_facts
from offbeat.check.link_check import LinkCheck, LinkFindings, link_limit_s
from offbeat.check.meeting import LostRanksError, Meeting, MeetingError, meet
from offbeat.check.table import facts_lines, link_lines, wrap
from offbeat.check.verdicts import (
    BEWARE,
    FAILS,
    SLOW,
    Verdict,
    facts_verdicts,
    link_verdicts,
)
from offbeat.core.plan import INSIDE
from offbeat.core.start.launch_request import current_links
from offbeat.core.start.launchers import torchrun_variables
from offbeat.frames.secret import common_secret

VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
LAUNCH = "torchrun --nnodes 4 --nproc-per-node 1 ... -m offbeat check, or srun offbeat check"
LEVELS = (FAILS, SLOW, BEWARE)  # the most serious first


def check(port: int | None = None, *, quick: bool = False, strict: bool = False) -> int:
    """Check the hosts of a job and the network between them. Rank 0 prints the result.

    Args:
        port: port on which the first rank of each host listens, other ranks on the following ones.
            None: those of OFFBEAT_PORTS, or else any free ones.
        quick: whether to leave out all rates.
        strict: whether every verdict counts as a failure.

    Returns:
        Exit code, equal on all ranks: 1 if the check fails, otherwise 0.

    Raises:
        ValueError: no launcher has started this process.
    """
    os.environ.update(torchrun_variables(os.environ))
    missing = [name for name in VARIABLES if not os.environ.get(name)]
    if missing:
        raise ValueError(
            f"check needs {', '.join(missing)}, which the launcher of a job sets; start it on "
            f"every rank, as in {LAUNCH}"
        )
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    try:
        meeting = meet(rank, world_size)
    except MeetingError as error:
        where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        who = f"rank {rank} ({socket.gethostname()})"
        _print(wrap(FAILS, f"{who} has not met the other ranks at {where}: {error}."))
        return 1
    facts: list[RankFacts] = []
    try:
        return _check_all(meeting, facts, port, quick=quick, strict=strict)
    except LostRanksError as error:
        # Rank 0 prints for all ranks, unless its store does not respond.
        if rank == 0 or error.ranks == [0]:
            names = ", ".join(f"{r} ({facts[r].host})" if facts else f"{r}" for r in error.ranks)
            text = (
                f"rank {names} has not finished step {meeting.step}: it has ended, hangs or is cut "
                "off. See its output. If it runs, compare the MTU of the interfaces and of tunnels."
            )
            _print(wrap(FAILS, text))
        meeting.close(error.ranks)
        return 1


def _check_all(
    meeting: Meeting, facts: list[RankFacts], port: int | None, *, quick: bool, strict: bool
) -> int:
    """Run all steps after the meeting. Adds the facts of all ranks to `facts`."""
    begin_s = time.monotonic()
    with ExitStack() as stack:
        own, listeners = _listen(meeting, port)
        for listener in listeners:
            stack.enter_context(listener)
        try:
            everyone, secret = common_secret(own.to_dict(), 0, meeting)
        except ValueError as error:  # raised on every rank
            return _finish(meeting, [], [(FAILS, f"{error}.")], strict=strict)
        facts += map(RankFacts.from_dict, everyone)
        hosts = _first_ranks(facts)
        verdicts, found = [*facts_verdicts(facts)], list[LinkFindings]()
        # Ranks with different versions of offbeat may have different steps.
        if not any(level == FAILS for level, _ in verdicts):
            if meeting.rank == 0 and not quick:
                bound_s = len(listeners) * link_limit_s(len(hosts))
                print(f"offbeat check: measures for at most {bound_s:.0f} s", file=sys.stderr)
            for link, listener in enumerate(listeners):
                endpoints = [fact.endpoints[link] for fact in facts]
                check_ = LinkCheck(meeting, endpoints, hosts, listener, secret)
                check_.check_reach()
                if not quick and len(hosts) > 1:
                    check_.measure_pairs()
                    check_.measure_connections()
                    check_.measure_ring()
                found.append(check_.findings)
                verdicts += link_verdicts(facts, check_.findings)
    parts = [
        f"{_count(len(facts), 'rank')} on {_count(len(hosts), 'host')}",
        *dict.fromkeys(point.interface for point in facts[0].endpoints),
        f"{time.monotonic() - begin_s + meeting.seconds:.0f} s",
    ]
    where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    lines = [
        f"offbeat check: {', '.join(parts)}",
        *facts_lines(facts, where, meeting.seconds),
    ]
    for each in found:
        table = link_lines(facts, each)
        if table and len(found) > 1:
            lines.append(f"  {each.endpoints[0].interface}")
        lines += table
    return _finish(meeting, lines, verdicts, strict=strict)


def _first_ranks(facts: Sequence[RankFacts]) -> list[int]:
    """Return the lowest rank of every host."""
    first = dict[str, int]()
    for rank, fact in enumerate(facts):
        first.setdefault(fact.host_key, rank)
    return [*first.values()]


def _listen(meeting: Meeting, port: int | None) -> tuple[RankFacts, list[socket.socket]]:
    """Return the facts of this rank, and a listener on its endpoint of every link."""
    endpoints, listeners = list[Endpoint](), list[socket.socket]()
    problem = None
    try:
        for spec in current_links():
            if spec.name == INSIDE:  # only between the ranks of a node
                continue
            endpoint = find_endpoint(spec)
            if endpoint.address in [known.address for known in endpoints]:
                continue  # the same interface twice
            number = None if port is None else port + int(os.environ.get("LOCAL_RANK") or 0)
            listeners.append(listen(endpoint.address, number, 2 * meeting.world_size))
            endpoints.append(replace(endpoint, port=listeners[-1].getsockname()[1]))
    except ValueError as error:
        problem = str(error)
    return replace(local_facts(), endpoints=endpoints, problem=problem), listeners


def _finish(
    meeting: Meeting, lines: Sequence[str], verdicts: Sequence[Verdict], *, strict: bool
) -> int:
    """Print the result on rank 0, and return its exit code on all ranks."""
    ordered = sorted(verdicts, key=lambda verdict: LEVELS.index(verdict[0]))
    if meeting.rank == 0:
        texts = [line for verdict in ordered for line in wrap(*verdict)]
        _print([*lines, *(texts or ["all well"])])
    failed = any(level == FAILS or strict for level, _ in ordered)
    code = meeting.gather(int(failed))[0]  # no rank ends before rank 0 has printed
    meeting.close()
    return code


def _count(n: int, noun: str) -> str:
    return f"{n} {noun}" if n == 1 else f"{n} {noun}s"


def _print(lines: Sequence[str]) -> None:
    print("\n".join(lines), flush=True)
