"""Metrics of a running job, and adapters that pass them on."""

from offbeat.core.runtime.metrics import (
    BYTES,
    DIVERGENCE,
    EXPOSED,
    LOSS,
    SECONDS,
    Log,
    Metrics,
    Prometheus,
    TensorBoard,
    WandB,
)

__all__ = [
    "BYTES",
    "DIVERGENCE",
    "EXPOSED",
    "LOSS",
    "SECONDS",
    "Log",
    "Metrics",
    "Prometheus",
    "TensorBoard",
    "WandB",
]
