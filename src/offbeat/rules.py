"""Rules of arithmetic: how an apply or a vote of a plan is registered, and what it is given."""

from offbeat.core.rules import Context, Rule, Setting, VoteRule, rule, vote

__all__ = ["Context", "Rule", "Setting", "VoteRule", "rule", "vote"]
