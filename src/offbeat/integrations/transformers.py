"""Trainer of transformers that trains with offbeat instead of DDP."""

from __future__ import annotations

from typing import Any

import transformers

from offbeat.core.runtime.prepared import Model
from offbeat.integrations.accelerate import adopt
from offbeat.integrations.options import Options
from offbeat.strategies import Strategy

Base: Any = object  # the Trainer class that follows the mixin


class TrainerMixin(Base):
    """Mixin for a Trainer class, placed before it: `class MyTrainer(TrainerMixin, SFTTrainer)`.

    Checkpoints, and the model after `train()`, contain the average of all replicas.

    Args:
        args: positional arguments of the Trainer.
        strategy: as in `offbeat.prepare`.
        options: keyword arguments of `offbeat.prepare`.
        kwargs: keyword arguments of the Trainer.
    """

    def __init__(
        self,
        *args: Any,
        strategy: Strategy | str | None = None,
        options: Options | None = None,
        **kwargs: Any,
    ):
        self._strategy, self._options = strategy, options or Options()
        super().__init__(*args, **kwargs)

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        adopt(self.accelerator, self._strategy, **self._options)

    def train(self, *args: Any, **kwargs: Any) -> Any:
        if self.args.n_gpu > 1:
            raise ValueError(
                f"this one process has {self.args.n_gpu} GPUs, over which the Trainer would spread "
                "the model by DataParallel; start one process per GPU, as with torchrun"
            )
        output = super().train(*args, **kwargs)
        self._consolidate()
        return output

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        if isinstance(self.model_wrapped, Model):
            self.model_wrapped.flush()  # the evaluation loop calls the unwrapped model
        return super().evaluation_loop(*args, **kwargs)

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> Any:
        self._consolidate()
        return super()._save_checkpoint(*args, **kwargs)

    def _consolidate(self) -> None:
        if isinstance(self.model_wrapped, Model):
            self.model_wrapped.consolidate()


class Trainer(TrainerMixin, transformers.Trainer):
    """`transformers.Trainer` with two additional arguments: `strategy` and `options`."""
