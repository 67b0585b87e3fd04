"""Amount of training that a verdict is for, as batches of one device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from offbeat.core.words import amount

DEFAULT_BATCHES = 1000


@dataclass(frozen=True)
class Work:
    """Amount of training.

    Attributes:
        batches: batches of one device in all; 0 if they depend on the method.
        text: description, such as "10 M samples".
        batches_by_label: batches of each method by its label, one number per seed, if they depend
            on the method, as to reach a loss. Methods that are missing have no verdict, except
            those with the same numbers as DDP, which need as many as DDP.
        target_loss: loss to reach; None for an amount of samples or batches.
    """

    batches: float
    text: str
    batches_by_label: Mapping[str, Sequence[float]] = field(default_factory=dict)
    target_loss: float | None = None

    @classmethod
    def of(
        cls, samples: float | None = None, batch: int | None = None, iterations: float | None = None
    ) -> Work:
        """Return the work of a number of samples, or of iterations of one device.

        Args:
            samples: samples in all.
            batch: samples per iteration of one device.
            iterations: iterations that one device would need.

        Raises:
            ValueError: a number is not above 0, samples lack the batch, or both are given.
        """
        for name, value in (("samples", samples), ("batch", batch), ("iterations", iterations)):
            if value is not None and not 0 < value < float("inf"):
                raise ValueError(f"{name} ({value:g}) must be a number above 0")
        if samples is not None and iterations is not None:
            raise ValueError(
                f"iterations ({iterations:g}) and samples ({samples:g}) are two amounts of "
                "training; give one"
            )
        if samples is not None:
            if batch is None:
                raise ValueError(
                    f"samples ({samples:g}) need the samples per iteration of one device; add "
                    "--batch N"
                )
            return cls(samples / batch, f"{amount(samples)} samples in batches of {batch}")
        if iterations is None:
            return cls(DEFAULT_BATCHES, f"{amount(DEFAULT_BATCHES)} batches")
        return cls(iterations, f"{amount(iterations)} batches")

    @classmethod
    def to_loss(cls, loss: float, batches_by_label: Mapping[str, Sequence[float]]) -> Work:
        """Return the work of training to a loss.

        Args:
            loss: loss to reach.
            batches_by_label: batches of each method by its label, one number per seed.
        """
        return cls(0.0, f"to loss {loss:.4g}", batches_by_label, loss)

    def batches_of(self, label: str, same_as: str | None = None) -> tuple[float, ...] | None:
        """Return the batches of a method, one number per seed; None if they are not known.

        Args:
            label: label of the method.
            same_as: label of a method that computes the same; None if there is none.
        """
        if self.target_loss is None and not self.batches_by_label:
            return (self.batches,)
        names = (name for name in (label, same_as) if name in self.batches_by_label)
        found = next(names, None)
        return None if found is None else tuple(self.batches_by_label[found])
