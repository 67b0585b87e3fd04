"""A byte-level GPT on the source of Python's standard library.

    python examples/gpt.py                                             alone
    torchrun --nproc-per-node 2 examples/gpt.py                        two processes, no lab
    offbeat run --hosts 4 --rate 100mbit examples/gpt.py               four hosts, slow network
    offbeat compare --strategies ddp,dreamddp examples/gpt.py --steps 200
Ordinary PyTorch but for the line marked below. Each rank trains on its own part of the files.
"""

import argparse
import math
import os
import random
import sysconfig
from contextlib import nullcontext
from pathlib import Path

import torch
from torch import Tensor, nn

import offbeat

RANK, WORLD_SIZE = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
CORPUS_BYTES = 4_000_000
HELD_OUT_BATCHES = 16


class Block(nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        batch, time, width = x.shape
        heads = self.qkv(self.norm1(x)).view(batch, time, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, time, width))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self, layers: int, width: int, heads: int, context: int):
        super().__init__()
        self.token, self.position = nn.Embedding(256, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256, bias=False)
        for matrix in (p for p in self.parameters() if p.dim() >= 2):
            nn.init.normal_(matrix, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.token(tokens) + self.position(places)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def corpus() -> tuple[Tensor, Tensor]:
    """Bytes to train on and held-out bytes, whole files, the same on every rank."""
    root = Path(sysconfig.get_path("stdlib"))
    skipped = {"site-packages", "test", "tests", "idlelib"}
    files = sorted(f for f in root.rglob("*.py") if not skipped & set(f.relative_to(root).parts))
    random.Random(0).shuffle(files)
    texts, size = [], 0
    for file in files:
        if size < CORPUS_BYTES:
            texts.append(file.read_bytes())
            size += len(texts[-1])
    return tokens_of(texts[len(texts) // 20 :]), tokens_of(texts[: len(texts) // 20])


def tokens_of(texts: list[bytes]) -> Tensor:
    return torch.frombuffer(bytearray(b"".join(texts)), dtype=torch.uint8)


def batch_of(data: Tensor, size: int, context: int, rng: torch.Generator) -> tuple[Tensor, Tensor]:
    """Random windows: (tokens, the tokens that follow them)."""
    starts = torch.randint(len(data) - context - 1, (size,), generator=rng)
    windows = torch.stack([data[s : s + context + 1] for s in starts.tolist()]).long()
    return windows[:, :-1], windows[:, 1:]


def loss_of(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--batch", type=int, default=8, help="sequences per rank and step")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--accumulate", type=int, default=1, help="steps summed per update")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--decay", type=float, default=0.1, help="share of lr in the last step")
    parser.add_argument("--seed", type=int, default=int(os.environ.get("OFFBEAT_SEED", 0)))
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    train, held_out = corpus()
    train = train.chunk(WORLD_SIZE)[RANK]
    rng = torch.Generator().manual_seed(args.seed * WORLD_SIZE + RANK)

    model = GPT(args.layers, args.width, args.heads, args.context)
    groups = [
        {"params": [p for p in model.parameters() if p.dim() >= 2], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, 0.95))
    model, optimizer = offbeat.prepare(model, optimizer)  # <- the one changed line

    def schedule(step: int) -> float:
        """Warm-up, then a cosine."""
        warmup = max(1, args.steps // 10)
        progress = min(1.0, max(0, step - warmup) / max(1, args.steps - warmup))
        fall = (1 - args.decay) / 2 * (1 - math.cos(math.pi * progress))
        return min(1.0, (step + 1) / warmup) * (1 - fall)

    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, schedule)
    for step in range(args.steps):
        updates = (step + 1) % args.accumulate == 0
        with nullcontext() if updates else model.no_sync():
            loss = loss_of(model, *batch_of(train, args.batch, args.context, rng))
            loss.backward()
        if updates:
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
        if RANK == 0 and (step % 10 == 0 or step == args.steps - 1):
            print(f"step {step:4d}  loss {loss.item():.4f}", flush=True)

    model.consolidate()  # replicas may differ between averages; from here on they are equal
    model.eval()
    rng = torch.Generator().manual_seed(0)
    with torch.no_grad():
        batches = [batch_of(held_out, 8, args.context, rng) for _ in range(HELD_OUT_BATCHES)]
        held_out_loss = sum(loss_of(model, *b).item() for b in batches) / HELD_OUT_BATCHES
    if RANK == 0:
        print(f"held-out loss {held_out_loss:.4f}", flush=True)


if __name__ == "__main__":
    main()
