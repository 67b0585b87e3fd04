"""PowerSGD: a message as a matrix, and of it the part within a few common directions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from offbeat.core.codecs.codec import Array, Codec, Memory
from offbeat.core.rules.vocabulary import Setting


@dataclass(frozen=True)
class PowerSGD(Codec):
    """`P = mean(M Q)`, orthogonalized; `Q = mean(M' P)`; `P Q'` arrives; the next begins with Q.

    The elements of a message, row by row, are a matrix M that is as square as can be, filled up
    with zeros. Rank r loses `M_r - P P' M_r`; the mean over ranks of what is left is `P Q'`. Both
    averages are of factors, not of codes, so they are all-reduces. A message that would not
    be smaller than its factors travels as it is.
    Source: Vogels et al., PowerSGD, NeurIPS 2019, Algorithms 1 and 2.
    """

    rank: int

    name: ClassVar[str] = "powersgd"
    settings: ClassVar[dict[str, Setting]] = {"rank": Setting("count", least=1)}
    linear: ClassVar[bool] = True
    rounds: ClassVar[int] = 2

    def bytes_of(self, size: int, itemsize: int = 4) -> int:
        rows, columns = matrix(size)
        return itemsize * (size if self.dense(size) else (rows + columns) * self.rank)

    def dense(self, size: int) -> bool:
        """Whether factors would be no smaller."""
        return sum(matrix(size)) * self.rank >= size

    def start(self, size: int) -> Array:
        """Q at first, the same on all ranks."""
        return np.random.default_rng(size).standard_normal((matrix(size)[1], self.rank))

    def arrives(self, x: Array, iteration: int = 0) -> Array:
        return self.average([x], iteration=iteration)[0]

    def average(
        self,
        given: Sequence[Array],
        via: str = "reduce",
        iteration: int = 0,
        memories: Sequence[Memory] | None = None,
    ) -> tuple[Array, list[Array]]:
        size, count = len(given[0]), len(given)
        if self.dense(size):
            return np.sum(given, axis=0) / count, [np.zeros_like(x) for x in given]
        shape = matrix(size)
        m = [np.append(x, np.zeros(math.prod(shape) - size)).reshape(shape) for x in given]
        q = self.start(size)
        if memories is not None:
            q = memories[0].get("q", q)
        p, _ = np.linalg.qr(np.sum([one @ q for one in m], axis=0) / count)
        own = [one.T @ p for one in m]
        q = np.sum(own, axis=0) / count
        for memory in memories or ():
            memory["q"] = q
        lost = [x - (p @ mine.T).reshape(-1)[:size] for x, mine in zip(given, own, strict=True)]
        return (p @ q.T).reshape(-1)[:size], lost


def matrix(size: int) -> tuple[int, int]:
    """Rows and columns of the matrix that a message of so many elements is."""
    columns = math.isqrt(max(size - 1, 0)) + 1
    return -(-size // columns), columns
