"""Loader whose batches also contain samples of other workers."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Mapping, Sized
from typing import Any

import torch
import torch.distributed as dist

from offbeat.core.transport.control import Control
from offbeat.data.batches import kind, leaves, pool, rebuild, samples_of
from offbeat.data.injection import Injection
from offbeat.data.numbers import require_count, require_positive
from offbeat.data.place import place, require_no_servers

ENDED = (0, "no batch")  # values that a rank sends after the end of its loader


class Injected:
    """Batches of `batch` samples: the samples of `loader`, then the shared samples of the
    iteration.

    All ranks must iterate together, after `torch.distributed` is initialized. Iteration ends on all
    ranks when the loader of one rank ends. Before each batch, a gloo group of its own carries one
    small message to compare the batches and one message per sharing worker.

    Args:
        loader: iterable of batches of exactly `injection.batch_size(batch)` samples, such as a
            DataLoader with `drop_last=True`. A batch is a tensor, or nested tuples, lists and
            dictionaries of tensors. The first dimension counts samples.
        injection: selection of workers and samples.
        batch: effective batch size.
        timeout_s: seconds to wait for another rank.

    Raises:
        RuntimeError: a rank was missing for `timeout_s` seconds.
    """

    def __init__(
        self, loader: Iterable[Any], injection: Injection, *, batch: int, timeout_s: float = 120.0
    ):
        require_positive("timeout_s", timeout_s)
        require_count("batch", batch)
        injection.batch_size(batch)  # raises on invalid sizes before any rank waits
        self.loader: Iterable[Any] = loader
        self.injection: Injection = injection
        self.batch: int = batch
        self._timeout_s = timeout_s
        self._control: Control | None = None
        self._iteration = 0  # number of the iteration, over all epochs

    def __len__(self) -> int:
        """Return the number of batches per epoch, the length of the loader."""
        if not isinstance(self.loader, Sized):
            raise TypeError(f"loader ({type(self.loader).__name__}) has no length")
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        workers = place()[1]
        if self.injection.batch_size(self.batch, workers) == self.batch:  # nothing to share
            yield from self.loader
            return
        control = self._control = self._control or self._create_control(workers)
        for own in self._matching_batches(control):
            made = self._inject(own, control)
            self._iteration += 1
            yield made

    def state_dict(self) -> dict[str, int]:
        """Return the number of completed iterations. The loader's sampler has its own state."""
        return {"iteration": self._iteration}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continue the random selection at a saved iteration.

        Args:
            state: result of `state_dict`, equal on all ranks.
        """
        require_count("iteration", state["iteration"], least=0)
        self._iteration = state["iteration"]

    def _create_control(self, workers: int) -> Control:
        if not dist.is_initialized():
            raise RuntimeError(
                f"torch.distributed must be initialized before {workers} workers can share "
                "samples; call offbeat.prepare or init_process_group before the first batch"
            )
        require_no_servers("an injected loader")
        control = Control(self._timeout_s)
        settings = f"{self.injection} with batch={self.batch} from iteration {self._iteration}"
        control.agree("injection", settings, "make it with the same settings")
        return control

    def _matching_batches(self, control: Control) -> Iterator[Any]:
        """Yield the batches of this rank while every rank has a batch of the same kind."""
        expected = self.injection.batch_size(self.batch, control.world_size)
        for own in _append_none(self.loader):
            control.set_iteration(self._iteration)
            if not self._is_same_kind(own, control) or own is None:
                return
            if (count := samples_of(leaves(own))) != expected:
                raise ValueError(
                    f"batch ({count} samples) must have b' = {expected} samples for {self.batch} "
                    "after injection; load injection.batch_size(batch) with drop_last=True"
                )
            yield own

    def _is_same_kind(self, own: Any, control: Control) -> bool:
        """Return whether all ranks have a batch of the same kind, or all have none.

        Returns False if only some ranks have a batch.

        Raises:
            ValueError: the batches differ; raised on all ranks.
        """
        said = ENDED if own is None else (samples_of(leaves(own)), kind(leaves(own)))
        try:
            if control.is_same([self._iteration, said[0], zlib.crc32(said[1].encode())]):
                return True
            if ENDED in control.gather(said):
                return False
        except RuntimeError as error:
            raise self._failure(error, control) from error
        words = f"{said[0]} samples of {said[1]} in iteration {self._iteration}"
        control.agree("batches", words, "use equal batch sizes, drop_last=True and one shape")
        raise AssertionError("ranks that say the same are the same")

    def _inject(self, own: Any, control: Control) -> Any:
        workers, tensors = control.world_size, leaves(own)
        sharers = self.injection.sharers(self._iteration, workers)
        given = self.injection.given(self.batch, workers)
        chosen = [
            self.injection.chosen(self._iteration, sharer, len(tensors[0]), count)
            for sharer, count in zip(sharers, given, strict=True)
        ]
        try:
            with control.waiting("sharing samples"):
                shared = pool(tensors, sharers, chosen, control.group)
        except RuntimeError as error:
            raise self._failure(error, control) from error
        joined = [torch.cat(pair) for pair in zip(tensors, shared, strict=True)]
        return rebuild(own, iter(joined))

    def _failure(self, error: Exception, control: Control) -> RuntimeError:
        return RuntimeError(
            f"rank {control.rank}: injection in iteration {self._iteration}: "
            f"{error.__cause__ or error}. {control.report_failure(self._iteration)}"
        )


def _append_none(batches: Iterable[Any]) -> Iterator[Any]:
    """Yield the batches, then None."""
    yield from batches
    yield None
