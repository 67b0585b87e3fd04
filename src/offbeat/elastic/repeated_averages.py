"""Averages of gradients that the survivors of a failure repeat, until their next epoch begins."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch.distributed as dist
from torch import Tensor

from offbeat.core.transport.collectives import averaging
from offbeat.core.transport.control import Control

EVERYWHERE, INSIDE_NODE = "#repeated", "#repeated-inside"  # names of no link: a channel has a link
Results = dict[str, tuple[int, Sequence[Tensor]]]


class RepeatedAverages:
    """Averages over all survivors, or over the ranks of a node.

    All ranks of a group run the same averages in the same order. If another member fails meanwhile,
    some ranks may have received an average that others have not. So the last result of each group
    is kept, and `recover` sends it to the others.

    Args:
        control: control of this rank, whose group has all survivors.

    Attributes:
        inside: group of the ranks of this node; None if the node has one rank.
        results: number and result of the last average of each group that this rank has received.
        is_alone: whether this rank has left the job, so that its own tensors are the average.
        awaited: by group, the tensors of the average in progress.
        recover: agrees with the other survivors after a failure; its argument is the failure.
    """

    def __init__(self, control: Control) -> None:
        self._control = control
        self.inside: dist.ProcessGroup | None = None
        self.is_alone = False
        self.awaited: dict[str, list[Tensor]] = {}
        self.recover: Callable[[RuntimeError], None] | None = None
        self.restart()

    def restart(self) -> None:
        """Count from 0 again. Called when an epoch begins."""
        self._counts, self.results = {EVERYWHERE: 0, INSIDE_NODE: 0}, Results()

    def average(self, tensors: Sequence[Tensor], *, inside: bool) -> list[Tensor]:
        """Return the averages of tensors.

        Args:
            tensors: tensors of this rank, which stay as they are.
            inside: average over the ranks of this node; otherwise over all survivors.
        """
        if self.is_alone or (inside and self.inside is None):
            return [tensor.clone() for tensor in tensors]
        name = INSIDE_NODE if inside else EVERYWHERE
        number, self.awaited[name] = self._counts[name], [*tensors]
        while self.results.get(name, (-1,))[0] != number:
            failure = self._try(name, number)
            if failure is not None:
                assert self.recover is not None
                self.recover(failure)
        averages = self.results[name][1]
        del self.awaited[name]
        self._counts[name] += 1
        return [one.to(like.device) for one, like in zip(averages, tensors, strict=True)]

    def _try(self, name: str, number: int) -> RuntimeError | None:
        """Average copies of the awaited tensors. Return the failure of a wait for other ranks."""
        group = self._control.group if name == EVERYWHERE else self.inside
        assert group is not None
        average, averages = averaging(group), list[Tensor]()
        try:
            for tensor in self.awaited[name]:
                averages.append(tensor.detach().to("cpu", copy=True))
                with self._control.waiting("averaging after a failure"):
                    average(averages[-1])
        except RuntimeError as error:
            words = str(error)  # frames of the error refer to the group, which would stay connected
        else:
            self.results[name] = number, averages
            return None
        return RuntimeError(f"averaging over the survivors of a failure has failed: {words}")
