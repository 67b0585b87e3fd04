"""What a vote of SelSync costs: the norm of the gradients, beside forward and backward.

    python benchmarks/selsync.py

A transformer of about 10 M parameters on one thread; medians and quartiles of microseconds. Then
what an iteration waits for votes and averages by the share of yes, computed for a cluster: with
all-reduces, and with the same votes and averages through one parameter server.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from statistics import median, quantiles

import torch
from torch import nn

from offbeat import Profile, SelSync
from offbeat.core.buckets.flat import Flat
from offbeat.core.buckets.layout import BucketSpec
from offbeat.core.runtime.actions import StorageContext
from offbeat.profile import Bucket, Link
from offbeat.sessions.separate_workers import server_of
from offbeat.sim import predict


class Gpt(nn.Module):
    """Byte-level, 12 layers of width 256."""

    def __init__(self, width: int = 256, layers: int = 12):
        super().__init__()
        self.embed = nn.Embedding(256, width)
        layer = [
            nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True)
            for _ in range(layers)
        ]
        self.layers = nn.Sequential(*layer)
        self.head = nn.Linear(width, 256)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(self.embed(tokens)))


def flat_of(model: nn.Module) -> Flat:
    """One bucket per module with parameters of its own, joined to about twenty."""
    names = [name for name, _ in model.named_parameters()][::-1]
    size = -(-len(names) // 20)
    runs = [names[i : i + size] for i in range(0, len(names), size)]
    return Flat(model, [BucketSpec(run[0], tuple(run)) for run in runs])


def microseconds(act: Callable[[], object], repeat: int) -> tuple[float, float, float]:
    """Quartiles."""
    act()
    taken = []
    for _ in range(repeat):
        begin = time.perf_counter()
        act()
        taken.append(1e6 * (time.perf_counter() - begin))
    low, _, high = quantiles(taken, n=4)
    return low, median(taken), high


SHARES = (0.0, 0.05, 0.2, 0.5, 1.0)
ITERATIONS = 20


def server_s(profile: Profile, share: float) -> float:
    """Return what an iteration waits if votes and averages pass one server. A vote is a message
    there and back; after a yes all workers push and pull at the same time."""
    server = server_of(profile, 1)
    incast_s = len(server.caps) * server.size_bytes / server.rate
    return 2 * server.latency_s + share * 2 * (incast_s + server.latency_s)


def profile_of(flat: Flat, compute_s: float, hosts: int, bytes_per_s: float) -> Profile:
    """Return a profile with equal compute per bucket and a round trip of 1 ms."""
    each_s = compute_s / len(flat.buckets)
    buckets = tuple(
        Bucket(f"b{b}", each_s / 3, each_s * 2 / 3, _bytes(flat, b))
        for b in range(len(flat.buckets))
    )
    hops = 2 * (hosts - 1)
    return Profile(buckets, (Link("net", 0.5e-3 * hops, bytes_per_s * hosts / hops),), hosts)


def _bytes(flat: Flat, bucket: int) -> int:
    return sum(t.nbytes for t in flat.tensors("param", range(bucket, bucket + 1)))


def print_traffic(profile: Profile) -> None:
    """Print what an iteration waits with all-reduces and through a server, by the share of yes."""
    print(f"{profile.world_size} hosts, computed: ms that votes and averages take of an iteration")
    print(f"{'share of yes':>12} {'all-reduce':>12} {'server':>12}")
    for share in SHARES:
        votes = [i < share * ITERATIONS for i in range(ITERATIONS)]
        reduced_s = predict(SelSync(), profile, votes={"sync": votes}).exposed_s
        print(f"{share:12g} {1e3 * reduced_s:12.1f} {1e3 * server_s(profile, share):12.1f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--repeat", type=int, default=15)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--hosts", type=int, default=8)
    parser.add_argument("--mbit", type=float, default=1000, help="rate of a host")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = Gpt()
    flat = flat_of(model)
    context = StorageContext(0, flat, None, None, None)  # type: ignore[arg-type]
    tokens = torch.randint(256, (arguments.batch, 64))

    def compute() -> None:
        logits = model(tokens)
        nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten()).backward()

    everything = range(len(flat.buckets))
    count = sum(p.numel() for p in model.parameters())
    print(
        f"{count / 1e6:.1f} M parameters, {len(everything)} buckets, batch {arguments.batch} x 64"
    )
    whole = microseconds(compute, arguments.repeat)
    rows = {
        "forward and backward": whole,
        "norm of the model": microseconds(
            lambda: context.squared_norm("grad", everything), 4 * arguments.repeat
        ),
        "norm of every bucket": microseconds(
            lambda: [context.squared_norm("grad", range(b, b + 1)) for b in everything],
            4 * arguments.repeat,
        ),
    }
    for name, (low, middle, high) in rows.items():
        share = 100 * middle / whole[1]
        print(f"{name:22} {middle:10.0f} us ({low:.0f} to {high:.0f})  {share:6.2f} %")
    bytes_per_s = arguments.mbit * 1e6 / 8
    print_traffic(profile_of(flat, whole[1] / 1e6, arguments.hosts, bytes_per_s))


if __name__ == "__main__":
    main()
