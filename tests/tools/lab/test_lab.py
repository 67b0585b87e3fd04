"""The lab: links, rates, refusals; with real namespaces."""

import json
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import offbeat
from offbeat.lab import Cluster, HostOverride, Lab, LabError, Link, NoLab, check_support, launch
from offbeat.lab.shaping import (
    bridged_segments_bytes,
    burst_bytes,
    queue_bytes,
    segments_bytes,
)

pytestmark = pytest.mark.timeout(60)

# Rank 0 receives from every other rank over the link LINK as many bytes as BYTES says and prints
# the seconds that this took; every rank prints its congestion control.
TRANSFER = """
import json, os, socket, time
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
size, there = int(os.environ["BYTES"]), (os.environ["SINK"], 7000)
control = lambda s: s.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).strip(bytes(1))
if rank == 0:
    server = socket.create_server(there)
    for _ in range(world - 1):
        peer, _ = server.accept()
        peer.sendall(b"go")
        start_s, left = time.monotonic(), size
        while left:
            left -= len(peer.recv(65536))
        print("took", time.monotonic() - start_s, control(peer).decode(), flush=True)
        peer.sendall(b"thanks")
else:
    while True:
        try:
            peer = socket.create_connection(there)
            break
        except ConnectionRefusedError:
            time.sleep(0.02)
    assert peer.recv(2) == b"go"
    peer.sendall(bytes(size))
    assert peer.recv(6) == b"thanks"
"""


def transfer(lab, argv, size_bytes: int, folder: Path, link: int = 0) -> tuple[float, str]:
    """Seconds for the transfer and the congestion control at the receiver."""
    lines: list[str] = []
    result = launch(
        lab,
        argv,
        env={"BYTES": str(size_bytes), "SINK": lab.address(0, link)},
        log_dir=folder,
        timeout_s=20,
        on_line=lambda _, line: lines.append(line),
    )
    assert result.problem is None
    ((_, seconds, control),) = [line.split() for line in lines if line.startswith("took")]
    return float(seconds), control


def least_s(size_bytes: int, rate_bps: float) -> float:
    """A shaped link is never faster than its rate, apart from its bursts (20 % and more here)."""
    return 0.8 * (size_bytes * 8 / rate_bps)


@pytest.mark.usefixtures("namespaces")
def test_an_override_slows_one_host_on_one_link(program, tmp_path):
    """And the congestion control is that of the description."""
    cluster = Cluster(
        hosts=2,
        links=(Link(name="fast"), Link(name="slow", rate="400mbit")),
        congestion_control="reno",
        overrides=(HostOverride(host=1, rates={"slow": "10mbit"}),),
    )
    with Lab(cluster) as lab:
        before = lab.counters()
        seconds, control = transfer(lab, program(TRANSFER), 600_000, tmp_path, link=1)
        after = lab.counters()
    assert after[1]["slow"].sent_bytes - before[1]["slow"].sent_bytes >= 600_000
    assert after[0]["slow"].received_bytes - before[0]["slow"].received_bytes >= 600_000
    assert after[1]["fast"].sent_bytes < 100_000
    assert seconds >= least_s(600_000, 10e6)
    assert control == "reno"


@pytest.mark.usefixtures("namespaces")
@pytest.mark.parametrize(
    "override",
    [
        HostOverride(host=0, rates={"net": "10mbit"}),  # host 0 only receives
        HostOverride(host=1, uplinks={"net": "10mbit"}),  # host 1 only sends
    ],
    ids=["receiver", "uplink"],
)
def test_each_direction_is_shaped(override, program, tmp_path):
    with Lab(Cluster(hosts=2, overrides=(override,), links=(Link(rate="400mbit"),))) as lab:
        [there] = lab.probe()
        assert there.asked.hosts == (0, 1)
        seconds, control = transfer(lab, program(TRANSFER), 600_000, tmp_path)
    assert seconds >= least_s(600_000, 10e6)
    assert control == "cubic"


