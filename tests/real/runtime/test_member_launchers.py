"""Nodes that are members, each with a torchrun of its own, which starts failed ranks again."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import torch
from cases.member_jobs import SECRET, epochs_of, membership_service
from cases.models import Case
from cases.node_jobs import profile_in
from harness.commands import ForkedPython

LIMIT_S = 100.0
AFTER = 6  # iterations of the restarted node, after which all members request to leave
SCRIPT = f"""
import os, signal, sys, time
from pathlib import Path
import torch
import offbeat
from cases.models import Case, build_model, build_optimizer, batch, loss_of

folder, address, node = Path(sys.argv[1]), *sys.argv[2:]
rank, attempt = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
case = Case()
model = build_model(case)
model, optimizer = offbeat.prepare(
    model,
    build_optimizer(case, model),
    offbeat.LocalSGD(period=3),
    profile=offbeat.Profile.load(folder / "profile.json"),
    nodes="auto",
    members=offbeat.Members(address, first=2),
    timeout_s=30,
)
first, requested, history = offbeat.iteration(model), False, {{}}
while not model.has_left:
    t = offbeat.iteration(model)
    if (node, rank, attempt, t) == ("b", 1, 0, 4):
        os.kill(os.getpid(), signal.SIGKILL)
    if attempt and t == first + {AFTER}:
        (folder / "stop").touch()
    if not requested and (folder / "stop").exists():
        requested = True
        model.request_leave()
    history[t] = {{name: p.detach().clone() for name, p in model.named_parameters()}}
    optimizer.zero_grad()
    loss_of(model, *batch(case, 2 * (node == "b") + rank, t)).backward()
    optimizer.step()
    time.sleep(0.01)
torch.save([first, history], folder / f"{{node}}{{rank}}-{{attempt}}")
"""


def test_torchrun_restarts_a_killed_node_which_joins_again(tmp_path: Path) -> None:
    """The ranks that torchrun starts again have the weights of the node that has continued, and
    the first attempt of the killed node has ended. All nodes leave when the script requests it."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    profile_in(Case(), [[0, 1], [2, 3]]).save(tmp_path / "profile.json")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    with membership_service() as address, contextlib.ExitStack() as stack:
        nodes = []
        for node in ("a", "b"):
            own = {k: v for k, v in os.environ.items() if not k.startswith("OFFBEAT_")}
            process = ForkedPython(
                [*torchrun, "2", "--max-restarts", "1", str(script), str(tmp_path), address, node],
                env=own | {"OFFBEAT_SECRET": SECRET, "OMP_NUM_THREADS": "1"},
                stderr=subprocess.PIPE,
                start_new_session=True,
                workers=True,
            )
            stack.callback(end_session, process.pid)
            nodes.append(process)
        texts = [process.communicate(timeout=LIMIT_S)[1] for process in nodes]
        epochs = epochs_of(address)
    assert [process.returncode for process in nodes] == [0, 0], "\n".join(texts)
    assert [len(epoch.members) for epoch in epochs[:3]] == [2, 1, 2]
    first, joined = torch.load(tmp_path / "b0-1")
    assert first == epochs[2].first_iteration >= epochs[1].first_iteration > 0
    ended = {path.name for path in tmp_path.glob("*-*")}
    assert ended == {"a0-0", "a1-0", "b0-1", "b1-1"}
    for name in ended:
        history = torch.load(tmp_path / name)[1]
        assert all(history[first][key].equal(value) for key, value in joined[first].items()), name


def end_session(number: int) -> None:
    """Kill the processes of a session whose first process has this number."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(number, signal.SIGKILL)
