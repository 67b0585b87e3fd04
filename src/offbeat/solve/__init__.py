"""Solvers: numbers in, numbers out, no torch."""

from offbeat.solve.fusion import (
    Fusion,
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

__all__ = [
    "Fusion",
    "Sets",
    "balanced",
    "best",
    "brute_force",
    "cap_fusion",
    "cost",
    "dfs",
    "equal_number",
    "fill_bubbles",
    "finish",
    "fusion_finish",
    "greedy_fusion",
    "no_fusion",
    "optimal",
    "optimal_fusion",
    "period_cost",
]
