"""Verdict of `offbeat advise` that is kept with a run, and its comparison with the measurement."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from offbeat.jobs.words import count_text, duration, prediction_error, seconds

VARIABLE = "OFFBEAT_VERDICT"  # file that `offbeat advise --out` has written
VERDICT_FILE = "verdict.json"  # its copy in the folder of a run
SCHEMA = 1
SAME_LOSS = 1e-3  # relative difference of two losses that are equal: commands have four digits


@dataclass(frozen=True)
class VerdictMethod:
    """A method of a verdict.

    Attributes:
        label: name of the method, or text of the strategy.
        strategy: strategy with its settings; None for a method of other libraries.
        machines: number of machines, with those of servers.
        iteration_s: predicted seconds per iteration.
        range_s: least and greatest of these by the uncertainty.
        to_loss_s: least, mean and greatest seconds to the loss of the verdict; None if it is
            without one, or if the method did not reach it.
    """

    label: str
    strategy: str | None
    machines: int
    iteration_s: float
    range_s: tuple[float, float]
    to_loss_s: tuple[float, float, float] | None = None

    @property
    def text(self) -> str:
        """Return the seconds and their range."""
        low, high = map(seconds, self.range_s)
        return f"{seconds(self.iteration_s)} ({low} to {high})"

    def loss_text(self, target_loss: float | None) -> str:
        """Return the rehearsed time to a loss with a comma before it; empty if there is none."""
        if target_loss is None or self.to_loss_s is None:
            return ""
        low, mean, high = map(duration, self.to_loss_s)
        return f", loss {target_loss:.4g} after {mean} ({low} to {high})"


@dataclass(frozen=True)
class KeptVerdict:
    """Verdict of a file.

    Attributes:
        best: method that the verdict takes.
        methods: all methods.
        machines: number of machines that the verdict is for.
        target_loss: loss to which the time was rehearsed; None if it was not.
    """

    best: VerdictMethod
    methods: tuple[VerdictMethod, ...]
    machines: int
    target_loss: float | None = None

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> KeptVerdict:
        """Return the verdict of a JSON object.

        Raises:
            ValueError: the object is no verdict, or of a newer version.
        """
        schema = data.get("schema")
        if not isinstance(schema, int) or not 1 <= schema <= SCHEMA:
            raise ValueError(f"schema ({schema!r}) must be from 1 to {SCHEMA}")
        try:
            loss = data.get("work", {}).get("target_loss")
            methods = tuple(_method(one, to_loss=loss is not None) for one in data["methods"])
            best = next(one for one in methods if one.label == data["best"])
            return cls(best, methods, int(data["machines"]), loss and float(loss))
        except (KeyError, TypeError, ValueError, StopIteration) as error:
            raise ValueError(f"the methods cannot be read ({error!r})") from None

    def has_target(self, loss: float | None) -> bool:
        """Return whether the verdict is for the time to this loss."""
        if loss is None or self.target_loss is None:
            return False
        return math.isclose(loss, self.target_loss, rel_tol=SAME_LOSS)

    @property
    def advice(self) -> str:
        """Return a sentence about the method that the verdict takes."""
        loss = self.best.loss_text(self.target_loss)
        return f"advised {self.best.label}: {self.best.text} per iteration{loss}"

    def compare(self, strategy: str, machines: int, measured_s: float | None) -> str:
        """Return sentences about a run: the advice, and the verdict of its strategy beside the
        measurement; see `parts`."""
        return "; ".join([self.advice, *self.parts(strategy, machines, measured_s)])

    def parts(
        self,
        strategy: str,
        machines: int,
        measured_s: float | None,
        to_loss_s: float | None = None,
    ) -> list[str]:
        """Return sentences about the verdict of a strategy beside its measurement.

        Args:
            strategy: strategy of the run with its settings.
            machines: number of machines of the run; 0 if not known.
            measured_s: measured seconds per iteration; None without a measurement.
            to_loss_s: measured seconds to the loss of the verdict; None without a measurement.
        """
        parts, loss = [], self.target_loss
        own = next((one for one in self.methods if one.strategy == strategy), None)
        expected = self.machines if own is None else own.machines  # with those of servers
        if machines not in (0, expected):
            return [
                f"the verdict is for {count_text(expected, 'machine')} and the run has "
                f"{machines:,}, so times cannot be compared"
            ]
        if own is None:
            parts.append(f"{strategy} is not in the verdict")
        elif own is not self.best:
            parts.append(f"{strategy}: {own.text}{own.loss_text(loss)}")
        if own is not None and measured_s is not None:
            low_s, high_s = own.range_s
            place = "within" if low_s <= measured_s <= high_s else "outside"
            error = prediction_error(own.iteration_s, measured_s)
            text = f"measured {seconds(measured_s)}, prediction error {error}, {place} the range"
            parts.append(text)
        if loss is not None and to_loss_s is not None:
            parts.append(f"measured loss {loss:.4g} after {duration(to_loss_s)}")
        return parts


def _method(data: Mapping[str, Any], *, to_loss: bool) -> VerdictMethod:
    low_s, high_s = map(float, data["iteration_range_s"])
    iteration_s = float(data["iteration_s"])
    if not all(0 < one < math.inf for one in (low_s, iteration_s, high_s)):
        raise ValueError(f"iteration_s ({iteration_s:g}) must be above 0")
    strategy = data["strategy"]
    return VerdictMethod(
        str(data["method"]),
        None if strategy is None else str(strategy),
        int(data["machines"]),
        iteration_s,
        (low_s, high_s),
        _seconds(data) if to_loss else None,
    )


def _seconds(data: Mapping[str, Any]) -> tuple[float, float, float] | None:
    if data.get("seconds") is None or data.get("range_s") is None:
        return None
    low_s, high_s = map(float, data["range_s"])
    return low_s, float(data["seconds"]), high_s


def read_verdict(path: str | Path) -> dict[str, Any]:
    """Return the JSON object of a file with a verdict.

    Raises:
        ValueError: the file cannot be read or is no verdict; the message names the remedy.
    """
    try:
        data = json.loads(Path(path).read_text())
        if not isinstance(data, dict):
            raise ValueError("it is no JSON object")
        KeptVerdict.from_dict(data)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ValueError(
            f"{VARIABLE} ({str(path)!r}) must be a file that `offbeat advise --out` has written: "
            f"{reason}; write it again, or unset the variable"
        ) from None
    return data


def verdict_of_run(folder: Path) -> KeptVerdict | None:
    """Return the verdict that is kept in the folder of a run; None without one that can be read."""
    try:
        data = json.loads((folder / VERDICT_FILE).read_text())
    except (OSError, ValueError):
        return None
    return find_verdict(data if isinstance(data, dict) else None)


def find_verdict(data: Mapping[str, Any] | None) -> KeptVerdict | None:
    """Return the verdict of a run's verdict.json; None without one that can be read."""
    try:
        return None if data is None else KeptVerdict.from_dict(data)
    except ValueError:
        return None
