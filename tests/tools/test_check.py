"""Parts of `offbeat check` on one host: tables, verdicts, rounds, launchers."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from harness.commands import ForkedPython
from harness.ranks import free_port, run_ranks, watch_ranks

from offbeat import __version__, cli
from offbeat.check.facts import Endpoint, RankFacts
from offbeat.check.measure import ALL_PAIRS, LinkFindings, schedule
from offbeat.check.table import WIDTH, link_lines, wrap
from offbeat.check.verdicts import facts_verdicts, link_verdicts

pytestmark = pytest.mark.timeout(60)


def made_up(hosts: int, rate_bps: float = 94e6) -> tuple[list[RankFacts], LinkFindings]:
    """Return facts and findings of hosts that all have the same rate."""
    points = [Endpoint("eth0", f"10.0.0.{r + 1}", 1500, f"10.0.0.{r + 1}") for r in range(hosts)]
    versions = {"offbeat": "0.2.0", "torch": "2.13.0", "python": "3.11"}
    facts = [
        RankFacts(f"host-{rank:02}-of-a-large-cluster", f"{rank}", versions, 4096, "cubic", [point])
        for rank, point in enumerate(points)
    ]
    found = LinkFindings(points, [*range(hosts)])
    for round_ in schedule(hosts):
        for a, b in round_:
            low, high = sorted((a, b))
            found.delay_s[low, high], found.offset_s[low, high] = 4e-4, 0.0
            found.rate_bps[low, high] = found.rate_bps[high, low] = rate_bps
    found.at_once_bps = {0: rate_bps}
    found.parallel_bps = dict.fromkeys((1, 2, 4), rate_bps)
    return facts, found


def verdicts(facts: list[RankFacts], found: LinkFindings) -> list[tuple[str, str]]:
    """Level and text of all verdicts, none of which exceeds the width of the table."""
    verdicts = [*facts_verdicts(facts), *link_verdicts(facts, found)]
    lines = [line for verdict in verdicts for line in wrap(*verdict)]
    assert max(map(len, lines), default=0) <= WIDTH
    return verdicts


def require(verdict: tuple[str, str], level: str, *names: str) -> None:
    """Require the level of a verdict, and that it names ranks, rates or settings in this order."""
    assert verdict[0] == level
    pattern = ".*".join(map(re.escape, names))
    assert re.search(pattern, verdict[1], re.DOTALL), (names, verdict[1])


@pytest.mark.parametrize("hosts", [2, 4, 5, 9, 10, 64])
def test_tables_fit_a_terminal(hosts: int) -> None:
    facts, found = made_up(hosts, 98765e6)
    lines = link_lines(facts, found)
    assert max(map(len, lines)) <= WIDTH
    assert sum(line.startswith("  1 ") for line in lines) == (2 if hosts < 10 else 1)
    assert verdicts(facts, found) == []


@pytest.mark.parametrize("hosts", [1, 2, 3, 15, 16, 17, 18])
def test_rounds(hosts: int) -> None:
    """No host is in two pairs of a round; all pairs, or beyond the limit the ring, once each."""
    rounds = schedule(hosts)
    for round_ in rounds:
        places = [place for pair in round_ for place in pair]
        assert len(places) == len(set(places))
    pairs = [frozenset(pair) for round_ in rounds for pair in round_]
    assert len(pairs) == len(set(pairs))
    if hosts <= ALL_PAIRS:
        assert len(pairs) == hosts * (hosts - 1) // 2
        assert len(rounds) == hosts - 1 + hosts % 2 or hosts == 1
    else:
        assert {*pairs} == {frozenset((i, (i + 1) % hosts)) for i in range(hosts)}
        assert len(rounds) == 2 + hosts % 2


def test_slow_pairs_and_hosts() -> None:
    """In both directions or one; a host whose pairs are all slow; one with a single pair, of whose
    other pairs nothing is known."""
    facts, found = made_up(4)
    found.at_once_bps.clear()
    found.rate_bps[2, 0] = found.rate_bps[0, 2] = 4.8e6
    (verdict,) = verdicts(facts, found)
    require(verdict, "slow", "<->", "4.8 Mbit/s", "94")
    assert {*re.findall(r"rank (\d)", verdict[1])} == {"0", "2"}
    found.rate_bps[0, 2] = 94e6
    (verdict,) = verdicts(facts, found)
    require(verdict, "slow", "rank 2 (", "-> rank 0 (")
    for hosts in (3, 4):  # with three hosts most pairs are slow
        facts, found = made_up(hosts)
        found.rate_bps |= {pair: 5e6 for pair in found.rate_bps if 1 in pair}
        (verdict,) = verdicts(facts, found)
        require(verdict, "slow", "rank 1 (host-01", "5.0 Mbit/s")
        assert "rank 0" not in verdict[1]
    facts, found = made_up(3)
    for pair in ((1, 2), (2, 1)):
        del found.rate_bps[pair]
    found.rate_bps[0, 2] = found.rate_bps[2, 0] = 5e6
    found.at_once_bps.clear()
    (verdict,) = verdicts(facts, found)
    require(verdict, "slow", "<->")


def test_a_shared_link_is_one_whose_rate_falls_below_that_of_its_slowest_pair() -> None:
    """The first pair is measured alone, as the others of its round may share the link, too."""
    facts, found = made_up(4)
    found.at_once_bps = {0: 46e6}
    (verdict,) = verdicts(facts, found)
    require(verdict, "slow", "46 Mbit/s", "94")
    found.rate_bps[1, 2] = 50e6
    assert verdicts(facts, found) == [], "a ring is as fast as its slowest pair"
    facts, found = made_up(4, 47e6)
    assert verdicts(facts, found) == []
    found.parallel_bps[1] = 94e6
    (verdict,) = verdicts(facts, found)
    require(verdict, "slow", "47 Mbit/s", "94")


def test_clocks_ahead_and_behind_the_median() -> None:
    """A host may be compared only with one whose clock was found by another pair."""
    facts, found = made_up(3)
    found.offset_s = {(1, 2): 2.0, (0, 2): 7.0}  # clocks of 0, 5 and 7 s
    assert found.clock_offsets() == {0: -5.0, 1: 0.0, 2: 2.0}
    behind, ahead = verdicts(facts, found)
    require(behind, "beware", "rank 0", "5.0 s behind")
    require(ahead, "beware", "rank 2", "2.0 s ahead")


def test_pairs_that_are_cut_fail() -> None:
    """In one direction or both, by all ports or by transfers without data; many are counted."""
    facts, found = made_up(3)
    found.unreachable = {(0, 1): "no answer in 3 s", (1, 0): "no answer in 3 s"}
    (verdict,) = verdicts(facts, found)
    require(verdict, "fails", "rank 0", "rank 1", "rank 1 cannot reach rank 0")
    facts, found = made_up(3)
    found.failures = {(1, 0): "timed out", (0, 1): "timed out"}
    (verdict,) = verdicts(facts, found)
    require(verdict, "fails", "rank 0", "rank 1", "MTU")
    facts, found = made_up(17)
    found.unreachable = {(rank, 3): "Connection refused" for rank in range(17) if rank != 3}
    *first, last = verdicts(facts, found)
    assert len(first) == 4
    require(first[0], "fails", "rank 0", "rank 3", "eth0", "Connection refused")
    assert "12" in last[1]


def test_a_gain_by_connections_names_the_setting() -> None:
    facts, found = made_up(2, 45e6)
    found.parallel_bps = {1: 50e6, 2: 90e6, 4: 94e6}
    assert "OFFBEAT_LINKS=eth0*4" in link_lines(facts, found)[-1]
    found.parallel_bps[1] = 90e6
    assert "OFFBEAT_LINKS" not in link_lines(facts, found)[-1]


def test_facts_that_differ() -> None:
    facts, found = made_up(4)
    facts[1] = replace(facts[1], problem="OFFBEAT_LINKS (eth7) must be one of lo", endpoints=[])
    facts[3] = replace(facts[3], congestion_control="bbr")
    found.endpoints[2] = replace(found.endpoints[2], mtu=9000)
    problem, control, mtu = verdicts(facts, found)
    require(problem, "fails", "rank 1", "(eth7)")
    require(control, "beware", "rank 3", "bbr", "cubic")
    require(mtu, "beware", "rank 2", "MTU 9000", "1500")
    facts, found = made_up(3)
    facts[2] = replace(facts[2], endpoints=[])
    (verdict,) = facts_verdicts(facts)
    require(verdict, "fails", "OFFBEAT_LINKS")
    facts, _ = made_up(2)
    local = [replace(facts[0].endpoints[0], gloo_address="127.0.1.1")]
    facts = [replace(fact, endpoints=local) for fact in facts]
    assert [level for level, _ in facts_verdicts(facts)] == ["fails", "fails"]
    facts = [replace(fact, host_key="the same") for fact in facts]
    assert [*facts_verdicts(facts)] == [], "ranks of one host reach each other there"


def test_open_files_count_every_connection() -> None:
    """One to every other rank for control, and those of each link, such as of eth0*4 and eth1."""
    facts, _ = made_up(4)
    eth0 = facts[1].endpoints[0]
    eth1 = replace(eth0, interface="eth1", address="10.0.1.2")
    facts = [replace(fact, endpoints=[replace(eth0, connections=4), eth1]) for fact in facts]
    needed = 256 + 3 * (1 + 4 + 1)
    facts[1] = replace(facts[1], open_files=needed)
    assert [*facts_verdicts(facts)] == []
    facts[1] = replace(facts[1], open_files=needed - 1)
    ((level, text),) = facts_verdicts(facts)
    require((level, text), "beware", f"{needed - 1} ", "rank 1 (host-01", f"{needed} ")


# --- launchers -----------------------------------------------------------------------------------


def test_without_a_launcher(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The facts of this host are printed, and no secret."""
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OFFBEAT_SECRET", "hunter2")
    assert cli.main(["check"]) == 0
    printed = capsys.readouterr().out
    assert re.search(rf"offbeat +{re.escape(__version__)}", printed)
    assert "OFFBEAT_SECRET" in printed
    assert "hunter2" not in printed
    assert cli.main(["check", "--quick"]) == 2
    monkeypatch.setenv("RANK", "0")
    assert cli.main(["check"]) == 2
    assert "MASTER_ADDR" in capsys.readouterr().err


