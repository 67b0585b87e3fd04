"""Servers under torchrun: the last ranks of an ordinary job."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from harness.commands import ForkedPython

COMMON = """
import torch

def build():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Tanh(), torch.nn.Linear(5, 2))
    model.double()
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

def loss_of(model, rank, t):
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(10 * t + rank)).double()
    return model(x).square().mean()
"""

SCRIPT = f"""
import os
from pathlib import Path
import offbeat
{COMMON}
rank, servers = int(os.environ["RANK"]), int(os.environ["OFFBEAT_SERVERS"])
model, optimizer = offbeat.prepare(*build(), offbeat.SSP(s=0), timeout_s=30)
assert rank < int(os.environ["WORLD_SIZE"]) - servers, "a server has gone on to train"
for t in range(5):
    optimizer.zero_grad()
    loss_of(model, rank, t).backward()
    optimizer.step()
torch.save(model.state_dict(), Path(__file__).with_name(f"weights{{rank}}.pt"))
"""


def expected() -> dict[str, torch.Tensor]:
    """In plain torch."""
    names: dict[str, Any] = {}
    exec(COMMON, names)
    model, optimizer = names["build"]()
    for t in range(5):
        optimizer.zero_grad()
        names["loss_of"](model, 0, t).backward()
        optimizer.step()
    return model.state_dict()


def test_a_worker_and_a_server(tmp_path: Path) -> None:
    """The job ends well by itself, the server included. (Several workers: test_session.py.)"""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    launcher = ForkedPython(
        [*torchrun, "--nproc-per-node", "2", str(script)],
        env={**os.environ, "OFFBEAT_SERVERS": "1", "OMP_NUM_THREADS": "1"},
        stderr=subprocess.PIPE,
        workers=True,
    )
    _, errors = launcher.communicate(timeout=100)
    assert launcher.returncode == 0, errors
    assert sorted(path.name for path in tmp_path.glob("*.pt")) == ["weights0.pt"]
    found = torch.load(tmp_path / "weights0.pt")
    for name, tensor in expected().items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-12, atol=1e-12)
