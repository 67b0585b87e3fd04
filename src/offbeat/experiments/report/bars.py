"""Bars of an iteration's time: computing and the network, measured above predicted."""

from __future__ import annotations

from dataclasses import dataclass

from offbeat.core import words
from offbeat.experiments.record.run_directory import Contestant, Run
from offbeat.experiments.report.breakdown import Parts, measured_parts
from offbeat.experiments.report.curves import Ordered
from offbeat.experiments.report.summary import Row


@dataclass(frozen=True)
class Bar:
    """Seconds of an iteration.

    Attributes:
        compute_s: seconds of computing.
        network_s: seconds of waiting for the network.
        split: whether the two parts are known; else `compute_s` is the whole.
        estimated: whether the parts are estimates.
    """

    compute_s: float
    network_s: float
    split: bool = True
    estimated: bool = False

    @property
    def total_s(self) -> float:
        return self.compute_s + self.network_s

    @property
    def text(self) -> str:
        """Return the parts in words."""
        if not self.split:
            return words.seconds(self.total_s)
        about = "≈ " * self.estimated
        return (
            f"{words.seconds(self.total_s)}: {about}{words.seconds(self.compute_s)} computing, "
            f"{about}{words.seconds(self.network_s)} waiting for the network"
        )


def _measured_bar(row: Row, parts: tuple[Parts, bool] | None) -> Bar | None:
    """Return the measured bar of a row; its parts are shares of the recorded periods."""
    if row.iteration_s is None:
        return None
    if parts is None or not parts[0].total_s:
        return Bar(row.iteration_s, 0.0, split=False)
    compute_s = row.iteration_s * parts[0].compute_s / parts[0].total_s
    return Bar(compute_s, row.iteration_s - compute_s, estimated=parts[1])


def predicted_bar(row: Row) -> Bar | None:
    """Return the predicted bar of a row."""
    if row.predicted_s is None:
        return None
    if row.exposed_s is None:
        return Bar(row.predicted_s, 0.0, split=False)
    return Bar(row.predicted_s - row.exposed_s, row.exposed_s)


def bars_of(run: Run, order: Ordered) -> list[tuple[Bar | None, Bar | None]]:
    """Return the measured and the predicted bar of each strategy."""
    return [(_measured_bar(row, _parts(run, row, c)), predicted_bar(row)) for row, c, _ in order]


def _parts(run: Run, row: Row, contestant: Contestant) -> tuple[Parts, bool] | None:
    """Return the measured parts of an iteration, and whether they are estimates."""
    if row.split is not None:
        return row.split.measured, row.split.estimated
    return measured_parts(run, contestant)
