"""Report of a run directory: summary, HTML page and traces; does not import torch."""

from offbeat.experiments.record.run_directory import Contestant, RankRecord, Repetition, Run, load
from offbeat.experiments.report.export import export
from offbeat.experiments.report.headline import headline
from offbeat.experiments.report.summary import Row, rank_rows, summarize
from offbeat.experiments.report.write import write

__all__ = [
    "Contestant",
    "RankRecord",
    "Repetition",
    "Row",
    "Run",
    "export",
    "headline",
    "load",
    "rank_rows",
    "summarize",
    "write",
]
