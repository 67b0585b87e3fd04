"""Nine small models for predictions, as one training script.

    offbeat compare --strategies ddp,dreamddp benchmarks/zoo.py --model vit --steps 32
    python benchmarks/zoo.py            prints parameters, modules and seconds of a step of each

Layers are those of the architectures; width and depth are small, so that a step takes some tens of
milliseconds on one core and messages .5 to 4 MB. Pictures, clicks and their labels are drawn from a
seed; text is the source of Python's standard library. `llama` is that of transformers, made from a
configuration without a download; the other models need torch alone.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor, nn

import offbeat

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
import gpt  # pyright: ignore[reportMissingImports]

RANK, RANKS = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
CLASSES, SIDE, PICTURES = 10, 16, 16  # pictures of SIDE x SIDE with one channel, per batch
CONTEXT, SEQUENCES, BYTES = 64, 8, 256
WORDS, SENTENCE = 4096, 24  # vocabulary and length of the LSTM
ROWS, TABLES, NUMBERS, CLICKS = 6000, 8, 13, 128  # of the recommendation model

Batch = tuple[Tensor, ...]


# ---- pictures -------------------------------------------------------------------------------


def convolution(before: int, after: int, side: int, stride: int = 1, groups: int = 1) -> nn.Module:
    """Return a convolution without bias and its batch normalization."""
    layer = nn.Conv2d(before, after, side, stride, side // 2, groups=groups, bias=False)
    return nn.Sequential(layer, nn.BatchNorm2d(after))


class Residual(nn.Module):
    """Input plus the output of a body; a `way` fits the input to another shape."""

    def __init__(self, body: nn.Module, way: nn.Module | None = None, *, last: bool = False):
        super().__init__()
        self.body, self.way, self.last = body, way or nn.Identity(), last

    def forward(self, x: Tensor) -> Tensor:
        x = self.way(x) + self.body(x)
        return torch.relu(x) if self.last else x


def classifier(width: int) -> list[nn.Module]:
    """Return the classifier: mean over places, and a linear layer."""
    return [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, CLASSES)]


def cnn() -> nn.Module:
    """Six convolutions with batch normalization, and a classifier of two layers."""
    layers: list[nn.Module] = []
    for before, after in ((1, 32), (32, 32), (32, 64), (64, 64), (64, 96), (96, 96)):
        layers += [convolution(before, after, 3), nn.ReLU()]
        if after == before:
            layers.append(nn.MaxPool2d(2))
    head = [nn.Flatten(), nn.Linear(4 * 96, 512), nn.ReLU(), nn.Linear(512, CLASSES)]
    return nn.Sequential(*layers, *head)


def resnet() -> nn.Module:
    """ResNet with six basic blocks."""

    def block(before: int, after: int, stride: int) -> nn.Module:
        body = [convolution(before, after, 3, stride), nn.ReLU(), convolution(after, after, 3)]
        way = None if stride == 1 and before == after else convolution(before, after, 1, stride)
        return Residual(nn.Sequential(*body), way, last=True)

    widths = ((32, 32, 1), (32, 32, 1), (32, 64, 2), (64, 64, 1), (64, 128, 2), (128, 128, 1))
    stem = [convolution(1, 32, 3), nn.ReLU()]
    return nn.Sequential(*stem, *(block(*width) for width in widths), *classifier(128))


def mobilenet() -> nn.Module:
    """MobileNetV2: inverted residuals with depthwise convolutions."""

    def block(before: int, after: int, stride: int, expansion: int = 6) -> nn.Module:
        wide = before * expansion
        body = nn.Sequential(
            convolution(before, wide, 1),
            nn.ReLU6(),
            convolution(wide, wide, 3, stride, groups=wide),
            nn.ReLU6(),
            convolution(wide, after, 1),
        )
        return Residual(body) if stride == 1 and before == after else body

    widths = ((16, 24, 1), (24, 24, 1), (24, 40, 2), (40, 40, 1), (40, 80, 2), (80, 80, 1))
    stem = [convolution(1, 16, 3), nn.ReLU6()]
    top = [convolution(80, 320, 1), nn.ReLU6()]
    return nn.Sequential(*stem, *(block(*width) for width in widths), *top, *classifier(320))


class ChannelsLast(nn.Module):
    """Module that acts on the channels of each place."""

    def __init__(self, *layers: nn.Module):
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


def convnext() -> nn.Module:
    """ConvNeXt: depthwise convolutions of 7 x 7, layer normalization and wide linear layers."""

    def block(width: int) -> nn.Module:
        depthwise = nn.Conv2d(width, width, 7, padding=3, groups=width)
        wide = nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        return Residual(nn.Sequential(depthwise, ChannelsLast(nn.LayerNorm(width), *wide)))

    layers: list[nn.Module] = [nn.Conv2d(1, 48, 2, 2), block(48), block(48)]
    for before, after in ((48, 96), (96, 160)):
        layers += [ChannelsLast(nn.LayerNorm(before)), nn.Conv2d(before, after, 2, 2)]
        layers += [block(after), block(after)]
    return nn.Sequential(*layers, *classifier(160))


class Vit(nn.Module):
    """Vision transformer: patches of 4 x 4, a class token, four encoder layers."""

    def __init__(self, width: int = 128, layers: int = 4):
        super().__init__()
        self.patches = nn.Conv2d(1, width, 4, 4)
        self.position = nn.Embedding((SIDE // 4) ** 2 + 1, width)
        self.token = nn.Embedding(1, width)
        layer = nn.TransformerEncoderLayer(
            width, 4, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.weight.expand(len(x), 1, -1), x], dim=1)
        x = self.encoder(x + self.position.weight)
        return self.head(self.norm(x[:, 0]))


@cache
def prototypes() -> Tensor:
    """Return one picture per class, equal on all ranks."""
    return torch.randn(CLASSES, 1, SIDE, SIDE, generator=torch.Generator().manual_seed(0))


def picture_batch(rng: torch.Generator) -> Batch:
    """Return pictures of random classes with noise, and the classes."""
    labels = torch.randint(CLASSES, (PICTURES,), generator=rng)
    noise = torch.randn(PICTURES, 1, SIDE, SIDE, generator=rng)
    return prototypes()[labels] + noise, labels


def class_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Return the cross entropy of classes."""
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


