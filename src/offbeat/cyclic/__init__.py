"""Cyclic data parallelism stage by stage: micro-batches interleaved on one or several devices."""

from offbeat.core.measuring.activations import Activations
from offbeat.cyclic.record import Record, recording, together
from offbeat.cyclic.splitting import split
from offbeat.cyclic.trainer import Interleaved

__all__ = ["Activations", "Interleaved", "Record", "recording", "split", "together"]
