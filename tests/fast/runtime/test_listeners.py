"""Ports of the services between ranks."""

from __future__ import annotations

import socket

import pytest
from harness.parts import open_listener


def test_the_first_free_port_of_the_range(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        monkeypatch.setenv("OFFBEAT_PORTS", f"{port}-{port}")
        with pytest.raises(ValueError, match=r"OFFBEAT_PORTS \("):
            open_listener("127.0.0.1")
        monkeypatch.setenv("OFFBEAT_PORTS", f"{port}-{min(port + 50, 65535)}")
        with open_listener("127.0.0.1") as other:
            assert port < other.getsockname()[1] <= port + 50


@pytest.mark.parametrize("text", ["29600", "29700-29600", "0-10", "60000-70000", "a-b"])
def test_what_is_no_range_is_refused(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OFFBEAT_PORTS", text)
    with pytest.raises(ValueError, match=rf"OFFBEAT_PORTS \('{text}'\)"):
        open_listener("127.0.0.1")
