"""A script whose model has the buckets h.0, h.1 ... of a profile that a test has written."""

from __future__ import annotations


def layered_script(buckets: int, size_bytes: int) -> str:
    """Return a script that trains a model with one parameter per bucket, of `size_bytes` bytes."""
    return f"""
import torch, offbeat

class Layered(torch.nn.Module):
    def __init__(self):
        super().__init__()
        whole = [torch.ones({size_bytes // 4}) for _ in range({buckets})]
        self.h = torch.nn.ParameterList(map(torch.nn.Parameter, whole))

    def forward(self):
        return sum((p * p).mean() for p in self.h)

model = Layered()
optimizer = torch.optim.SGD(model.parameters(), 0.01)
model, optimizer = offbeat.prepare(model, optimizer)
for _ in range(12):
    optimizer.zero_grad()
    model().backward()
    optimizer.step()
"""
