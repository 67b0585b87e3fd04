"""The switch of our own between real hosts: delays, losses, changes, nothing left behind."""

import json
import os
import signal
from pathlib import Path

import pytest
from harness.leftovers import alive, eventually, namespace_users

from offbeat.lab import Change, Cluster, HostOverride, Lab, LabError, Link, Pair, launch

pytestmark = [pytest.mark.timeout(60), pytest.mark.usefixtures("namespaces", "switching")]

UNEVEN = Cluster(
    hosts=3,
    links=(Link(rate="20mbit"),),
    overrides=(HostOverride(host=2, latencies={"net": "15ms"}, speed=0.5, jitter=0.1),),
    pairs=(Pair(hosts=(0, 1), rates={"net": "5mbit"}),),
)

# Rank 0 asks rank 1 over and over how it is, and prints when and how long the answer took.
PING = """
import os, socket, time
there = (os.environ["SINK"], 7000)
if os.environ["RANK"] == "1":
    server = socket.create_server(there)
    print("ready", flush=True)
    peer, _ = server.accept()
    while peer.recv(1):
        peer.sendall(b"!")
else:
    while True:
        try:
            peer = socket.create_connection(there)
            break
        except ConnectionRefusedError:
            time.sleep(0.02)
    end_s = time.monotonic() + 1.2
    while time.monotonic() < end_s:
        start_s = time.monotonic()
        peer.sendall(b"?")
        peer.recv(1)
        print("took", start_s, time.monotonic() - start_s, flush=True)
        time.sleep(0.02)
"""


@pytest.fixture
def switching() -> None:
    """Skip the test where TAP devices are refused."""
    try:
        with Lab(UNEVEN):
            return
    except LabError as error:
        pytest.skip(str(error))


def test_hosts_and_pairs_get_what_is_asked_of_them():
    with Lab(UNEVEN, "uneven") as lab:
        assert lab.switched == ("net",)
        found = {measured.asked.hosts: measured for measured in lab.probe()}
        assert json.loads(json.dumps(lab.record()))["switched"] == ["net"]
        traffic = lab.counters()
    assert found[0, 2].latency_s >= 0.015
    assert found[0, 1].rate_bps <= 1.25 * 5e6
    assert found[0, 2].rate_bps <= 1.25 * 20e6
    assert traffic[0]["net"].sent_bytes > 100_000 < traffic[2]["net"].received_bytes


def test_a_change_holds_while_ranks_run_and_no_longer(program, tmp_path: Path):
    cluster = Cluster(hosts=2, changes=(Change(at="0.6s", latency="150ms", hosts=(1,)),))
    lines: list[str] = []
    with Lab(cluster) as lab:
        result = launch(
            lab,
            program(PING),
            env={"SINK": lab.address(1)},
            log_dir=tmp_path,
            timeout_s=20,
            on_line=lambda _, line: lines.append(line),
        )
        [after] = lab.probe()
        unchanged = launch(lab, program(""), log_dir=tmp_path, timeout_s=20, changes=False)
    assert result.problem is None
    [(at_s, number)] = result.changes
    assert (at_s >= 0.6, number, unchanged.changes) == (True, 0, ())
    trips = [tuple(map(float, line.split()[1:])) for line in lines if line.startswith("took")]
    slow = [took_s >= 0.3 for _, took_s in trips]
    assert (slow[0], slow[-1]) == (False, True)
    assert after.latency_s < 0.15


def test_a_transfer_survives_loss(program, tmp_path: Path):
    code = PING.replace("1.2", "0.5")
    with Lab(Cluster.simple(2, "20mbit", loss="2%")) as lab:
        env = {"SINK": lab.address(1)}
        assert launch(lab, program(code), env=env, log_dir=tmp_path, timeout_s=20).problem is None


OWNER = """
from offbeat.lab import Cluster, Lab, launch
cluster = Cluster.from_toml({text!r})
with Lab(cluster, "owned") as lab:
    children = open(f"/proc/{{lab.process.pid}}/task/{{lab.process.pid}}/children").read()
    print("inodes", *lab.inodes(), flush=True)
    print("pids", lab.process.pid, children, flush=True)
    input()
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_the_switch_ends_with_its_owner(owner, number):
    with owner(OWNER.format(text=UNEVEN.to_toml())) as process:
        inodes = [int(word) for word in process.stdout.readline().split()[1:]]
        pids = [int(word) for word in process.stdout.readline().split()[1:]]
        assert (len(pids), all(map(alive, pids))) == (2, True)
        assert namespace_users(inodes)
        process.send_signal(number)
        process.wait(15)
    assert eventually(lambda: not any(map(alive, pids)))
    assert eventually(lambda: not namespace_users(inodes))


def test_a_dead_switch_is_an_error():
    with Lab(UNEVEN) as lab:
        pid = lab.process.pid
        (switch,) = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        os.kill(int(switch), signal.SIGKILL)
        assert eventually(lambda: not alive(pid))
        with pytest.raises(LabError, match="ended unexpectedly"):
            lab.counters()
