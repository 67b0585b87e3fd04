"""Who leaves samples of its replica, by the parts of the model that ranks hold."""

from __future__ import annotations

from unittest.mock import Mock

import torch

from offbeat.core.transport.device import CPU
from offbeat.core.transport.topology import Topology
from offbeat.jobs.meter import open_meter
from offbeat.metrics import Metrics


def test_ranks_with_parts_of_the_model_leave_no_samples() -> None:
    for sharded in (False, True):
        nodes = Topology(((0, 1), (2, 3)), sharded)
        cluster = Mock(control=Mock(rank=0), topology=nodes, device=CPU())
        job = Mock(cluster=cluster, ranks=Mock(workers=range(4)), model=torch.nn.Linear(2, 1))
        session = Mock(traffic=dict[str, int], iteration=0)
        meter = open_meter(Metrics(print), session, job, [100] * 4)
        assert meter is not None
        meter.close()
        assert (meter._board is None) is sharded
