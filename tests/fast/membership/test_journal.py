"""The journal: torn at each byte, damaged, full disks, two services, later versions."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import random
from pathlib import Path
from typing import Any

import pytest

from offbeat.core.files import SchemaError
from offbeat.membership import Epoch, EpochReplacedError, JoinRequest, RequestRefusedError
from offbeat.membership import journal as journals
from offbeat.membership.journal import Journal
from offbeat.membership.ledger import JournalError, Ledger
from offbeat.membership.registry import Registry, encode

B = encode(b"value")


def commands() -> list[dict[str, Any]]:
    """Every operation with an effect, in an order in which each has one."""
    return [
        {"op": "propose", "epoch": Epoch(0, ("a", "b"), details={"x": "ü"}).to_dict()},
        {"op": "set", "epoch": 0, "key": "k", "value": B, "token": "t1"},
        {"op": "add", "epoch": 0, "key": "n", "amount": 3, "token": "t2"},
        {"op": "join", "request": JoinRequest("c", 2).to_dict()},
        {"op": "join", "request": JoinRequest("d").to_dict()},
        {"op": "leave", "request": {"member": "b", "reason": "r"}},
        {"op": "death", "report": {"member": "a", "reporter": "b"}},
        {"op": "withdraw", "member": "d"},
        {"op": "propose", "epoch": Epoch(1, ("b", "c"), 5, samples=9).to_dict()},
        {"op": "compare_set", "epoch": 1, "key": "k", "expected": "", "desired": B, "token": "t3"},
        {"op": "delete", "epoch": 0, "key": "k", "token": "t4"},
        {"op": "add", "epoch": 1, "key": "n", "amount": -1, "token": "t5"},
    ]


def written(path: Path) -> list[dict[str, Any]]:
    """A journal of all commands; the state after each number of them."""
    ledger, states = Ledger(Journal(path)), []
    states.append(ledger.registry.snapshot())
    for command in commands():
        assert ledger.execute(command).commit is not None
        states.append(ledger.registry.snapshot())
    ledger.close()
    return states


def entries(path: Path) -> list[tuple[str, dict[str, Any]]]:
    journal = Journal(path)
    journal.close()
    return journal.entries


def reopened(path: Path) -> dict[str, Any]:
    ledger = Ledger(Journal(path))
    ledger.close()
    return ledger.registry.snapshot()


def test_a_restart_restores_everything(tmp_path: Path) -> None:
    states = written(tmp_path / "j")
    assert reopened(tmp_path / "j") == states[-1]
    assert reopened(tmp_path / "j") == states[-1]  # from the snapshot of the first restart
    assert [kind for kind, _ in entries(tmp_path / "j")] == ["snapshot"]


@pytest.mark.long
def test_a_journal_torn_at_each_byte_has_all_answered_commands(tmp_path: Path) -> None:
    path, torn = tmp_path / "j", tmp_path / "torn"
    states = written(path)
    data = path.read_bytes()
    ends = [at + 1 for at, byte in enumerate(data) if byte == ord("\n")]
    assert len(ends) == 2 + len(commands())  # the format, and the snapshot of the start
    for size in range(len(data) + 1):
        torn.write_bytes(data[:size])
        complete = max(0, sum(end <= size for end in ends) - 2)
        journal = Journal(torn)
        ledger = Ledger()
        journals.replay(journal, ledger.registry.restore, ledger._apply)
        assert ledger.registry.snapshot() == states[complete], size
        command = {"op": "join", "request": JoinRequest("new").to_dict()}
        journal.append(command, sync=False)  # after the last complete line
        journal.close()
        assert entries(torn)[-1] == ("command", command)


def test_damage_is_refused_where_the_disk_held_the_entry(tmp_path: Path) -> None:
    """Keys are written without a wait for the disk. The last ones may be damaged by a power
    failure, and then they and all after them are dropped."""
    path = tmp_path / "j"
    states = written(path)
    data = path.read_bytes()
    lines = data.splitlines(keepends=True)
    second_epoch = 1 + 1 + 8  # after the format, the snapshot of the start and eight commands
    assert b"propose" in lines[second_epoch]
    for number in range(1, len(lines)):
        at = sum(map(len, lines[:number])) + len(lines[number]) // 2
        path.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        if number <= second_epoch:
            with pytest.raises(ValueError, match=rf"line {number + 1} of the journal .* damaged"):
                Journal(path)
            assert len(path.read_bytes()) == len(data)
        else:
            journal = Journal(path)
            assert path.stat().st_size == sum(map(len, lines[:number]))
            journal.close()
            assert reopened(path) == states[number - 2]


def test_a_file_of_another_kind_is_not_overwritten(tmp_path: Path) -> None:
    for content in (b"garbage", b"garbage\nmore\n", b"{}\n", b"[1]\n", b'{"format": "x"', b"\n"):
        path = tmp_path / "other"
        path.write_bytes(content)
        with pytest.raises(ValueError, match="must be a file of `offbeat membership`"):
            Journal(path)
        assert path.read_bytes() == content


@pytest.mark.parametrize("step", [-1, 1])
def test_another_schema_is_refused(tmp_path: Path, step: int) -> None:
    path = tmp_path / "j"
    written(path)
    header, rest = path.read_bytes().split(b"\n", 1)
    other = json.dumps({**json.loads(header), "schema": journals.SCHEMA + step}).encode()
    path.write_bytes(other + b"\n" + rest)
    with pytest.raises(SchemaError, match="schema"):
        Journal(path)


def test_a_command_that_cannot_be_applied_is_named(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "j")
    journal.append({"op": "propose", "epoch": {"number": 3, "members": ["a"]}}, sync=True)
    journal.close()
    with pytest.raises(ValueError, match=r"line 2 of the journal .* cannot be applied .*number"):
        Ledger(Journal(tmp_path / "j"))


def test_two_services_cannot_share_a_journal(tmp_path: Path) -> None:
    path = tmp_path / "j"
    ledger = Ledger(Journal(path))  # its start has replaced the file
    with pytest.raises(ValueError, match="another one has it open"):
        Journal(path)
    ledger.close()
    Journal(path).close()


def test_a_journal_needs_a_file_system_with_locks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another service does not have it open."""

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(ValueError, match=r"a file system with locks \(No locks available\)"):
        Journal(tmp_path / "j")


