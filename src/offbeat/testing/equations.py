"""Reference equations for `Strategy.equations`, which a strategy's plan must compute."""

from offbeat.strategies.cyclic import cyclic
from offbeat.strategies.deft import closing, merged
from offbeat.strategies.equations import Equations, World, synchronous
from offbeat.strategies.fedavg import federated
from offbeat.strategies.local_sgd import local_sgd
from offbeat.strategies.outer_optimizer import Outer
from offbeat.strategies.pieces import Clip, delayed, layer_sets, partial
from offbeat.strategies.selsync import Changes, selective
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
