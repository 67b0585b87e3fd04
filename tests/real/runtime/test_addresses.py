"""Wrong addresses and interfaces are refused at once, with the remedy."""

import os
import socket
import subprocess
import sys
import time

import pytest
from harness.commands import ForkedPython

from offbeat.cli import entry as cli
from offbeat.core.transport import addresses, rendezvous

UNKNOWN, ELSEWHERE = "no-such-host.invalid", "192.0.2.77"  # reserved: neither exists anywhere
SCRIPT = """
import torch
import offbeat

model = torch.nn.Linear(4, 1)
offbeat.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
"""


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(addresses, "RESOLVE_S", 0.0)
    monkeypatch.setattr(addresses, "ARRIVE_S", 0.5)


def check(host: str, rank: int = 0, **variables: str) -> None:
    environ = {"MASTER_ADDR": host, "MASTER_PORT": str(free_port()), **variables}
    addresses.require_address(rank, environ, hosts_store=rank == 0)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def test_a_port_that_another_program_uses_is_named(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        monkeypatch.setenv("MASTER_PORT", str(port))
        with pytest.raises(ValueError, match=rf"MASTER_PORT \({port}\) .* choose another port"):
            rendezvous.open_store(0, 2, 5.0)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_name_that_does_not_resolve(rank):
    with pytest.raises(ValueError, match=rf"MASTER_ADDR \({UNKNOWN}\) .* rank {rank} cannot"):
        check(UNKNOWN, rank)


def test_rank_0_hosts_the_store_at_an_address_of_its_own():
    with pytest.raises(ValueError, match=rf"MASTER_ADDR \({ELSEWHERE}\) .* rank 0's host .* Start"):
        check(ELSEWHERE)
    check(ELSEWHERE, rank=1)  # others only connect
    for host in ("127.0.0.1", "localhost", "::1"):
        check(host)


def test_an_address_that_leads_here_by_translation(monkeypatch):
    monkeypatch.setattr(addresses, "is_local", lambda _: False)
    check("127.0.0.1")


def test_a_rank_that_connects_early_does_not_disturb_the_probe(monkeypatch):
    connect, early = socket.create_connection, []

    def connect_after_a_rank(address, timeout_s):
        early.append(connect(address, timeout_s))
        early[0].sendall(b"of a rank")
        return connect(address, timeout_s)

    monkeypatch.setattr(addresses, "ARRIVE_S", 10.0)
    monkeypatch.setattr(socket, "create_connection", connect_after_a_rank)
    assert addresses._arrives_here((socket.AF_INET, "127.0.0.1"), free_port())
    assert len(early) == 1
    early[0].close()


def test_gloos_interface():
    check("127.0.0.1", GLOO_SOCKET_IFNAME="lo")
    with pytest.raises(ValueError, match=r"GLOO_SOCKET_IFNAME \(eth77\) must be .*it has .*lo"):
        check("127.0.0.1", GLOO_SOCKET_IFNAME="eth77")


def test_a_script_ends_long_before_the_timeout(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    place = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": ELSEWHERE, "MASTER_PORT": "29512"}
    start_s = time.monotonic()
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    command = [sys.executable, "train.py"]
    script = ForkedPython(command, cwd=tmp_path, env=os.environ | place, ends=True, **pipes)
    _, said = script.communicate(timeout=100)
    assert f"MASTER_ADDR ({ELSEWHERE})" in said
    assert script.returncode == 1
    assert time.monotonic() - start_s < 60  # the timeout is 120 s


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ("run --lab none --links eth77 train.py", "--links (eth77) must be a network interface"),
        ("compare --lab none --links lo,gloo:eth77 train.py", "--links (eth77) must be"),
        (f"join {UNKNOWN}:4000 train.py", f"address ({UNKNOWN}:4000) must begin with"),
    ],
)
def test_wrong_addresses_on_the_command_line(argv, words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    assert cli.main(argv.split()) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith(f"offbeat: {words}")
    assert printed.err.count("\n") == 1
    assert not printed.out
