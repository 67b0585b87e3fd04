"""Solvers of the strategies' planning problems, on plain numbers and without torch."""

from offbeat.strategies.solvers import knapsack, preserver
from offbeat.strategies.solvers import queues as deft
from offbeat.strategies.solvers.fusion import (
    Fusion,
    MessageSeconds,
    cap_fusion,
    delaying_fusion,
    fusion_finish,
    greedy_fusion,
    no_fusion,
    optimal_fusion,
)
from offbeat.strategies.solvers.ordering import Compute, Slice, iteration_s, priority_order
from offbeat.strategies.solvers.simultaneous import simultaneous_fusion
from offbeat.strategies.solvers.usbyte import improved, unit_runs

__all__ = [
    "Compute",
    "Fusion",
    "MessageSeconds",
    "Slice",
    "cap_fusion",
    "deft",
    "delaying_fusion",
    "fusion_finish",
    "greedy_fusion",
    "improved",
    "iteration_s",
    "knapsack",
    "no_fusion",
    "optimal_fusion",
    "preserver",
    "priority_order",
    "simultaneous_fusion",
    "unit_runs",
]
