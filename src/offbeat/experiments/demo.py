"""Script of `offbeat demo`: a small GPT on the bytes of Python's standard library.

    offbeat demo                              compares strategies on four emulated hosts
    torchrun --nproc-per-node 2 -m offbeat.experiments.demo
It is ordinary PyTorch but for the marked line.
"""

import argparse
import os
import sysconfig
from pathlib import Path

import torch
from torch import Tensor, nn

import offbeat

WIDTH, HEADS, LAYERS, CONTEXT, BATCH = 128, 4, 3, 64, 4
CORPUS_BYTES = 2_000_000
RATE, WARMUP = 5e-4, 5  # learning rate, reached after these iterations


class GPT(nn.Module):
    """A causal transformer over bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(256, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(
                WIDTH, HEADS, 4 * WIDTH, 0.0, "gelu", batch_first=True, norm_first=True
            )
            for _ in range(LAYERS)
        )
        self.head = nn.Linear(WIDTH, 256)
        mask = nn.Transformer.generate_square_subsequent_mask(CONTEXT)
        self.register_buffer("mask", mask, persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits of the next bytes [batch, time, 256]."""
        x = self.token(tokens) + self.position.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x, src_mask=self.mask, is_causal=True)
        return self.head(x)


def corpus() -> Tensor:
    """Return the first bytes of the standard library, in order of the files' names."""
    folder, data = Path(sysconfig.get_path("stdlib")), bytearray()
    for file in sorted(folder.glob("*.py")):
        data += file.read_bytes()
    return torch.frombuffer(data[:CORPUS_BYTES], dtype=torch.uint8)


def main() -> None:
    """Train for `--iterations` iterations on this rank's part of the corpus."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--iterations", type=int, default=24)
    iterations = parser.parse_args().iterations
    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    seed = int(os.environ.get("OFFBEAT_SEED", 0))
    torch.manual_seed(seed)
    data = corpus().chunk(world_size)[rank]
    rng = torch.Generator().manual_seed(seed * world_size + rank)

    model = GPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    model, optimizer = offbeat.prepare(model, optimizer)  # <- the one changed line

    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1 / WARMUP, total_iters=WARMUP)
    for iteration in range(iterations):
        starts = torch.randint(len(data) - CONTEXT - 1, (BATCH,), generator=rng)
        windows = torch.stack([data[s : s + CONTEXT + 1] for s in starts.tolist()]).long()
        optimizer.zero_grad()
        logits = model(windows[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        scheduler.step()
        if rank == 0 and iteration % 10 == 0:
            print(f"iteration {iteration:4d}  loss {loss.item():.4f}", flush=True)
    model.consolidate()  # replicas may differ between averages; from here on they are equal


if __name__ == "__main__":
    main()
