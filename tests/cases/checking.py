"""Ranks of `offbeat check` in the network namespaces of a lab."""

from __future__ import annotations

import contextlib
import io
import os
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from harness.ranks import enter, namespaces_of, run_ranks

from offbeat.lab import Lab
from offbeat.lab.addressing import address

PORTS = "29600-29600"  # on each address
Printed = tuple[int, str, str]  # exit code, stdout, stderr


def check_in(
    lab: Lab,
    ranks: int,
    change: Callable[[int], None] | None = None,
    *,
    quick: bool = False,
    strict: bool = False,
) -> list[Printed]:
    """Return what `offbeat check` prints on every rank, one rank per host.

    `change` is called with the rank in the process of each rank.
    """
    names = namespaces_of(lab)[1:]
    options = {"quick": quick, "strict": strict}
    return run_ranks(ranks, check_on_host, names, options, change)


def check_on_host(
    names: Sequence[str], options: Mapping[str, Any], change: Callable[[int], None] | None
) -> Printed:
    from offbeat.check import measure
    from offbeat.check.command import check

    measure.REACH_S = 1.0  # on one machine an answer takes milliseconds
    rank = int(os.environ["RANK"])
    enter(names[rank])
    socket.gethostname = lambda: f"host-{chr(ord('a') + rank)}"
    os.environ |= {"MASTER_ADDR": address(0, 0), "OFFBEAT_LINKS": "eth0", "OFFBEAT_PORTS": PORTS}
    if change is not None:
        change(rank)
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = check(**options)
        except SystemExit as end:
            code = int(end.code or 0)
    return code, out.getvalue(), err.getvalue()


# --- faults --------------------------------------------------------------------------------------


def block(pairs: Sequence[tuple[str, str]], port: int) -> None:
    """In each namespace drop the answers from a port to an address, which then cannot connect."""
    from pyroute2.iproute import IPRoute

    for name, peer in pairs:
        enter(name)
        with IPRoute() as ip:
            sport = f"{port}:{port}"
            ip.rule("add", dst=peer, dst_len=32, ip_proto=6, sport_range=sport, action="blackhole")


def share(center: str, hosts: Sequence[int], rate_bps: int) -> None:
    """Move some hosts of the lab's first link to a second bridge, behind one cable of a rate."""
    from pyroute2.iproute import IPRoute

    from offbeat.lab.addressing import port_name
    from offbeat.lab.shaping import burst_bytes, queue_bytes

    enter(center)
    with IPRoute() as ip:

        def index(interface: str) -> int:
            return ip.link_lookup(ifname=interface)[0]

        ip.link("add", ifname="far", kind="bridge", br_stp_state=0)
        ip.link("set", index=index("far"), state="up")
        ip.link("add", ifname="cable0", kind="veth", peer={"ifname": "cable1"})
        for end, bridge in (("cable0", "br0"), ("cable1", "far")):
            ip.link("set", index=index(end), master=index(bridge), state="up", gso_max_size=1500)
            limits = {"burst": burst_bytes(rate_bps), "limit": queue_bytes(rate_bps)}
            ip.tc("add", "tbf", index=index(end), handle=0x10000, rate=rate_bps // 8, **limits)
        for host in hosts:
            ip.link("set", index=index(port_name(0, host)), master=index("far"))


def differ(rank: int) -> None:
    """Make the last of two hosts differ in what only deserves attention."""
    import resource
    import time

    import torch

    if rank == 1:
        true_time = time.time
        time.time = lambda: true_time() + 1.75
        torch.__version__ = "2.12.0"
        resource.setrlimit(resource.RLIMIT_NOFILE, (200, 200))


def be_outdated(rank: int) -> None:
    """Give rank 2 another version of offbeat, and all ranks the variables of srun."""
    import offbeat

    names = {"SLURM_PROCID": "RANK", "SLURM_NTASKS": "WORLD_SIZE", "SLURM_LOCALID": "LOCAL_RANK"}
    os.environ.update({name: os.environ.pop(old) for name, old in names.items()})
    os.environ.update({"SLURM_STEP_ID": "0", "SLURM_JOB_ID": "7"})
    if rank == 2:
        offbeat.__version__ = "0.0.9"


def hide_the_name(rank: int) -> None:
    """Let the name of rank 2's host resolve as many distributions write /etc/hosts."""
    del os.environ["OFFBEAT_LINKS"]
    addresses = [address(0, 0), address(1, 0), "127.0.1.1"]
    socket.gethostbyname = lambda _: addresses[rank]


def end_early(rank: int) -> None:
    """End rank 1 after the exchange of facts."""
    from offbeat.check import command, meeting

    meeting.STEP_S = 2.0
    if rank == 1:
        command.find_unreachable = lambda *_: sys.exit(3)


def lose_large_packets(name: str) -> None:
    """Drop all large packets that the host of a namespace sends, as a tunnel does."""
    from pyroute2.iproute import IPRoute

    enter(name)
    with IPRoute() as ip:
        index = ip.link_lookup(ifname="eth0")[0]
        ip.tc("replace", "tbf", index=index, handle=0x10000, rate=10**6, burst=900, limit=10**5)


def wait_briefly(_: int) -> None:
    """Give up messages after a second."""
    from offbeat.check import measure

    measure.MESSAGE_S = 1.0


def use_two_links(_: int) -> None:
    """Name both interfaces of a lab with two links."""
    os.environ["OFFBEAT_LINKS"] = "eth0,eth1*2"
