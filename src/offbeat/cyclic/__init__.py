"""Cyclic data parallelism in one process: micro-batches interleaved stage by stage."""

from offbeat.cyclic.activations import Activations
from offbeat.cyclic.interleaved import Interleaved
from offbeat.cyclic.splitting import split

__all__ = ["Activations", "Interleaved", "split"]
