"""Cyclic data parallelism by stages: micro-batches interleaved on one or several devices."""

from offbeat.cyclic.kept_activations import Activations
from offbeat.cyclic.record import Record, merge_records, recording
from offbeat.cyclic.splitting import split
from offbeat.cyclic.trainer import Interleaved

__all__ = ["Activations", "Interleaved", "Record", "merge_records", "recording", "split"]
