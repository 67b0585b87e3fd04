"""Ranks with different versions of offbeat or torch."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist
from harness.ranks import watch_ranks
from torch._C._distributed_c10d import HashStore

import offbeat
from offbeat.core.transport.versions import compare_versions, publish_versions

SAME = ("0.1.0", "2.13.0+cpu")


def compare(*versions: tuple[str, str] | None) -> list[str | None]:
    """Errors of ranks with these versions of offbeat and torch; None: no version is stored."""
    store = HashStore()

    def run(rank: int) -> str | None:
        try:
            compare_versions(store, rank, len(versions), timeout_s=10)
        except ValueError as error:
            return str(error)
        return None

    for rank, one in enumerate(versions):
        if one is not None:
            publish_versions(store, rank, f"host-{rank}", *one)
    ranks = [rank for rank, one in enumerate(versions) if one is not None]
    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(run, ranks))


def test_same_versions() -> None:
    assert compare(SAME, SAME, (SAME[0], "2.13.1")) == [None] * 3


def test_another_version_of_offbeat_is_refused_on_every_rank() -> None:
    error = (
        "rank 2 (host-2) has offbeat 0.0.9, rank 3 (host-3) has offbeat 0.2.0, rank 0 has 0.1.0; "
        "install one version"
    )
    assert compare(SAME, SAME, ("0.0.9", "2.12.0"), ("0.2.0", SAME[1])) == [error] * 4


def test_version_without_this_comparison_is_refused() -> None:
    error = "rank 1 has an earlier version of offbeat, rank 0 has 0.1.0; install one version"
    assert compare(SAME, None, SAME) == [error] * 2
    error = "rank 0 has an earlier version of offbeat; install one version"
    assert compare(None, SAME, SAME) == [error] * 2


def test_another_minor_version_of_torch_is_a_warning() -> None:
    words = r"^rank 1 \(host-1\) has torch 2.9.0, rank 0 has 2.13.0\+cpu; install one version$"
    with pytest.warns(UserWarning, match=words):
        assert compare(SAME, (SAME[0], "2.9.0"), SAME) == [None] * 3


def test_result_is_awaited_for_the_timeout() -> None:
    store = HashStore()
    publish_versions(store, 0, "host-0", *SAME)
    with pytest.raises(dist.DistStoreError):
        compare_versions(store, 1, 2, timeout_s=0.1)


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
