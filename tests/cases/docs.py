"""Pages of the docs: their examples, and what these are given."""

from __future__ import annotations

import contextlib
import io
import os
import re
import runpy
import shlex
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from offbeat.cli import texts
from offbeat.cli.entry import app, mark_script

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
FENCE = re.compile(
    r"(?:^ *<!-- (not run|parsed): ([^\n]+) -->\n)?^( *)```(\w*)\n(.*?)^\3```",
    re.MULTILINE | re.DOTALL,
)
GENERATED = re.compile(
    r"^<!-- [^\n]*-->\n(?:(?!<!-- )[^\n]*\n)*?<!-- /generated -->$", re.MULTILINE
)
REASONS = ("not run", "parsed")
LANGUAGES = ("python", "sh", "console", "text", "toml", "bash", "yaml")
COMMAND = re.compile(
    r"^ *\$? ?(?:[A-Z_]+=\S+ )*(?:offbeat|torchrun|python|make|srun|mpirun|pip|docker) \S",
    re.MULTILINE,
)
"""First words of a command, which belongs into a block of commands."""

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
    """Fenced block of a page.

    Attributes:
        language: python: executed. sh: commands, executed line by line. console: commands, each
            with the output that it must print. text: output or formulas. Others are files.
        treatment: "not run"; "parsed": commands whose options are checked; "" otherwise.
        reason: reason of the treatment.
    """

    language: str
    text: str
    line: int
    treatment: str = ""
    reason: str = ""

    @property
    def runs(self) -> bool:
        return not self.treatment and self.language in ("python", "sh", "console")


def pages() -> list[Path]:
    """All of them, and the README."""
    return [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]


def blocks(page: Path) -> list[Block]:
    """Return the fenced blocks of a page, except generated ones: `docs/fill.py` runs these."""
    text = GENERATED.sub(lambda found: "\n" * found.group().count("\n"), page.read_text())
    return [
        Block(
            found[4],
            textwrap.dedent(found[5]),
            text.count("\n", 0, found.start(5)),
            found[1] or "",
            found[2] or "",
        )
        for found in FENCE.finditer(text)
    ]


def prose_of(page: Path) -> str:
    """Return the text of a page outside of blocks and generated parts."""
    return FENCE.sub("", GENERATED.sub("", page.read_text()))


def name_of(page: Path) -> str:
    return page.relative_to(DOCS).as_posix() if page.is_relative_to(DOCS) else page.name


def commands(page: Path) -> Iterator[list[str]]:
    """Yield the words of each command of a page: lines of sh blocks, and of the README's blocks."""
    for block in blocks(page):
        if block.treatment == "not run":
            continue
        if block.language == "sh" or (not block.language and page.name == "README.md"):
            yield from _commands_in(block.text)
        elif block.language == "console":
            yield from _commands_in("\n".join(re.findall(r"^\$ (.*)", block.text, re.MULTILINE)))


def _commands_in(text: str) -> Iterator[list[str]]:
    text = re.sub(r"\$\([^)]*\)", "SUBSTITUTED", text.replace("\\\n", " "))
    for line in text.splitlines():
        for command in line.split(" && "):
            words = shlex.split(command, comments=True)
            if words:
                yield words


def check_command(words: Sequence[str]) -> None:
    """Raise unless a command parses: programs, options, strategies, and names of files."""
    words = list(words)
    while re.match(r"[A-Z_]+=", words[0]):
        name, _, value = words.pop(0).partition("=")
        if name == "OFFBEAT_STRATEGY":
            texts.parse_strategies(value, None)
    program, *argv = words
    if program not in PROGRAMS:
        raise ValueError(f"{program} is none of {', '.join(PROGRAMS)}")
    PROGRAMS[program](argv)


def _check_offbeat(argv: list[str]) -> None:
    _, bound, *_ = app.parse_args(mark_script(argv), exit_on_error=False, print_error=False)
    given = bound.arguments
    if "strategies" in given:
        texts.contestants(given["strategies"], given.get("set_") or [])
    elif given.get("strategy"):
        texts.parse_strategies(given["strategy"], given.get("set_"))


def _check_torchrun(argv: list[str]) -> None:
    from torch.distributed.run import get_args_parser

    parsed = get_args_parser().parse_args([word for word in argv if word != "..."])
    if parsed.module:
        assert parsed.training_script == "offbeat", argv
        _check_offbeat(parsed.training_script_args)
    else:
        _check_python([parsed.training_script])


