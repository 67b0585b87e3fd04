"""Reference equations for `Strategy.equations`, which a strategy's plan must compute."""

from offbeat.strategies.equations import (
    Changes,
    Clip,
    Equations,
    Outer,
    World,
    closing,
    cyclic,
    delayed,
    federated,
    layer_sets,
    local_sgd,
    merged,
    partial,
    selective,
    synchronous,
)
from offbeat.testing.replicas import NumpyWorld, Optimizer, Task, adam, momentum, rmsprop

__all__ = [
    "Changes",
    "Clip",
    "Equations",
    "NumpyWorld",
    "Optimizer",
    "Outer",
    "Task",
    "World",
    "adam",
    "closing",
    "cyclic",
    "delayed",
    "federated",
    "layer_sets",
    "local_sgd",
    "merged",
    "momentum",
    "partial",
    "rmsprop",
    "selective",
    "synchronous",
]
