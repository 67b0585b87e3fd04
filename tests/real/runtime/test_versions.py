"""Ranks with different versions of offbeat or torch."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from harness.ranks import watch_ranks

import offbeat
from offbeat.core.transport.agreement import compare_versions

SAME = ("0.1.0", "2.13.0+cpu")


class Answers:
    """Exchange of values in which other ranks have these hosts and versions."""

    def __init__(self, rank: int, everyone: list[list[str]]) -> None:
        self.rank, self.everyone = rank, everyone

    def gather(self, own: list[str]) -> list[list[str]]:
        assert own[1:] == self.everyone[self.rank][1:]
        return self.everyone


def compare(*versions: tuple[str, str]) -> list[str | None]:
    """Errors of ranks with these versions of offbeat and torch."""
    everyone = [[f"host-{rank}", *one] for rank, one in enumerate(versions)]

    def run(rank: int) -> str | None:
        ranks: Any = Answers(rank, everyone)
        try:
            assert compare_versions(ranks, *versions[rank]) == [host for host, *_ in everyone]
        except ValueError as error:
            return str(error)
        return None

    return [*map(run, range(len(versions)))]


def test_same_versions() -> None:
    assert compare(SAME, SAME, (SAME[0], "2.13.1")) == [None] * 3


def test_another_version_of_offbeat_is_refused_on_every_rank() -> None:
    error = (
        "rank 2 (host-2) has offbeat 0.0.9, rank 3 (host-3) has offbeat 0.2.0, rank 0 has 0.1.0; "
        "install one version"
    )
    assert compare(SAME, SAME, ("0.0.9", "2.12.0"), ("0.2.0", SAME[1])) == [error] * 4


def test_another_minor_version_of_torch_is_a_warning() -> None:
    words = r"^rank 1 \(host-1\) has torch 2.9.0, rank 0 has 2.13.0\+cpu; install one version$"
    with pytest.warns(UserWarning, match=words):
        assert compare(SAME, (SAME[0], "2.9.0"), SAME) == [None] * 3


def prepare_with_versions() -> None:
    if os.environ["RANK"] == "1":
        offbeat.__version__ = "0.0.9"
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    offbeat.prepare(model, optimizer, "bsp", observe=1, timeout_s=20)


def test_prepare_compares_versions() -> None:
    """Before any collective: both ranks raise, and neither waits for the other one."""
    for outcome in watch_ranks(2, prepare_with_versions, timeout_s=60):
        assert outcome.kind == "ValueError", outcome.error
        assert "rank 1 (" in outcome.error
        assert f"has offbeat 0.0.9, rank 0 has {offbeat.__version__};" in outcome.error
        assert outcome.seconds < 19
