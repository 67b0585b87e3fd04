"""Ranks: how the workers of a simulated cluster differ from each other."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from offbeat.core.plan import base_link
from offbeat.core.profile import Profile


@dataclass(frozen=True, slots=True)
class Ranks:
    """Differences between ranks; by default those of the profile.

    `scale[r]` is rank r's forward, backward and update time relative to the profile's (empty: the
    profile's `rank_scale`). `jitter` is the relative standard deviation of a lognormal factor with
    mean 1 on the same times, drawn per rank and iteration (None: the profile's).
    `link_rates[link][r]` is rank r's rate on a link (and its channels) relative to the profile's; a
    collective runs at the slowest rank's. ValueError on values that are not finite and positive.
    """

    scale: tuple[float, ...] = ()
    jitter: float | None = None
    link_rates: Mapping[str, tuple[float, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.jitter is not None and not (math.isfinite(self.jitter) and self.jitter >= 0):
            raise ValueError(f"jitter ({self.jitter}) must be finite and at least 0")
        for name, values in self._per_rank():
            for rank, value in enumerate(values):
                if not (math.isfinite(value) and value > 0):
                    raise ValueError(f"{name}[{rank}] ({value}) must be finite and above 0")

    def fit(self, profile: Profile) -> None:
        """ValueError unless there is one value per rank, on links that the profile has."""
        for name, values in self._per_rank():
            if len(values) != profile.world_size and (values or name != "scale"):
                raise ValueError(
                    f"{name} ({len(values)} values) must have one value per rank "
                    f"({profile.world_size})"
                )
        for link in self.link_rates:
            if profile.link(link).name != link:
                raise ValueError(
                    f"link_rates ({link!r}) must name a link, not a channel; its rates count for "
                    "all of its channels"
                )

    def _per_rank(self) -> Iterator[tuple[str, tuple[float, ...]]]:
        """Every setting with one value per rank, by name."""
        yield "scale", self.scale
        for link, rates in self.link_rates.items():
            yield f"link_rates[{link!r}]", rates

    def compute_scale(self, profile: Profile) -> tuple[float, ...]:
        """Compute time of every rank relative to the profile's."""
        return self.scale or profile.rank_scale or (1.0,) * profile.world_size

    def link_rate(self, link: str, ranks: Sequence[int] | None = None) -> float:
        """Rate of a message between some ranks, or all of them, on a link or channel relative to
        the profile's: the slowest one's."""
        rates = self.link_rates.get(base_link(link), ())
        if ranks is not None and rates:
            rates = [rates[rank] for rank in ranks]
        return min(rates, default=1.0)

    def jitters(self, profile: Profile) -> tuple[float, ...]:
        """Relative standard deviation of every rank's compute."""
        return profile.jitters if self.jitter is None else (self.jitter,) * profile.world_size

    def noise(self, iterations: int, profile: Profile, seed: int) -> NDArray[np.float64] | None:
        """Jitter factors [iteration, rank]; a longer draw begins with the shorter one. None: no
        rank varies."""
        jitters = np.array(self.jitters(profile))
        if not jitters.any():
            return None
        shape = iterations, profile.world_size
        return lognormal(np.random.default_rng(seed).standard_normal(shape), jitters)


def lognormal(
    draws: NDArray[np.float64], deviation: float | NDArray[np.float64]
) -> NDArray[np.float64]:
    """Factors with mean 1 and this standard deviation, from standard normal draws."""
    spread = np.log1p(np.square(deviation))  # variance of the logarithm; -spread / 2 gives mean 1
    return np.exp(np.sqrt(spread) * draws - spread / 2)


def alike(values: Sequence[float]) -> bool:
    """Whether all values are the same."""
    return min(values) == max(values)
