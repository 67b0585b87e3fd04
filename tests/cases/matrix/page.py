"""The page of the matrix: one row per script, one column per strategy, refusals as footnotes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from cases.matrix.features import FEATURES
from cases.matrix.job import STRATEGIES
from cases.matrix.running import (
    DIFFERENT,
    LIKE_DDP,
    LIKE_REFERENCE,
    NOT_RUN,
    REFUSED,
    SIGNS,
    Verdict,
)

PATH = Path(__file__).parents[3] / "docs" / "compatibility.md"
INTRODUCTION = f"""# What scripts may do

Every script below is trained by two processes under every strategy. It is written as for one
device and changes nothing for a strategy. Weights, and what the script looks at, are compared at
the end.

| sign | outcome |
|---|---|
| {SIGNS[LIKE_DDP]} | the same as torch's own `DistributedDataParallel` (1e-12, in float64) |
| {SIGNS[LIKE_REFERENCE]} | the same as the strategy's equations, computed by a plain program |
| {SIGNS[REFUSED]} | refused in words; the number leads to them |
| {SIGNS[NOT_RUN]} | not run: torch itself waits for ever |

`tests/real/matrix` makes this page; nothing in it is written by hand. The test suite runs a
quarter of the scripts, each under a third of the strategies, and compares with this page;
`OFFBEAT_WHOLE_MATRIX=1 pytest tests/real/matrix` runs all, and `OFFBEAT_REWRITE_GOLDENS=1` writes
the page again.

Some strategies change what they do after a script's first iteration
([why](design.md#prepare)). The profile is given, so nothing is observed before. Gossip
(A2CiD2) runs without an exchange here, as the moments of exchanges are chance. Under DeFT,
iterations that apply nothing show one gradient, a zero.

Under P3, DeAR, ByteScheduler and US-Byte the update of a step is done at the next forward, or as
soon as the script looks at the weights: through the objects that `offbeat.prepare` returned,
`layer.weight`, `parameters()`, `named_parameters()` or `state_dict()` of the bare module,
`p.data`, `p.detach()`, `p.clone()` or `p.view()`, a copy of the module, or pruning. So averages of
weights and clamping are those of DDP. Other looks, such as `average.lerp_(p, 0.1)` with a `p` that
the script keeps, need `model.flush()` before. A write without it is an error: in every iteration if
torch counts it, in the first three steps and every hundredth one if it goes through a tensor that
`p.data` returned earlier. A read without it is one update behind.

Hooks of `optimizer.step()` that are registered before the first iteration run once per iteration.

The buffers of a module that forward writes (running norms, codebooks, counters, batch
normalization) are those of rank 0 on all ranks at the next forward, under every strategy that
computes what DDP computes, except `ps-bsp` and `ssp`. They leave rank 0 when backward is over. So
the job differs from DDP where a script writes buffers between backward and the next forward, and
where it calls the model twice before one backward. Each rank keeps its own buffers under all other
strategies, and with `prepare(broadcast_buffers=False)`. Which buffers are written is seen in the
first iteration, and then every `compare_every` iterations.
"""


def page(matrix: Mapping[str, Mapping[str, Verdict]]) -> str:
    """The whole page; `matrix` is by strategy, then by script."""
    notes: dict[str, int] = {}
    names = list(STRATEGIES)
    lines = ["| script | " + " | ".join(names) + " |", "|---|" + ":-:|" * len(names)]
    for key, feature in FEATURES.items():
        cells = [_cell(matrix[name][key], notes) for name in names]
        lines.append(f"| {feature.title} | " + " | ".join(cells) + " |")
    settings = ", ".join(f"`{STRATEGIES[name]}`" for name in names)
    count = len(FEATURES) * len(names)
    table = "\n".join(lines)
    said = "\n".join(f"{number}. {words}" for words, number in notes.items())
    return (
        f"{INTRODUCTION}\nThe strategies, in {count} cases: {settings}.\n\n{table}\n\n"
        f"## Refusals\n\n{said}\n"
    )


def _cell(verdict: Verdict, notes: dict[str, int]) -> str:
    sign, words = shown(verdict)
    return f"{sign} {notes.setdefault(words, len(notes) + 1)}" if words else sign


def shown(verdict: Verdict) -> tuple[str, str]:
    """What the page says of a verdict: its sign, and the words of a refusal."""
    assert verdict.kind != DIFFERENT, verdict
    return SIGNS[verdict.kind], _general(verdict.words) if verdict.kind == REFUSED else ""


def read(text: str) -> dict[tuple[str, str], tuple[str, str]]:
    """What a page says, by the title of a script and the name of a strategy."""
    notes = dict(re.findall(r"^(\d+)\. (.*)$", text, re.MULTILINE))
    found = {}
    for line in text.splitlines():
        title, *cells = line.strip("| ").split(" | ")
        if len(cells) == len(STRATEGIES) and cells[0][0] in SIGNS.values():
            for name, cell in zip(STRATEGIES, cells, strict=True):
                sign, _, number = cell.partition(" ")
                found[title, name] = sign, notes.get(number, "")
    return found


def _general(words: str) -> str:
    """A message without what differs from strategy to strategy: bucket names and sizes."""
    words = re.sub(r"bucket '[^']*'( to '[^']*')?", "bucket ...", words.replace("\n", " "))
    return re.sub(r"differ by [0-9.e-]+ of", "differ by ... of", words)
