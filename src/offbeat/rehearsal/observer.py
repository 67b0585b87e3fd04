"""Observer of a rank of a rehearsal, which counts the inputs and ends the script."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from offbeat.core.parts import register_parts
from offbeat.core.runtime.hooks import tensors_of
from offbeat.jobs.observer import JobObserver

if TYPE_CHECKING:
    from offbeat.core.runtime.session import Session
    from offbeat.core.strategy.interface import Strategy
    from offbeat.core.transport.cluster import Cluster
    from offbeat.jobs.settings import JobSettings

INPUTS = "input_elements"  # note of a record: elements of the inputs of forwards for training


class RehearsalObserver(JobObserver):
    """Observer that also notes the number of input elements.

    Attributes:
        last: the observer that began last.
        iterations: iterations after which `optimizer.step()` ends the script; None: never.
    """

    last: ClassVar[RehearsalObserver]
    iterations: ClassVar[int | None] = None

    def attach(self, session: Session) -> None:
        super().attach(session)
        forward = session.forward
        self.notes[INPUTS] = 0

        def count(call: Any, *args: Any, **kwargs: Any) -> Any:
            module = getattr(call, "__self__", call)  # of a method
            if module.training and torch.is_grad_enabled():
                self.notes[INPUTS] += sum(t.numel() for t in tensors_of((args, kwargs)))
            return forward(call, *args, **kwargs)

        session.forward = count
        RehearsalObserver.last = self
        if self.iterations is not None:
            session.stop_request = _LastIteration(self.iterations)  # type: ignore[assignment]


@dataclass(frozen=True)
class _LastIteration:
    """Stop request that ends the script of every rank after the same iteration."""

    iterations: int

    def on_iteration_end(self, iteration: int) -> None:
        if iteration >= self.iterations:
            raise SystemExit(0)


def open_observer(
    settings: JobSettings, strategy: Strategy, cluster: Cluster, members: Sequence[str] = ()
) -> RehearsalObserver:
    """Return the observer of this rank, in place of that of `jobs/observer.py`."""
    return RehearsalObserver(settings, strategy, cluster, members=members)


def record_rehearsal(iterations: int | None = None) -> None:
    """Record the jobs of this process, which is a rank of a rehearsal.

    Args:
        iterations: iterations after which the script ends; None: at its own end.
    """
    RehearsalObserver.iterations = iterations
    register_parts([f"{__name__}:{open_observer.__name__}"])