@pytest.mark.usefixtures("namespaces")
def test_a_rate_changes_while_a_transfer_runs(program, tmp_path):
    with Lab(Cluster.simple(2, "8mbit")) as lab:
        # At 8 Mbit/s 20 MB would take 20 s, the limit of the launch.
        timer = threading.Timer(0.5, lambda: [lab.set_rate(host, "net", None) for host in (0, 1)])
        timer.start()
        transfer(lab, program(TRANSFER), 20_000_000, tmp_path)
        timer.join()
        lab.set_rate(1, "net", "unlimited")  # twice is no error
        lab.set_rate(1, "net", "10mbit")
        seconds, _ = transfer(lab, program(TRANSFER), 600_000, tmp_path)
    assert seconds >= least_s(600_000, 10e6)


@pytest.mark.usefixtures("namespaces")
def test_labs_side_by_side_do_not_meet_and_do_not_show_outside(program, tmp_path):
    def interfaces() -> list[str]:
        return [line.split(":")[0] for line in Path("/proc/self/net/dev").read_text().splitlines()]

    before = interfaces()
    argv = program(
        "import os, socket, sys\n"
        "server = socket.create_server((os.environ['MASTER_ADDR'], int(os.environ['MASTER_PORT'])))"
        "\nprint('bound', flush=True)\n"
    )
    with Lab(Cluster.simple(1, "10mbit"), "a") as one, Lab(Cluster.simple(1), "b") as two:
        assert interfaces() == before
        assert not set(one.inodes()) & set(two.inodes())
        assert one.address(0) == two.address(0)
        for lab in (one, two):
            assert launch(lab, argv, log_dir=tmp_path, timeout_s=20).problem is None


@pytest.mark.usefixtures("namespaces")
def test_records_and_congestion_controls():
    with Lab(Cluster.simple(2, "10mbit"), "record") as lab:
        record = json.loads(json.dumps(lab.record()))
    assert (record["kind"], record["name"], record["note"]) == ("namespaces", "record", None)
    assert Cluster(**record["cluster"]) == lab.cluster
    assert record["congestion_control"] == "cubic"
    default = Path("/proc/sys/net/ipv4/tcp_congestion_control").read_text().strip()
    with Lab(Cluster(hosts=1, congestion_control="default")) as lab:
        assert lab.congestion_control == default
    with pytest.raises(LabError, match=r"congestion_control \('nosuch'\)"):
        check_support(Cluster(hosts=4, congestion_control="nosuch"))


@pytest.mark.usefixtures("namespaces")
def test_latency_works_or_names_what_is_missing(program, tmp_path):
    cluster = Cluster.simple(2, "10mbit", latency="20ms")
    try:
        check_support(cluster)
    except LabError as error:
        refusal = str(error)
    else:
        refusal = ""
    if refusal:
        assert "link 'net'" in refusal
        assert "latency (20ms)" in refusal
        return
    with Lab(cluster) as lab:  # one way there, one way back, at least
        seconds, _ = transfer(lab, program(TRANSFER), 100_000, tmp_path)
    assert seconds >= 0.04


# Enters a user namespace, as somebody else than root, and runs the rest of its arguments there.
AS_USER = """
import os, sys
from pathlib import Path
sys.path.insert(0, {source!r} + "/offbeat/lab")
import syscalls  # not offbeat.lab: numpy's threads forbid to enter a user namespace
user, group = os.geteuid(), os.getegid()
syscalls.unshare(syscalls.CLONE_NEWUSER)
Path("/proc/self/setgroups").write_text("deny")
Path("/proc/self/uid_map").write_text(f"4321 {{user}} 1")
Path("/proc/self/gid_map").write_text(f"4321 {{group}} 1")
{limit}
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""

ROOTLESS = """
import os, sys
sys.path.insert(0, {source!r})
from offbeat.lab import Cluster, Lab, LabError, launch
status = open("/proc/self/status").read()
assert os.getuid() == 4321 and "CapEff:\\t0000000000000000" in status
try:
    with Lab(Cluster.simple(2, "10mbit"), "rootless") as lab:
        code = "import os; print(os.getuid(), 'eth0:' in open('/proc/net/dev').read())"
        result = launch(lab, [sys.executable, "-c", code], log_dir={folder!r}, timeout_s=20)
        print(result.problem or "fine", result.log_files[0].read_text())
