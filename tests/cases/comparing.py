"""Comparing what ranks have with what the references have."""

from __future__ import annotations

from typing import Any

import torch
from oracle.training import Piece, Replica
from torch import Tensor

from cases.workers import Trained
from offbeat import Plan, Profile


def assert_same(mine: Trained, replica: Replica, where: str, tolerance: float = 1e-12) -> None:
    """Weights, buffers and the optimizer's groups and state are a replica's."""
    assert_close(mine.model, replica.model.state_dict(), f"{where}: model", tolerance)
    assert_close(mine.optimizer, replica.optimizer.state_dict(), f"{where}: optimizer", tolerance)


def assert_close(mine: Any, theirs: Any, where: str, tolerance: float = 1e-12) -> None:
    """Nested containers with equal keys, equal numbers and close tensors."""
    if isinstance(theirs, Tensor):
        torch.testing.assert_close(
            mine, theirs, rtol=tolerance, atol=tolerance, msg=lambda m: f"{where}: {m}"
        )
    elif isinstance(theirs, dict):
        assert sorted(mine) == sorted(theirs), where
        for key in theirs:
            assert_close(mine[key], theirs[key], f"{where}.{key}", tolerance)
    elif isinstance(theirs, (list, tuple)):
        assert len(mine) == len(theirs), where
        for i, (m, t) in enumerate(zip(mine, theirs, strict=True)):
            assert_close(m, t, f"{where}[{i}]", tolerance)
    else:
        assert mine == theirs, where


def sets_of(plan: Plan, profile: Profile, buffer: str = "param") -> list[list[Piece]]:
    """What the layer sets of a plan average, per iteration of its period."""
    return [
        [
            Piece(profile.buckets[b].tensors, t.payload.part, t.payload.parts)
            for t in plan.transfers
            if h in t.phases and t.payload.buffer == buffer
            for b in t.payload.buckets
        ]
        for h in plan.phases
    ]
