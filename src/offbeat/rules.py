"""Rules of arithmetic: registration of applies and votes, and the context that they receive."""

from offbeat.core.rules import Context, Rule, Setting, VoteRule, rule, vote

__all__ = ["Context", "Rule", "Setting", "VoteRule", "rule", "vote"]
