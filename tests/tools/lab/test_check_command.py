"""`offbeat check` between the hosts of a lab.

Rates are so low that the buffers of the kernel hold more than a busy machine delays a process.
"""

from __future__ import annotations

import os
import re
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest
from cases.checking import (
    Printed,
    be_outdated,
    block,
    check_in,
    differ,
    end_early,
    hide_the_name,
    lose_large_packets,
    share,
    use_two_links,
    wait_briefly,
)
from harness.ranks import namespaces_of, run_ranks

from offbeat.lab import Cluster, Lab, Link

pytestmark = [
    pytest.mark.timeout(100),
    pytest.mark.usefixtures("namespaces"),
    pytest.mark.skipif(os.geteuid() != 0, reason="only root enters the namespaces of a lab"),
]
PORT = 29600


def printed_by_rank_0(printed: list[tuple[int, str, str]], code: int) -> list[str]:
    """Return the lines of rank 0, after checks that all ranks end alike and only rank 0 prints."""
    assert [ended for ended, _, _ in printed] == [code] * len(printed)
    assert {out for _, out, _ in printed[1:]} == {""}
    lines = printed[0][1].splitlines()
    assert max(map(len, lines)) <= 80
    return lines


def verdicts(lines: list[str]) -> list[str]:
    """Return the verdicts, each in one line."""
    text = re.sub(r"\n {7,8}(?=\S)", " ", "\n".join(lines))
    return re.findall(r"^(?:fails|slow|beware): .*", text, re.MULTILINE)


def numbers(lines: list[str], first: str) -> list[float]:
    """Return the numbers of the line that begins with a text."""
    (line,) = [line for line in lines if line.startswith(first)]
    return [float(text) for text in re.findall(r"(?<!\S)\d*\.?\d+", line.removeprefix(first))]


SLOW_PAIR = 'hosts = 3\nrate = "4mbit"\n[[pairs]]\nhosts = [0, 2]\nrates = { net = ".8mbit" }'
LONG = {
    "well": Cluster.simple(3, "4mbit"),
    "a slow pair": Cluster.from_toml(SLOW_PAIR),
    "a shared link": Cluster.simple(4, "4mbit"),
    "differences": Cluster.simple(2, "20mbit"),
}
CHANGES = {"differences": differ}  # of ranks whose check is strict


@pytest.fixture(scope="module")
def printed(_support: str | None) -> dict[str, list[Printed]]:
    """What long checks print. They take place at the same time, as they wait for slow links."""
    if _support is not None:
        pytest.skip(_support)
    with ExitStack() as stack:
        labs = {name: stack.enter_context(Lab(cluster)) for name, cluster in LONG.items()}
        run_ranks(1, share, namespaces_of(labs["a shared link"])[0], (1, 3), 4_000_000)
        pool = stack.enter_context(ThreadPoolExecutor(len(labs)))
        checks = {
            name: pool.submit(
                check_in, lab, lab.cluster.hosts, CHANGES.get(name), strict=name in CHANGES
            )
            for name, lab in labs.items()
        }
        return {name: check.result() for name, check in checks.items()}


def test_all_is_well(printed: dict[str, list[Printed]]) -> None:
    lines = printed_by_rank_0(printed["well"], 0)
    assert re.fullmatch(r"offbeat check: 3 ranks on 3 hosts, eth0, \d+ s", lines[0])
    assert re.match(r"  meeting    all 3 met at 10\.77\.0\.1:\d+ within \S+ s$", lines[1])
    assert lines[-1] == "all well"
    end = next(i for i, line in enumerate(lines) if line.startswith("  ms"))
    rates = [numbers(lines[:end], f"  {rank}  host-{'abc'[rank]}") for rank in range(3)]
    assert all(3 < rate < 4.6 for row in rates for rate in row)
    assert 3 < numbers(lines, "  at once")[0] < 4.6
    assert len(numbers(lines, "  parallel")) == 5


