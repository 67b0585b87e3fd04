"""Workers that come to a job of gossip that runs."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import networkx as nx
import pytest
import torch
from cases.gossip_jobs import come, cut, flats, job, kill, together, until, warm
from harness.commands import ForkedPython
from harness.ranks import free_port
from torch import Tensor

from offbeat import A2CiD2, cli
from offbeat.cli import texts
from offbeat.frames.frames import WireError
from offbeat.gossip import startup as gossiping
from offbeat.gossip.joining import Place
from offbeat.gossip.peers import Peers, _Peer
from offbeat.gossip.protocol import Kind
from offbeat.gossip.settings import Member
from offbeat.gossip.startup import _print_join_command
from offbeat.gossip.state import AVERAGING
from offbeat.gossip.view import State, View
from offbeat.gossip.worker import Gossip
from offbeat.jobs.interval import combine
from offbeat.jobs.record_lines import load


def test_a_worker_joins_with_the_state_of_another() -> None:
    """It has neighbours, exchanges with them, and the mean is that of four from then on."""
    x = flats(4, torch.float64)
    total = torch.stack(x[:3]).sum(0)
    with job(nx.cycle_graph(3), x[:3]) as workers:
        warm(workers)
        until(lambda: all(worker.count() > 3 for worker in workers))
        before = workers[0].state.course.last
        newcomer = come(workers, x[3], through=1)
        assert newcomer.gossip.me == 4
        warm([newcomer])
        edges = [(0, 1), (0, 2), (0, 4), (1, 2), (1, 4), (2, 4)]
        for worker in workers:
            until(lambda worker=worker: worker.gossip._agreements.agreed.edges == edges)
        until(lambda: len({worker.state.course.last for worker in workers} | {before}) == 2)
        count = newcomer.count()
        until(lambda: newcomer.count() > count + 5)
        assert together([worker.consolidate for worker in workers]) == [None] * 4
        words = workers[0].gossip.take_notices()
        assert any("worker 4 has joined" in word for word in words)
        assert newcomer.gossip.take_notices() == []
    for flat in x:
        torch.testing.assert_close(flat, (total + newcomer.began) / 4, rtol=0, atol=1e-9)


def test_a_worker_that_died_comes_back_as_another_process() -> None:
    x = flats(4)
    with job(nx.cycle_graph(4), x, silent_s=1.0) as workers:
        warm(workers)
        until(lambda: all(worker.count() for worker in workers))
        with pytest.raises(RuntimeError, match="worker 1 is there already"):
            come(workers, x[1], worker=1)
        kill(workers.pop(1))
        until(lambda: all(worker.gossip.view.dead_workers() == [1] for worker in workers))
        back = come(workers, torch.empty_like(x[1]), worker=1, silent_s=1.0)
        assert (back.gossip.me, back.gossip.view.neighbours_of(1)) == (1, [0, 2])
        warm([back])
        until(lambda: back.gossip.counts.exchanges.keys() == {0, 2})
        assert set(back.gossip._peers._retry_at_s) == {0}  # from now on 2 connects, as before
        for _ in range(3):  # whoever is to connect finds it where it is now
            cut(back)
            until(lambda: len(back.gossip.view.edges(State.UP)) == 4)
        assert together([worker.consolidate for worker in workers]) == [None] * 4
        assert torch.equal(workers[0].flat, back.flat)


def test_what_is_in_doubt_with_the_dead_is_kept_when_another_process_takes_its_place() -> None:
    """Its counts begin anew, so it cannot say what the dead one had."""
    x, reverted = flats(3), list[Any]()
    with job(nx.complete_graph(3), x, silent_s=1.0) as workers:
        warm(workers)
        kill(workers.pop(2))
        until(lambda: all(worker.gossip.view.dead_workers() == [2] for worker in workers))
        workers[0].gossip.pause()
        exchanges = workers[0].gossip._exchanging.exchanges
        exchanges.begin(2, 7, 0.0, AVERAGING)
        for chunk, _ in enumerate(exchanges.wire.chunks):
            exchanges.buffer(chunk)
            exchanges.apply_chunk()
        assert exchanges.abort(2)
        assert exchanges.partners_in_doubt() == [2]
        exchanges._revert = lambda *about: reverted.append(about)  # type: ignore[method-assign]
        come(workers, torch.empty_like(x[2]), through=1, worker=2)
        until(lambda: len(workers[0].gossip.view.edges(State.UP)) == 3)
        assert exchanges.partners_in_doubt() == reverted == []
        assert exchanges.next_number(2) == 1


def test_who_joins_does_not_wait_for_the_dead() -> None:
    """It has its place from a worker that does not know yet that a neighbour has died."""
    x = flats(4)
    with job(nx.complete_graph(3), x[:3], silent_s=1.0) as workers:
        warm(workers)
        addresses = dict(workers[0].gossip._neighbours.addresses)
        dead = workers.pop()
        kill(dead)
        for worker in workers:
            until(lambda worker=worker: worker.gossip.view.dead_workers() == [2])
        # As if that had not been noticed: it is still given as a neighbour.
        workers[0].gossip._peers.reachable = lambda: [1, 2]
        workers[0].gossip._neighbours.addresses.update(addresses)
        newcomer = come(workers, x[3], silent_s=1.0)
        del workers[0].gossip._peers.reachable
        assert newcomer.gossip.take_notices() == [
            "worker 3: workers 2 do not answer; it begins without them"
        ]
        warm([newcomer])
        until(lambda: newcomer.count() > 3)
        assert together([worker.consolidate for worker in workers]) == [None] * 3
        assert torch.equal(x[0], x[1])
        assert torch.equal(x[0], x[3])


@pytest.mark.parametrize("reachable", [[], [2]])
def test_a_joining_worker_needs_one_neighbour(reachable: list[int]) -> None:
    gossip: Any = Gossip.__new__(Gossip)
    gossip.me, gossip._error = 4, None
    gossip._neighbours = SimpleNamespace(never_came={1})
    gossip._changed = threading.Condition()
    gossip._settings: Any = SimpleNamespace(silent_s=0.0, timeout_s=0.0)
    nothing: Any = None
    view = View(4, [(1, 4)])
    gossip._member = Member(gossip._settings, nothing, nothing, view, has_joined=True)
    gossip._peers = SimpleNamespace(reachable=lambda: reachable)
    if reachable:
        gossip.connect()
        assert gossip.take_notices() == [
            "worker 4: workers 1 do not answer; it begins without them"
        ]
        return
    with pytest.raises(RuntimeError, match="worker 4 waited 0 s for workers 1 to connect"):
        gossip.connect()


def test_who_has_come_back_gives_places_too() -> None:
    x = flats(5)
    with job(nx.cycle_graph(4), x[:4], silent_s=1.0) as workers:
        warm(workers)
        kill(workers.pop())
        until(lambda: all(worker.gossip.view.dead_workers() == [3] for worker in workers))
        back = come(workers, x[3], worker=3, silent_s=1.0)
        newcomer = come(workers, x[4], through=workers.index(back), silent_s=1.0)
        assert 3 in newcomer.gossip._peers.reachable()
        assert together([worker.consolidate for worker in workers]) == [None] * 5
        assert all(torch.equal(x[0], one) for one in x)


def test_who_consolidates_waits_for_a_worker_that_has_a_place() -> None:
    """Also if others have met without it already: it counts as many meetings as they."""
    x = flats(4)
    with job(nx.complete_graph(3), x[:3]) as workers:
        warm(workers)
        assert together([worker.consolidate for worker in workers]) == [None] * 3
        for worker in workers:
            worker.gossip.resume()
        until(lambda: not any(worker.gossip._exchanging.pairing.paused for worker in workers))
        come(workers, x[3], through=2)
        assert together([worker.consolidate for worker in workers]) == [None] * 4
        assert torch.equal(x[0], x[3])


def test_meetings_begin_anew_when_a_newcomer_can_be_talked_to() -> None:
    """It may have heard from another neighbour that its edge is there, before it could send."""
    x = flats(3)
    with job(nx.complete_graph(2), x[:2]) as workers:
        warm(workers)
        gossip = come(workers, x[2]).gossip
        until(lambda: len(gossip.view.edges(State.UP)) == 3)
        versions: list[int] = []

        def again() -> None:
            gossip._neighbours.never_came.add(0)
            versions.extend(version for _, _, version, *_ in gossip.view.changed_edges())
            gossip._neighbours.on_connect(0, workers[0].gossip._neighbours.hello(2))
            versions.extend(version for _, _, version, *_ in gossip.view.changed_edges())

        gossip._commands.append(again)
        gossip._peers.wake()
        until(lambda: len(versions) == 4)
        assert sum(versions[2:]) > sum(versions[:2])


def test_who_consolidates_gives_no_place() -> None:
    x = flats(3)
    with job(nx.complete_graph(2), x[:2]) as workers:
        warm(workers)
        workers[0].gossip.pause()
        with pytest.raises(RuntimeError, match=r"had no time within 0.3 s"):
            come(workers, x[2], timeout_s=0.3)


@pytest.mark.parametrize(
    ("about", "words"),
    [
        ({"layout": "another"}, "refuses: the model is another one"),
        ({"strategy": "ad-psgd"}, re.escape("its strategy (ad-psgd) must be ")),
        ({"worker": 7}, "worker 7 is none of 0, 1"),
        ({"secret": b"another"}, "does not accept this OFFBEAT_SECRET"),
    ],
    ids=["model", "strategy", "worker", "secret"],
)
def test_who_is_no_worker_of_this_job(about: dict, words: str) -> None:
    with job(nx.complete_graph(2), flats(2)) as workers:
        warm(workers)
        edges = workers[0].gossip.view.edges(State.LEFT)
        with pytest.raises(RuntimeError, match=words):
            come(workers, flats(1)[0], **about)
        assert workers[0].gossip.view.edges(State.LEFT) == edges


def test_nobody_is_there() -> None:
    with job(nx.complete_graph(2), flats(2)) as workers:
        workers[0].gossip._neighbours.addresses[0] = ("127.0.0.1", 1)
        with pytest.raises(RuntimeError, match=r"cannot be joined: .*refused"):
            come(workers, flats(1)[0])


def test_the_line_to_copy_names_a_strategy_that_the_launcher_chose(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """And what of it is not as by default; a script that names its own needs neither."""
    monkeypatch.setattr(sys, "argv", ["train.py", "--name", "a b"])
    made = A2CiD2("0-1,1-2", rate=2.0)
    _print_join_command(("10.0.0.1", 4000), made)
    job = tmp_path / "job.json"
    job.write_text(json.dumps({"schema": 1, "strategy": "a2cid2", "settings": made.settings()}))
    monkeypatch.setenv("OFFBEAT_JOB", str(job))
    _print_join_command(("10.0.0.1", 4000), made)
    plain, chosen = [
        line for line in capsys.readouterr().err.splitlines() if "offbeat join" in line
    ]
    words = shlex.split(plain)
    assert words == ["offbeat", "join", "10.0.0.1:4000", "train.py", "--name", "a b"]
    words = shlex.split(chosen)
    name, settings = words[3], [words[5], words[7]]
    assert texts.strategy(name, settings) == made
    assert words[8:] == ["10.0.0.1:4000", "train.py", "--name", "a b"]


def test_a_name_that_leads_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(host: str) -> str:
        raise OSError(f"{host} is not known")

    monkeypatch.setattr(gossiping, "address_towards", unknown)
    with pytest.raises(RuntimeError, match=r"nowhere:9 cannot be joined: there is no way to"):
        gossiping._own_host(("nowhere", 9))


def test_a_place_that_is_never_taken_stops_nobody() -> None:
    x = flats(3)
    with job(nx.complete_graph(2), x[:2], silent_s=1.0) as workers:
        warm(workers)
        with pytest.raises(ZeroDivisionError):
            come(workers, _Unwilling(x[2]))  # type: ignore[arg-type]
        assert together([worker.consolidate for worker in workers]) == [None] * 2
        assert any("has not come" in word for word in workers[0].gossip.take_notices())


class _Unwilling:
    def __init__(self, flat: Tensor):
        self._flat = flat

    def __getattr__(self, name: str) -> None:
        raise ZeroDivisionError


def test_places_that_cannot_be() -> None:
    data = {"me": 7, "first": [[0, 1]], "near": {"0": ["10.0.0.1", 4000]}, "held": 4}
    place = Place.unpack(data, 0.5, torch.zeros(1))
    assert (place.me, place.first, place.held) == (7, [(0, 1)], 4)
    assert place.near == {0: ("10.0.0.1", 4000)}
    for wrong in ({"first": 3}, {"near": 3}, {"held": None}):
        with pytest.raises(WireError):
            Place.unpack({**data, **wrong}, 0.5, torch.zeros(1))


SCRIPT = """
import sys, time, torch, offbeat
from torch import nn
torch.manual_seed(int(sys.argv[1]))
model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
optimizer = torch.optim.SGD(model.parameters(), lr=.01, momentum=.9)
strategy = offbeat.A2CiD2("complete", wire="int8")
model, optimizer = offbeat.prepare(model, optimizer, strategy, timeout_s=40)
gossip = model._session._gossip
momentum = optimizer.state_dict()["state"]
if gossip.me == 2:
    assert momentum[0]["momentum_buffer"].abs().sum() > 0, "the neighbour's"
    assert model.module[1].num_batches_tracked > 0
