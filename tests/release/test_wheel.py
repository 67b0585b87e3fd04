"""The distributions: built without warnings, complete, and sufficient in an empty environment."""

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
from email import message_from_string
from importlib import metadata
from pathlib import Path
from zipfile import ZipFile

import pytest
from packaging.requirements import Requirement
from readme_renderer import markdown

from offbeat import __version__

ROOT = Path(__file__).parents[2]
PROFILE = ROOT / "docs" / "example.json"
SOURCES = (
    *("pyproject.toml", "setup.py", "README.md", "LICENSE", "MANIFEST.in", "Makefile"),
    *("constraints.txt", "CHANGELOG.md", "CITATION.cff", "CONTRIBUTING.md", "SECURITY.md"),
)
FOLDERS = ("src", "docs", "examples", "tests", "mkdocs.yml")
pytestmark = pytest.mark.timeout(400)

SCRIPT = """
import torch
import offbeat

torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer = offbeat.prepare(model, optimizer)
for step in range(12):
    optimizer.zero_grad()
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
model.consolidate()
"""


def environment() -> dict[str, str]:
    """The variables of this process without those that change what Python, pip and offbeat do."""
    changes = ("PIP_", "PYTHON", "OFFBEAT_", "VIRTUAL_ENV")
    env = {name: value for name, value in os.environ.items() if not name.startswith(changes)}
    return env | {"PIP_CONFIG_FILE": os.devnull}


@pytest.fixture(scope="module")
def distributions(tmp_path_factory):
    """Folder with the source distribution and the wheel."""
    source, folder = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    shutil.copytree(  # a build writes into it
        ROOT / "src", source / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info")
    )
    for name in (*SOURCES, *FOLDERS, "benchmarks"):  # of benchmarks only the pages are packed
        if name != "src":
            (source / name).symlink_to(ROOT / name)
    build("build_sdist", source, folder)
    build("build_wheel", source, folder)
    return folder


def build(what: str, source: Path, folder: Path) -> None:
    """Run one function of the build backend in the folder of the sources."""
    code = f"from setuptools import build_meta; build_meta.{what}({str(folder)!r})"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        cwd=source,
        env=environment(),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "warning" not in (done.stdout + done.stderr).lower()


def contents(folder: Path) -> dict[str, bytes]:
    """Return the files of the one wheel in a folder."""
    (wheel,) = folder.glob("*.whl")
    with ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


@pytest.fixture(scope="module")
def fields(distributions):
    """Metadata of the wheel."""
    (text,) = [
        text
        for name, text in contents(distributions).items()
        if name.endswith(".dist-info/METADATA")
    ]
    return message_from_string(text.decode())


def test_metadata_is_complete(distributions, fields):
    names = contents(distributions)
    assert fields["Version"] == __version__
    assert fields["License-Expression"] == "Apache-2.0"
    assert fields["License-File"] == "LICENSE"
    assert fields["Author"]
    classifiers = fields.get_all("Classifier", [])
    assert [text for text in classifiers if text.startswith("Development Status :: ")]
    # Other systems have not been tried.
    linux = "Operating System :: POSIX :: Linux"
    assert [text for text in classifiers if text.startswith("Operating System")] == [linux]
    for minor in range(11, 15):
        assert f"Programming Language :: Python :: 3.{minor}" in classifiers
    package = ROOT / "src" / "offbeat"
    assert {name for name in names if name.startswith("offbeat/")} == {
        str(file.relative_to(package.parent))
        for file in package.rglob("*")
        if file.is_file() and file.suffix != ".pyc"
    }


def test_the_source_distribution_is_complete(distributions, tmp_path):
    """It has what the checkout has, and builds the same wheel."""
    (archive,) = distributions.glob("*.tar.gz")
    with tarfile.open(archive) as opened:
        opened.extractall(
            tmp_path, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {})
        )
    (source,) = tmp_path.iterdir()
    wanted = {
        str(file.relative_to(ROOT))
        for folder in FOLDERS
        for file in (ROOT / folder).rglob("*")
        if file.is_file() and "__pycache__" not in file.parts and ".egg-info" not in str(file)
    }
    pages = {str(page.relative_to(ROOT)) for page in (ROOT / "benchmarks").glob("*.md")}
    assert not [name for name in (*SOURCES, *wanted, *pages) if not (source / name).exists()]
    build("build_wheel", source, tmp_path)
    assert contents(tmp_path) == contents(distributions)


