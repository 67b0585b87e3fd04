"""What the documents show is what the code says: the site builds, examples run."""

import os
import re
import subprocess
import sys
from dataclasses import dataclass, fields
from typing import ClassVar

import pytest
from support.docs import (
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
from support.promised import MODULES, promised
from support.scripts import docs_script
from support.strategy_lists import ALL
from support.worlds import run_world

from offbeat.core.runtime import metrics
from offbeat.lab import Cluster
from offbeat.lab.description import Way
from offbeat.profile import Bucket, Link, Profile
from offbeat.strategies import PartialSync


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
    assert cluster.way(0, 3, "net") == Way(10_000_000, 0.08, 0.001)
    assert cluster.way(0, 2, "net") == Way(20_000_000, 0.04, 0.001)


@pytest.mark.parametrize(
    "page", [page for page in pages() if any(block.runs for block in blocks(page))], ids=name_of
)
def test_examples(page, tmp_path):
    ranks = RANKS.get(name_of(page), 1)
    assert run_world(run_page, ranks, page, tmp_path) == ranks * [
        sum(block.runs for block in blocks(page))
    ]


@pytest.mark.parametrize("page", [page for page in pages() if any(commands(page))], ids=name_of)
def test_commands_parse(page):
    """Names of commands, options, strategies and files, and values of settings."""
    for words in commands(page):
        check_command(words)


@pytest.mark.parametrize(
    "words",
    [
        ["offbeat", "run", "--no-such-option", "train.py"],
        ["OFFBEAT_STRATEGY=bspp", "torchrun", "train.py"],
        ["torchrun", "--no-such-option", "1", "train.py"],
        ["python", "benchmarks/none.py"],
        ["make", "none"],
        ["rm", "train.py"],
    ],
)
def test_commands_that_do_not_parse(words):
    with pytest.raises((Exception, SystemExit)):
        check_command(words)


@pytest.mark.parametrize("page", sorted(DOCS.rglob("*.md")), ids=name_of)
def test_every_block_is_run_or_excused(page):
    """Blocks are commands, examples, files or output; commands stand only in blocks of commands."""
    for block in blocks(page):
        assert block.language in LANGUAGES, (block.line, block.text)
        assert not block.treatment or len(block.reason.split()) > 1, (block.line, block.reason)
        if block.language == "text":
            assert not COMMAND.search(block.text), (block.line, block.text)
    indented = re.findall(r"^ {4,}.*", prose_of(page), re.MULTILINE)
    assert not [line for line in indented if COMMAND.match(line)]


def test_links_of_the_readme():
    """Those of the pages are looked at when the site is built."""
    targets = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", (ROOT / "README.md").read_text())
    assert targets
    assert not [target for target in targets if not (ROOT / target).exists()]


LAUNCH = ROOT / "examples" / "launch"

# --- the site ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """Built with warnings as errors: links, anchors and pages that are in no menu, too."""
    for tool in ("material", "mkdocstrings"):
        pytest.importorskip(tool, reason="the extra docs is not installed")
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=ROOT,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    return folder


def test_the_site_fetches_nothing(site):
    fetched = re.compile(r"<(?:script|link|img|iframe)[^>]*(?:src|href)=[\"']?(?:https?:)?//")
    for page in site.rglob("*.html"):
        assert not fetched.findall(page.read_text()), page
    for sheet in site.rglob("*.css"):
        assert not re.findall(r"(?:url\(|@import )[\"']?(?:https?:)?//", sheet.read_text()), sheet


@pytest.mark.parametrize("name", ALL)
def test_the_page_of_a_strategy(name, site):
    """It has a plan or a command's output, a picture with boxes, every setting, and the source."""
    text = (site / "strategies" / f"{name}.html").read_text()
    assert "$ offbeat " in re.sub(r"<[^>]+>", "", text)
    (shown, *_) = re.findall(r'<img alt="[^"]+" src="\.\./(pictures/[^"]+)"', text)
    assert '<rect class="box ' in (site / shown).read_text()
    for field in fields(ALL[name]):
        assert f"<td><code>{field.name}</code></td>" in text
    assert ALL[name].citation.partition(",")[0] in text
    for title in ("When to take it", "Schedule", "Settings", "Source"):
        assert f'<h2 id="{title.lower().replace(" ", "-")}">' in text, title
    assert re.search(r"<p>Take .*?\bIt\s+costs\s", text, re.DOTALL)
    assert f'href="{name}.html"' in (site / "strategies" / "index.html").read_text()


@pytest.mark.parametrize("module", MODULES)
def test_the_page_of_a_module(module, site):
    """It explains every promised name, or links to the page that does."""
    page = {"offbeat": "index"}.get(module) or module.split(".")[1]
    text = (site / "api" / f"{page}.html").read_text()
    for name in (name for where, name in promised() if where == module):
        heading = rf'<h[1-6] id="{module}\.(?:{name}\.)?{name}"'
        link = rf'href="\w+\.html#offbeat\.\w+\.{name}"'
        assert re.search(f"{heading}|{link}" if module == "offbeat" else heading, text), name


# --- generated parts -----------------------------------------------------------------------------

FILL = docs_script("fill")


@pytest.mark.parametrize("page", FILL.pages(), ids=name_of)
def test_generated_parts_are_those_of_the_code(page):
    text = page.read_text()
    assert FILL.filled(text, page) == text, "run `make pages`"


def test_pictures_are_those_of_the_code():
    committed = {path.name: path.read_text() for path in FILL.PICTURES.glob("*.svg")}
    made = FILL.pictures()
    assert committed.keys() == made.keys(), "run `make pages`"
    assert [name for name in made if committed[name] != made[name]] == [], "run `make pages`"


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
    assert "offbeat.BSP()" in filled
    assert "](../pictures/bsp.svg)" in filled
    assert filled.count("\n<!-- /generated -->\n") == 2
    assert "\n\nb\n\n" in filled
    assert FILL.filled(filled, page) == filled


@pytest.mark.parametrize(
    ("marker", "words"),
    [
        ("<!-- drawing: bsp -->", "views are output, picture"),
        ("<!-- picture: bspp -->", "did you mean 'bsp'"),
        ("<!-- settings: bspp -->", "bspp"),
        ("<!-- output: ls -->", "only offbeat is run"),
        ("<!-- output: offbeat plan --profile none.json --strategy bsp -->", "ends with 2"),
    ],
)
def test_markers_that_are_none(marker, words):
    with pytest.raises(ValueError, match=words):
        FILL.filled(f"{marker}\n", DOCS / "some.md")


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

    assert docs_script("_views").meanings(More) == {"a": "First, on two lines.", "c": "Third."}
    for cls in ALL.values():
        assert set(docs_script("_views").meanings(cls)) >= {field.name for field in fields(cls)}


@pytest.mark.parametrize(
    "example",
    [
        *sorted((DOCS.parent / "examples" / "frameworks").glob("*.py")),
        *(LAUNCH / name for name in ("srun.sbatch", "trainjob.yaml", "with_ray.py")),
    ],
    ids=lambda path: path.name,
)
def test_pages_show_what_is_run(example):
    kind = {".py": "python", ".sbatch": "bash", ".yaml": "yaml"}[example.suffix]
    page = "jobs.md" if example.parent == LAUNCH else "frameworks.md"
    page = "nodes.md" if example.stem.endswith("_nodes") else page
    assert f"```{kind}\n{example.read_text()}```" in (DOCS / page).read_text()


def test_the_metrics_page_names_all_numbers():
    text = (DOCS / "metrics.md").read_text()
    for name in (metrics.SECONDS, metrics.EXPOSED, metrics.BYTES, metrics.DIVERGENCE, metrics.LOSS):
        assert f"| `{name}" in text