def test_a_full_disk_refuses_and_keeps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A half-written command has no effect, in memory or on disk, and the next one is complete."""
    path = tmp_path / "j"
    ledger = Ledger(Journal(path))
    first, second, third = commands()[0], commands()[3], commands()[4]
    ledger.execute(first)
    state, pwrite = ledger.registry.snapshot(), os.pwrite

    def fill(descriptor: int, data: Any, offset: int) -> int:
        if len(data) > 20:
            return pwrite(descriptor, data[:20], offset)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", fill)
    with pytest.raises(JournalError, match=r"j\) cannot be written: No space left"):
        ledger.execute(second)
    assert ledger.registry.snapshot() == state
    monkeypatch.setattr(os, "pwrite", pwrite)
    ledger.execute(third)
    state = ledger.registry.snapshot()
    ledger.close()
    assert reopened(path) == state
    assert [request["member"] for request in state["state"]["joining"]] == ["d"]


def test_a_disk_that_fails_after_a_write_leaves_no_entry(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A command that was refused has no effect after a restart either."""
    path = tmp_path / "j"
    ledger = Ledger(Journal(path))
    ledger.execute(commands()[0])
    state, fsync = ledger.registry.snapshot(), os.fsync

    def fail(_: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(JournalError, match="Input/output error"):
        ledger.execute(commands()[3])
    monkeypatch.setattr(os, "fsync", fsync)
    ledger.close()
    assert reopened(path) == state


def test_a_journal_that_is_replaced_before_its_lock_is_opened_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another service may replace the file between the opening and the lock."""
    path, newer = tmp_path / "j", tmp_path / "newer"
    for one, command in ((path, commands()[3]), (newer, commands()[4])):
        journal = Journal(one)
        journal.append(command, sync=True)
        journal.close()
    flock = fcntl.flock

    def replace(file: Any, operation: int) -> None:
        if newer.exists():
            newer.replace(path)
        flock(file, operation)

    monkeypatch.setattr(fcntl, "flock", replace)
    assert entries(path) == [("command", commands()[4])]


def test_a_long_journal_is_rewritten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journals, "LEAST_REWRITE_BYTES", 2000)
    path = tmp_path / "j"
    ledger = Ledger(Journal(path))
    ledger.execute(commands()[0])
    sizes = []
    for n in range(200):
        ledger.execute({"op": "set", "epoch": 0, "key": "k", "value": encode(bytes([n % 7] * 50))})
        sizes.append(path.stat().st_size)
    assert max(sizes) < 6000 < len(sizes) * 100  # 200 lines have more than 20,000 bytes
    state = ledger.registry.snapshot()
    ledger.close()
    assert reopened(path) == state
    assert not path.with_name("j.part").exists()


def test_a_failed_rewrite_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journals, "LEAST_REWRITE_BYTES", 500)
    path = tmp_path / "j"
    ledger = Ledger(Journal(path))
    ledger.execute(commands()[0])

    def fail(*_: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(Path, "replace", fail)
    for n in range(50):
        ledger.execute({"op": "add", "epoch": 0, "key": "n", "amount": n})
    monkeypatch.undo()
    state = ledger.registry.snapshot()
    ledger.close()
    assert not path.with_name("j.part").exists()
    assert reopened(path) == state


def test_a_repeated_command_has_one_effect_also_after_a_restart(tmp_path: Path) -> None:
    path = tmp_path / "j"
    ledger = Ledger(Journal(path))
    for command in commands():
        ledger.execute(command)
    add = {"op": "add", "epoch": 1, "key": "n", "amount": 4, "token": "again"}
    assert ledger.execute(add).reply == {"total": 3}
    for _ in range(2):
        ledger.close()
        ledger = Ledger(Journal(path))
        assert ledger.execute(add).reply == {"total": 3}
    lock = {"op": "compare_set", "epoch": 1, "key": "l", "expected": "", "desired": B, "token": "l"}
    assert ledger.execute(lock).reply == {"value": B}
    ledger.execute({"op": "set", "epoch": 1, "key": "l", "value": encode(b"other")})
    assert ledger.execute(lock).reply == {"value": B}
    ledger.close()


def test_no_command_raises_another_error_than_a_refusal() -> None:  # noqa: C901
    """Random values of JSON in the place of each argument."""
    draw, registry = random.Random(5), Registry()
    values = [
        None, True, 0, -1, 1.5, 1 << 70, "", "a", "\ud800", [], ["a"], [[]], {}, {"a": 1},
        "x" * 600, {"member": "a"}, {"number": 1, "members": ["a"]}, [None], "=", "AAA",
    ]  # fmt: skip
    for command in commands()[:6]:
        if (commit := registry.answer(command).commit) is not None:
            commit()
    bases = [*commands(), {"op": "state", "version": 1}, {"op": "epoch", "number": 0},
             {"op": "await", "epoch": 0, "keys": ["k"], "value": True, "replaces": True},
             {"op": "count", "epoch": 0}]  # fmt: skip
    refused = 0
    for _ in range(4000):
        command = json.loads(json.dumps(draw.choice(bases)))
        part = command
        while nested := [v for v in part.values() if isinstance(v, dict) and v]:
            if draw.random() < 0.4:
                break
            part = nested[0]
        part[draw.choice([*part, "more"])] = draw.choice(values)
        try:
            answer = registry.answer(command)
        except (RequestRefusedError, EpochReplacedError):
            refused += 1
        else:
            if answer.commit is not None:
                answer.commit()
            json.dumps(answer.reply)
    assert 1000 < refused < 4000
    for value in values:
        if value != {}:
            with pytest.raises(RequestRefusedError):
                registry.answer(value)
    restored = Registry()
    restored.restore(json.loads(json.dumps(registry.snapshot())))
    assert restored.snapshot() == registry.snapshot()
