"""Numerics: what an apply computes, what a vote asks, what a wire does to numbers; one rule a file.

A rule is a function of a context and the apply (or vote) that asked for it. It works on whatever
arrays the context hands out - NumPy in the interpreter, torch in the runtime - so it is written
once. The rule `local`, the user's own optimizer, is the context's.
"""

from offbeat.core.rules import (  # noqa: F401  # importing a module registers its rules
    blend,
    changed,
    clip,
    close,
    delta,
    moves,
    optimizer,
    outer,
    select,
)
from offbeat.core.rules.vocabulary import (
    EFFECTS,
    RULES,
    SETTINGS,
    VOTES,
    Context,
    Effects,
    Rule,
    Setting,
    VoteRule,
    rule,
    vote,
)

__all__ = [
    "EFFECTS",
    "RULES",
    "SETTINGS",
    "VOTES",
    "Context",
    "Effects",
    "Rule",
    "Setting",
    "VoteRule",
    "rule",
    "vote",
]
