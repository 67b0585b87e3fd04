"""Parts of `offbeat check` on one host: tables, verdicts, rounds, connections, launchers."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.forking import ForkedPython
from support.worlds import free_port, run_world, watch_world

from offbeat import cli
from offbeat.check import command, link_check, meeting
from offbeat.check.connections import LIMIT_S, accept, connect, listen
from offbeat.check.facts import Endpoint, RankFacts
from offbeat.check.link_check import (
    ALL_PAIRS,
    MESSAGE_S,
    PARALLEL_S,
    LinkCheck,
    LinkFindings,
    link_limit_s,
    schedule,
)
from offbeat.check.table import WIDTH, link_lines, number, wrap
from offbeat.check.traffic import DRAIN_S, TRIPS_S, send_message
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
    found.at_once_bps = dict.fromkeys(range(hosts), rate_bps)
    found.parallel_bps, found.alone_bps = dict.fromkeys((1, 2, 4), rate_bps), {0: rate_bps}
    return facts, found


def level_and_text(found: LinkFindings, facts: list[RankFacts]) -> list[tuple[str, str]]:
    return [*link_verdicts(facts, found)]


@pytest.mark.parametrize("hosts", [2, 4, 5, 9, 10, 16, 17, 64])
def test_tables_fit_a_terminal(hosts: int) -> None:
    facts, found = made_up(hosts, 98765e6)
    lines = link_lines(facts, found)
    assert max(map(len, lines)) <= WIDTH
    assert sum(line.startswith("  1 ") for line in lines) == (2 if 4 < hosts < 10 else 1)
    assert level_and_text(found, facts) == []


def test_numbers() -> None:
    assert [number(x) for x in (0.0, 0.41, 4.81, 94.2, 9412.3)] == [
        "0",
        ".41",
        "4.8",
        "94",
        "9,412",
    ]


@pytest.mark.parametrize("hosts", [1, 2, 3, 4, 15, 16, 17, 18])
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
        assert link_limit_s(hosts) <= 19


def test_slow_pairs_and_hosts() -> None:
    facts, found = made_up(4)
    found.rate_bps[2, 0] = found.rate_bps[0, 2] = 4.8e6
    ((level, text),) = level_and_text(found, facts)
    assert level == "slow"
    assert re.search(r"rank \d .* <-> rank \d .* 4\.8 Mbit/s, the others 94 \(median\)", text)
    found.rate_bps[0, 2] = 94e6
    ((_, text),) = level_and_text(found, facts)
    assert re.match(r"rank 2 \(.*\) -> rank 0 \(", text)
    for hosts in (3, 4):  # with three hosts most pairs are slow
        facts, found = made_up(hosts)
        found.rate_bps |= {pair: 5e6 for pair in found.rate_bps if 1 in pair}
        ((_, text),) = level_and_text(found, facts)
        assert text.startswith("rank 1 (host-01-of-a-large-cluster) 5 Mbit/s to all other hosts")


def test_a_slow_pair_of_a_host_with_one_pair() -> None:
    """Nothing is known of its other pairs."""
    facts, found = made_up(3)
    for pair in ((1, 2), (2, 1)):
        del found.rate_bps[pair]
    found.rate_bps[0, 2] = found.rate_bps[2, 0] = 5e6
    found.at_once_bps.clear()
    ((level, text),) = level_and_text(found, facts)
    assert level == "slow"
    assert re.match(r"rank 0 \(.*\) <-> rank 2 \(|rank 2 \(.*\) <-> rank 0 \(", text)


def test_a_shared_link_is_one_whose_mean_rate_falls() -> None:
    """The first pair is measured alone, as the others of its round may share the link, too."""
    facts, found = made_up(4)
    found.at_once_bps = {0: 94e6, 1: 30e6, 2: 30e6, 3: 30e6}
    ((level, text),) = level_and_text(found, facts)
    assert (level, text[:51]) == ("slow", "at once 46 Mbit/s, alone 94: hosts share a link. of")
    facts, found = made_up(4, 47e6)
    assert level_and_text(found, facts) == []
    found.alone_bps = {0: 94e6}
    ((_, text),) = level_and_text(found, facts)
    assert text.startswith("at once 47 Mbit/s, alone 94: hosts share a link")
    found.rate_bps[1, 2] = 90e6  # one fast pair: the mean may not exceed the highest rate
    assert found.single_rate_bps() == pytest.approx(94e6)


def test_clocks_ahead_and_behind_the_median() -> None:
    """A host may be compared only with one whose clock was found by another pair."""
    facts, found = made_up(3)
    found.offset_s = {(1, 2): 2.0, (0, 2): 7.0}  # clocks of 0, 5 and 7 s
    assert found.clock_offsets() == {0: -5.0, 1: 0.0, 2: 2.0}
    texts = [text for _, text in level_and_text(found, facts)]
    assert ["5 s behind" in texts[0], "2 s ahead" in texts[1], len(texts)] == [True, True, 2]


def test_pairs_that_are_cut_in_one_direction_or_both() -> None:
    facts, found = made_up(3)
    found.unreachable = {(0, 1): "no answer in 3 s", (1, 0): "no answer in 3 s"}
    assert [found.is_cut(*pair) for pair in ((0, 1), (1, 0), (0, 2))] == [True, True, False]
    ((_, text),) = level_and_text(found, facts)
    assert "; rank 1 cannot reach rank 0. " in text
    found.unreachable = {(0, 1): "no answer in 3 s"}
    assert found.is_cut(1, 0)


def test_links_and_loopback_addresses_of_ranks() -> None:
    facts, _ = made_up(3)
    facts[2] = replace(facts[2], endpoints=[])
    assert [text for _, text in facts_verdicts(facts)] == [
        "OFFBEAT_LINKS must name the same number of links on every rank."
    ]
    facts, _ = made_up(2)
    local = [replace(facts[0].endpoints[0], gloo_address="127.0.1.1")]
    facts = [replace(fact, endpoints=local) for fact in facts]
    assert [level for level, _ in facts_verdicts(facts)] == ["fails", "fails"]
    facts = [replace(fact, host_key="the same") for fact in facts]
    assert [*facts_verdicts(facts)] == [], "ranks of one host reach each other there"


def test_many_failures_are_counted() -> None:
    facts, found = made_up(17)
    found.unreachable = {(rank, 3): "Connection refused" for rank in range(17) if rank != 3}
    texts = [text for _, text in level_and_text(found, facts)]
    assert len(texts) == 5
    assert "on eth0: Connection refused; rank 3 reaches rank 0." in texts[0]
    assert texts[-1] == "12 more pairs likewise."


def test_transfers_without_data_fail() -> None:
    facts, found = made_up(3)
    found.rate_bps[0, 1] = 0.0
    found.failures[1, 0] = "no connection in 3 s"
    found.at_once_bps.clear()
    ((level, text),) = level_and_text(found, facts)
    assert level == "fails"
    assert "but the transfer fails: no data arrives. Compare the MTU" in text


def test_a_gain_by_connections_names_the_setting() -> None:
    facts, found = made_up(2, 45e6)
    found.parallel_bps = {1: 50e6, 2: 90e6, 4: 94e6}
    assert link_lines(facts, found)[-2:] == [
        "  parallel   2 carry 1.80, 4 carry 1.88 times what 1 carries after a pause",
        "             OFFBEAT_LINKS=eth0*4 opens 4 connections",
    ]
    found.parallel_bps[1] = 90e6
    assert link_lines(facts, found)[-1].startswith("  parallel   2 carry 1.00, 4 carry 1.04 times")


def test_facts_that_differ() -> None:
    facts, found_on_link = made_up(4)
    facts[1] = replace(facts[1], problem="OFFBEAT_LINKS (eth7) must be one of lo", endpoints=[])
    facts[3] = replace(facts[3], congestion_control="bbr")
    found_on_link.endpoints[2] = replace(found_on_link.endpoints[2], mtu=9000)
    found = [*facts_verdicts(facts), *link_verdicts(facts, found_on_link)]
    assert [level for level, _ in found] == ["fails", "beware", "beware"]
    assert "(eth7) must be one of lo." in found[0][1]
    assert "has congestion control bbr, the others cubic" in found[1][1]
    assert "has MTU 9000, the others 1500" in found[2][1]
    text = "\n".join(line for verdict in found for line in wrap(*verdict))
    assert max(map(len, text.splitlines())) <= WIDTH


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
    assert level == "beware"
    assert text.startswith(f"{needed - 1} files may be open on rank 1 (host-01-of-a-large-cluster)")
    assert f"about {needed} are needed" in text


# --- connections ---------------------------------------------------------------------------------


def test_strangers_are_not_accepted() -> None:
    """Of connections that were closed, that prove another secret, that belong to another step."""
    with listen("127.0.0.1", 0, 16) as listener:
        there, until_s = listener.getsockname(), time.monotonic() + 30

        def strangers() -> None:
            socket.create_connection(there).close()
            with pytest.raises(ConnectionError):
                connect("127.0.0.1", there, b"another secret", 1, 7, until_s)
            connect("127.0.0.1", there, b"secret", 1, 6, until_s).close()
            connect("127.0.0.1", there, b"secret", 2, 7, until_s).close()
            with connect("127.0.0.1", there, b"secret", 1, 7, until_s) as s:
                s.sendall(b"known")

        thread = threading.Thread(target=strangers)
        thread.start()
        with accept(listener, b"secret", 1, 7, until_s) as s:
            assert s.recv(5) == b"known"
        thread.join()
        with pytest.raises(ValueError, match=r"--port \(\d+\) cannot be opened on 127.0.0.1"):
            listen("127.0.0.1", there[1], 1)
        with pytest.raises(TimeoutError, match="no connection in time"):
            accept(listener, b"secret", 1, 8, time.monotonic() + 0.05)


def test_links_inside_nodes_have_no_endpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such a link connects only ranks of one host."""
    addresses = {"eth0": "127.0.0.1", "lo": "127.0.0.2"}
    monkeypatch.setattr(
        command,
        "find_endpoint",
        lambda spec: Endpoint(spec.interface, addresses[spec.interface], 1500, ""),
    )
    monkeypatch.setenv("OFFBEAT_LINKS", "inside=lo,eth0")
    two: Any = SimpleNamespace(world_size=2)
    facts, listeners = command._listen(two, None)
    for listener in listeners:
        listener.close()
    assert facts.problem is None
    assert [point.interface for point in facts.endpoints] == ["eth0"]
    assert len(listeners) == 1