def test_the_context_of_the_image_builds_the_same_wheel(distributions, tmp_path):
    """The Dockerfile installs from the files that its ignore file lets through."""
    lines = (ROOT / "examples" / "docker" / "Dockerfile.dockerignore").read_text().splitlines()
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for name in [line.removeprefix("!") for line in lines if line.startswith("!")]:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, tmp_path / name, ignore=ignored)
        else:
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, tmp_path / name)
    build("build_wheel", tmp_path, tmp_path)
    assert contents(tmp_path) == contents(distributions)


def test_a_package_index_can_show_the_readme(fields):
    text = fields.get_payload()
    assert fields["Description-Content-Type"] == "text/markdown"
    assert text.startswith("# offbeat\n")
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    assert not re.findall(r"\]\((?!https?://)[^)]*\)|<(?:picture|source|img)\b|<!--", prose)
    page = markdown.render(text)
    assert page is not None
    assert not re.findall(r'(?:href|src)="(?!https?://|#user-content-)[^"]*"', page)
    assert page.count("<table>") == len(re.findall(r"^\|[ :|-]*---[ :|-]*$", prose, re.MULTILINE))


@pytest.fixture(scope="module")
def installed(distributions, tmp_path_factory):
    """Folder of the programs of an environment that has the wheel and what it depends on."""
    root = tmp_path_factory.mktemp("installed")
    venv.create(root, with_pip=False, symlinks=True)
    site = Path(sysconfig.get_path("purelib", "venv", {"base": str(root)}))
    link_dependencies(site)
    python = root / "bin" / "python"
    (wheel,) = distributions.glob("*.whl")
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--no-index"]
    # Without --no-deps pip raises if a dependency is missing.
    subprocess.run([*pip, "-q", str(wheel)], env=environment(), check=True)
    return root / "bin"


def link_dependencies(site: Path) -> None:
    """Link the required distributions, and those that they require, into an environment."""
    todo, seen = ["offbeat"], set()
    while todo:
        found = metadata.distribution(todo.pop())
        if found.name in seen:
            continue
        seen.add(found.name)
        needed = [Requirement(text) for text in found.requires or ()]
        todo += [
            need.name
            for need in needed
            if need.marker is None or need.marker.evaluate({"extra": ""})
        ]
        if found.name == "offbeat":
            continue
        for top in {file.parts[0] for file in found.files or ()} - {"..", "__pycache__"}:
            if not (site / top).exists():
                (site / top).symlink_to(Path(str(found.locate_file(top))))


IN_TURN = """
import contextlib, io, json, sys
from offbeat.cli import main

outputs = []
for argv in json.loads(sys.argv[1]):
    with contextlib.redirect_stdout(io.StringIO()) as output:
        code = main(argv)
    assert code == 0, (argv, output.getvalue())
    outputs.append(output.getvalue())
print(json.dumps(outputs))
"""


def test_every_command_works(installed, tmp_path):
    def run(*command: str | Path) -> str:
        done = subprocess.run(
            [installed / command[0], *map(str, command[1:])],
            cwd=tmp_path,
            env=environment(),
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout

    known = ("--profile", str(PROFILE))
    argv = [  # in one process: the start of each takes seconds
        ["--help"],
        ["strategies"],
        ["plan", *known, "--strategy", "dreamddp"],
        ["simulate", *known, "--strategy", "ddp", "--json"],
        ["advise", *known, "--json"],
        ["join", "--help"],  # needs a job that runs
        ["compare", "--help"],  # as `run`, with more runs
        ["demo", "--help"],  # with a script of the package, whose files another test compares
    ]
    text, strategies, plan, *tables, _, _, _ = json.loads(
        run("python", "-c", IN_TURN, json.dumps(argv))
    )
    commands = ("advise", "compare", "demo", "join", "plan", "profile")
    assert all(name in text for name in (*commands, "report", "run", "simulate", "strategies"))
    assert "dreamddp" in strategies
    assert "param" in plan
    assert all(map(json.loads, tables))
    assert run("offbeat", "--version").strip() == __version__

    (tmp_path / "train.py").write_text(SCRIPT)
    here = ("--lab", "none", "--hosts", "1")  # the files of the wheel are what is tested
    known = (*here, "--profile", "profile.json", "--strategy", "bsp")
    argv = [
        ["profile", *here, "-o", "profile.json", "train.py"],
        ["run", *known, "--out", "one", "--json", "train.py"],
        ["report", "one", "--json"],
    ]
    _, ran, reported = json.loads(run("python", "-c", IN_TURN, json.dumps(argv)))
    assert json.loads(ran) == json.loads(reported)
    assert (tmp_path / "one" / "report.html").exists()
