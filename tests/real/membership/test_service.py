"""The service over sockets: restarts, lost replies, secrets, versions, and the command."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from cases.memberships import (
    SECRET,
    admit,
    begin,
    hosted,
    reserved_port,
    run_threads,
)

from offbeat import __version__, cli
from offbeat.frames.secret import FILE_VARIABLE, VARIABLE, read_secret
from offbeat.membership import (
    Epoch,
    JoinRequest,
    Membership,
    MembershipClient,
    MembershipWatch,
    ProtocolRefusedError,
    RequestRefusedError,
    SecretRefusedError,
    ServiceUnreachableError,
    remote,
)
from offbeat.membership import protocol as protocols
from offbeat.membership.protocol import Kind
from offbeat.membership.service import MembershipService, open_service


def test_a_restart_in_the_middle_loses_and_repeats_nothing(tmp_path: Path) -> None:
    """Eight threads add, propose and wait while the service restarts four times."""
    with hosted(tmp_path / "j") as host:
        begin(host.client(), "a")
        done, most = threading.Event(), 25

        def act(number: int) -> None:
            if number == 8:
                for _ in range(4):
                    host.restart()
                done.set()
                return
            client = host.client()
            for n in range(most):
                client.rendezvous(0).add("sum", 1)
                client.request_join(JoinRequest(f"m{number}.{n}"))
                client.wait_for_change(-1, 1)
            assert done.wait(60)

        run_threads(act, 9)
        client = host.client()
        assert client.rendezvous(0).add("sum", 0) == 8 * most
        joining = [request.member for request in client.state().joining]
        assert sorted(joining) == sorted(
            f"m{number}.{n}" for number in range(8) for n in range(most)
        )


def test_a_wait_lasts_over_a_restart(tmp_path: Path) -> None:
    with hosted(tmp_path / "j") as host:
        client = host.client()
        begin(client, "a", "b")
        found: list[Any] = []
        waits = [
            lambda: found.append(host.client().rendezvous(0).get("k", 60)),
            lambda: found.append(host.client().wait_for_change(1, 60).version),
        ]
        threads = [threading.Thread(target=wait, daemon=True) for wait in waits]
        for thread in threads:
            thread.start()
        host.restart()
        client.rendezvous(0).set("k", b"v")
        client.request_join(JoinRequest("c"))
        for thread in threads:
            thread.join(60)
        assert {*found} == {b"v", 2}


def test_replies_that_are_lost_do_not_repeat_a_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The service executes each command and breaks the connection before every second reply."""
    with hosted(tmp_path / "j") as host:
        client = host.client()
        begin(client, "a")
        send, count = MembershipService._send, [0]

        def lose(self: MembershipService, peer: Any, kind: Kind, *args: Any, **header: Any) -> None:
            count[0] += kind is Kind.REPLY
            if kind is Kind.REPLY and count[0] % 2:
                self._reset(peer)
            else:
                send(self, peer, kind, *args, **header)

        monkeypatch.setattr(MembershipService, "_send", lose)
        keys = client.rendezvous(0)
        assert [keys.add("n", 1) for _ in range(5)] == [1, 2, 3, 4, 5]
        assert keys.compare_set("lock", b"", b"mine") == b"mine"
        assert keys.delete("lock")
        keys.set("k", b"v")
        assert client.propose(Epoch(1, ("a",))) == Epoch(1, ("a",))
        client.request_join(JoinRequest("b"))
        assert [request.member for request in client.state().joining] == ["b"]
        assert client.rendezvous(0).add("n", 0) == 5
        assert count[0] > 20


def test_a_missing_service_is_named_after_the_timeout() -> None:
    reserved = reserved_port()
    port = reserved.getsockname()[1]
    client = MembershipClient(f"127.0.0.1:{port}", SECRET, timeout_s=0.2)
    with pytest.raises(ServiceUnreachableError) as caught:
        client.state()
    text = str(caught.value)
    assert f"membership service at 127.0.0.1:{port} has not answered for 0.2 s" in text
    assert "offbeat membership --journal FILE" in text
    watch = MembershipWatch(client)
    deadline_s = time.monotonic() + 30
    while watch.error is None and time.monotonic() < deadline_s:
        time.sleep(0.01)
    watch.close()
    watch._thread.join(30)
    assert isinstance(watch.error, ServiceUnreachableError)
    assert (watch.state, watch.version) == (None, -1)
    reserved.close()


