"""What the ranks of the tests on a GPU do. They run on a CPU, too, with `device="cpu"`."""

from __future__ import annotations

import os
import time
import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import offbeat
from cases.failing import happen
from cases.workers import bits, rank
from offbeat.core.transport.cluster import connect
from offbeat.core.transport.collectives import collectives, shards
from offbeat.core.transport.device import device_of
from offbeat.core.transport.interfaces import LinkSpec
from offbeat.plan import Moment, transfer

ITERATIONS = 6
TIMEOUT_S = 30.0
AMONG_ALL = ("all_reduce", "reduce_scatter", "all_gather", "broadcast")  # verbs
SIZES = (1, 1000, 2_000_003, 10, 500_000)
ALL_SAME = [True] * len(AMONG_ALL) * len(SIZES)


class Blocks(nn.Module):
    """Blocks that a script compiles one by one, and a head of 10 classes: its bias has a size that
    pushes what follows out of line."""

    def __init__(self, compiled: bool = False) -> None:
        super().__init__()
        blocks = [nn.Sequential(nn.Linear(33, 33), nn.Tanh()) for _ in range(3)]
        self.blocks = nn.ModuleList(torch.compile(b) if compiled else b for b in blocks)
        self.head = nn.Linear(33, 10)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def place(device: str) -> torch.device:
    """The device of this rank: a GPU of its own if there are several."""
    if device == "cpu":
        return torch.device("cpu")
    return torch.device("cuda", rank() % torch.cuda.device_count())


def use_nccl() -> None:
    """Let two ranks of NCCL share a GPU, which it refuses within a host."""
    os.environ["NCCL_HOSTID"] = os.environ["RANK"]
    os.environ["NCCL_SOCKET_IFNAME"] = "lo"


def batch_of(t: int, where: torch.device) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(10 * t + rank())
    x = torch.randn(16, 33, generator=random)
    return x.to(where), torch.randint(0, 10, (16,), generator=random).to(where)


def script(
    strategy: str, links: list[str], device: str, *, compiled: bool = False, **options: Any
) -> tuple[Any, Any, torch.device]:
    if any(link.partition("=")[2].startswith("nccl") or link[:4] == "nccl" for link in links):
        use_nccl()
    where = place(device)
    torch.manual_seed(0)
    model = Blocks(compiled).to(where)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    options = {"observe": 2, "min_bucket_bytes": 1, "timeout_s": TIMEOUT_S, **options}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model, optimizer = offbeat.prepare(model, optimizer, strategy, links=links, **options)
    return model, optimizer, where


def iterate(model: Any, optimizer: Any, t: int, where: torch.device) -> Tensor:
    optimizer.zero_grad()
    x, y = batch_of(t, where)
    loss = nn.functional.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    return loss.detach()


def train(
    strategies: list[str], links: list[str], device: str = "cuda", **options: Any
) -> list[dict[str, Any]]:
    """Per strategy the weights after a few iterations, averaged over ranks, and their bits."""
    found = []
    for strategy in strategies:
        model, optimizer, where = script(strategy, links, device, **options)
        losses = [iterate(model, optimizer, t, where) for t in range(ITERATIONS)]
        model.consolidate()
        weights = {name: tensor.cpu() for name, tensor in model.state_dict().items()}
        model.close()
        holder = nn.ParameterDict({n.replace(".", "-"): p for n, p in weights.items()})
        found.append(
            {"weights": weights, "bits": bits(holder), "losses": torch.stack(losses).tolist()}
        )
    return found


def train_beside(device: str = "cuda") -> list[dict[str, Any]]:
    """With links of NCCL and of gloo whose messages are in flight at the same time, on one queue of
    the device, so that the order of launches matters most."""
    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    links = ["nccl:lo", "second=lo"] if device == "cuda" else ["lo", "second=lo"]
    return train(["deft", "selsync:delta=0.0", "asc-wfbp"], links, device)


def fail(
    links: list[str], how: str, who: int, device: str = "cuda", **options: Any
) -> tuple[str, float]:
    """In the fourth iteration something happens to one rank. Of the others the error, and the
    seconds until then."""
    model, optimizer, where = script("wfbp", links, device, **options)
    begun_s = time.monotonic()
    for t in range(400):
        if t == 3:
            begun_s = time.monotonic()
            if rank() == who:
                happen(how)
        try:
            iterate(model, optimizer, t, where)
        except RuntimeError as error:
            return str(error), time.monotonic() - begun_s
    return "trained on", time.monotonic() - begun_s


def resume(folder: str, device: str = "cuda") -> list[list[float]]:
    """Losses after a checkpoint of a codec with memory, of the saved run and of the resumed one."""
    losses = []
    for again in (False, True):
        model, optimizer, where = script("wfbp:wire=powersgd:1", ["lo"], device)
        if again:
            assert offbeat.load(folder, model, optimizer).exact
        else:
            for t in range(4):
                iterate(model, optimizer, t, where)
            offbeat.save(folder, model, optimizer).wait()
        losses.append([float(iterate(model, optimizer, t, where)) for t in range(4, 8)])
        model.close()
    return losses


def serve(device: str = "cuda") -> float | None:
    """The last loss of a worker that accumulates two iterations; None on the server."""
    os.environ["OFFBEAT_SERVERS"] = "1"
    try:
        model, optimizer, where = script("ssp:s=0:accumulate=2", ["lo"], device)
    except SystemExit:
        return None
    for t in range(ITERATIONS):
        loss = iterate(model, optimizer, t, where)
    model.close()
    return float(loss)


def send_over_gloo(where: str = "cuda:0") -> list[bool]:
    """Whether a link through the host's memory gives, bit by bit, what the host's tensors get;
    all messages are in the air at once, growing and shrinking."""
    dist.init_process_group("gloo")
    rank, device = dist.get_rank(), torch.device(where)
    cluster = connect([LinkSpec("gloo", None, "gloo")], device, device_of(device), 30.0)
    link, group = cluster.links["gloo"], cluster.groups["gloo"]
    tensors = [torch.randn(size, generator=torch.Generator().manual_seed(rank)) for size in SIZES]
    sent = [
        (link.enqueue(_rule(verb), 0), t.to(device, copy=True), verb, t.clone())
        for verb in AMONG_ALL
        for t in tensors
    ]
    for message, tensor, _, _ in sent:
        link.release(message, (tensor,))
    for message, _, verb, _ in sent:
        assert message.wait(60.0), verb
        assert message.error is None, f"{verb}: {message.error!r}"
    cluster.device.finish()
    host = collectives(group, "gloo", torch.device("cpu"), 30.0).by_verb
    same = []
    for _, tensor, verb, expected in sent:
        host[verb](expected)
        seen = tensor.cpu()
        if verb == "reduce_scatter":
            expected, seen = (shards(t, dist.get_world_size())[rank] for t in (expected, seen))
        same.append(torch.equal(seen, expected))
    assert cluster.close()
    return same


def _rule(verb: str) -> Any:
    when = {"after": Moment("step"), "before": Moment("end"), "phases": [0]}
    return transfer("grad", range(1), link="gloo", verb=verb, **when)