# ---- text -----------------------------------------------------------------------------------


class WordModel(nn.Module):
    """Six LSTM layers behind an embedding that holds most of the parameters."""

    def __init__(self, width: int = 128, layers: int = 6):
        super().__init__()
        self.words = nn.Embedding(WORDS, width)
        self.layers = nn.ModuleList(nn.LSTM(width, width, batch_first=True) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens)
        for layer in self.layers:
            x = x + layer(x)[0]
        return self.head(self.norm(x[:, -1]))


def llama() -> nn.Module:
    """Return the Llama of transformers with four layers.

    Raises:
        ModuleNotFoundError: transformers is not installed.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    size = {"hidden_size": 128, "intermediate_size": 344, "num_hidden_layers": 4}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    limits = {"vocab_size": BYTES, "max_position_embeddings": CONTEXT, "use_cache": False}
    return LlamaForCausalLM(LlamaConfig(**size, **heads, **limits))


@cache
def text() -> Tensor:
    """Return this rank's part of the bytes to train on."""
    return gpt.corpus()[0].chunk(RANKS)[RANK]


def text_batch(rng: torch.Generator) -> Batch:
    """Return random windows, and the bytes that follow theirs."""
    return gpt.batch_of(text(), SEQUENCES, CONTEXT, rng)


def word_batch(rng: torch.Generator) -> Batch:
    """Return sentences of random words and a class that some of the words determine."""
    words = torch.randint(WORDS, (SEQUENCES, SENTENCE), generator=rng)
    return words, words[:, ::4].sum(dim=1) % CLASSES