until = time.monotonic() + 120  # that a busy machine may take to start the third one
while not {0, 1, 2} <= {gossip.me, *gossip.counts.exchanges} and time.monotonic() < until:
    optimizer.zero_grad()
    model(torch.randn(8, 4)).square().sum().backward()
    optimizer.step()
    time.sleep(.03)  # leaves the processor to the one that starts
model.consolidate()
print("end", gossip.me, [p.double().sum().item() for p in model.parameters()], flush=True)
model.close()
"""


def test_a_script_joins_by_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two ranks and one that comes later, in processes of their own: all end alike. Its first
    exchanges are of parameters, the others of codes. It has a record of its own."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    port = free_port()
    for name, value in (("SECRET", "of a test"), ("RECORD", str(tmp_path / "runs"))):
        monkeypatch.setenv(f"OFFBEAT_{name}", value)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    world = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    ranks, said, printed = [], tmp_path / "said", list[str]()

    def run(command: list[str], env: dict[str, str]) -> ForkedPython:
        joining = ForkedPython(command, env=env, **pipes)
        printed.extend(joining.communicate(timeout=150))
        return joining

    monkeypatch.setattr("offbeat.experiments.joining.subprocess", SimpleNamespace(run=run))
    for n in range(2):
        own = {**os.environ, **world, "RANK": str(n)}
        with (said if n == 0 else tmp_path / "other").open("w") as errors:
            files = {"stdout": subprocess.PIPE, "stderr": errors}
            ranks.append(ForkedPython([sys.executable, script, n], env=own, **files))
    try:
        while "offbeat join" not in said.read_text().rpartition("\n")[0]:
            assert ranks[0].poll() is None, said.read_text()
            time.sleep(0.05)
        line = next(line for line in said.read_text().splitlines() if "offbeat join" in line)
        code = cli.main(shlex.split(line)[1:])
        ends = [rank.communicate(timeout=150)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    out, errors = printed
    assert code == 0, errors
    assert "as worker 2" in " ".join(errors.split())
    sums = [end.split("end")[1].split(" ", 2)[1:] for end in (*ends, out)]
    assert sorted(me for me, _ in sums) == ["0", "1", "2"]
    assert len({words for _, words in sums}) == 1
    records = [load([run]) for run in (tmp_path / "runs").iterdir()]
    assert sorted(record.world_size for record in records) == [1, 2]
    for record in records:
        assert record.missing == []
        for lines in record.ranks.values():
            assert lines.end is not None
            assert lines.end["how"] == "ended"
            assert combine(lines.intervals).n > 0


def test_bad_calls_of_join(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "t.py").write_text("")
    for argv, secret, words in [
        (["nowhere", "t.py"], "a", "must be HOST:PORT of a worker"),
        (["127.0.0.1:1", "no.py"], "a", "must begin with an existing file"),
        (["127.0.0.1:1", "t.py"], None, "must be set to the job's secret"),
        (["--strategy", "wfbp", "127.0.0.1:1", "t.py"], "a", "must be one of gossip"),
    ]:
        monkeypatch.delenv("OFFBEAT_SECRET", raising=False)
        if secret is not None:
            monkeypatch.setenv("OFFBEAT_SECRET", secret)
        assert cli.main(["join", *argv]) == 2
        assert words in capsys.readouterr().err


def test_a_neighbour_that_connects_anew_leaves_its_earlier_connection() -> None:
    """Exchanges and requests over the earlier one end before the new one is used."""
    peers: Any = Peers.__new__(Peers)
    earlier, new = (_Peer(Mock(bytes_sent=5), 1) for _ in range(2))
    peers.me, peers._sent_before, peers._selector = 2, 0, Mock()
    peers._connections, peers._pending, peers._peers = {1: earlier}, {new}, {earlier, new}
    peers._tries, peers._retry_at_s, peers.receiver = {1: 3}, {}, Mock()
    peers._introduce(new, SimpleNamespace(header=SimpleNamespace(rank=1, kind=Kind.HELLO), meta={}))
    assert [name for name, *_ in peers.receiver.method_calls] == ["on_disconnect", "on_connect"]
    assert earlier.connection.close.called  # type: ignore[attr-defined]
    assert (peers._connections, peers._pending, peers._tries) == ({1: new}, set(), {1: 0})
    assert peers.bytes_sent == 10
