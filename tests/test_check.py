"""Parts of `offbeat check` on one host: tables, verdicts, rounds, connections, launchers."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import threading
from dataclasses import replace
from types import SimpleNamespace

import pytest
from support.worlds import free_port, run_world, watch_world

from offbeat import cli
from offbeat.check import command, meeting
from offbeat.check.connections import accept, connect, listen
from offbeat.check.facts import Endpoint, RankFacts
from offbeat.check.link_check import ALL_PAIRS, LinkFindings, schedule
from offbeat.check.table import WIDTH, link_lines, number, wrap
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
    found.parallel_bps = dict.fromkeys((1, 2, 4), rate_bps)
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
        assert command.limit_s(hosts) <= 19


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
        "  parallel   2 carry 1.80, 4 carry 1.88 times what 1 connection carries, 0 to 1",
        "             OFFBEAT_LINKS=eth0*4 opens 4 connections",
    ]
    found.rate_bps[0, 1] = 90e6
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


# --- connections ---------------------------------------------------------------------------------


def test_strangers_are_not_accepted() -> None:
    """Of connections that were closed, that prove another secret, that belong to another step."""
    with listen("127.0.0.1", 0, 16) as listener:
        there = listener.getsockname()

        def strangers() -> None:
            socket.create_connection(there).close()
            with pytest.raises(ConnectionError):
                connect("127.0.0.1", there, b"another secret", 1, 7)
            connect("127.0.0.1", there, b"secret", 1, 6).close()
            connect("127.0.0.1", there, b"secret", 2, 7).close()
            with connect("127.0.0.1", there, b"secret", 1, 7) as s:
                s.sendall(b"known")

        thread = threading.Thread(target=strangers)
        thread.start()
        with accept(listener, b"secret", 1, 7) as s:
            assert s.recv(5) == b"known"
        thread.join()
        with pytest.raises(ValueError, match=r"--port \(\d+\) cannot be opened on 127.0.0.1"):
            listen("127.0.0.1", there[1], 1)


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


def check_quickly(environ: dict[int, dict[str, str]]) -> tuple[int, str]:
    import contextlib
    import io

    meeting.MEET_S = 1.5
    os.environ |= environ.get(int(os.environ["RANK"]), {})
    with contextlib.redirect_stdout(io.StringIO()) as out:
        code = command.check(quick=True)
    return code, " ".join(out.getvalue().split())


def test_missing_ranks_are_named() -> None:
    outcomes = watch_world(check_quickly, 3, {}, ranks=[0, 1])
    code, text = outcomes[0].result
    assert code == 1
    assert "has not met the other ranks at 127.0.0.1:" in text
    assert "within 1.5 s rank 2 has not connected." in text
    assert outcomes[1].result[0] == 1


def test_a_rank_that_resolves_the_address_to_itself() -> None:
    ((code, text),) = [o.result for o in watch_world(check_quickly, 2, {}, ranks=[1])]
    assert code == 1
    assert "it resolves MASTER_ADDR (127.0.0.1) to 127.0.0.1, which is its own host, and no" in text


def test_different_secrets_fail() -> None:
    secrets = {0: {"OFFBEAT_SECRET": "a"}, 1: {"OFFBEAT_SECRET": "b"}}
    (code, text), (other, _) = run_world(check_quickly, 2, secrets)
    assert code == other == 1
    assert text.startswith("fails: the secret of rank 1 must be that of rank 0: OFFBEAT_SECRET")


def test_under_torchrun() -> None:
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"),
            *("--master-port", str(free_port()), "-m", "offbeat", "check", "--strict"),
        ],
        capture_output=True,
        text=True,
        timeout=50,
        env=os.environ | {"OFFBEAT_LINKS": "lo", "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    first, *_, last = done.stdout.splitlines()
    assert re.fullmatch(r"offbeat check: 2 ranks on 1 host, lo, \d+ s", first)
    assert last == "all well"
