"""`offbeat doctor`: facts of this host, and no secret."""

from __future__ import annotations

import json
import platform

import pytest

from offbeat import __version__, cli


def test_facts_are_there_and_secrets_are_not(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OFFBEAT_SECRET", "hunter2")
    monkeypatch.setenv("OFFBEAT_LINKS", "lo")
    assert cli.main(["doctor", "--json"]) == 0
    text = capsys.readouterr().out
    facts = json.loads(text)
    assert facts["versions"]["offbeat"] == __version__
    assert facts["versions"]["python"] == platform.python_version()
    assert facts["interfaces"]["lo"].startswith("127.0.0.1")
    assert facts["limits"]["open files"] > 0
    assert facts["environment"]["OFFBEAT_LINKS"] == "lo"
    assert facts["environment"]["OFFBEAT_SECRET"] == "set, not shown"
    assert "hunter2" not in text
    assert facts["lab"]["network namespaces"]


def test_the_text_fits_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert {"versions", "platform", "interfaces", "limits", "lab", "environment"} <= {*lines}
