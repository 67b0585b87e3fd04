"""Advice: which strategies suit a model and its network, beside methods of other libraries."""

from offbeat.experiments.advice.options import (
    CHANGES,
    Change,
    Option,
    describe_change,
    option_of,
    predict_option,
)
from offbeat.experiments.advice.selection import MAX_STALENESS, Advice, advise, candidates

__all__ = [
    "CHANGES",
    "MAX_STALENESS",
    "Advice",
    "Change",
    "Option",
    "advise",
    "candidates",
    "describe_change",
    "option_of",
    "predict_option",
]
