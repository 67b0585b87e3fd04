"""Two more real models for `paced.py`: a small ResNet on digits, a small Llama on source code.

offbeat compare benchmarks/paced_worker.py --model llama --steps 30
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import torch
from torch import Tensor, nn

import offbeat

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
import digits
import gpt

RANK = int(os.environ.get("RANK", 0))


class Residual(nn.Module):
    """Two 3x3 convolutions around which the input goes; `stride` halves the picture."""

    def __init__(self, before: int, after: int, stride: int):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(before, after, 3, stride, 1, bias=False),
            nn.BatchNorm2d(after),
            nn.ReLU(),
            nn.Conv2d(after, after, 3, 1, 1, bias=False),
            nn.BatchNorm2d(after),
        )
        same = before == after and stride == 1
        self.way = nn.Identity() if same else nn.Conv2d(before, after, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.body(x) + self.way(x))


def resnet() -> nn.Module:
    """Six residual blocks, .7 million parameters."""
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, 1, 1, bias=False),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        Residual(32, 32, 1),
        Residual(32, 32, 1),
        Residual(32, 64, 2),
        Residual(64, 64, 1),
        Residual(64, 128, 2),
        Residual(128, 128, 1),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(128, 10),
    )


class Layer(nn.Module):
    """Attention with rotated positions and shared keys, and a gated network (SwiGLU)."""

    def __init__(self, width: int, heads: int, shared: int):
        super().__init__()
        self.heads, self.shared, size = heads, shared, width // heads
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.q, self.out = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.kv = nn.Linear(width, 2 * shared * size, bias=False)
        hidden = 8 * width // 3
        self.gate, self.up = (
            nn.Linear(width, hidden, bias=False),
            nn.Linear(width, hidden, bias=False),
        )
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, time, width = x.shape
        h = self.norm1(x)
        q = self.q(h).view(batch, time, self.heads, -1).transpose(1, 2)
        kv = self.kv(h).view(batch, time, 2, self.shared, -1).permute(2, 0, 3, 1, 4)
        k, v = kv.repeat_interleave(self.heads // self.shared, dim=2)
        q, k = rotated(q), rotated(k)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, time, width))
        h = self.norm2(x)
        return x + self.down(nn.functional.silu(self.gate(h)) * self.up(h))


def rotated(x: Tensor) -> Tensor:
    """Rotary positions: pairs of numbers turn by angles that grow with the place."""
    time, size = x.shape[-2:]
    rates = 10_000 ** (-torch.arange(0, size, 2) / size)
    angles = torch.arange(time)[:, None] * rates
    even, odd = x[..., ::2], x[..., 1::2]
    cos, sin = angles.cos(), angles.sin()
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2)


class Llama(nn.Module):
    """Four layers of width 128, one million parameters."""

    def __init__(self, layers: int = 4, width: int = 128):
        super().__init__()
        self.token = nn.Embedding(256, width)
        self.layers = nn.ModuleList(Layer(width, 4, 2) for _ in range(layers))
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, 256, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", choices=("resnet", "llama"), required=True)
    parser.add_argument("--steps", type=int, default=30)
    args = parser.parse_args()
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(RANK)
    if args.model == "resnet":
        model: nn.Module = resnet()
        images, labels = digits.digits()
    else:
        model = Llama()
        text, _ = gpt.corpus()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer = offbeat.prepare(model, optimizer)
    for _ in range(args.steps):
        if args.model == "resnet":
            chosen = torch.randint(len(labels), (32,), generator=generator)
            x, y = images[chosen], labels[chosen]
        else:
            x, y = gpt.batch_of(text, 8, 64, generator)
            y = y.reshape(-1)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x).reshape(len(y), -1), y)
        loss.backward()
        optimizer.step()
    model.consolidate()


if __name__ == "__main__":
    main()
