"""Cyclic data parallelism stage by stage: micro-batches interleaved on one or several devices."""

from offbeat.cyclic.interleaved import Interleaved
from offbeat.cyclic.record import Record, recording, together
from offbeat.cyclic.splitting import split
from offbeat.measuring.activations import Activations

__all__ = ["Activations", "Interleaved", "Record", "recording", "split", "together"]
