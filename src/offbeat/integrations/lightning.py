"""Strategies for the Trainer and Fabric of the package `lightning`."""

from __future__ import annotations

from lightning.fabric.strategies.ddp import DDPStrategy as FabricDDPStrategy
from lightning.pytorch.strategies import DDPStrategy

from offbeat.integrations.lightning_strategies import FabricStrategy, TrainerStrategy


class OffbeatStrategy(TrainerStrategy, DDPStrategy):
    """Strategy of the Trainer: `Trainer(strategy=OffbeatStrategy("dreamddp:period=8"))`.

    Checkpoints, and the model after `fit`, contain the average of all replicas.
    """


class OffbeatFabricStrategy(FabricStrategy, FabricDDPStrategy):
    """Strategy of Fabric: `Fabric(strategy=OffbeatFabricStrategy("dreamddp:period=8"))`.

    Checkpoints contain the average of all replicas.
    """
