"""Integration with Accelerate: `prepare` in place of `Accelerator.prepare`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any, Unpack

import torch
from accelerate import Accelerator, DistributedType
from torch import nn

from offbeat.core.runtime.prepare import prepare as prepare_training
from offbeat.core.runtime.prepared import Model
from offbeat.integrations.options import Options
from offbeat.strategies import Strategy

# These plugins shard or run the model themselves, so offbeat cannot wrap it.
SHARDED_TYPES = (
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
    """Return the result of `accelerator.prepare(*objects)`, with a model that trains with offbeat
    instead of DDP.

    Args:
        accelerator: accelerator of the script.
        objects: one model with its optimizer, and any loaders and schedulers, or only loaders and
            schedulers.
        strategy: as in `offbeat.prepare`.
        options: keyword arguments of `offbeat.prepare`.

    Raises:
        ValueError: a model has no optimizer, there are several models, or the accelerator shards
            the model.
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
    if accelerator.distributed_type in SHARDED_TYPES:
        raise ValueError(
            f"the accelerator's distributed_type ({accelerator.distributed_type.value}) must be "
            "that of one process per device (NO, MULTI_CPU, MULTI_GPU, ...), as offbeat takes the "
            "place of DDP; leave its plugin out. Shard a large model inside nodes by fully_shard, "
            "and give the mesh between them as mesh="
        )
    if accelerator.device_placement:
        models[0].to(accelerator.device)
    model, optimizer = prepare_training(models[0], optimizers[0], strategy, **options)
    _apply_autocast(accelerator, model)
    _replace_methods(accelerator)
    given = [model if o is models[0] else optimizer if o is optimizers[0] else o for o in objects]
    # The optimizer state is on the devices of its parameters and must not be loaded again.
    placed = [False if o is optimizer else None for o in given]
    return type(accelerator).prepare(accelerator, *given, device_placement=placed)


def adopt(
    accelerator: Accelerator, strategy: Strategy | str | None = None, **options: Unpack[Options]
) -> None:
    """Replace `accelerator.prepare` by `prepare` with this strategy and these options."""
    _replace_methods(accelerator)
    accelerator.prepare = partial(prepare, accelerator, strategy=strategy, **options)


def _apply_autocast(accelerator: Accelerator, model: Model) -> None:
    """Apply the mixed precision of the accelerator to the forward of the prepared model."""
    model._is_accelerate_prepared = False
    wrapped = accelerator.prepare_model(model, device_placement=False, evaluation_mode=True)
    if wrapped is not model:
        raise ValueError(
            "the accelerator must not compile the model as a whole (dynamo_backend), as all "
            "gradients would then be ready at once; compile the model's blocks before"
        )
    model._is_accelerate_prepared = True


def _replace_methods(accelerator: Accelerator) -> None:
    """Make `no_sync` and `unwrap_model` of an accelerator accept a prepared model as they accept
    DDP, and `save_state` save the mean of all replicas.

    Scripts, the Trainer and PEFT test the class of the unwrapped model.
    """
    if "unwrap_model" in vars(accelerator):
        return
    no_sync_of_ddp, unwrap_ddp = accelerator.no_sync, accelerator.unwrap_model
    save_replica = accelerator.save_state

    @contextmanager
    def no_sync(model: nn.Module) -> Iterator[None]:
        with model.no_sync() if isinstance(model, Model) else no_sync_of_ddp(model):
            yield

    def unwrap_model(model: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        return unwrap_ddp(model.module if isinstance(model, Model) else model, *args, **kwargs)

    @wraps(save_replica)
    def save_state(*args: Any, **kwargs: Any) -> Any:
        prepared = [model for model in accelerator._models if isinstance(model, Model)]
        for model in prepared if accelerator.sync_gradients else ():
            if not model._session.keeps_replicas_equal:
                model.consolidate()
        return save_replica(*args, **kwargs)

    accelerator.no_sync, accelerator.unwrap_model = no_sync, unwrap_model
    accelerator.save_state = save_state
