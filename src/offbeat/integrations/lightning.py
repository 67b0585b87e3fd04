"""lightning: strategies for its Trainer and for Fabric."""

from __future__ import annotations

from lightning.fabric.strategies.ddp import DDPStrategy as FabricDDPStrategy
from lightning.pytorch.strategies import DDPStrategy

from offbeat.integrations.lightning_strategies import FabricStrategy, TrainerStrategy


class OffbeatStrategy(TrainerStrategy, DDPStrategy):
    """`Trainer(strategy=OffbeatStrategy("dreamddp:period=8"))`.

    What is saved, and the model after `fit`, is the mean of all replicas.
    """


class OffbeatFabricStrategy(FabricStrategy, FabricDDPStrategy):
    """`Fabric(strategy=OffbeatFabricStrategy("dreamddp:period=8"))`.

    What is saved is the mean of all replicas.
    """
