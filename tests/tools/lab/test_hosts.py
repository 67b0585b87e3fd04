"""Ranks of the tests on hosts of a lab."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from harness.ranks import run_ranks


def summed() -> tuple[float, bool]:
    """Sum of the ranks' numbers, and whether the rank sees a host of its own."""
    dist.init_process_group("gloo")
    numbers = torch.tensor([float(dist.get_rank() + 1)])
    dist.all_reduce(numbers)
    with open("/proc/self/net/dev") as file:  # noqa: PTH123
        return numbers.item(), "eth0" in file.read()


@pytest.mark.usefixtures("namespaces")
def test_ranks_meet_over_the_links_of_a_lab() -> None:
    assert run_ranks(2, summed, where="netns") == [(3.0, True)] * 2
