"""Strategies for the Trainer of `pytorch_lightning` and for Fabric of `lightning_fabric`."""

from __future__ import annotations

from lightning_fabric.strategies.ddp import DDPStrategy as FabricDDPStrategy
from pytorch_lightning.strategies import DDPStrategy, ModelParallelStrategy

from offbeat.integrations.lightning_strategies import (
    FabricStrategy,
    ShardedTrainerStrategy,
    TrainerStrategy,
)


class OffbeatStrategy(TrainerStrategy, DDPStrategy):
    """Strategy of the Trainer: `Trainer(strategy=OffbeatStrategy("dreamddp:period=8"))`.

    Checkpoints, and the model after `fit`, contain the average of all replicas.
    """


class OffbeatModelParallelStrategy(ShardedTrainerStrategy, ModelParallelStrategy):
    """Strategy of the Trainer for models that `configure_model` shards inside nodes by
    `fully_shard(..., mesh=self.device_mesh["tensor_parallel"])`.

    `data_parallel_size` is the number of nodes, and `tensor_parallel_size` that of the ranks of
    each. Every rank has its own batches. Checkpoints, and the model after `fit`, contain the
    average of all replicas.
    """


class OffbeatFabricStrategy(FabricStrategy, FabricDDPStrategy):
    """Strategy of Fabric: `Fabric(strategy=OffbeatFabricStrategy("dreamddp:period=8"))`.

    Checkpoints contain the average of all replicas.
    """