except LabError as error:
    print("LabError", error)
"""


def as_user(program, tmp_path: Path, limit: str = "") -> str:
    """Output of a process without any right that tries a lab."""
    source = str(Path(offbeat.__file__).parents[1])
    enter = program(AS_USER.format(source=source, limit=limit))
    rootless = program(ROOTLESS.format(source=source, folder=str(tmp_path / "logs")))
    done = subprocess.run(
        [sys.executable, enter[-1], rootless[-1]], capture_output=True, text=True, timeout=25
    )
    if "in <module>\n    syscalls.unshare" in done.stderr:
        pytest.skip(f"user namespaces are refused: {done.stderr.splitlines()[-1]}")
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_user_without_rights_can_have_a_lab(program, tmp_path):
    output = as_user(program, tmp_path)
    if output.startswith("LabError network namespaces are refused"):
        pytest.skip(output)
    assert output.startswith("fine 4321 True")


def test_a_real_refusal_is_explained(program, tmp_path):
    limit = 'Path("/proc/sys/user/max_net_namespaces").write_text("0")'
    output = as_user(program, tmp_path, limit)
    assert output.startswith("LabError ")
    assert "--lab none" in output


@pytest.mark.parametrize("kind", [Lab, NoLab])
def test_wrong_uses_are_refused(kind):
    lab = kind(Cluster.simple(2))
    with pytest.raises(ValueError, match=r"host \(2\)"):
        lab.address(2)
    with pytest.raises(ValueError, match=r"link \(1\)"):
        lab.interface(1)
    if kind is Lab:
        with pytest.raises(LabError):  # it was not entered
            lab.counters()


def test_no_lab_says_loudly_that_it_is_unshaped():
    with NoLab(Cluster.simple(2, "10mbit")) as lab:
        assert lab.note is not None
        assert lab.record()["note"] == lab.note
        assert lab.counters() == {}
        assert lab.verify(limit_s=0.1) is None
        assert (lab.interface(0), lab.address(1)) == ("lo", "127.0.0.1")
        with pytest.raises(LabError):
            lab.set_rate(0, "net", "5mbit")


@pytest.mark.parametrize("rate_bps", [1_000, 1_000_000, 200_000_000, 250_000_000, 32_000_000_000])
def test_a_shaper_holds_more_than_a_packet_and_queues_more_than_it_lets_through(rate_bps):
    assert burst_bytes(rate_bps) == max(2 * 1514, rate_bps // 4000)  # two frames, 2 ms
    assert queue_bytes(rate_bps) >= burst_bytes(rate_bps) + 128 * 1024
    # With 66 bytes of headers for each packet of 1448 a hand-over still fits into a burst.
    segments = segments_bytes(rate_bps)
    assert segments + -(-segments // 1448) * 66 <= burst_bytes(rate_bps)
    assert segments <= segments_bytes(None) == 65536
    single = rate_bps <= 200_000_000
    assert bridged_segments_bytes(rate_bps) == (65536 if single else segments)


@pytest.mark.usefixtures("namespaces")
def test_what_is_handed_over_at_once_arrives_so(program, tmp_path):
    """A shaper that cuts it into single packets keeps processors busy and has them out of order."""
    packets = """
        rows = [line.split() for line in open("/proc/self/net/dev") if "eth0:" in line]
        print("took", rows[0][2], "packets")"""
    code = TRANSFER.replace(
        '        peer.sendall(b"thanks")', packets + '\n        peer.sendall(b"thanks")'
    )
    code = code.replace('        print("took", time', '        print("not", time')
    with Lab(Cluster.simple(2, "210mbit")) as lab:
        received, _ = transfer(lab, program(code), 4_000_000, tmp_path)
        host = lab.counters()[0]["net"]
    assert host.received_bytes / received > 3 * 1514