def _check_python(argv: list[str]) -> None:
    script = argv[0]
    places = (ROOT / script, ROOT / "examples" / "frameworks" / script)
    assert script == "train.py" or any(place.exists() for place in places), script


def _check_launcher(argv: list[str]) -> None:
    """Check the script, or the command of offbeat, that srun or mpirun starts."""
    if "offbeat" in argv:
        return _check_offbeat(argv[argv.index("offbeat") + 1 :])
    return _check_python(argv[argv.index("python") + 1 :])


def _check_make(argv: list[str]) -> None:
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert {word for word in argv if "=" not in word} <= {*targets}, argv


def _check_docker(argv: list[str]) -> None:
    assert (ROOT / argv[argv.index("-f") + 1]).exists(), argv


def _check_pip(argv: list[str]) -> None:
    assert argv[0] == "install", argv
    for n, word in enumerate(argv):
        if word in ("-c", "-e", "-r"):
            assert (ROOT / argv[n + 1].partition("[")[0]).exists(), argv


PROGRAMS: dict[str, Callable[[list[str]], None]] = {
    "offbeat": _check_offbeat,
    "torchrun": _check_torchrun,
    "python": _check_python,
    "srun": _check_launcher,
    "mpirun": _check_launcher,
    "make": _check_make,
    "docker": _check_docker,
    "pip": _check_pip,
    **dict.fromkeys(("git", "cd", "export", "openssl", "chmod", "iptables"), lambda _: None),
}
"""Check of each program that pages may name. Those of the last line are only listed."""


def run_page(page: Path, folder: Path) -> int:
    """Run the examples of a page in their order, on one rank. Return their number."""
    rank = int(os.environ["RANK"])
    (folder / str(rank)).mkdir()
    os.chdir(folder / str(rank))
    module = sys.modules["example"] = ModuleType("example")  # dataclasses ask for theirs
    scope = vars(module)
    scope |= given(name_of(page))
    examples = [block for block in blocks(page) if block.runs]
    for block in examples:
        where = f"{page}, line {block.line}"
        if block.language == "python":
            with contextlib.redirect_stdout(io.StringIO()):
                # Lines count from the top of the page, as tracebacks show them.
                exec(compile("\n" * block.line + block.text, str(page), "exec"), scope)
        elif rank == 0 and block.language == "sh":
            for words in _commands_in(block.text):
                _run_command(words, where)
        elif rank == 0:
            parts = re.split(r"^\$ (.*)\n", block.text, flags=re.MULTILINE)[1:]
            for command, shown in zip(parts[::2], parts[1::2], strict=True):
                printed = _run_command(shlex.split(command), where)
                assert printed == shown, f"{where}: the command prints\n{printed}"
    return len(examples)


def _run_command(words: Sequence[str], where: str) -> str:
    """Run a command of offbeat or a script of this repository in this process."""
    from offbeat import cli

    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        if words[0] == "offbeat":
            assert cli.main(list(words[1:])) == 0, where
        else:
            assert words[0] == "python", f"{where}: only offbeat and scripts are run"
            argv, script = sys.argv, ROOT / words[1]
            sys.path.insert(0, str(script.parent))  # scripts import each other
            sys.argv = list(words[1:])
            try:
                runpy.run_path(str(script), run_name="__main__")
            finally:
                sys.argv = argv
                sys.path.remove(str(script.parent))
    return printed.getvalue()


def given(page: str) -> dict[str, Any]:
    """Names that a page's examples take for granted, and files."""
    return {
        "README.md": _of_readme,
        "codecs.md": _of_readme,
        "cyclic.md": _of_cyclic,
        "data.md": _of_data,
        "failures.md": _of_readme,
        "getting-started.md": _with_profile,
        "gossip.md": _of_gossip,
        "metrics.md": _of_readme,
        "using.md": _of_using,
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


def _with_profile() -> dict[str, Any]:
    shutil.copy(DOCS / "example.json", "profile.json")
    return {}


def _of_using() -> dict[str, Any]:
    return _of_readme() | _with_profile()


def _of_data() -> dict[str, Any]:
    import numpy as np
    import torch
    import torch.distributed as dist
    from torch.utils.data import TensorDataset

    dist.init_process_group("gloo")
    labels = torch.arange(400) % 10
    np.save("labels.npy", labels.numpy())
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
    """As many layers as stages, so that they are cut alike on all ranks."""
    import torch
    import torch.distributed as dist
    from torch import nn

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
