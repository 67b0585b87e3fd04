"""Numerics: what an apply computes, what a vote asks, what a wire does to numbers; one rule a file.

A rule is a function of a context and the apply (or vote) that asked for it. It works on whatever
arrays the context hands out - NumPy in the interpreter, torch in the runtime - so it is written
once. The rule `local`, the user's own optimizer, is the context's.
"""

from offbeat.numerics.base import SETTINGS, Context, Rule, Setting, VoteRule, takes
from offbeat.numerics.blend import blend
from offbeat.numerics.change import changed, measure
from offbeat.numerics.clip import clip, clip_early
from offbeat.numerics.close import close
from offbeat.numerics.codecs import WIRES, Codec
from offbeat.numerics.delta import delta
from offbeat.numerics.moves import add, clear, copy, scale, swap
from offbeat.numerics.optimizer import local, reset
from offbeat.numerics.outer import outer
from offbeat.numerics.select import select

RULES: dict[str, Rule] = {
    rule.__name__: rule
    for rule in (
        *(local, close, reset, add, clear, clip, clip_early, copy, scale, select, swap, delta),
        *(outer, blend, measure),
    )
}
VOTES: dict[str, VoteRule] = {rule.__name__: rule for rule in (changed,)}

__all__ = [
    "RULES",
    "SETTINGS",
    "VOTES",
    "WIRES",
    "Codec",
    "Context",
    "Rule",
    "Setting",
    "VoteRule",
    "takes",
]