def check_quickly(
    environ: dict[int, dict[str, str]], meet_s: float = 30.0, folder: str = "", together: int = 1
) -> tuple[int, str]:
    """Check once all processes that are started together have left a file in a folder."""
    import contextlib
    import io

    from offbeat.check import command, meeting

    meeting.MEET_S = meet_s
    os.environ |= environ.get(int(os.environ["RANK"]), {})
    if folder:
        Path(folder, os.environ["RANK"]).touch()
        while len([*Path(folder).iterdir()]) < together:
            time.sleep(0.01)
    with contextlib.redirect_stdout(io.StringIO()) as out:
        code = command.check(quick=True)
    return code, " ".join(out.getvalue().split())


def test_missing_ranks_are_named(tmp_path: Path) -> None:
    outcomes = watch_ranks(3, check_quickly, {}, 1.5, str(tmp_path), 2, only=[0, 1])
    for code, text in [one.result for one in outcomes]:
        assert code == 1
        assert "rank 2" in text
    ((code, text),) = [o.result for o in watch_ranks(2, check_quickly, {}, 1.5, only=[1])]
    assert code == 1
    assert "MASTER_ADDR (127.0.0.1)" in text, "a rank that resolves the address to itself"


def test_different_secrets_fail() -> None:
    secrets = {0: {"OFFBEAT_SECRET": "a"}, 1: {"OFFBEAT_SECRET": "b"}}
    (code, text), (other, _) = run_ranks(2, check_quickly, secrets)
    assert code == other == 1
    assert "rank 1" in text
    assert "OFFBEAT_SECRET" in text


def test_the_ports_of_the_job_are_used() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        links = {"OFFBEAT_LINKS": "lo", "OFFBEAT_PORTS": f"{port}-{port}"}
        (code, text), (other, _) = run_ranks(2, check_quickly, {0: links, 1: links})
    assert code == other == 1
    assert f"OFFBEAT_PORTS ({port}-{port})" in text


def test_under_torchrun() -> None:
    process = ForkedPython(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"),
            *("--master-port", str(free_port()), "-m", "offbeat", "check", "--strict"),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=os.environ | {"OFFBEAT_LINKS": "lo", "OMP_NUM_THREADS": "1"},
        workers=True,
    )
    printed, errors = process.communicate(timeout=50)
    assert process.returncode == 0, errors
    first, *_, last = printed.splitlines()
    assert re.fullmatch(r"offbeat check: 2 ranks on 1 host, lo, \d+ s", first)
    assert last == "all well"