def test_a_connection_to_itself_is_no_service(monkeypatch: pytest.MonkeyPatch) -> None:
    """TCP opens one if the port of the service is chosen for the client. It must not stay open,
    as the service could not start again."""
    reserved, connect, opened = reserved_port(), socket.create_connection, list[socket.socket]()
    address = reserved.getsockname()
    reserved.close()

    def connect_to_itself(_: object, timeout: float) -> socket.socket:
        opened.append(connect(address, timeout, address))
        return opened[-1]

    monkeypatch.setattr(socket, "create_connection", connect_to_itself)
    client = MembershipClient(f"127.0.0.1:{address[1]}", SECRET)
    with pytest.raises(ConnectionRefusedError, match="no service listens at its port"):
        client._connect(20.0)
    assert opened[0].fileno() == -1


def test_another_program_at_the_address_is_named() -> None:
    """A program that talks first, and one that accepts and is silent."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"

        def talk() -> None:
            while True:
                try:
                    sock, _ = listener.accept()
                except OSError:  # the test has closed the listener
                    return
                with sock:
                    sock.sendall(b"HTTP/1.0 400 Bad Request\r\n\r\n" * 20)
                    with suppress(ConnectionResetError):
                        sock.recv(64)

        thread = threading.Thread(target=talk, daemon=True)
        thread.start()
        with pytest.raises(SecretRefusedError, match="does not accept the secret"):
            MembershipClient(address, SECRET, timeout_s=5).state()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        with pytest.raises(ServiceUnreachableError, match=r"has not answered for 0\.2 s"):
            MembershipClient(address, SECRET, timeout_s=0.2).state()


def test_a_client_connects_when_it_is_used(tmp_path: Path) -> None:
    """And does without the service as long as nothing is requested."""
    with hosted(tmp_path / "j") as host:
        host.end()
        client = host.client()
        host.service = host._start()
        assert client.state().epoch is None
        assert len(client._idle) == 1


def test_an_idle_connection_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with hosted(tmp_path / "j") as host:
        client = host.client()
        client.state()
        ((first, _),) = client._idle
        client.state()
        assert client._idle[0][0] is first
        monkeypatch.setattr(remote, "IDLE_S", 0.0)
        client.state()
        assert client._idle[0][0] is not first
        assert first.sock.fileno() == -1


@pytest.mark.parametrize("address", ["", "host", "host:", ":1", "host:0", "host:70000", "host:x"])
def test_an_address_is_checked_at_once(address: str) -> None:
    with pytest.raises(ValueError, match="must be HOST:PORT of the membership service"):
        MembershipClient(address, SECRET)


# ---- versions -------------------------------------------------------------------------------


def test_other_protocol_versions_are_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with hosted(tmp_path / "j") as host:
        begin(host.client(), "a")
        monkeypatch.setattr(remote, "PROTOCOL_VERSION", protocols.PROTOCOL_VERSION + 1)
        with pytest.raises(ProtocolRefusedError) as caught:
            host.client().request_join(JoinRequest("b"))
        text = str(caught.value)
        assert f"protocol ({protocols.PROTOCOL_VERSION + 1}) of offbeat {__version__}" in text
        assert f"must be {protocols.PROTOCOL_VERSION}" in text
        monkeypatch.undo()
        monkeypatch.setattr(remote, "__version__", "9.9.9")  # versions of one protocol join
        host.client().request_join(JoinRequest("b"))
        assert admit(host.client(), 1, "a", "b").members == ("a", "b")


# ---- secrets --------------------------------------------------------------------------------


def test_the_secret_is_read_from_a_file_or_a_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (VARIABLE, FILE_VARIABLE):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ValueError, match=f"{FILE_VARIABLE} must name a file"):
        read_secret()
    with pytest.raises(ValueError, match=f"{FILE_VARIABLE} must name a file"):
        MembershipClient("127.0.0.1:1")
    monkeypatch.setenv(VARIABLE, "from variable")
    assert read_secret() == b"from variable"
    file = tmp_path / "secret"
    file.write_text("\n from file \r\n")
    monkeypatch.setenv(FILE_VARIABLE, str(file))
    assert read_secret() == b"from file"
    file.write_text("a\nb\n")
    with pytest.raises(ValueError, match=r"\(2 lines\)"):
        read_secret()
    with pytest.raises(ValueError, match=r"\(0 lines\)"):
        read_secret(Path(os.devnull))
    with pytest.raises(FileNotFoundError):
        read_secret(tmp_path / "missing")


# ---- the command ----------------------------------------------------------------------------


@contextmanager
def started(*arguments: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The command in a process, and the line that it prints first."""
    process = subprocess.Popen(
        [sys.executable, "-m", "offbeat", "membership", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={k: v for k, v in os.environ.items() if k not in (VARIABLE, FILE_VARIABLE)},
    )
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        found = re.search(r"membership service at 127\.0\.0\.1:(\d+), (.*)", line)
        assert found, line
        yield process, found[0]
    finally:
        if process.returncode is None:
            process.kill()
            process.communicate()


def test_the_command_continues_after_it_was_killed(tmp_path: Path) -> None:
    """And its secret is in no argument, in no output and not in its journal."""
    secret, journal = tmp_path / "secret", tmp_path / "journal"
    secret.write_bytes(SECRET)
    secret.chmod(0o600)
    reserved = reserved_port()
    port = str(reserved.getsockname()[1])
    options = ["--journal", str(journal), "--host", "127.0.0.1", "--secret", str(secret)]
    with started(*options, "--port", port) as (process, text):
        assert text.endswith(f"127.0.0.1:{port}, no epoch yet")
        client = MembershipClient(f"127.0.0.1:{port}", SECRET, 60)
        begin(client, "a", "b")
        client.rendezvous(0).set("k", b"v")
        arguments = Path(f"/proc/{process.pid}/cmdline").read_bytes()
        imported = Path(f"/proc/{process.pid}/maps").read_text()
        process.kill()
        output = process.communicate()[0]
    assert "epoch 0 with 2 members" in output
    with started(*options, "--port", port) as (process, text):
        assert text.endswith("epoch 0 with 2 members")
        assert client.state().epoch == Epoch(0, ("a", "b"))
        assert client.rendezvous(0).get("k", 0) == b"v"
        process.terminate()
        output += process.communicate()[0]
        assert process.returncode == 0, output
    client.close()
    reserved.close()
    for found in (arguments, output.encode(), text.encode(), journal.read_bytes()):
        assert SECRET not in found
    assert "libtorch" not in imported  # the service needs no torch


def test_wrong_use_of_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in (VARIABLE, FILE_VARIABLE):
        monkeypatch.delenv(name, raising=False)

    def refused(*options: str) -> str:
        assert cli.main(["membership", *options]) == 2
        return " ".join(capsys.readouterr().err.split())

    journal = str(tmp_path / "j")
    assert "must name a file with the secret" in refused("--journal", journal)
    assert not Path(journal).exists()
    monkeypatch.setenv(VARIABLE, "s")
    assert "--port (70000) must be from 0 to 65535" in refused(
        "--journal", journal, "--port", "70000"
    )
    missing = str(tmp_path / "no" / "j")
    assert missing in refused("--journal", missing, "--port", "0")
    assert missing in refused("--journal", journal, "--secret", missing)
    (tmp_path / "text").write_text("text")
    assert "must be a file of `offbeat membership`" in refused("--journal", str(tmp_path / "text"))
    ours = open_service(tmp_path / "j", "127.0.0.1", 0, SECRET)
    assert "another one has it open" in refused("--journal", journal, "--port", "0")
    port = ours.address.rpartition(":")[2]
    other = str(tmp_path / "k")
    assert "in use" in refused("--journal", other, "--host", "127.0.0.1", "--port", port)
    ours.close()


def test_records_have_one_json_form(tmp_path: Path) -> None:
    """What a client sends is what a journal holds."""
    with hosted(tmp_path / "j") as host:
        client: Membership = host.client()
        begin(client, "a")
        with pytest.raises(RequestRefusedError, match="op"):
            client.request({"op": "unknown"})
    lines = (tmp_path / "j").read_text().splitlines()
    _, _, command = json.loads(lines[-1].partition(" ")[2])
    assert Epoch.from_dict(command["epoch"]) == Epoch(0, ("a",))
