"""Partitions of data sets among workers, samplers for them, and exchange of samples between
workers.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from offbeat.data.partition import Partition
from offbeat.data.splits import Chunks, Dirichlet, LabelSkew

if TYPE_CHECKING:
    from offbeat.data.injected_loader import Injected
    from offbeat.data.injection import Injection
    from offbeat.data.member_sampler import MemberSampler
    from offbeat.data.samplers import DefDP, SelDP

__all__ = [
    "Chunks",
    "DefDP",
    "Dirichlet",
    "Injected",
    "Injection",
    "LabelSkew",
    "MemberSampler",
    "Partition",
    "SelDP",
]

_NEED_TORCH = {
    "DefDP": "samplers",
    "SelDP": "samplers",
    "Injected": "injected_loader",
    "Injection": "injection",
    "MemberSampler": "member_sampler",
}


def __getattr__(name: str) -> Any:
    """Samplers and injection are fetched when first used: partitions do not need torch."""
    if name in _NEED_TORCH:
        return getattr(import_module(f"offbeat.data.{_NEED_TORCH[name]}"), name)
    raise AttributeError(f"module 'offbeat.data' has no attribute {name!r}")
