"""Plans: the types, what they mean (`program`), and what is wrong with one (`check`)."""

from offbeat.plan.model import (
    BUILT_IN,
    CHANNEL,
    VERBS,
    Apply,
    Buffer,
    Fact,
    Kind,
    Merge,
    Moment,
    Payload,
    Plan,
    Transfer,
    Verb,
    Vote,
    Wire,
    base_link,
    channel,
    local,
    transfer,
)
from offbeat.plan.phases import Phases
from offbeat.plan.text import parse_moment

__all__ = [
    "BUILT_IN",
    "CHANNEL",
    "VERBS",
    "Apply",
    "Buffer",
    "Fact",
    "Kind",
    "Merge",
    "Moment",
    "Payload",
    "Phases",
    "Plan",
    "Transfer",
    "Verb",
    "Vote",
    "Wire",
    "base_link",
    "channel",
    "local",
    "parse_moment",
    "transfer",
]