def llama_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Return the cross entropy of the next byte."""
    scores = model(input_ids=batch[0]).logits
    return nn.functional.cross_entropy(scores.flatten(0, 1), batch[1].flatten())


# ---- recommendation -------------------------------------------------------------------------


class Dlrm(nn.Module):
    """DLRM: tables of embeddings, a network of the numbers, products of all pairs, and a second
    network."""

    def __init__(self, width: int = 16):
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(ROWS, width) for _ in range(TABLES))
        self.bottom = nn.Sequential(
            nn.Linear(NUMBERS, 256), nn.ReLU(), nn.Linear(256, 64), nn.ReLU(), nn.Linear(64, width)
        )
        pairs = (TABLES + 1) * TABLES // 2
        self.top = nn.Sequential(
            nn.Linear(pairs + width, 256), nn.ReLU(), nn.Linear(256, 128), nn.ReLU()
        )
        self.head = nn.Linear(128, 1)

    def forward(self, numbers: Tensor, rows: Tensor) -> Tensor:
        dense = self.bottom(numbers)
        vectors = torch.stack(
            [dense, *(table(rows[:, n]) for n, table in enumerate(self.tables))], 1
        )
        above = torch.triu_indices(TABLES + 1, TABLES + 1, offset=1)
        products = (vectors @ vectors.transpose(1, 2))[:, above[0], above[1]]
        return self.head(self.top(torch.cat([dense, products], dim=1)))[:, 0]


def click_batch(rng: torch.Generator) -> Batch:
    """Return numbers, rows of all tables and clicks; small numbers and rows make clicks likely."""
    numbers = torch.randn(CLICKS, NUMBERS, generator=rng)
    rows = torch.randint(ROWS, (CLICKS, TABLES), generator=rng)
    score = numbers[:, :3].sum(1) + 4 * rows.float().mean(1) / ROWS - 2
    return numbers, rows, (score < 0).float()


def click_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Return the binary cross entropy of clicks."""
    return nn.functional.binary_cross_entropy_with_logits(model(*batch[:2]), batch[2])


# ---- models ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Entry:
    """A model with the batches of one rank and the loss."""

    make: Callable[[], nn.Module]
    batch: Callable[[torch.Generator], Batch]
    loss: Callable[[nn.Module, Batch], Tensor]


MODELS = {
    "gpt": Entry(lambda: gpt.GPT(4, 128, 4, CONTEXT), text_batch, lambda m, b: gpt.loss_of(m, *b)),
    "resnet": Entry(resnet, picture_batch, class_loss),
    "cnn": Entry(cnn, picture_batch, class_loss),
    "mobilenet": Entry(mobilenet, picture_batch, class_loss),
    "convnext": Entry(convnext, picture_batch, class_loss),
    "vit": Entry(Vit, picture_batch, class_loss),
    "lstm": Entry(WordModel, word_batch, class_loss),
    "dlrm": Entry(Dlrm, click_batch, click_loss),
    "llama": Entry(llama, text_batch, llama_loss),
}


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """Return AdamW with the same settings for all models."""
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def train(name: str, steps: int, seed: int) -> None:
    """Train a model under the strategy of the job.

    Args:
        name: name of the model.
        steps: number of iterations.
        seed: seed of the initial weights and of the batches.
    """
    entry = MODELS[name]
    torch.manual_seed(seed)
    rng = torch.Generator().manual_seed(seed * RANKS + RANK)
    model = entry.make()
    model, optimizer = offbeat.prepare(model, optimizer_of(model))
    for _ in range(steps):
        batch = entry.batch(rng)
        optimizer.zero_grad()
        entry.loss(model, batch).backward()
        optimizer.step()
    model.consolidate()


def print_sizes() -> None:
    """Print parameters, modules with parameters, and seconds of a step of each model."""
    print("| model | parameters | modules | ms per step |\n|---|---|---|---|")
    for name, entry in MODELS.items():
        try:
            model = entry.make()
        except ModuleNotFoundError as error:
            print(f"| {name} | {error.name} is not installed | | |")
            continue
        optimizer, rng = optimizer_of(model), torch.Generator().manual_seed(0)
        times_s = []
        for _ in range(4):
            batch, start = entry.batch(rng), time.perf_counter()
            optimizer.zero_grad()
            entry.loss(model, batch).backward()
            optimizer.step()
            times_s.append(time.perf_counter() - start)
        parameters = sum(p.numel() for p in model.parameters())
        modules = sum(any(True for _ in m.parameters(recurse=False)) for m in model.modules())
        print(f"| {name} | {parameters} | {modules} | {1e3 * min(times_s):.0f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=tuple(MODELS))
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--seed", type=int, default=int(os.environ.get("OFFBEAT_SEED", 0)))
    options = parser.parse_args()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", 1)))
    if options.model is None:
        print_sizes()
    else:
        train(options.model, options.steps, options.seed)


if __name__ == "__main__":
    main()
