"""State of the membership service: epochs, requests, reports, and the keys of rendezvous.

The state depends on the sequence of commands alone, so that a journal of commands restores it. No
clock, no socket and no file is used here.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NoReturn

from offbeat.membership.errors import EpochReplacedError, RequestRefusedError
from offbeat.membership.records import (
    DeathReport,
    Epoch,
    JoinRequest,
    LeaveRequest,
    MembershipState,
    Record,
    require_count,
    require_name,
)

KEPT_EPOCHS = 16
KEPT_SPACES = 2  # epochs whose keys are kept: the newest, and the one that its members leave
MOST_STATE_BYTES = 640 << 10  # of the JSON form, so that a snapshot fits into one frame
MOST_KEY_CHARACTERS = 512
MOST_KEYS_PER_REQUEST = 1024
MOST_VALUE_BYTES = 256 << 10
MOST_SPACE_BYTES = 64 << 20  # of keys and values of one epoch
KEY_BYTES = 128  # counted for each key beside its characters and its value
MOST_TOKENS = 1 << 14  # of the latest requests that are repeatable by token

Command = dict[str, Any]
Reply = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Answer:
    """Answer to a command.

    Attributes:
        reply: reply; the one at the end of the wait if `is_ready` is False.
        is_ready: whether the condition holds for which the command waits.
        commit: applies the change of the command; None if it changes nothing.
    """

    reply: Reply
    is_ready: bool = True
    commit: Callable[[], None] | None = None


@dataclass(slots=True)
class Space:
    """Keys of the rendezvous of one epoch.

    Attributes:
        values: values by key.
        tokens: replies of the latest commands with a token, so that a repeated one has no effect.
        size_bytes: counted size of keys and values.
    """

    values: dict[str, bytes] = field(default_factory=dict[str, bytes])
    tokens: OrderedDict[str, Reply] = field(default_factory=OrderedDict[str, Reply])
    size_bytes: int = 0

    def put(self, key: str, value: bytes) -> None:
        """Set a key."""
        self.size_bytes += self.growth_bytes(key, value)
        self.values[key] = value

    def growth_bytes(self, key: str, value: bytes) -> int:
        """Return the growth of the counted size if a key is set."""
        known = self.values.get(key)
        return len(value) - len(known) if known is not None else _entry_bytes(key, value)

    def remove(self, key: str) -> None:
        """Remove a key, if it exists."""
        if key in self.values:
            self.size_bytes -= _entry_bytes(key, self.values.pop(key))

    def remember(self, token: str, reply: Reply) -> None:
        """Keep the reply to a command with a token."""
        self.tokens[token] = reply
        if len(self.tokens) > MOST_TOKENS:
            self.tokens.popitem(last=False)


def _entry_bytes(key: str, value: bytes) -> int:
    return KEY_BYTES + len(key) + len(value)


class Registry:
    """State of the service.

    Attributes:
        changes: number of committed changes, those of keys included.
    """

    def __init__(self) -> None:
        self.changes = 0
        self._version = 0
        self._epochs: dict[int, Epoch] = {}
        self._joining: dict[str, JoinRequest] = {}
        self._leaving: dict[str, LeaveRequest] = {}
        self._dead: dict[str, DeathReport] = {}
        self._spaces: dict[int, Space] = {}
        self._operations: dict[str, Callable[[Command], Answer]] = {
            "state": self._answer_state,
            "epoch": self._answer_epoch,
            "propose": self._propose,
            "join": self._join,
            "leave": self._leave,
            "death": self._report_death,
            "withdraw": self._withdraw,
            "await": self._await_keys,
            "set": self._set,
            "add": self._add,
            "compare_set": self._compare_set,
            "delete": self._delete,
            "count": self._count,
        }

    @property
    def state(self) -> MembershipState:
        """Snapshot of the membership."""
        return self._state_with()

    def answer(self, command: object) -> Answer:
        """Return the answer to a command. The state changes only by `Answer.commit`.

        Raises:
            RequestRefusedError: the command is not allowed.
            EpochReplacedError: the command needs keys of an epoch that a later one has replaced.
        """
        if not isinstance(command, dict):
            raise RequestRefusedError("a command must be an object of JSON")
        name = command.get("op")
        operation = self._operations.get(name) if isinstance(name, str) else None
        if operation is None:
            raise RequestRefusedError(
                f"operation ({str(name)[:80]}) must be one of {', '.join(self._operations)}"
            )
        answer = operation(command)
        if answer.commit is None:
            return answer
        return Answer(answer.reply, answer.is_ready, self._with_count(answer.commit))

    def _with_count(self, commit: Callable[[], None]) -> Callable[[], None]:
        def apply() -> None:
            commit()
            self.changes += 1

        return apply

    # ---- snapshot ---------------------------------------------------------------------------

    def snapshot(self) -> dict[str, Any]:
        """Return the whole state as a dictionary that JSON supports."""
        return {
            "state": self.state.to_dict(),
            "epochs": [epoch.to_dict() for epoch in self._epochs.values()],
            "spaces": {
                str(number): {
                    "values": {key: encode(value) for key, value in space.values.items()},
                    "tokens": list(space.tokens.items()),
                }
                for number, space in self._spaces.items()
            },
        }

    def restore(self, snapshot: dict[str, Any]) -> None:
        """Replace the state by a snapshot.

        Raises:
            KeyError, TypeError, ValueError: the snapshot is not one of `snapshot`.
        """
        state = MembershipState.from_dict(snapshot["state"])
        epochs = [Epoch.from_dict(value) for value in snapshot["epochs"]]
        spaces = dict[int, Space]()
        for number, content in snapshot["spaces"].items():
            space = spaces[int(number)] = Space()
            for key, value in content["values"].items():
                space.put(key, decode(value))
            space.tokens.update((token, reply) for token, reply in content["tokens"])
        self._version = state.version
        self._epochs = {epoch.number: epoch for epoch in epochs}
        self._joining = {one.member: one for one in state.joining}
        self._leaving = {one.member: one for one in state.leaving}
        self._dead = {one.member: one for one in state.dead}
        self._spaces = spaces

    # ---- membership -------------------------------------------------------------------------

    @property
    def _newest(self) -> Epoch | None:
        return self._epochs[max(self._epochs)] if self._epochs else None

    @property
    def _members(self) -> tuple[str, ...]:
        return () if self._newest is None else self._newest.members

    def _answer_state(self, command: Command) -> Answer:
        version = command.get("version")
        if version is not None and (isinstance(version, bool) or not isinstance(version, int)):
            raise RequestRefusedError("version must be a whole number")
        reply = {"state": self.state.to_dict()}
        return Answer(reply, is_ready=version is None or self._version > version)

    def _answer_epoch(self, command: Command) -> Answer:
        number, newest = require_count("number", command.get("number")), self._newest
        if newest is None or number > newest.number:
            return Answer({"epoch": None})
        if number not in self._epochs:
            raise RequestRefusedError(
                f"epoch ({number}) must be one of the newest {KEPT_EPOCHS}; the service no longer "
                "keeps it"
            )
        return Answer({"epoch": self._epochs[number].to_dict()})

    def _propose(self, command: Command) -> Answer:
        proposed, newest = Epoch.from_dict(command.get("epoch")), self._newest
        next_number = 0 if newest is None else newest.number + 1
        if proposed.number < next_number:
            return self._answer_epoch({"number": proposed.number})
        if proposed.number > next_number:
            raise RequestRefusedError(
                f"number ({proposed.number}) of the proposed epoch must be {next_number}; read the "
                "state and propose again"
            )
        if newest is not None:
            self._require_continuation(newest, proposed)
        members = set(proposed.members)
        joining = {name: one for name, one in self._joining.items() if name not in members}
        leaving = {name: one for name, one in self._leaving.items() if name in members}
        dead = {name: one for name, one in self._dead.items() if name in members}
        self._require_room(epoch=proposed, joining=joining, leaving=leaving, dead=dead)

        def commit() -> None:
            self._epochs[proposed.number] = proposed
            self._epochs.pop(proposed.number - KEPT_EPOCHS, None)
            self._spaces[proposed.number] = Space()
            self._spaces.pop(proposed.number - KEPT_SPACES, None)
            self._joining, self._leaving, self._dead = joining, leaving, dead
            self._version += 1

        return Answer({"epoch": proposed.to_dict()}, commit=commit)

    def _require_continuation(self, newest: Epoch, proposed: Epoch) -> None:
        """Raise RequestRefusedError if an epoch cannot follow the newest one."""
        for member in proposed.members:
            if member not in newest.members and member not in self._joining:
                raise RequestRefusedError(
                    f"member ({member}) must be in epoch {newest.number} or have requested to "
                    "join; its request was withdrawn, as nothing was heard from it: read the state "
                    "and propose again"
                )
        if not set(newest.members) & set(proposed.members):
            return  # a new run of the job
        for name in ("first_iteration", "samples"):
            value, least = getattr(proposed, name), getattr(newest, name)
            if value < least:
                raise RequestRefusedError(
                    f"{name} ({value}) must be at least {least}, that of epoch {newest.number}; "
                    "a run that begins again needs members with new names"
                )

    def _join(self, command: Command) -> Answer:
        request = JoinRequest.from_dict(command.get("request"))
        if request.member in self._members:
            return Answer({})
        return self._record("_joining", request.member, request)

    def _leave(self, command: Command) -> Answer:
        request = LeaveRequest.from_dict(command.get("request"))
        if request.member not in self._members:
            return Answer({})
        return self._record("_leaving", request.member, request)

    def _report_death(self, command: Command) -> Answer:
        report = DeathReport.from_dict(command.get("report"))
        if report.member not in self._members or report.member in self._dead:
            return Answer({})  # the first report counts
        return self._record("_dead", report.member, report)

    def _withdraw(self, command: Command) -> Answer:
        member = require_name("member", command.get("member"))
        if member not in self._joining and member not in self._leaving:
            return Answer({})

        def commit() -> None:
            self._joining.pop(member, None)
            self._leaving.pop(member, None)
            self._version += 1

        return Answer({}, commit=commit)

    def _record(self, name: str, member: str, record: Record) -> Answer:
        known = getattr(self, name)
        if known.get(member) == record:
            return Answer({})
        records = {**known, member: record}
        self._require_room(**{name.removeprefix("_"): records})

        def commit() -> None:
            setattr(self, name, records)
            self._version += 1

        return Answer({}, commit=commit)

    def _state_with(
        self,
        epoch: Epoch | None = None,
        joining: dict[str, JoinRequest] | None = None,
        leaving: dict[str, LeaveRequest] | None = None,
        dead: dict[str, DeathReport] | None = None,
    ) -> MembershipState:
        """Return the state with some parts replaced."""
        return MembershipState(
            self._version,
            self._newest if epoch is None else epoch,
            tuple((self._joining if joining is None else joining).values()),
            tuple((self._leaving if leaving is None else leaving).values()),
            tuple((self._dead if dead is None else dead).values()),
        )

    def _require_room(self, **parts: Any) -> None:
        size = len(json.dumps(self._state_with(**parts).to_dict()))
        if size > MOST_STATE_BYTES:
            raise RequestRefusedError(
                f"epoch, requests and reports ({size} bytes of JSON) must have at most "
                f"{MOST_STATE_BYTES} bytes; shorten the details, or request later"
            )

    # ---- keys of a rendezvous ---------------------------------------------------------------

    def _space(self, command: Command) -> Space:
        number, newest = require_count("epoch", command.get("epoch")), self._newest
        if newest is None or number > newest.number:
            raise RequestRefusedError(
                f"epoch ({number}) must be written before its rendezvous; propose it"
            )
        if number not in self._spaces:
            raise EpochReplacedError(number, newest)
        return self._spaces[number]

    def _await_keys(self, command: Command) -> Answer:
        """Answer with the missing keys, or with the value of a single key if it is requested."""
        space, keys = self._space(command), _keys_of(command)
        missing = [key for key in keys if key not in space.values]
        if missing:
            newest = self._newest
            assert newest is not None
            if command.get("replaces") and command["epoch"] < newest.number:
                raise EpochReplacedError(command["epoch"], newest)
            return Answer({"missing": missing}, is_ready=False)
        reply = Reply(missing=[])
        if command.get("value"):
            reply["value"] = encode(space.values[keys[0]])
        return Answer(reply)

    def _set(self, command: Command) -> Answer:
        space, key = self._space(command), _key_of(command)
        if (known := self._known_reply(space, command)) is not None:
            return known
        return self._change(command, key, _bytes_of(command, "value"), {})

    def _add(self, command: Command) -> Answer:
        space, key = self._space(command), _key_of(command)
        if (known := self._known_reply(space, command)) is not None:
            return known
        amount = command.get("amount")
        if isinstance(amount, bool) or not isinstance(amount, int) or abs(amount) > 1 << 62:
            raise RequestRefusedError("amount must be a whole number of at most 62 bits")
        text = space.values.get(key, b"0")
        try:
            total = int(text) + amount
        except ValueError:
            raise RequestRefusedError(f"value of key ({key}) must be a whole number") from None
        if abs(total) >= 1 << 63:
            raise RequestRefusedError(f"sum ({total}) at key ({key}) must fit into 64 bits")
        return self._change(command, key, str(total).encode(), {"total": total})

    def _compare_set(self, command: Command) -> Answer:
        space, key = self._space(command), _key_of(command)
        if (known := self._known_reply(space, command)) is not None:
            return known
        expected, desired = _bytes_of(command, "expected"), _bytes_of(command, "desired")
        current = space.values.get(key)
        if current is None and expected:
            return Answer({"value": encode(expected)})  # as torch's stores answer
        if current is not None and current != expected:
            return Answer({"value": encode(current)})
        return self._change(command, key, desired, {"value": encode(desired)})

    def _delete(self, command: Command) -> Answer:
        space, key = self._space(command), _key_of(command)
        if (known := self._known_reply(space, command)) is not None:
            return known
        if key not in space.values:
            return Answer({"existed": False})
        return self._change(command, key, None, {"existed": True})

    def _count(self, command: Command) -> Answer:
        return Answer({"count": len(self._space(command).values)})

    def _known_reply(self, space: Space, command: Command) -> Answer | None:
        """Return the reply that a command with the same token has got."""
        reply = space.tokens.get(_token_of(command))
        return None if reply is None else Answer(reply)

    def _change(self, command: Command, key: str, value: bytes | None, reply: Reply) -> Answer:
        """Return an answer whose commit sets a key, or removes it (None)."""
        space, token = self._space(command), _token_of(command)
        if value is not None:
            size = space.size_bytes + space.growth_bytes(key, value)
            if size > MOST_SPACE_BYTES:
                raise RequestRefusedError(
                    f"keys and values of epoch {command['epoch']} ({size} bytes) must have at most "
                    f"{MOST_SPACE_BYTES} bytes"
                )

        def commit() -> None:
            if value is None:
                space.remove(key)
            else:
                space.put(key, value)
            if token:
                space.remember(token, reply)

        return Answer(reply, commit=commit)


def encode(value: bytes) -> str:
    """Return bytes as text for JSON."""
    return base64.b64encode(value).decode()


def decode(text: object) -> bytes:
    """Return the bytes of a text of `encode`. Raise RequestRefusedError for other values."""
    if not isinstance(text, str):
        _refuse_bytes()
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        _refuse_bytes()


def _refuse_bytes() -> NoReturn:
    raise RequestRefusedError("a value must be bytes in base64")


def _bytes_of(command: Command, name: str) -> bytes:
    value = decode(command.get(name))
    if len(value) > MOST_VALUE_BYTES:
        raise RequestRefusedError(
            f"{name} ({len(value)} bytes) must have at most {MOST_VALUE_BYTES} bytes"
        )
    return value


def _key_of(command: Command) -> str:
    (key,) = _require_keys([command.get("key")])
    return key


def _keys_of(command: Command) -> list[str]:
    keys = command.get("keys")
    if not isinstance(keys, list) or not 0 < len(keys) <= MOST_KEYS_PER_REQUEST:
        raise RequestRefusedError(f"keys must be a list of 1 to {MOST_KEYS_PER_REQUEST} texts")
    return _require_keys(keys)


def _require_keys(keys: Iterable[object]) -> list[str]:
    found = list[str]()
    for key in keys:
        if not isinstance(key, str) or len(key) > MOST_KEY_CHARACTERS:
            raise RequestRefusedError(
                f"a key must be a text of at most {MOST_KEY_CHARACTERS} characters"
            )
        found.append(key)
    return found


def _token_of(command: Command) -> str:
    token = command.get("token", "")
    if not isinstance(token, str) or len(token) > 32:
        raise RequestRefusedError("token must be a text of at most 32 characters")
    return token
