"""A small convolutional network on scikit-learn's handwritten digits (1,797 images, 8x8).

    python examples/digits.py                                          alone
    torchrun --nproc-per-node 2 examples/digits.py                     two processes, no lab
    offbeat run --hosts 4 --rate 100mbit examples/digits.py            four hosts, slow network
    offbeat compare --strategies ddp,dreamddp examples/digits.py --steps 200

Ordinary PyTorch but for the line marked below. Each rank trains on its own part of the images;
all test the same network on the same images it has not seen.
"""

import argparse
import os
from contextlib import nullcontext

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

import offbeat

RANK, WORLD_SIZE = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
HELD_OUT_IMAGES = 360


def network(width: int) -> nn.Module:
    """Two convolutions with batch normalization, 8x8 to 4x4, and a classifier of two layers."""
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1, bias=False),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1, bias=False),
        nn.BatchNorm2d(64),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(4 * 4 * 64, width),
        nn.ReLU(),
        nn.Linear(width, 10),
    )


def digits() -> tuple[Tensor, Tensor]:
    """Images (n, 1, 8, 8) from 0 to 1 and labels, in an order that is the same on every rank."""
    pixels, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    images = torch.tensor(pixels, dtype=torch.float32).view(-1, 1, 8, 8) / 16
    return images[order], torch.tensor(labels)[order]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--width", type=int, default=1024, help="of the hidden layer")
    parser.add_argument("--batch", type=int, default=32, help="images per rank and step")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--accumulate", type=int, default=1, help="steps summed per update")
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--seed", type=int, default=int(os.environ.get("OFFBEAT_SEED", 0)))
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    images, labels = digits()
    held_out_images, held_out_labels = images[:HELD_OUT_IMAGES], labels[:HELD_OUT_IMAGES]
    images = images[HELD_OUT_IMAGES:].chunk(WORLD_SIZE)[RANK]
    labels = labels[HELD_OUT_IMAGES:].chunk(WORLD_SIZE)[RANK]
    rng = torch.Generator().manual_seed(args.seed * WORLD_SIZE + RANK)

    model = network(args.width)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9, weight_decay=1e-4)
    model, optimizer = offbeat.prepare(model, optimizer)  # <- the one changed line

    for step in range(args.steps):
        chosen = torch.randint(len(images), (args.batch,), generator=rng)
        updates = (step + 1) % args.accumulate == 0
        with nullcontext() if updates else model.no_sync():
            loss = nn.functional.cross_entropy(model(images[chosen]), labels[chosen])
            loss.backward()
        if updates:
            optimizer.step()
            optimizer.zero_grad()
        if RANK == 0 and (step % 10 == 0 or step == args.steps - 1):
            print(f"step {step:4d}  loss {loss.item():.4f}", flush=True)

    model.consolidate()  # replicas may differ between averages; from here on they are equal
    model.eval()
    with torch.no_grad():
        scores = model(held_out_images)
    if RANK == 0:
        hits = scores.argmax(dim=1) == held_out_labels
        loss = nn.functional.cross_entropy(scores, held_out_labels)
        print(f"held-out loss {loss.item():.4f}", flush=True)
        print(f"held-out accuracy {hits.float().mean().item():.4f}", flush=True)


if __name__ == "__main__":
    main()