def test_only_what_deserves_attention(printed: dict[str, list[Printed]]) -> None:
    lines = printed_by_rank_0(printed["differences"], 1)
    with Lab(LONG["differences"]) as lab:
        quick = printed_by_rank_0(check_in(lab, 2, differ, quick=True), 0)
    torch, files, clock = verdicts(lines)
    assert all(text.startswith("beware: ") for text in (torch, files, clock))
    assert all("rank 1 (host-b)" in text for text in (torch, files, clock))
    assert "2.12.0" in torch
    assert "200 files" in files
    assert "258" in files
    assert re.search(r"1\.[78] s ahead", clock)
    assert verdicts(quick) == [torch, files]
    assert not any(line.startswith("  Mbit/s") for line in quick)


def test_blocked_ports_are_named() -> None:
    with Lab(Cluster.simple(4, "20mbit")) as lab:
        names = namespaces_of(lab)[1:]
        pairs = [(names[host], lab.address(peer)) for host, peer in ((1, 2), (2, 1), (3, 0))]
        run_ranks(1, block, pairs, PORT)
        printed = check_in(lab, 4, quick=True)
    one_way, both_ways = verdicts(printed_by_rank_0(printed, 1))
    for text, names in (
        (one_way, ("rank 0 (host-a)", "rank 3 (host-d, 10.77.0.4)", "eth0", "rank 3 reaches rank 0",
                   "10.77.0.1", "OFFBEAT_LINKS")),
        (both_ways, ("rank 1 (host-b)", "rank 2 (host-c, 10.77.0.3)", "eth0")),
    ):  # fmt: skip
        assert text.startswith("fails: ")
        assert [name for name in names if name not in text] == []


def test_every_link_is_checked() -> None:
    with Lab(Cluster(hosts=2, links=(Link(name="a"), Link(name="b")))) as lab:
        names = namespaces_of(lab)[1:]
        well = check_in(lab, 2, use_two_links, quick=True)
        run_ranks(1, block, [(names[1], lab.address(0, 1))], PORT)
        printed = check_in(lab, 2, use_two_links, quick=True)
    lines = printed_by_rank_0(well, 0)
    assert re.fullmatch(r"offbeat check: 2 ranks on 2 hosts, eth0, eth1, \d s", lines[0])
    assert lines[-1] == "all well"
    (found,) = verdicts(printed_by_rank_0(printed, 1))
    assert "rank 1 (host-b, 10.77.1.2)" in found
    assert "eth1" in found


def test_a_slow_pair_is_named(printed: dict[str, list[Printed]]) -> None:
    (found,) = verdicts(printed_by_rank_0(printed["a slow pair"], 0))
    assert re.match(
        r"slow: +rank \d \(host-[ac]\) <-> rank \d \(host-[ac]\) 0?\.[5-9]\d? Mbit/s, the others "
        r"(3|4)\.?\d? \(median\)",
        found,
    )


def test_a_pair_without_data_is_named() -> None:
    with Lab(Cluster.simple(3, "20mbit")) as lab:
        run_ranks(1, lose_large_packets, namespaces_of(lab)[2])
        printed = check_in(lab, 3, wait_briefly)
    (found,) = verdicts(printed_by_rank_0(printed, 1))
    assert re.match(r"fails: rank \d \(host-\w\) connects to rank \d \(host-\w\)", found)
    assert "rank 1 (host-b)" in found
    assert "MTU" in found


def test_a_shared_link_is_named(printed: dict[str, list[Printed]]) -> None:
    lines = printed_by_rank_0(printed["a shared link"], 0)
    shared = r"slow: +at once [12]\.?\d? Mbit/s, alone [34]\.?\d?: hosts share a link"
    assert any(re.match(shared, text) for text in verdicts(lines)), lines


@pytest.mark.parametrize(
    ("change", "rank", "name"),
    [
        (be_outdated, "rank 2 (host-c)", "0.0.9"),
        (hide_the_name, "rank 2 (host-c)", "127.0.1.1"),
        (end_early, "rank 1 (host-b)", "step 3"),
    ],
)
def test_faults_that_end_the_check(change, rank: str, name: str) -> None:
    with Lab(Cluster.simple(3, "20mbit")) as lab:
        printed = check_in(lab, 3, change)
    (found,) = verdicts(printed[0][1].splitlines())
    assert found.startswith(f"fails: {rank} ")
    assert name in found
    assert printed[0][0] == printed[2][0] == 1
