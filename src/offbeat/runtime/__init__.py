"""The runtime: plans on a real model, over torch.distributed."""

from offbeat.runtime.prepare import prepare
from offbeat.runtime.wrap import Model, Optimizer

__all__ = ["Model", "Optimizer", "prepare"]
