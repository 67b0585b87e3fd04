"""Processes without the secret, and processes with it that break the protocol."""

from __future__ import annotations

import gc
import random
import resource
import socket
import threading
import time
import tracemalloc
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from cases.memberships import SECRET, ServiceHost, begin, hosted, run_threads

from offbeat.frames import secret as proofs
from offbeat.frames.connection import NOTHING, Connection
from offbeat.frames.frames import HEADER_BYTES, MOST_META_BYTES, pack
from offbeat.membership import (
    JoinRequest,
    ProtocolRefusedError,
    SecretRefusedError,
    ServiceUnreachableError,
    registry,
    service,
)
from offbeat.membership.protocol import PROTOCOL_VERSION, Kind
from offbeat.membership.registry import encode

STRANGERS = 1000


def connected(host: ServiceHost) -> socket.socket:
    name, port = host.address.split(":")
    return socket.create_connection((name, int(port)), 20)


def closed(sock: socket.socket) -> bytes:
    """What arrives until the service has closed the connection."""
    found = b""
    with sock, suppress(ConnectionResetError):
        while data := sock.recv(1 << 16):
            found += data
    return found


def open_files() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.002)


class Talker:
    """A connection with the proof of a secret and frames of the test's choice."""

    def __init__(self, host: ServiceHost, secret: bytes = SECRET):
        self.sock = connected(host)
        self.connection: Connection[Kind] = Connection(
            self.sock, Kind, lambda _: (None, NOTHING), secret, connects=True
        )

    def hello(self, **meta: object) -> Kind:
        self.connection.send(pack(Kind.HELLO, 0, meta={"protocol": PROTOCOL_VERSION, **meta}))
        return self.connection.await_frame(20).header.kind

    def refusal(self, frame: bytes) -> str:
        """The refusal of a frame, which ends the connection."""
        self.connection.send(frame)
        reply = self.connection.await_frame(20)
        assert reply.header.kind is Kind.REFUSED
        with pytest.raises(ConnectionError):
            self.connection.await_frame(20)
        self.connection.close()
        return str(reply.meta["why"])


