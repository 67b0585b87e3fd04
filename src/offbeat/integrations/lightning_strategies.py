"""Mixins for the DDP strategies of both Lightning packages."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from offbeat.core.runtime.prepare import prepare as prepare_training
from offbeat.core.runtime.prepared import Model
from offbeat.core.transport.heartbeat import publish_exception
from offbeat.integrations.options import Options
from offbeat.strategies import Strategy

Base: Any = object  # both packages define their own strategies


class _Configured(Base):
    """Arguments of `offbeat.prepare` and of the DDP strategy, for both mixins."""

    def __init__(
        self,
        strategy: Strategy | str | None = None,
        *,
        options: Options | None = None,
        **kwargs: Any,
    ):
        super().__init__(**kwargs)
        self._strategy, self._options = strategy, options or Options()


class TrainerStrategy(_Configured):
    """Mixin for the Trainer's DDPStrategy, placed before it. Accepts its arguments as well."""

    _between_iterations = True  # remains true while gradients only accumulate
    _accumulating = False

    def configure_ddp(self) -> None:
        """Do nothing: `setup_optimizers` wraps the model, because offbeat needs the optimizer."""

    def setup_optimizers(self, trainer: Any) -> None:
        self._close_model()
        super().setup_optimizers(trainer)
        if len(self.optimizers) != 1 or not isinstance(self.optimizers[0], torch.optim.Optimizer):
            raise ValueError(
                f"configure_optimizers must return one optimizer ({len(self.optimizers)} here); "
                "give it the parameters of all as param groups, or prepare networks that step in "
                "turn (GANs) one by one, in your own loop or with Fabric"
            )
        self.model, optimizer = prepare_training(
            self.model, self.optimizers[0], self._strategy, **self._options
        )
        self.optimizers = [optimizer]

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        self._between_iterations = self._accumulating
        return super().training_step(*args, **kwargs)

    def optimizer_step(self, *args: Any, **kwargs: Any) -> Any:
        output = super().optimizer_step(*args, **kwargs)
        self._between_iterations = True
        return output

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        self._accumulating = True
        try:
            with self.model.no_sync() if isinstance(self.model, Model) else nullcontext():
                yield
        finally:
            self._accumulating = False

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the weights of a checkpoint, averaged over all replicas.

        Between backward and the optimizer step, the weights of this rank are returned.
        """
        self._consolidate()
        return super().lightning_module_state_dict()

    def on_train_end(self) -> None:
        self._consolidate()
        super().on_train_end()

    def on_exception(self, exception: BaseException) -> None:
        """Publish the exception before `teardown` closes the model."""
        if isinstance(self.model, Model):
            publish_exception(exception, exception.__traceback__)
        super().on_exception(exception)

    def teardown(self) -> None:
        self._close_model()
        super().teardown()

    def _consolidate(self) -> None:
        if isinstance(self.model, Model) and self._between_iterations:
            self.model.consolidate()

    def _close_model(self) -> None:
        if isinstance(self.model, Model):
            self.model.close()
            self.model, self._between_iterations = self.lightning_module, True


class ShardedTrainerStrategy(TrainerStrategy):
    """Mixin for the Trainer's ModelParallelStrategy, placed before it, where the ranks of a node
    share a replica by `fully_shard`. Accepts its arguments as well."""

    def setup_optimizers(self, trainer: Any) -> None:
        self._options = Options(mesh=self.device_mesh["data_parallel"]) | self._options
        super().setup_optimizers(trainer)

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Return the arguments of the sampler, by which every rank has its own batches."""
        return {"num_replicas": self.world_size, "rank": self.global_rank}

    def lightning_module_state_dict(self) -> dict[str, Any]:
        prepared = self.model
        try:
            self._consolidate()
            self.model = self.lightning_module  # torch collects shards by the names of its modules
            return super(TrainerStrategy, self).lightning_module_state_dict()
        finally:
            self.model = prepared


class FabricStrategy(_Configured):
    """Mixin for Fabric's DDPStrategy, placed before it. Accepts its arguments as well."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._prepared: list[Model] = []
        self._backward_sync_control = _Accumulation()

    def setup_module_and_optimizers(
        self, module: nn.Module, optimizers: list[Any], scheduler: Any = None
    ) -> tuple[nn.Module, list[Any], Any]:
        if len(optimizers) != 1:
            raise ValueError(
                f"setup must be given one optimizer ({len(optimizers)} here); give it the "
                "parameters of all as param groups"
            )
        prepared, optimizer = prepare_training(
            module, optimizers[0], self._strategy, **self._options
        )
        self._prepared.append(prepared)
        return prepared, [optimizer], scheduler

    def setup_module(self, module: nn.Module) -> Any:
        if any(p.requires_grad for p in module.parameters()):
            raise ValueError(
                "the module must be set up together with its optimizer: "
                "model, optimizer = fabric.setup(model, optimizer)"
            )
        return module

    def consolidate(self) -> None:
        """Make replicas bit-identical. Every rank must call `fabric.strategy.consolidate()`."""
        for model in self._prepared:
            model.consolidate()

    def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        """Save the average of all replicas. Every rank must call it, as with `fabric.save`."""
        self.consolidate()
        super().save_checkpoint(*args, **kwargs)


class _Accumulation:
    """Context manager factory for `fabric.no_backward_sync`."""

    def no_backward_sync(self, module: nn.Module, enabled: bool) -> AbstractContextManager[None]:
        return module.no_sync() if enabled and isinstance(module, Model) else nullcontext()
