"""How near workers of gossip come to each other over each wire: exchanges one after the other in
one process, with the numbers of training and no network.

    python benchmarks/gossip_wires.py --workers 8
"""

from __future__ import annotations

import argparse
import random

import torch

from offbeat.gossip.chunks import Wire
from offbeat.gossip.exchange import Exchanges
from offbeat.gossip.graphs import constants, edge_rates, topology
from offbeat.gossip.state import AVERAGING, Mixing, State
from offbeat.strategies.compressible import codec_of

SIZE, SPREAD = 2048, 0.1
WIRES = ("none", "bf16", "fp16", "int8", "int4", "sign", "topk:0.1", "topk:0.01")


def course(
    wire: str, workers: int, exchanges: int, noise: float, momentum: bool
) -> tuple[list[float], float, float]:
    """Root of the mean squared distance to the mean after none, each quarter of the exchanges; how
    far the mean is off; the share of the bytes of float32."""
    draws, rng, t, sent = torch.Generator().manual_seed(0), random.Random(0), 0.0, 0
    near = torch.randn(SIZE, generator=draws)
    x = [near + SPREAD * torch.randn(SIZE, generator=draws) for _ in range(workers)]
    expected = torch.stack(x).double().mean(0)
    rates = edge_rates(topology("ring", workers), 1.0)
    known = constants(rates, workers)
    mixing = Mixing(known.eta, known.alpha, known.alpha_tilde) if momentum else AVERAGING
    codec = None if wire in ("none", "bf16") else codec_of(wire)
    states, ends, found = [], [], []
    for flat in x:
        wired = Wire([flat], "bf16" if wire == "bf16" else "none", codec=codec)
        states.append(State([flat], wired, mixing, momentum=momentum))
        ends.append(Exchanges(states[-1], wired))
    for count in range(exchanges + 1):
        if count % (exchanges // 4) == 0:
            for state in states:
                state.mix_until(t)
            now = torch.stack(x).double()
            found.append(float((now - now.mean(0)).square().sum(1).mean().sqrt()))
        t += rng.expovariate(workers / 2)
        i = rng.randrange(workers)
        j = (i + 1) % workers
        for n in (i, j) if noise else ():
            change = noise * torch.randn(SIZE, generator=draws)
            expected += change.double() / workers
            states[n].step(t, lambda n=n, change=change: x[n].add_(change))
        one, other = ends[i], ends[j]
        coded, number = one.anchor_number(j) > 0, one.next_number(j)
        begun = [
            one.begin(j, number, t, states[i].course.mixing_at(t), coded=coded),
            other.begin(i, number, t, states[j].course.mixing_at(t), coded=coded),
        ]
        sent += one.bytes
        for chunk in range(len(one.wire.chunks)):
            one.buffer(chunk)[:], other.buffer(chunk)[:] = (
                other.data(chunk),
                one.data(chunk),
            )
            one.apply_chunk()
            other.apply_chunk()
        for exchange, end in zip(begun, (one, other), strict=True):
            exchange.confirmed = True
            end.end_if_complete()
    for state in states:
        state.mix_until(t)
    off = (torch.stack(x).double().mean(0) - expected).abs().max()
    return found, float(off), sent / (exchanges + 1) / (4 * SIZE)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--exchanges", type=int, default=400)
    parser.add_argument("--noise", type=float, default=0.003, help="of a gradient")
    args = parser.parse_args()
    for momentum in (True, False):
        for noise in (0.0, args.noise):
            print(f"{'A2CiD2' if momentum else 'AD-PSGD'}, gradients of {noise:g}")
            for wire in WIRES:
                found, off, share = course(wire, args.workers, args.exchanges, noise, momentum)
                distances = " | ".join(f"{one:.2g}" for one in found)
                print(f"| `{wire}` | {share:.3f} | {distances} | {off:.1g} |", flush=True)


if __name__ == "__main__":
    main()