@pytest.mark.long
def test_strangers_lose_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thousand open connections with garbage, wrong proofs, parts of proofs and silence, while
    two members work: all their requests are applied once, and the service has as much memory and
    as many files as after two hundred."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(limits[0], min(4096, limits[1])), limits[1]))
    monkeypatch.setattr(registry, "MOST_TOKENS", 64)  # otherwise memory grows up to that number
    draw = random.Random(1)
    wrong = proofs.answer(b"wrong", bytes(32), bytes(32))
    contents = [
        b"",
        b"x",
        draw.randbytes(63),
        wrong,
        draw.randbytes(4096),
        b"GET / HTTP/1.0\r\n\r\n",
    ]
    with hosted(tmp_path / "j") as host:
        begin(host.client(), "a")
        done, peak = threading.Event(), [0]
        counts = [0] * 2

        def work(number: int) -> None:
            if number < 2:
                client = host.client(timeout_s=60)
                while not done.is_set() or not counts[number]:
                    client.rendezvous(0).add("sum", 1)
                    client.close()  # each request needs a new connection among the strangers
                    counts[number] += 1
                return
            try:
                tracemalloc.start()
                flood(STRANGERS // 5)
                first_bytes, first_files = used_bytes(), open_files()
                flood(STRANGERS)
                until(lambda: used_bytes() - first_bytes < 300_000)
                until(lambda: open_files() - first_files < 20)
            finally:
                tracemalloc.stop()
                done.set()

        def flood(count: int) -> None:
            socks = list[socket.socket]()
            for n in range(count):
                with suppress(ConnectionError):
                    socks.append(connected(host))
                    socks[-1].sendall(contents[n % len(contents)])
                peak[0] = max(peak[0], len(host.service._peers))
            for sock in socks:
                sock.close()
            host.client().rendezvous(0).add("sum", 0)  # the service has accepted all before this
            until(lambda: len(host.service._peers) <= 8)

        def used_bytes() -> int:
            gc.collect()  # closed connections are cyclic garbage
            return tracemalloc.get_traced_memory()[0]

        run_threads(work, 3)
        assert host.client().rendezvous(0).add("sum", 0) == sum(counts)
        assert min(counts) > 0
        assert peak[0] <= service.MOST_STRANGERS + 8


class RecordingSocket(socket.socket):
    """A socket that stores the bytes that it has sent."""

    sent = bytearray()

    def send(self, data: bytes | bytearray | memoryview, flags: int = 0) -> int:
        count = super().send(data, flags)
        self.sent.extend(bytes(data)[:count])
        return count


def test_a_recorded_connection_proves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All bytes of a member's request, sent again: the service expects another proof."""
    with hosted(tmp_path / "j") as host:
        client, connect = host.client(), socket.create_connection
        begin(client, "a")
        client.close()

        def record(*address: Any, **options: Any) -> socket.socket:
            return RecordingSocket(fileno=connect(*address, **options).detach())

        with monkeypatch.context() as patched:
            patched.setattr(socket, "create_connection", record)
            assert client.rendezvous(0).add("n", 1) == 1
        sent = bytes(RecordingSocket.sent)
        assert b'"op":"add"' in sent
        for _ in range(3):
            with connected(host) as sock:
                sock.sendall(sent)
                assert len(closed(sock)) in (0, proofs.NONCE_BYTES)  # a reset may overtake it
        assert client.rendezvous(0).add("n", 0) == 1


def test_wrong_secrets_are_refused(tmp_path: Path) -> None:
    with hosted(tmp_path / "j") as host:
        begin(host.client(), "a")
        for secret in (b"", b"secret", SECRET + b"x", SECRET[:-1]):
            with pytest.raises(SecretRefusedError) as caught:
                host.client(secret, timeout_s=10).request_join(JoinRequest("b"))
            assert SECRET.decode() not in str(caught.value)
        assert host.client().state().joining == ()


def test_no_byte_is_parsed_before_the_proof(tmp_path: Path) -> None:
    """A frame without a proof is 64 bytes of a wrong proof, whatever it holds."""
    with hosted(tmp_path / "j") as host:
        frame = pack(Kind.REQUEST, 0, meta={"command": {"op": "join", "request": {"member": "x"}}})
        assert len(frame) > proofs.ANSWER_BYTES
        with connected(host) as sock:
            sock.sendall(frame * 100)
            assert len(closed(sock)) in (0, proofs.NONCE_BYTES)
        assert host.client().state().joining == ()


def test_frames_out_of_order_are_refused(tmp_path: Path) -> None:
    """Before their content is read or memory is allocated."""
    with hosted(tmp_path / "j") as host:
        request = pack(Kind.REQUEST, 0, meta={"command": {"op": "state"}, "wait_s": 0})
        assert "REQUEST is not expected now" in Talker(host).refusal(request)
        long = pack(Kind.HELLO, 0, meta={"protocol": PROTOCOL_VERSION, "x": "y" * 5000})
        assert "HELLO (" in Talker(host).refusal(long)
        cases = {
            pack(Kind.HELLO, 0): "HELLO is not expected now",
            pack(Kind.REPLY, 0): "REPLY is not expected now",
            pack(Kind.REQUEST, 0, body_bytes=1 << 40): "body (1099511627776 bytes) must have 0",
            b"\0" * HEADER_BYTES: "the peer does not speak offbeat's protocol",
            request[:4] + b"\x63" + request[5:]: "version (99) must be 1",
            request[:5] + b"\x63" + request[6:]: "kind (99) is unknown",
            pack(Kind.REQUEST, 0): "command must be an object",
            pack(Kind.REQUEST, 0, meta={"wait_s": "x"}): "wait_s must be a number of seconds",
            pack(Kind.REQUEST, 0, meta={"wait_s": -1}): "wait_s must be a number of seconds",
            pack(Kind.REQUEST, 0, meta={"wait_s": float("nan")}): "wait_s must be a number",
        }
        for frame, expected in cases.items():
            talker = Talker(host)
            assert talker.hello() is Kind.WELCOME
            if "command" in expected:  # a wrong command does not end the connection
                talker.connection.send(frame)
                assert expected in talker.connection.await_frame(20).meta["why"]
                talker.connection.close()
            else:
                assert expected in talker.refusal(frame)
        talker = Talker(host)
        assert talker.hello() is Kind.WELCOME
        head = bytearray(pack(Kind.REQUEST, 0))
        head[20:24] = (MOST_META_BYTES + 1).to_bytes(4, "big")
        assert "cannot be" in talker.refusal(bytes(head))
        talker = Talker(host)
        assert talker.hello(protocol=0) is Kind.REFUSED
        talker.connection.close()
        assert host.client().state().version == 0


def test_one_request_at_a_time(tmp_path: Path) -> None:
    """Otherwise a client that reads no reply could fill the memory of the service."""
    with hosted(tmp_path / "j") as host:
        begin(host.client(), "a")
        talker = Talker(host)
        assert talker.hello() is Kind.WELCOME
        wait = {"op": "await", "epoch": 0, "keys": ["k"]}
        request = pack(Kind.REQUEST, 0, meta={"command": wait, "wait_s": 20})
        assert "before the reply to the last one" in talker.refusal(request * 2)


def test_a_client_that_reads_no_reply_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "ENDING_S", 0.05)
    with hosted(tmp_path / "j") as host:
        client = host.client()
        begin(client, "a")
        client.rendezvous(0).set("k", bytes(200_000))
        talker = Talker(host)
        assert talker.hello() is Kind.WELCOME
        command = {"op": "await", "epoch": 0, "keys": ["k"], "value": True}
        request = pack(Kind.REQUEST, 0, meta={"command": command, "wait_s": 0})
        talker.sock.setblocking(True)
        talker.sock.settimeout(20)
        with suppress(ConnectionError):
            talker.sock.sendall(request * 100_000)
        until(lambda: len(host.service._peers) == 1)  # the connection of the client
        talker.sock.close()
        assert encode(client.rendezvous(0).get("k", 0)) == encode(bytes(200_000))


