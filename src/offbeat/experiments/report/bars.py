"""Bars of an iteration's time: computing and the network, measured above predicted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from offbeat.experiments.report import words
from offbeat.experiments.report.breakdown import Parts
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


def measured_bar(row: Row, parts: tuple[Parts, bool] | None) -> Bar | None:
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


def bars(measured: Bar | None, predicted: Bar | None, bound_s: float | None, most_s: float) -> str:
    """Return both bars and the bound as HTML; `most_s` is the whole width."""
    texts = [f"measured {measured.text}"] if measured else []
    texts += [f"predicted {predicted.text}"] if predicted else []
    texts += [f"bound {words.seconds(bound_s)}"] if bound_s is not None else []
    parts = [f'<div class="bars" role="img" aria-label="{"; ".join(texts)}">']
    if measured is not None:
        parts.append(_bar(measured, most_s, "m", ("computes", "waits for the network")))
    if predicted is not None:
        alone = "" if measured is not None else " outlined"
        parts.append(_bar(predicted, most_s, "p" + alone, ("", "")))
    if bound_s is not None:
        left = min(100.0, 100 * bound_s / most_s)
        parts.append(
            f'<span class="bound" style="left:{left:.2f}%" title="bound {words.seconds(bound_s)}">'
            "</span>"
        )
    return "".join([*parts, "</div>"])


def _bar(bar: Bar, most_s: float, look: str, labels: Sequence[str]) -> str:
    looks = ("c", "n" + " est" * bar.estimated) if bar.split else ("a", "n")
    values = (bar.compute_s, bar.network_s)
    boxes = "".join(
        f'<i class="{kind}" style="width:{100 * max(0.0, value) / most_s:.2f}%">'
        f"{f'<b>{label}</b>' if label and bar.split else ''}</i>"
        for kind, value, label in zip(looks, values, labels, strict=True)
        if value > 0
    )
    return f'<div class="bar {look}">{boxes}</div>'
