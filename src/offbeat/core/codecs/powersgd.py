"""Codec PowerSGD: low-rank approximation of a message, reshaped to a matrix."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from offbeat.core.codecs.codec import Array, Codec, Memory
from offbeat.core.rules.vocabulary import Setting


@dataclass(frozen=True)
class PowerSGD(Codec):
    """Codec that sends two factors of rank `rank` of the message.

    The elements of a message fill a matrix M row by row. M is as square as possible and padded with
    zeros. Each average computes `P = mean(M Q)`, orthogonalizes P, and computes `Q = mean(M' P)`.
    The ranks receive `P Q'`. The next average starts with this Q. The error of rank r is
    `M_r - P P' M_r`; the mean over ranks of `P P' M_r` is `P Q'`. Both means are all-reduces. If
    the factors are not smaller than the message, the message is sent without encoding.

    Source: Vogels et al., PowerSGD, NeurIPS 2019, Algorithms 1 and 2.
    """

    rank: int

    name: ClassVar[str] = "powersgd"
    settings: ClassVar[dict[str, Setting]] = {"rank": Setting("count", least=1)}
    example: ClassVar[dict[str, Any]] = {"rank": 4}
    linear: ClassVar[bool] = True
    rounds: ClassVar[int] = 2

    def bytes_of(self, size: int, itemsize: int = 4) -> int:
        rows, columns = matrix_shape(size)
        return itemsize * (size if self.is_dense(size) else (rows + columns) * self.rank)

    def is_dense(self, size: int) -> bool:
        """Return whether a message of `size` elements is sent without encoding.

        This is so if its factors are not smaller than the message.
        """
        return sum(matrix_shape(size)) * self.rank >= size

    def initial_q(self, size: int) -> Array:
        """Return Q for the first message; equal on all ranks."""
        return np.random.default_rng(size).standard_normal((matrix_shape(size)[1], self.rank))

    def round_trip(self, x: Array, iteration: int = 0) -> Array:
        return self.average([x], iteration=iteration)[0]

    def average(
        self,
        given: Sequence[Array],
        via: str = "reduce",
        iteration: int = 0,
        memories: Sequence[Memory] | None = None,
    ) -> tuple[Array, list[Array]]:
        size, count = len(given[0]), len(given)
        if self.is_dense(size):
            return np.sum(given, axis=0) / count, [np.zeros_like(x) for x in given]
        shape = matrix_shape(size)
        m = [np.append(x, np.zeros(math.prod(shape) - size)).reshape(shape) for x in given]
        q = self.initial_q(size)
        if memories is not None:
            q = memories[0].get("q", q)
        p, _ = np.linalg.qr(np.sum([one @ q for one in m], axis=0) / count)
        own = [one.T @ p for one in m]
        q = np.sum(own, axis=0) / count
        for memory in memories or ():
            memory["q"] = q
        lost = [x - (p @ mine.T).reshape(-1)[:size] for x, mine in zip(given, own, strict=True)]
        return (p @ q.T).reshape(-1)[:size], lost


def matrix_shape(size: int) -> tuple[int, int]:
    """Return the rows and columns of the matrix of a message with `size` elements."""
    columns = math.isqrt(max(size - 1, 0)) + 1
    return -(-size // columns), columns
