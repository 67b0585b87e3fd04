"""A small convolutional network on scikit-learn's handwritten digits (1,797 images, 8x8).

    python examples/digits.py                                          alone
    torchrun --nproc-per-node 2 examples/digits.py                     two processes, no lab
    offbeat run --hosts 4 --rate 10mbit examples/digits.py             four hosts, slow network

Ordinary PyTorch but for the line marked below. Each rank trains on its own part of the images;
all test the same network on the same images it has not seen.
"""

import argparse
import os

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

import offbeat

RANK, WORLD_SIZE = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
TEST_IMAGES = 360


def network() -> nn.Module:
    """Two convolutions with batch normalization, 8x8 to 4x4 to 2x2, and a classifier."""
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1, bias=False),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1, bias=False),
        nn.BatchNorm2d(64),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(4 * 64, 128),
        nn.ReLU(),
        nn.Linear(128, 10),
    )


def digits() -> tuple[Tensor, Tensor]:
    """Images (n, 1, 8, 8) from 0 to 1 and labels, in an order that is the same everywhere."""
    pixels, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    images = torch.tensor(pixels, dtype=torch.float32).view(-1, 1, 8, 8) / 16
    return images[order], torch.tensor(labels)[order]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--batch", type=int, default=32, help="images per rank and step")
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--seed", type=int, default=int(os.environ.get("OFFBEAT_SEED", 0)))
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    images, labels = digits()
    test_images, test_labels = images[:TEST_IMAGES], labels[:TEST_IMAGES]
    share = (len(images) - TEST_IMAGES) // WORLD_SIZE  # equal, so that all ranks step as often
    mine = slice(TEST_IMAGES + RANK * share, TEST_IMAGES + (RANK + 1) * share)
    images, labels = images[mine], labels[mine]
    rng = torch.Generator().manual_seed(args.seed * WORLD_SIZE + RANK)

    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9, weight_decay=1e-4)
    model, optimizer = offbeat.prepare(model, optimizer)  # <- the one changed line

    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, max(1, args.epochs // 2), gamma=0.2)
    for epoch in range(args.epochs):
        model.train()
        losses = []
        for chosen in torch.randperm(share, generator=rng).split(args.batch):
            loss = nn.functional.cross_entropy(model(images[chosen]), labels[chosen])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        scheduler.step()
        if RANK == 0:
            print(f"epoch {epoch:3d}  loss {sum(losses) / len(losses):.4f}", flush=True)

    model.consolidate()  # replicas may differ between averages; from here on they are equal
    model.eval()
    with torch.no_grad():
        hits = model(test_images).argmax(dim=1) == test_labels
    if RANK == 0:
        print(f"test accuracy {hits.float().mean().item():.4f}", flush=True)


if __name__ == "__main__":
    main()
