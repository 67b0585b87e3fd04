"""Metrics that a training script reports, such as its accuracy."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import SupportsFloat

LOSS = "loss"  # the training loss, which is recorded by itself
_NAME = re.compile(r"[A-Za-z][\w.@/-]*", re.ASCII)


def is_name(text: str) -> bool:
    """Return whether a text is a valid name of a metric, or that of the loss."""
    return _NAME.fullmatch(text) is not None


Receiver = Callable[[str, float], None]
_receiver: Receiver | None = None


def report_metric(name: str, value: SupportsFloat) -> None:
    """Record a metric of the script, such as its accuracy, for the report of a run.

    The value belongs to the iteration of the last `optimizer.step()`. Ranks may report at different
    iterations; a curve holds the mean over the ranks that reported. Without a recorded run
    (`offbeat run`, `offbeat compare`) the value is discarded.

    Args:
        name: name of the metric, as in `offbeat compare --target accuracy=.97`; not "loss", which
            is recorded by itself.
        value: a number, or a tensor with one element, which is read at once.

    Raises:
        ValueError: the name is no word, or is "loss".
        TypeError: the value is no number.
    """
    if not is_name(name) or name == LOSS:
        raise ValueError(
            f"name ({name!r}) must be a word other than {LOSS}, as in report_metric('accuracy', .9)"
        )
    number = float(value)
    if _receiver is not None:
        _receiver(name, number)


def set_receiver(receiver: Receiver | None) -> None:
    """Pass metrics to a function from now on. None discards them."""
    global _receiver
    _receiver = receiver


def clear_receiver(receiver: Receiver) -> None:
    """Discard metrics from now on, unless another function has replaced this receiver."""
    if _receiver == receiver:
        set_receiver(None)
