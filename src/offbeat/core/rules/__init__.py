"""Rules of arithmetic: applies, votes and settings of codecs, one group of rules per module.

A rule is a function of a context and an apply (or a vote). It works on the arrays of the context:
NumPy arrays in the interpreter, tensors in the runtime. So each rule is written once. The context
implements the rule `local`, the user's optimizer.
"""

from offbeat.core.rules import (  # importing a module registers its rules
    changed,
    clip,
    merge_average,
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
