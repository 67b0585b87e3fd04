"""The pages show what the code does: commands, examples, generated parts, the site and the map."""

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest
from cases.docs import (
    COMMAND,
    DOCS,
    LANGUAGES,
    RANKS,
    REASONS,
    ROOT,
    blocks,
    check_command,
    commands,
    name_of,
    pages,
    prose_of,
    run_page,
)
from cases.promised import promised
from cases.scripts import docs_script
from cases.strategy_lists import ALL
from harness.ranks import run_ranks

from offbeat import metrics
from offbeat.core.strategy.interface import setting_fields
from offbeat.lab import Cluster
from offbeat.profile import Bucket, Link, Profile
from offbeat.strategies import PartialSync

EXAMPLES = ROOT / "examples"
FILL = docs_script("fill")
SOURCE = ROOT / "src" / "offbeat"

pytestmark = pytest.mark.timeout(400)  # building the site takes half a minute of processor time

# --- blocks and commands ---------------------------------------------------------------------


def test_the_plan_that_the_design_begins_with():
    buckets = tuple(Bucket(f"b{i}", 0.01, 0.02, 4000) for i in range(3))
    profile = Profile(buckets, (Link("net", 0.001, 1e6),), world_size=2)
    assert (
        f"```text\n{PartialSync(period=3).plan(profile)}\n```" in (DOCS / "design.md").read_text()
    )


def test_the_cluster_file_of_the_lab():
    text = (DOCS / "lab.md").read_text()
    cluster = Cluster.from_toml(text.partition("```toml\n")[2].partition("```")[0])
    assert Cluster.from_toml(cluster.to_toml()) == cluster
    assert (cluster.speed_of(2), cluster.jitter_of(2)) == (0.5, 0.1)
    rates = [cluster.way(0, host, "net").rate_bps for host in (2, 3)]
    assert rates == [20_000_000, 10_000_000]


@pytest.mark.parametrize(
    "page", [page for page in pages() if any(block.runs for block in blocks(page))], ids=name_of
)
def test_examples(page, tmp_path):
    ranks = RANKS.get(name_of(page), 1)
    assert run_ranks(ranks, run_page, page, tmp_path) == ranks * [
        sum(block.runs for block in blocks(page))
    ]


def test_commands_parse():
    """Names of commands, options, strategies and files, and values of settings."""
    for page in pages():
        for words in commands(page):
            try:
                check_command(words)
            except (Exception, SystemExit) as error:
                pytest.fail(f"{name_of(page)}: {words}: {error!r}")


def test_commands_that_do_not_parse():
    for command in (
        "offbeat run --no-such-option train.py",
        "OFFBEAT_STRATEGY=bspp torchrun train.py",
        "torchrun --no-such-option 1 train.py",
        "python benchmarks/none.py",
        "make none",
        "rm train.py",
    ):
        with pytest.raises((Exception, SystemExit)):
            check_command(command.split())


def test_every_block_is_run_or_excused():
    """Blocks are commands, examples, files or output; commands stand only in blocks of commands."""
    for page in pages():
        for block in blocks(page):
            where = (name_of(page), block.line)
            assert block.language in LANGUAGES or page == ROOT / "README.md", where
            assert not block.treatment or len(block.reason.split()) > 1, where
            assert block.language != "text" or not COMMAND.search(block.text), where
        indented = re.findall(r"^ {4,}.*", prose_of(page), re.MULTILINE)
        assert not [line for line in indented if COMMAND.match(line)], name_of(page)


def test_links_of_the_readme():
    """Building the site checks the links of the other pages."""
    targets = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", (ROOT / "README.md").read_text())
    assert targets
    assert not [target for target in targets if not (ROOT / target).exists()]


def test_pages_show_the_examples():
    launch = [
        EXAMPLES / "launch" / name for name in ("srun.sbatch", "trainjob.yaml", "with_ray.py")
    ]
    shown = "".join((DOCS / f"{page}.md").read_text() for page in ("frameworks", "jobs", "nodes"))
    for path in (*(EXAMPLES / "frameworks").glob("*.py"), *launch):
        kind = {".py": "python", ".sbatch": "bash", ".yaml": "yaml"}[path.suffix]
        assert f"```{kind}\n{path.read_text()}```" in shown, path.name


def test_the_metrics_page_names_all_numbers():
    text = (DOCS / "metrics.md").read_text()
    for name in (metrics.SECONDS, metrics.EXPOSED, metrics.BYTES, metrics.DIVERGENCE, metrics.LOSS):
        assert f"| `{name}" in text


# --- the map ---------------------------------------------------------------------------------


def names_in(body: list[ast.stmt], prefix: str = "") -> Iterator[str]:
    """Yield functions, classes and values of a module, and members as `Class.member`."""
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield prefix + node.name
            if isinstance(node, ast.ClassDef):
                yield from names_in(node.body, f"{prefix}{node.name}.")
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from (prefix + target.id for target in targets if isinstance(target, ast.Name))


