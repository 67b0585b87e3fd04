"""Emulated accelerators: real parameters on a real network, compute that only takes time.

    python examples/emulated.py                                        alone
    torchrun --nproc-per-node 2 examples/emulated.py                   two processes, no lab
    offbeat run --hosts 4 --rate 100mbit examples/emulated.py          four hosts, slow network
    offbeat compare --strategies ddp,local-sgd,dreamddp examples/emulated.py --steps 60

The layers, their sizes and their times come from a profile: `emulated_20.json` is 20 layers of
0.4 MB, 100 ms forward and 200 ms backward; `offbeat profile` measures one of your own model.
What is measured here is the network and the schedule, on a machine without accelerators.
"""

import argparse
import os
import time
from pathlib import Path

import torch
from emulated_model import EmulatedModel

import offbeat

RANK, WORLD_SIZE = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


def main() -> None:
    parser = argparse.ArgumentParser()
    default = Path(__file__).with_name("emulated_20.json")
    parser.add_argument("--profile", type=Path, default=default, help="layers, sizes and times")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--straggler", type=float, default=1.0, help="last rank's slowdown")
    parser.add_argument("--seed", type=int, default=int(os.environ.get("OFFBEAT_SEED", 0)))
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    layers = offbeat.Profile.load(args.profile).buckets
    slowdown = args.straggler if RANK == WORLD_SIZE - 1 else 1.0
    rng = torch.Generator().manual_seed(args.seed * WORLD_SIZE + RANK)

    model = EmulatedModel(layers, slowdown=slowdown)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)
    model, optimizer = offbeat.prepare(model, optimizer)  # <- the one changed line

    start_s = time.perf_counter()
    for step in range(args.steps):
        loss = model(torch.randn(16, generator=rng))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if RANK == 0 and (step % 10 == 9 or step == args.steps - 1):
            now_s = time.perf_counter() - start_s
            print(f"step {step + 1:4d}  loss {loss.item():.4f}  {now_s:.2f} s", flush=True)

    model.consolidate()  # replicas may differ between averages; from here on they are equal


if __name__ == "__main__":
    main()
