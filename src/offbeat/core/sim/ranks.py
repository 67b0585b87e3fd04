"""Differences between the ranks of a simulated cluster."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from offbeat.core.plan import base_link
from offbeat.core.profile import Profile

# Standard normal numbers of an expectation. The sum over an even grid is exact to rounding for a
# density that vanishes at both ends. A quadrature of NumPy would start the threads of LAPACK.
NORMALS = np.linspace(-9.0, 9.0, 145)


@dataclass(frozen=True, slots=True)
class Ranks:
    """Differences between ranks. By default the ranks differ as in the profile.

    Attributes:
        scale: forward, backward and update time of each rank relative to the profile's; empty for
            the profile's `rank_scale`.
        jitter: relative standard deviation of a lognormal factor with mean 1 on these times, drawn
            per rank and iteration; None for the profile's jitter.
        link_rates: for a link by name, the rate of each rank on the link and its channels, relative
            to the profile's. A collective runs at the rate of its slowest rank.
        receive_rates: for a link by name, the rate at which each rank receives, if it differs from
            the one at which it sends. Only gossip and strategies with servers use it.
        server_rates: for a link by name, the rates at which a server sends and receives, relative
            to the profile's.

    Raises:
        ValueError: a scale or a rate is not finite and above 0, or `jitter` is not finite or is
            negative.
    """

    scale: tuple[float, ...] = ()
    jitter: float | None = None
    link_rates: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    receive_rates: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    server_rates: Mapping[str, tuple[float, float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.jitter is not None and not (math.isfinite(self.jitter) and self.jitter >= 0):
            raise ValueError(f"jitter ({self.jitter}) must be finite and at least 0")
        pairs = ((f"server_rates[{link!r}]", pair) for link, pair in self.server_rates.items())
        for name, values in (*self._per_rank(), *pairs):
            for rank, value in enumerate(values):
                if not (math.isfinite(value) and value > 0):
                    raise ValueError(f"{name}[{rank}] ({value}) must be finite and above 0")

    def fit(self, profile: Profile) -> None:
        """Raise if these settings do not fit a profile.

        Args:
            profile: profile with the number of ranks and the links.

        Raises:
            ValueError: a setting does not have one value per rank, or a link is a channel or is not
                in the profile.
        """
        for name, values in self._per_rank():
            if len(values) != profile.world_size and (values or name != "scale"):
                raise ValueError(
                    f"{name} ({len(values)} values) must have one value per rank "
                    f"({profile.world_size})"
                )
        for link in {*self.link_rates, *self.receive_rates, *self.server_rates}:
            if profile.link(link).name != link:
                raise ValueError(
                    f"link_rates ({link!r}) must name a link, not a channel; its rates count for "
                    "all of its channels"
                )

    def _per_rank(self) -> Iterator[tuple[str, tuple[float, ...]]]:
        """Yield name and values of every setting with one value per rank."""
        yield "scale", self.scale
        for name in ("link_rates", "receive_rates"):
            for link, rates in getattr(self, name).items():
                yield f"{name}[{link!r}]", rates

    def compute_scale(self, profile: Profile) -> tuple[float, ...]:
        """Return the compute time of every rank relative to the profile's.

        Args:
            profile: profile that the ranks belong to.
        """
        return self.scale or profile.rank_scale or (1.0,) * profile.world_size

    def link_rate(self, link: str, ranks: Sequence[int] | None = None) -> float:
        """Return the rate of a message relative to the profile's rate of the link.

        Args:
            link: name of a link or channel.
            ranks: ranks that take part in the message; None for all ranks.

        Returns:
            Relative rate of the slowest of these ranks.
        """
        rates = self.link_rates.get(base_link(link), ())
        if ranks is not None and rates:
            rates = [rates[rank] for rank in ranks]
        return min(rates, default=1.0)

    def receive_rate(self, link: str, rank: int) -> float:
        """Return the rate at which a rank receives relative to the profile's rate of the link.

        Args:
            link: name of a link or channel.
            rank: the rank.
        """
        rates = self.receive_rates.get(base_link(link), ())
        return rates[rank] if rates else self.link_rate(link, (rank,))

    def jitters(self, profile: Profile) -> tuple[float, ...]:
        """Return the relative standard deviation of every rank's compute time.

        Args:
            profile: profile that the ranks belong to.
        """
        return profile.jitters if self.jitter is None else (self.jitter,) * profile.world_size

    def noise(self, iterations: int, profile: Profile, seed: int) -> NDArray[np.float64] | None:
        """Return jitter factors, or None if no rank has jitter.

        The ranks of a replicated node wait for each other in every iteration, so the factor of a
        replica is the largest of as many draws as it has ranks. With the same seed, the first rows
        do not depend on the number of iterations.

        Args:
            iterations: number of iterations.
            profile: profile that the ranks belong to.
            seed: seed of the draws.

        Returns:
            Factors of compute times, `[iterations, replicas]`.
        """
        jitters = np.array(self.jitters(profile))
        if not jitters.any():
            return None
        counts = _waiting_ranks(profile)
        shape = iterations, profile.world_size, counts.max()
        draws = np.random.default_rng(seed).standard_normal(shape)
        draws[:, counts[:, None] <= np.arange(counts.max())] = -np.inf
        return lognormal(draws.max(axis=2), jitters)

    def expected_noise(self, profile: Profile) -> NDArray[np.float64]:
        """Return the expectation of the factors of `noise` for each replica.

        Source: order statistics. With s the deviation of the logarithm, the largest of K lognormal
        factors of mean 1 has the expectation K E[F(u + s)^(K - 1)], where u is a standard normal
        number and F its distribution function.

        Args:
            profile: profile that the ranks belong to.
        """
        weights = np.exp(-(NORMALS**2) / 2)
        pairs = zip(self.jitters(profile), _waiting_ranks(profile).tolist(), strict=True)
        means = []
        for jitter, count in pairs:
            below = [
                NormalDist().cdf(x + math.sqrt(math.log1p(jitter**2))) for x in NORMALS.tolist()
            ]
            means.append(count * np.average(np.power(below, count - 1), weights=weights))
        return np.array(means)


def _waiting_ranks(profile: Profile) -> NDArray[np.int64]:
    """Return for each replica the number of ranks whose compute it waits for in an iteration.

    It is 1 for sharded replicas, because measured times of FSDP contain these waits, and on
    emulated hosts, because all ranks of a host have the same jitter.
    """
    alike = profile.inside is None or profile.pace
    counts = (1,) * profile.world_size if alike else profile.topology
    return np.array(counts, dtype=np.int64)


def lognormal(
    draws: NDArray[np.float64], deviation: float | NDArray[np.float64]
) -> NDArray[np.float64]:
    """Map standard normal draws to lognormal factors with mean 1 and this standard deviation."""
    spread = np.log1p(np.square(deviation))  # variance of the logarithm; -spread / 2 gives mean 1
    return np.exp(np.sqrt(spread) * draws - spread / 2)
