"""accelerate: what `Accelerator.prepare` does, with offbeat in the place of DDP."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Unpack

import torch
from accelerate import Accelerator, DistributedType
from torch import nn

from offbeat.core.runtime.prepare import prepare as prepare_training
from offbeat.core.runtime.prepared import Model
from offbeat.integrations.options import Options
from offbeat.strategies import Strategy

# Who shards a model, or runs it, does not leave it whole to offbeat.
OTHER_WAYS = (
    DistributedType.DEEPSPEED,
    DistributedType.FSDP,
    DistributedType.MEGATRON_LM,
    DistributedType.XLA,
)


def prepare(
    accelerator: Accelerator,
    *objects: Any,
    strategy: Strategy | str | None = None,
    **options: Unpack[Options],
) -> Any:
    """What `accelerator.prepare(*objects)` returns; the model trains with offbeat, not with DDP.

    Model and optimizer must come together, one of each. Loaders and schedulers, without or with
    them, are prepared as ever. `strategy` and `options` are those of `offbeat.prepare`.
    ValueError for a model without an optimizer, or for several.
    """
    models = [o for o in objects if isinstance(o, nn.Module) and not isinstance(o, Model)]
    if not models:
        return type(accelerator).prepare(accelerator, *objects)
    optimizers = [o for o in objects if isinstance(o, torch.optim.Optimizer)]
    if len(models) != 1 or len(optimizers) != 1:
        raise ValueError(
            f"prepare must be given one model with its optimizer ({len(models)} and "
            f"{len(optimizers)} here); train several models as one module with one optimizer"
        )
    if accelerator.distributed_type in OTHER_WAYS:
        raise ValueError(
            f"the accelerator's distributed_type ({accelerator.distributed_type.value}) must be "
            "that of one process per device (NO, MULTI_CPU, MULTI_GPU, ...), as offbeat takes the "
            "place of DDP; leave its plugin out"
        )
    if accelerator.device_placement:
        models[0].to(accelerator.device)
    model, optimizer = prepare_training(models[0], optimizers[0], strategy, **options)
    _autocast(accelerator, model)
    _replace_methods(accelerator)
    given = [model if o is models[0] else optimizer if o is optimizers[0] else o for o in objects]
    # The optimizer's state is where its parameters are, and is not to be loaded again.
    placed = [False if o is optimizer else None for o in given]
    return type(accelerator).prepare(accelerator, *given, device_placement=placed)


def adopt(
    accelerator: Accelerator, strategy: Strategy | str | None = None, **options: Unpack[Options]
) -> None:
    """Replace `accelerator.prepare` with `prepare`, bound to this strategy and these options."""
    _replace_methods(accelerator)
    accelerator.prepare = partial(prepare, accelerator, strategy=strategy, **options)


def _autocast(accelerator: Accelerator, model: Model) -> None:
    """Mixed precision as the accelerator has it, around the prepared model's forward."""
    model._is_accelerate_prepared = False
    wrapped = accelerator.prepare_model(model, device_placement=False, evaluation_mode=True)
    if wrapped is not model:
        raise ValueError(
            "the accelerator must not compile the model as a whole (dynamo_backend), as all "
            "gradients would then be ready at once; compile the model's blocks before"
        )
    model._is_accelerate_prepared = True


def _replace_methods(accelerator: Accelerator) -> None:
    """Make `no_sync` and `unwrap_model` of an accelerator handle a prepared model as they handle
    DDP. Scripts, the Trainer and PEFT test the class of the unwrapped model."""
    if "unwrap_model" in vars(accelerator):
        return
    no_sync_of_ddp, unwrap_ddp = accelerator.no_sync, accelerator.unwrap_model

    @contextmanager
    def no_sync(model: nn.Module) -> Iterator[None]:
        with model.no_sync() if isinstance(model, Model) else no_sync_of_ddp(model):
            yield

    def unwrap_model(model: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        return unwrap_ddp(model.module if isinstance(model, Model) else model, *args, **kwargs)

    accelerator.no_sync, accelerator.unwrap_model = no_sync, unwrap_model
