"""Solvers: numbers in, numbers out, no torch."""

from offbeat.solve import deft, knapsack, preserver
from offbeat.solve.fusion import (
    Fusion,
    MessageSeconds,
    cap_fusion,
    fusion_finish,
    greedy_fusion,
    no_fusion,
    optimal_fusion,
)
from offbeat.solve.partition import (
    Sets,
    balanced,
    best,
    brute_force,
    cost,
    dfs,
    equal_number,
    fill_bubbles,
    finish,
    optimal,
    period_cost,
)
from offbeat.solve.priority import Compute, Slice, iteration_s, priority_order
from offbeat.solve.simultaneous import simultaneous_fusion
from offbeat.solve.usbyte import improved, unit_runs

__all__ = [
    "Compute",
    "Fusion",
    "MessageSeconds",
    "Sets",
    "Slice",
    "balanced",
    "best",
    "brute_force",
    "cap_fusion",
    "cost",
    "deft",
    "dfs",
    "equal_number",
    "fill_bubbles",
    "finish",
    "fusion_finish",
    "greedy_fusion",
    "improved",
    "iteration_s",
    "knapsack",
    "no_fusion",
    "optimal",
    "optimal_fusion",
    "period_cost",
    "preserver",
    "priority_order",
    "simultaneous_fusion",
    "unit_runs",
]
