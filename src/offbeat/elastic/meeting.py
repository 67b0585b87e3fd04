"""Meeting of the survivors of a failure: their reports, and what they agree on."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from offbeat.core.plan import INSIDE, base_link
from offbeat.elastic.members import LOOK_EVERY_S, JobMember
from offbeat.elastic.node import describe_rank, member_of
from offbeat.elastic.repeated_averages import INSIDE_NODE

if TYPE_CHECKING:
    from offbeat.membership import Epoch, Rendezvous


@dataclass(frozen=True)
class Report:
    """Report of a rank after a failure.

    Attributes:
        begun: number of the epoch in which it trains.
        first_iteration: first iteration that it has not begun.
        lost_from: first iteration whose training is lost with a member that has failed.
        results: by link, the number of the last message whose result it has.
        unions: number of averages of whole replicas that it has completed in the epoch.
        has_united: whether it has completed the last one after its last iteration.
    """

    begun: int
    first_iteration: int
    lost_from: int
    results: Mapping[str, int] = field(default_factory=dict[str, int])
    unions: int = 0
    has_united: bool = False


Reports = Mapping[str, Report]


def meet(
    member: JobMember,
    begun: Collection[str],
    report: Report,
    read_count: Callable[[int], int],
    timeout_s: float,
) -> Epoch:
    """Return the next epoch, on which all survivors agree.

    A member of several ranks survives if all its ranks have reported.

    Args:
        member: this process as a member.
        begun: members that have trained. All ranks of these are awaited, unless their processes
            have ended. If a report shows that the epoch has begun, all its members have trained.
        report: report of this rank.
        read_count: returns the number of samples that all members have read before an iteration.
        timeout_s: longest wait for a rank whose process does not answer. One that answers may be
            in a wait of torch, which ends after the same time, so its report is awaited longer.

    Raises:
        RuntimeError: another rank of this member has failed, too few members are left, or the
            others continue without this member.
    """
    # Imported here, because jobs without changing members do not need the module.
    from offbeat.membership import EpochReplacedError

    try:
        return _meet(member, begun, report, read_count, timeout_s)
    except EpochReplacedError:  # at least two epochs have been written meanwhile
        raise _lateness(member) from None


def following_epoch(member: JobMember) -> Epoch | None:
    """Return the epoch after that of this member; None if it is not written.

    Raises:
        RuntimeError: the service no longer keeps it, because the others have written many.
    """
    from offbeat.membership import RequestRefusedError

    try:
        return member.membership.epoch(member.epoch.number + 1)
    except RequestRefusedError:
        raise _lateness(member) from None


def _meet(
    member: JobMember,
    begun: Collection[str],
    report: Report,
    read_count: Callable[[int], int],
    timeout_s: float,
) -> Epoch:
    """Return the next epoch, see `meet`. Raise EpochReplacedError if its keys are not kept."""
    from offbeat.membership import EpochReplacedError

    before = member.epoch
    keys, names = member.membership.rendezvous(before.number), member.rank_names
    keys.set(_key_of(member.rank_name), json.dumps(asdict(report)).encode())
    begun_s = time.monotonic()
    others = [name for name in names if name != member.rank_name]
    awaited, awaits_all = [name for name in others if member_of(name) in begun], False
    there = set[str]()  # ranks that have reported, which is never undone
    while (epoch := following_epoch(member)) is None:
        there.update(_present(keys, [name for name in names if name not in there]))
        awaited = [name for name in awaited if name not in there]
        _require_whole(member, awaited)
        share = (time.monotonic() - begun_s) / timeout_s
        missing = next((name for name in awaited if _is_awaited(member, name, share)), None)
        if missing is not None:
            with suppress(TimeoutError, EpochReplacedError):
                keys.wait([_key_of(missing)], LOOK_EVERY_S)
            continue
        found = [name for name in names if name in there]
        given = [json.loads(keys.get(_key_of(name), 1.0)) for name in found]
        reports = {name: Report(**values) for name, values in zip(found, given, strict=True)}
        if not awaits_all and any(one.begun == before.number for one in reports.values()):
            awaited, awaits_all = others, True
            continue
        lost = {member_of(name) for name in names if name not in reports}
        alive = [name for name in before.members if name not in lost]
        _require_enough(member, alive)
        reports = {name: one for name, one in reports.items() if member_of(name) in alive}
        first = max(one.first_iteration for one in reports.values())
        more = agreed_details(reports)
        addresses = before.details["addresses"]
        epoch = member.propose(alive, first, read_count(first), addresses, more)
    if member.name not in epoch.members:
        own = [name for name in names if member_of(name) == member.name]
        absent = [name for name in own if name not in _present(keys, own)]
        _require_whole(member, absent, has_ended=True)
        raise _lateness(member)
    return epoch


def _lateness(member: JobMember) -> RuntimeError:
    """Return the error of a member without which the others continue."""
    return RuntimeError(
        f"The other members continue without {member.describe_rank(member.rank_name)}, whose "
        "report came too late; start it again to join the job"
    )


def _is_awaited(member: JobMember, rank_name: str, share: float) -> bool:
    """Return whether the report of a rank may still arrive.

    Args:
        member: this process as a member.
        rank_name: name of the rank.
        share: time of the wait, as a share of the timeout.
    """
    if share > 2 or (share > 1 and not member.is_alive(rank_name)):
        return False
    return not member.is_gone(rank_name)


def _key_of(rank_name: str) -> str:
    return f"survivor/{rank_name}"


def _present(keys: Rendezvous, names: Sequence[str]) -> list[str]:
    """Return the ranks that have reported."""
    missing = {*keys.missing([_key_of(name) for name in names])} if names else set[str]()
    return [name for name in names if _key_of(name) not in missing]


def _require_whole(member: JobMember, missing: Sequence[str], *, has_ended: bool = False) -> None:
    """Raise RuntimeError if another rank of this member has failed.

    Args:
        member: this process as a member.
        missing: ranks without a report.
        has_ended: whether the other members have ceased to wait for them.
    """
    own = [name for name in missing if member_of(name) == member.name]
    lost = own if has_ended else member.lost_ranks(own)
    if lost:
        words = ", ".join(map(member.describe_rank, lost))
        raise RuntimeError(
            f"{words} has failed or does not respond, and a member fails with all its ranks; start "
            "all ranks of this node again to join the job"
        )


def _require_enough(member: JobMember, alive: Sequence[str]) -> None:
    """Raise RuntimeError if fewer members than `least` are left."""
    least = member.settings.least
    if len(alive) < least:
        lost = [name for name in member.epoch.members if name not in alive]
        raise RuntimeError(
            f"least ({least}) in Members must be at most the number of members that are left "
            f"({len(alive)}) after the failure of {', '.join(map(describe_rank, lost))}; start the "
            "job again from its last checkpoint"
        )


# ---- what the survivors agree on ------------------------------------------------------------


def agreed_details(reports: Reports) -> dict[str, Any]:
    """Return the details of the epoch after a failure.

    Args:
        reports: reports of the survivors by the names of their ranks.
    """
    begun = max(one.begun for one in reports.values())
    # Ranks that have not begun this epoch have all messages and averages of the one before.
    training = {name: one for name, one in reports.items() if one.begun == begun}
    return {
        "begun": begun,
        "landed": find_landed(training),
        "lost_from": max(one.lost_from for one in reports.values()),
        **find_united(training),
    }


def find_landed(reports: Reports) -> dict[str, Any]:
    """Return the last messages that a survivor has received.

    Args:
        reports: reports of the survivors that have begun the same epoch.

    Returns:
        By link, and on links inside nodes by link and member: the link, the number of the message
        (`order`), the first survivor that has its result (`holder`), and the survivors without it
        (`missing`). On links inside nodes these are ranks of the same member.
    """
    landed = {}
    links = sorted({link for report in reports.values() for link in report.results})
    for link in links:
        for key, names in _groups(link, reports):
            orders = {name: reports[name].results.get(link, -1) for name in names}
            order = max(orders.values())
            if order >= 0:
                holder = next(name for name, one in orders.items() if one == order)
                missing = [name for name, one in orders.items() if one < order]
                landed[key] = {"link": link, "order": order, "holder": holder, "missing": missing}
    return landed


def _groups(link: str, reports: Reports) -> list[tuple[str, list[str]]]:
    """Return the groups of ranks with common messages on a link, each with a key."""
    if link != INSIDE_NODE and base_link(link) != INSIDE:
        return [(link, [*reports])]
    members = dict.fromkeys(map(member_of, reports))
    return [(f"{link} {m}", [n for n in reports if member_of(n) == m]) for m in members]


def find_united(reports: Reports) -> dict[str, list[str]]:
    """Return the survivors that have completed an average of whole replicas after their last
    iteration (`united`), and the survivors that need its result (`ununited`).

    A rank trains on only when all ranks have the average. So survivors without it have not trained
    since, and those with it still have it.

    Args:
        reports: reports of the survivors that have begun the same epoch.
    """
    most = max(one.unions for one in reports.values())
    missing = [name for name, one in reports.items() if one.unions < most]
    united = [name for name, one in reports.items() if one.unions == most and one.has_united]
    return {"united": united, "ununited": missing}


# ---- exchange of results --------------------------------------------------------------------


def exchange_results(
    member: JobMember,
    landed: Mapping[str, Any],
    results: dict[str, tuple[int, Sequence[Tensor]]],
    shapes_of: Callable[[str, int], Sequence[Tensor]],
) -> set[str]:
    """Send the results of landed messages to the ranks that have not received them.

    Args:
        member: this process as a member.
        landed: result of `find_landed`.
        results: by link, number and result of the last message that this rank has. Results are
            added.
        shapes_of: returns tensors with the shapes of the result that this rank awaits, by link and
            number.

    Returns:
        The links of the results that this rank has received from another one.
    """
    ranks, links = member.rank_names, set[str]()
    for _, entry in sorted(landed.items()):
        link, order, holder = entry["link"], entry["order"], entry["holder"]
        for receiver in entry["missing"]:
            if member.rank_name == holder:
                for tensor in results[link][1]:
                    if tensor.numel():
                        dist.send(tensor.detach().cpu().contiguous(), ranks.index(receiver))
            elif member.rank_name == receiver:
                like = shapes_of(link, order)
                received = [receive(tensor, ranks.index(holder)) for tensor in like]
                results[link] = order, received
                links.add(link)
    return links


def send_average(member: JobMember, details: Mapping[str, Any], tensors: Sequence[Tensor]) -> bool:
    """Send an average of whole replicas to the ranks that have not completed it.

    Args:
        member: this process as a member.
        details: details of the epoch, see `find_united`.
        tensors: tensors of the replica of this rank, to which the average is copied.

    Returns:
        Whether this rank has received it.
    """
    united, ranks, own = details["united"], member.rank_names, member.rank_name
    receivers = details["ununited"] if united else []
    for receiver in receivers:
        if own == united[0]:
            for tensor in tensors:
                dist.send(tensor.cpu().contiguous(), ranks.index(receiver))
        elif own == receiver:
            average = [receive(tensor, ranks.index(united[0])) for tensor in tensors]
            for tensor, value in zip(tensors, average, strict=True):
                tensor.copy_(value)
    return own in receivers


def receive(like: Tensor, source: int) -> Tensor:
    """Return a tensor from another rank, on the device of `like`."""
    received = torch.empty_like(like, device="cpu", memory_format=torch.contiguous_format)
    if received.numel():
        dist.recv(received, source)
    return received.to(like.device)