def test_a_port_beyond_the_last_one_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the second rank of a host, which listens on the port after the given one."""
    monkeypatch.setenv("OFFBEAT_LINKS", "lo")
    monkeypatch.setenv("LOCAL_RANK", "1")
    two: Any = SimpleNamespace(world_size=2)
    facts, listeners = command._listen(two, 65535)
    assert listeners == []
    assert facts.problem is not None
    assert facts.problem.startswith("--port (65536) must be at most 65535")


def test_a_message_is_divided_between_connections() -> None:
    """Until it is acknowledged, or until its time has passed if the other end does not read."""
    size = 3_000_000
    with listen("127.0.0.1", 0, 4) as listener:
        sending = [socket.create_connection(listener.getsockname()) for _ in range(3)]
        receiving = [listener.accept()[0] for _ in sending]
    received = dict.fromkeys(range(3), 0)

    def receive(k: int) -> None:
        with receiving[k]:
            while data := receiving[k].recv(1 << 16):
                received[k] += len(data)

    threads = [threading.Thread(target=receive, args=(k,)) for k in received]
    for thread in threads:
        thread.start()
    assert send_message(sending, size, time.monotonic() + 30) > 0
    assert send_message(sending[:1], size, time.monotonic() + 30) > 0, "they stay open"
    for s in sending:
        s.close()
    for thread in threads:
        thread.join(10)
    assert received == {0: size // 3 + size, 1: size // 3, 2: size // 3}
    with listen("127.0.0.1", 0, 4) as listener:
        with socket.create_connection(listener.getsockname()) as s:
            acknowledged = send_message([s], 1 << 30, time.monotonic() + 0.1) * 0.1 / 8
        assert acknowledged < 1 << 30


class Clocks(threading.local):
    """Time of each rank, which is a thread."""

    now_s = 0.0


class Together:
    """A meeting of threads. All of them leave a step at the time of the last one."""

    def __init__(self, ranks: int, clocks: Clocks):
        self.clocks, self.values = clocks, [(0.0, None)] * ranks
        self.barrier = threading.Barrier(ranks)

    def view(self, rank: int) -> Any:
        return SimpleNamespace(
            rank=rank, step=0, gather=lambda value=None: self.gather(rank, value)
        )

    def gather(self, rank: int, value: Any) -> list[Any]:
        self.values[rank] = self.clocks.now_s, value  # type: ignore[assignment]
        self.barrier.wait(20)
        values = [*self.values]
        self.barrier.wait(20)
        self.clocks.now_s = max(now_s for now_s, _ in values)
        return [value for _, value in values]


def check_on_a_clock(
    ranks: int, fails: set[frozenset[int]], monkeypatch: pytest.MonkeyPatch
) -> tuple[list[LinkFindings], float, list[frozenset[int]]]:
    """Return the findings of all ranks, the seconds, and the connections that were tried.

    If pairs fail, everything takes the longest time that it may take.
    """
    clocks, tried = Clocks(), list[frozenset[int]]()
    ring: dict[int, list[str]] = {rank: [] for rank in range(ranks)}
    together = Together(ranks, clocks)
    points = made_up(ranks)[1].endpoints
    ends: list[float] = [0.0] * ranks

    def take(seconds: float) -> None:
        clocks.now_s += seconds

    def open_connection(own: int, peer: int, until_s: float) -> socket.socket:
        tried.append(frozenset((own, peer)))
        assert until_s > clocks.now_s, "no time is left"
        take(until_s - clocks.now_s if frozenset((own, peer)) in fails else 0.0)
        if frozenset((own, peer)) in fails:
            raise TimeoutError("no connection in time")
        return socket.socket()

    def send(sending: Sequence[Any], receiving: Sequence[Any], seconds: float) -> float:
        if sending or seconds != PARALLEL_S:  # else until the other end closes
            take(seconds + (DRAIN_S if fails else 0.0))
        for s in (*sending, *receiving):
            s.close()
        return 94e6

    def send_a_message(*_: Any) -> float:
        take(MESSAGE_S)
        return 94e6

    clock = SimpleNamespace(monotonic=lambda: clocks.now_s, sleep=take)
    monkeypatch.setattr(link_check, "time", clock)
    monkeypatch.setattr(link_check, "unreachable", lambda *_: take(LIMIT_S if fails else 0.0) or {})
    monkeypatch.setattr(link_check, "measure_trips", lambda _: take(TRIPS_S) or (1e-3, 0.0))
    monkeypatch.setattr(link_check, "answer_trips", lambda _: take(TRIPS_S))
    monkeypatch.setattr(link_check, "transfer", send)
    monkeypatch.setattr(link_check, "send_message", send_a_message)

    def run(rank: int) -> None:
        check_ = LinkCheck(together.view(rank), points, range(ranks), None, b"")  # type: ignore
        check_._accept = lambda peer: open_connection(rank, peer, check_._open_s)  # type: ignore
        check_._connect = lambda peer: open_connection(rank, peer, check_._open_s)  # type: ignore
        check_.check_reach()
        check_.measure_pairs()
        check_.measure_connections()
        accept_, connect_ = check_._accept, check_._connect
        check_._accept = lambda peer: ring[rank].append("accept") or accept_(peer)  # type: ignore
        check_._connect = lambda peer: ring[rank].append("connect") or connect_(peer)  # type: ignore
        check_.measure_ring()
        found[rank], ends[rank] = check_.findings, clocks.now_s

    found: list[Any] = [None] * ranks
    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    if ranks > 1 and not fails and "the ring" not in "".join(found[0].omitted):
        assert {*ring[0][:1], *ring[1][:1]} == {"accept", "connect"}, "not all wait for each other"
    return found, max(ends), tried


@pytest.mark.parametrize("hosts", [2, 3, 8, 17])
def test_the_time_is_limited_whatever_fails(hosts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    found, seconds, _ = check_on_a_clock(hosts, set(), monkeypatch)
    assert seconds <= link_limit_s(hosts)
    assert [one.omitted for one in found] == [[]] * hosts
    assert found[0].rate_bps.keys() == made_up(hosts)[1].rate_bps.keys()
    assert found[0].at_once_bps.keys() == {*range(hosts)}
    pairs = {frozenset(pair) for round_ in schedule(hosts) for pair in round_}
    found, seconds, tried = check_on_a_clock(hosts, pairs, monkeypatch)
    assert seconds <= link_limit_s(hosts)
    assert all(one.failures == found[0].failures for one in found)
    failed = {frozenset(pair) for pair in found[0].failures}
    assert {*tried} == failed
    assert len(tried) == 2 * len(failed), "both ranks of a pair know that it has failed"
    texts = [text for level, text in level_and_text(found[0], made_up(hosts)[0])]
    assert texts[0].endswith(
        "no connection in time. Compare the MTU of their interfaces and of tunnels between them."
    )
    assert all(one.omitted == found[0].omitted for one in found)
    assert "the ring of all hosts (a pair of it fails)" in texts[-1]
    rounds = len(schedule(hosts))
    assert ("pairs of " in texts[-1]) == (failed != pairs), (rounds, texts)


def test_measurements_without_time_are_left_out_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_check, "FIRST_S", -7.0)
    found, seconds, _ = check_on_a_clock(3, set(), monkeypatch)
    assert seconds <= link_limit_s(3)
    expected = ["pairs of 2 of 3 rounds", "parallel connections", "the ring of all hosts"]
    for one in found:
        assert one.omitted == [f"{name} (no time left)" for name in expected]
    assert found[0].rate_bps.keys() < made_up(3)[1].rate_bps.keys()
    ((level, text),) = level_and_text(found[0], made_up(3)[0])
    assert level == "beware"
    assert text.startswith("not measured: pairs of 2 of 3 rounds (no time left), parallel conn")


def test_a_store_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the network dropped all large packets: a rank ends its wait by itself."""
    monkeypatch.setattr(meeting, "STEP_S", 0.1)
    monkeypatch.setattr(meeting, "ANSWER_S", 0.1)
    never = threading.Event()
    store = SimpleNamespace(
        set=lambda *_: None,
        wait=lambda *_: None,
        check=lambda _: True,
        multi_get=lambda _: never.wait(5),
    )
    with pytest.raises(meeting.LostRanksError) as caught:
        meeting.Meeting(store, 1, 2).gather()
    assert caught.value.ranks == [0]
    never.set()


