"""Pages of the docs: their examples, and what these are given."""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
FENCE = re.compile(
    r"(?:^<!-- not run: ([^\n]+) -->\n)?^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL
)
GENERATED = re.compile(
    r"^<!-- [^\n]*-->\n(?:(?!<!-- )[^\n]*\n)*?<!-- /generated -->$", re.MULTILINE
)
REASONS = ("not run",)
OURS = "$ offbeat "

RANKS = {
    "adding-a-codec.md": 2,
    "adding-a-rule.md": 2,
    "adding-a-session.md": 2,
    "getting-started.md": 2,
    "data.md": 4,
    "cyclic.md": 4,
}
"""Pages whose examples need so many ranks; the others have one."""


@dataclass(frozen=True)
class Block:
    """A fenced block; `excuse`: why it is not run, None if it is to be."""

    language: str
    text: str
    line: int
    excuse: str | None

    @property
    def runs(self) -> bool:
        return self.excuse is None and (self.language == "python" or self.text.startswith(OURS))


def pages() -> list[Path]:
    """All of them, and the README."""
    return [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]


def blocks(page: Path) -> list[Block]:
    """Return the fenced blocks of a page, except generated ones: `docs/fill.py` runs these."""
    text = GENERATED.sub(lambda found: "\n" * found.group().count("\n"), page.read_text())
    return [
        Block(found[2], found[3], text.count("\n", 0, found.start(3)), found[1])
        for found in FENCE.finditer(text)
    ]


def name_of(page: Path) -> str:
    return page.relative_to(DOCS).as_posix() if page.is_relative_to(DOCS) else page.name


def commands(page: Path) -> Iterator[list[str]]:
    """Arguments of every line that runs offbeat in a block without a language."""
    for block in blocks(page):
        for line in block.text.splitlines() if not block.language else ():
            found = re.match(r"(?:\$ )?(?:[A-Z_]+=\S+ )*offbeat ([a-z].*)", line)
            if found:
                yield shlex.split(found[1], comments=True)


def run_page(page: Path, folder: Path) -> int:
    """Run a page's examples in their order, on one rank; how many there were."""
    from offbeat import cli

    rank = int(os.environ["RANK"])
    (folder / str(rank)).mkdir()
    os.chdir(folder / str(rank))
    module = sys.modules["example"] = ModuleType("example")  # dataclasses ask for theirs
    scope = vars(module)
    scope |= given(name_of(page))
    examples = [block for block in blocks(page) if block.runs]
    for block in examples:
        where = f"{page}, line {block.line}"
        said = io.StringIO()
        with contextlib.redirect_stdout(said):
            if block.language == "python":
                # Lines count from the top of the page, as tracebacks show them.
                exec(compile("\n" * block.line + block.text, str(page), "exec"), scope)
            elif rank == 0:
                command, _, shown = block.text.removeprefix(OURS).partition("\n")
                assert cli.main(shlex.split(command)) == 0, where
                assert said.getvalue() == shown, f"{where}: the command prints\n{said.getvalue()}"
    return len(examples)


def given(page: str) -> dict[str, Any]:
    """Names that a page's examples take for granted, and files."""
    return {
        "README.md": _of_readme,
        "using.md": _of_readme,
        "checkpoints.md": _of_checkpoints,
        "codecs.md": _of_readme,
        "data.md": _of_data,
        "failures.md": _of_readme,
        "metrics.md": _of_readme,
        "gossip.md": _of_gossip,
        "cyclic.md": _of_cyclic,
    }.get(page, dict)()


def _of_readme() -> dict[str, Any]:
    import torch

    import offbeat
    from offbeat.data import DefDP

    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return {
        "offbeat": offbeat,
        "model": model,
        "optimizer": optimizer,
        "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 3),
        "sampler": DefDP(24, rank=0, world_size=1),
        "loader": [(torch.ones(2, 4), torch.ones(2, 1))] * 12,
        "loss_fn": torch.nn.MSELoss(),
    }


def _of_checkpoints() -> dict[str, Any]:
    scope = _of_readme()
    return scope | {"steps": 8, "batches": iter(scope["loader"]), "resuming": False}


def _of_data() -> dict[str, Any]:
    import torch
    import torch.distributed as dist
    from torch.utils.data import TensorDataset

    dist.init_process_group("gloo")
    labels = torch.arange(400) % 10
    return {"dataset": TensorDataset(torch.zeros(400, 2), labels), "labels": labels, "epochs": 2}


def _of_gossip() -> dict[str, Any]:
    import numpy as np

    return {
        "pair_rate_bytes_s": np.full((4, 4), 1e6),
        "pair_delay_s": np.full((4, 4), 1e-3),
        "message_bytes": 100_000,
        "x": np.random.default_rng(0).normal(size=(16, 32)),
    }


def _of_cyclic() -> dict[str, Any]:
    """As many layers as stages, so that they are cut alike on all ranks. The profile is of layers
    that keep less the deeper they are, in equal time."""
    import torch
    import torch.distributed as dist
    from torch import nn

    from offbeat.profile import Bucket, Link, Profile

    buckets = tuple(
        Bucket(f"layers.{9 - i}", 0.01, 0.02, 4_000_000, activation_bytes=4_000_000 * (i + 5))
        for i in range(10)
    )
    Profile(buckets, (Link("net", 0.001, 1e7),), 4, update_s=0.01).save("profile.json")
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(3, 3) for _ in range(4)))
    return {
        "dist": dist,
        "model": model,
        "example_input": torch.ones(2, 3),
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.01),
        "loss": nn.functional.mse_loss,
        "data": [[(torch.ones(2, 3), torch.ones(2, 3))] * 4] * 3,
    }
