"""Plans: the types, the meaning of a plan (`program`), and its text and JSON forms (`text`)."""

from offbeat.core.plan.phases import Phases
from offbeat.core.plan.text import parse_moment
from offbeat.core.plan.types import (
    BUFFERS,
    BUILT_IN,
    CHANNEL,
    INSIDE,
    VERBS,
    VOTES,
    Apply,
    Buffer,
    Fact,
    Groups,
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
    groups_of,
    is_vote_channel,
    local,
    transfer,
    vote_channel,
)