# --- launchers -----------------------------------------------------------------------------------


def test_without_a_launcher(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in command.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    assert cli.main(["check"]) == 2
    assert capsys.readouterr().err.startswith(
        "offbeat: check needs RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT, which the launcher"
    )
    assert cli.main(["check", "--port", "70000"]) == 2
    assert "--port (70000) must be from 1 to 65535" in capsys.readouterr().err


def check_quickly(
    environ: dict[int, dict[str, str]], meet_s: float = 30.0, folder: str = "", together: int = 1
) -> tuple[int, str]:
    """Check once all processes that are started together have left a file in a folder."""
    import contextlib
    import io

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
    outcomes = watch_world(check_quickly, 3, {}, 1.5, str(tmp_path), 2, ranks=[0, 1])
    for code, text in [one.result for one in outcomes]:
        assert code == 1
        assert "has not met the other ranks at 127.0.0.1:" in text
        assert "within 1.5 s rank 2 has not connected." in text


def test_a_rank_that_resolves_the_address_to_itself() -> None:
    ((code, text),) = [o.result for o in watch_world(check_quickly, 2, {}, 1.5, ranks=[1])]
    assert code == 1
    assert "it resolves MASTER_ADDR (127.0.0.1) to 127.0.0.1, which is its own host, and no" in text


def test_different_secrets_fail() -> None:
    secrets = {0: {"OFFBEAT_SECRET": "a"}, 1: {"OFFBEAT_SECRET": "b"}}
    (code, text), (other, _) = run_world(check_quickly, 2, secrets)
    assert code == other == 1
    assert text.startswith("fails: the secret of rank 1 must be that of rank 0: OFFBEAT_SECRET")


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
