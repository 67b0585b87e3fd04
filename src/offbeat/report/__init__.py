"""Reports: a run directory read, summarized and written as one HTML page; no torch."""

from offbeat.report.run import Contestant, RankRecord, Repetition, Run, load
from offbeat.report.summary import Row, ranked, summarize
from offbeat.report.verdict import winner
from offbeat.report.write import write

__all__ = [
    "Contestant",
    "RankRecord",
    "Repetition",
    "Row",
    "Run",
    "load",
    "ranked",
    "summarize",
    "winner",
    "write",
]
