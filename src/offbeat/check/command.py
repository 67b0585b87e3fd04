"""Check of a job on one of its ranks: meeting, facts, reach, rates, verdicts."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace

from offbeat.check.facts import Endpoint, RankFacts, find_endpoint, local_facts
from offbeat.check.measure import LinkFindings, find_unreachable, measure
from offbeat.check.meeting import LostRanksError, Meeting, MeetingError, meet
from offbeat.check.table import facts_lines, link_lines, wrap
from offbeat.check.verdicts import FAILS, LEVELS, Verdict, facts_verdicts, link_verdicts
from offbeat.core.plan import INSIDE
from offbeat.core.start.launch_request import current_links
from offbeat.core.start.launchers import torchrun_variables
from offbeat.core.transport.listeners import open_listener
from offbeat.core.words import count_text
from offbeat.frames.secret import common_secret

VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
LAUNCH = "torchrun --nnodes 4 --nproc-per-node 1 ... -m offbeat check, or srun offbeat check"


def check(*, quick: bool = False, strict: bool = False) -> int:
    """Check the hosts of a job and the network between them. Rank 0 prints the result.

    Args:
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
        return _check_all(meeting, facts, quick=quick, strict=strict)
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


def _check_all(meeting: Meeting, facts: list[RankFacts], *, quick: bool, strict: bool) -> int:
    """Run all steps after the meeting. Adds the facts of all ranks to `facts`."""
    begin_s = time.monotonic()
    with ExitStack() as stack:
        own = _listen(stack)
        try:
            everyone, _ = common_secret(own.to_dict(), 0, meeting)
        except ValueError as error:  # raised on every rank
            return _finish(meeting, [], [(FAILS, f"{error}.")], strict=strict)
        facts += map(RankFacts.from_dict, everyone)
        first = {fact.host_key: rank for rank, fact in reversed([*enumerate(facts)])}
        hosts = sorted(first.values())
        verdicts, found = [*facts_verdicts(facts)], list[LinkFindings]()
        # Ranks with different versions of offbeat may have different steps.
        if not any(level == FAILS for level, _ in verdicts):
            for link in range(len(own.endpoints)):
                found.append(LinkFindings([fact.endpoints[link] for fact in facts], hosts))
                find_unreachable(meeting, found[-1])
        if not quick and len(hosts) > 1:
            for one in found:
                if not any(each.unreachable or each.failures for each in found):
                    measure(meeting, one)
    verdicts += [verdict for one in found for verdict in link_verdicts(facts, one)]
    parts = [
        f"{count_text(len(facts), 'rank')} on {count_text(len(hosts), 'host')}",
        *dict.fromkeys(point.interface for point in facts[0].endpoints),
        f"{time.monotonic() - begin_s + meeting.seconds:.0f} s",
    ]
    where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    lines = [f"offbeat check: {', '.join(parts)}", *facts_lines(facts, where, meeting.seconds)]
    for each in found:
        table = link_lines(facts, each)
        lines += [f"  {each.endpoints[0].interface}"] if table and len(found) > 1 else []
        lines += table
    return _finish(meeting, lines, verdicts, strict=strict)


def _listen(stack: ExitStack) -> RankFacts:
    """Listen on every link within `stack`, and return the facts of this rank with its endpoints."""
    endpoints = dict[str, Endpoint]()  # by address: the same interface twice counts once
    problem = None
    try:
        for spec in current_links():
            if spec.name == INSIDE:  # only between the ranks of a node
                continue
            endpoint = find_endpoint(spec)
            if endpoint.address not in endpoints:
                port = stack.enter_context(open_listener(endpoint.address)).getsockname()[1]
                endpoints[endpoint.address] = replace(endpoint, port=port)
    except ValueError as error:
        problem = str(error)
    return replace(local_facts(), endpoints=[*endpoints.values()], problem=problem)


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


def _print(lines: Sequence[str]) -> None:
    print("\n".join(lines), flush=True)
