"""Frames of the membership service, and the version of its protocol.

Each connection begins with the proof of the secret (`frames/secret.py`), HELLO of the client and
WELCOME of the service. Then the client sends one REQUEST at a time, and the service answers each
with REPLY or with REFUSED.
"""

from __future__ import annotations

from enum import IntEnum

PROTOCOL_VERSION = 2
"""Version of the protocol between the members of a job and with the service.

Members with equal versions can train together, also if their versions of offbeat differ. It grows
with each change of what members send to each other or to the service."""

MOST_WAIT_S = 20.0  # of one request; a client repeats requests that wait longer


class Kind(IntEnum):
    """Kinds of frames."""

    HELLO = 1
    WELCOME = 2
    REQUEST = 3
    REPLY = 4
    REFUSED = 5


class Refusal:
    """Causes of a REFUSED frame, in its meta `cause`."""

    PROTOCOL = "protocol"
    REQUEST = "request"
    REPLACED = "replaced"
    JOURNAL = "journal"
    FRAME = "frame"
