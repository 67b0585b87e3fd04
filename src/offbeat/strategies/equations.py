"""Replicas and one iteration of them, for equations as papers state them: what a plan must compute.

The equations of a method stand in its file. They state the arithmetic of all replicas in one
iteration, without messages, moments and links, and run on a `World`, such as the replicas in NumPy
of `offbeat.testing.replicas`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from offbeat.core.plan import Merge, Payload

Array = NDArray[np.float64]
StatePolicy = Literal["local", "averaged", "reset"]
"""Treatment of optimizer state at an average of parameters."""


class World(Protocol):
    """All replicas of one job. Optional `piece` arguments select a part of the model; None
    selects all."""

    @property
    def size(self) -> int:
        """Return the number of replicas."""
        ...

    def gradients(self, iteration: int) -> None:
        """Compute the gradients of each replica at its own weights; they become the current
        gradients.

        Args:
            iteration: iteration, which selects the batch.
        """
        ...

    def average(
        self, kind: str, piece: Payload | None = None, weights: Sequence[float] | None = None
    ) -> None:
        """Replace the values of all replicas by their mean.

        Args:
            kind: "grad", "param", "state", or the name of a moment, such as "state.0".
            piece: part of the model.
            weights: one weight per replica for a weighted mean; None for equal weights.
        """
        ...

    def reset(self, piece: Payload | None = None) -> None:
        """Reset the optimizer's state to its initial values.

        Args:
            piece: part of the model; None for all.
        """
        ...

    def norms(self, piece: Payload | None = None) -> Sequence[float]:
        """Return the squared norm of the current gradients, for each replica.

        Args:
            piece: part of the model; None for all.
        """
        ...

    def scale(self, piece: Payload | None, factors: Sequence[float]) -> None:
        """Multiply the current gradients by one factor per replica.

        Args:
            piece: part of the model; None for all.
            factors: factor of each replica.
        """
        ...

    def step(self, ranks: Collection[int] | None = None) -> None:
        """Step the optimizers with the current gradients.

        Args:
            ranks: replicas to step; None for all.
        """
        ...

    def add_up(self) -> None:
        """Add the current gradients to those of the open window."""
        ...

    def close(self) -> None:
        """Close the open window and open a new one."""
        ...

    def recall(self, merge: Merge) -> bool:
        """Make the gradients of the window that was closed last the current gradients.

        Args:
            merge: "sum" for the sum over the iterations of the window, "mean" for their mean.

        Returns:
            False if no window has been closed, in which case nothing changes.
        """
        ...

    def keep(self) -> Any:
        """Return a copy of the weights of all replicas."""
        ...

    def use(self, rank: int, piece: Payload | None, kept: Any) -> None:
        """Replace the weights of one replica by those of a copy.

        Args:
            rank: number of the replica.
            piece: part of the model; None for all.
            kept: copy of the weights of all replicas, a result of `keep`.
        """
        ...

    def shift(self, piece: Payload, kept: Any) -> None:
        """Add `mean(kept) - kept` to the weights.

        Args:
            piece: part of the model.
            kept: copy of the weights of all replicas, a result of `keep`.
        """
        ...

    def change(
        self,
        piece: Payload | None,
        rule: Callable[..., Any],
        *kept: Any,
        kind: Literal["param", "grad"] = "param",
    ) -> None:
        """Replace a piece of the weights or of the current gradients by `rule(w, *kept)`.

        Args:
            piece: part of the model.
            rule: function of arrays with one row per replica. It may change the arrays in
                `kept`.
            kept: copies of the weights of all replicas.
            kind: values to replace.
        """
        ...

    def end(self) -> None:
        """End an iteration; learning rate schedules advance here."""
        ...


Equations = Callable[[World, int], None]
"""One iteration of all replicas."""


def synchronous() -> Equations:
    """Return the equations of synchronous SGD: `g = mean_k(g_k)`, then each replica steps."""

    def advance(world: World, iteration: int) -> None:
        world.gradients(iteration)
        world.average("grad")
        world.step()
        world.end()

    return advance


def average_piece(
    world: World,
    piece: Payload | None,
    state: StatePolicy,
    weights: Sequence[float] | None = None,
) -> None:
    """Replace a piece of the parameters by its mean, and treat the optimizer's state.

    Args:
        world: replicas.
        piece: part of the model; None for all.
        state: treatment of the optimizer's state: "local", "averaged" or "reset".
        weights: one weight per replica; None for equal weights.
    """
    world.average("param", piece, weights)
    if state == "averaged":
        world.average("state", piece, weights)
    elif state == "reset":
        world.reset(piece)