def test_time_of_connections_is_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without proof, without HELLO, after a refusal that is not read, and without requests."""
    with hosted(tmp_path / "j") as host:
        client = host.client()
        begin(client, "a")
        with connected(host) as silent, connected(host) as slow:
            for sock in (silent, slow):
                assert len(sock.recv(32)) == 32
            for name in ("GREETING_S", "IDLE_S", "ENDING_S"):
                monkeypatch.setattr(service, name, 0.05)
            talker = Talker(host)
            with pytest.raises((ConnectionError, TimeoutError)):
                talker.connection.await_frame(0.01)  # the proof alone
            refused = Talker(host)
            refused.connection.send(pack(Kind.REPLY, 0))
            with suppress(TimeoutError, ConnectionError):
                refused.connection.await_frame(0.01)
            until(lambda: not host.service._peers)
            talker.connection.close()
            refused.connection.close()
        client.request_join(JoinRequest("b"))  # over a new connection
        assert client.state().joining == (JoinRequest("b"),)


def test_number_of_connections_is_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Idle connections of members are closed first; each member connects again."""
    monkeypatch.setattr(service, "MOST_CONNECTIONS", 6)
    with hosted(tmp_path / "j") as host:
        clients = [host.client() for _ in range(20)]
        begin(clients[0], "a")
        waiting = threading.Thread(
            target=lambda: clients[0].rendezvous(0).get("k", 60), daemon=True
        )
        waiting.start()
        until(lambda: any(peer.waiting for peer in list(host.service._peers)))
        for _ in range(3):
            for client in clients[1:]:
                client.rendezvous(0).add("n", 1)
                assert len(host.service._peers) <= 6
        assert clients[1].rendezvous(0).add("n", 0) == 3 * 19
        clients[1].rendezvous(0).set("k", b"")
        waiting.join(30)
        assert not waiting.is_alive()


def test_strangers_of_one_host_do_not_exclude_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The connection that is closed is one of the host with the most of them."""
    monkeypatch.setattr(service, "MOST_STRANGERS", 4)
    with hosted(tmp_path / "j") as host:
        name, port = host.address.split(":")
        with socket.create_connection((name, int(port)), 20, ("127.0.0.2", 0)) as first:
            assert len(first.recv(32)) == 32
            socks, resets = list[socket.socket](), 0
            for _ in range(20):
                sock = None
                try:
                    sock = connected(host)
                    sock.recv(32)
                    socks.append(sock)
                except ConnectionResetError:
                    resets += 1
                    if sock is not None:
                        sock.close()
            hosts = [peer.host for peer in list(host.service._peers)]
            assert sorted(hosts) == ["127.0.0.1"] * 3 + ["127.0.0.2"]
            for sock in socks:
                sock.settimeout(0)
                with suppress(BlockingIOError):
                    try:
                        assert sock.recv(32)  # no end, as it follows a wrong secret
                    except ConnectionResetError:
                        resets += 1
                sock.close()
            assert resets == 17


def test_a_client_reports_a_broken_service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replies that are no replies, with the right secret."""
    with hosted(tmp_path / "j") as host:
        client, hasty = host.client(), host.client(timeout_s=0.3)
        send = service.MembershipService._send
        monkeypatch.setattr(
            service.MembershipService,
            "_send",
            lambda self, peer, kind, *a, **h: send(
                self, peer, Kind.HELLO if kind is Kind.REPLY else kind, *a, **h
            ),
        )
        with pytest.raises(ProtocolRefusedError, match="HELLO is not expected now"):
            client.state()
        monkeypatch.setattr(service.MembershipService, "_send", lambda *_, **__: None)
        monkeypatch.setattr("offbeat.membership.remote.ANSWER_S", 0.1)
        with pytest.raises(ServiceUnreachableError, match=r"has not answered for 0\.3 s"):
            hasty.state()


def test_strangers_leave_room_for_members(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They have at most half of the connections, also where a process may open few files."""
    monkeypatch.setattr(service, "MOST_CONNECTIONS", 8)
    with hosted(tmp_path / "j") as host:
        clients = [host.client() for _ in range(4)]
        begin(clients[0], "a")
        for client in clients:
            client.state()
        known = [peer for peer in host.service._peers if peer.is_known]
        assert len(known) == 4
        socks = list[socket.socket]()
        for _ in range(20):
            with suppress(ConnectionResetError):
                socks.append(connected(host))
                socks[-1].recv(32)
        assert {*known} <= host.service._peers
        assert len(host.service._peers) == 8
        for sock in socks:
            sock.close()