def test_the_map_has_every_room_and_only_paths_and_names_that_exist():
    text = (DOCS / "map.md").read_text()
    rooms = {path.parent for path in SOURCE.rglob("__init__.py")} - {SOURCE, SOURCE / "core"}
    table = text.partition("## Rooms")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `([^`]+)` \|", table, re.MULTILINE)
    assert sorted(rows) == sorted(room.relative_to(SOURCE).as_posix() for room in rooms)

    text = text.replace("`src/offbeat`", "").replace("`file.py::name`", "")
    quoted = re.findall(r"`([\w./]+)(?:::([\w.]+))?`", text)
    named = [(path, name) for path, name in quoted if name or "/" in path or ".py" in path]
    assert len(named) > 60
    assert not [path for path, _ in named if not (SOURCE / path).exists()]
    members = {(path, name) for path, name in named if name}
    bodies = {path: ast.parse((SOURCE / path).read_text()).body for path in dict(members)}
    assert not members - {(path, name) for path in bodies for name in names_in(bodies[path])}


# --- the site --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """Built with warnings as errors: links, anchors and pages that are in no menu, too."""
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=ROOT,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return folder


def test_the_site_fetches_nothing(site):
    fetched = re.compile(r"<(?:script|link|img|iframe)[^>]*(?:src|href)=[\"']?(?:https?:)?//")
    for page in site.rglob("*.html"):
        assert not fetched.findall(page.read_text()), page
    for sheet in site.rglob("*.css"):
        assert not re.findall(r"(?:url\(|@import )[\"']?(?:https?:)?//", sheet.read_text()), sheet


def test_the_pages_of_strategies(site):
    """Each has a command with its output, a picture with boxes, every setting and the source."""
    index = (site / "strategies" / "index.html").read_text()
    for name, strategy in ALL.items():
        text = (site / "strategies" / f"{name}.html").read_text()
        assert "$ offbeat " in re.sub(r"<[^>]+>", "", text), name
        (shown, *_) = re.findall(r'<img alt="[^"]+" src="\.\./(pictures/[^"]+)"', text)
        assert '<rect class="box ' in (site / shown).read_text(), name
        for field in setting_fields(strategy):
            assert f"<td><code>{field.name}</code></td>" in text, (name, field.name)
        assert strategy.citation.partition(",")[0] in text, name
        for title in ("when-to-take-it", "schedule", "settings", "source"):
            assert f'<h2 id="{title}">' in text, (name, title)
        assert f'href="{name}.html"' in index, name


def test_the_pages_of_modules(site):
    """Each explains the promised names of its module; the first one may link to another page."""
    for module, name in promised():
        page = "index" if module == "offbeat" else module.split(".")[1]
        text = (site / "api" / f"{page}.html").read_text()
        heading = rf'<h[1-6] id="{module}\.(?:{name}\.)?{name}"'
        link = rf'|href="\w+\.html#offbeat\.\w+\.{name}"' if module == "offbeat" else ""
        assert re.search(heading + link, text), (module, name)


# --- generated parts -------------------------------------------------------------------------


def test_generated_parts_are_those_of_the_code():
    """`make pages` changes nothing."""
    for page in FILL.pages():
        text = page.read_text()
        assert FILL.filled(text, page) == text, f"{name_of(page)}: run `make pages`"
    assert {path.name: path.read_text() for path in FILL.PICTURES.glob("*.svg")} == FILL.pictures()


def test_every_marker_is_one():
    """Misspelled markers would stay empty."""
    known = {*FILL.VIEWS, "table", "notes", "list", "/generated", *REASONS}
    for page in pages():
        text = re.sub(r"^( *)```.*?^\1```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
        for words in re.findall(r"^<!-- (\S+(?: run)?)", text, re.MULTILINE):
            assert words.removesuffix(":") in known, (name_of(page), words)


def test_filling():
    page = DOCS / "strategies" / "some.md"
    text = "a\n\n<!-- source: bsp -->\n\nb\n\n<!-- picture: bsp -->\n"
    filled = FILL.filled(text, page)
    assert filled.startswith("a\n\n<!-- source: bsp -->\n\nOn the command line `--strategy bsp`")
    assert "](../pictures/bsp.svg)" in filled
    assert filled.count("\n<!-- /generated -->\n") == 2
    assert "\n\nb\n\n" in filled
    assert FILL.filled(filled, page) == filled


def test_markers_that_are_none():
    for marker in ("drawing: bsp", "picture: bspp", "settings: bspp", "output: ls"):
        with pytest.raises(ValueError, match=marker):
            FILL.filled(f"<!-- {marker} -->\n", DOCS / "some.md")


def test_meanings_of_settings():
    @dataclass
    class Base:
        """As every class."""

        a: int = 1
        """First,
        on two lines."""
        name: ClassVar[str] = "base"

    @dataclass
    class More(Base):
        """Inherits."""

        b: int = 2
        c: int = 3
        """Third."""

    meanings = docs_script("_views").meanings
    assert meanings(More) == {"a": "First, on two lines.", "c": "Third."}
    for strategy in ALL.values():
        assert set(meanings(strategy)) >= {field.name for field in setting_fields(strategy)}
