"""The README as a package index shows it: links and pictures are rewritten by setup.py."""

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = "https://example.org/offbeat/{}/v1.2.3/"
CASES = {
    "[docs](docs/lab.md#pace)": (
        "[docs](https://example.org/offbeat/blob/v1.2.3/docs/lab.md#pace)",
        "docs",
    ),
    "[above](#try-it)": (
        "[above](https://example.org/offbeat/blob/v1.2.3/README.md#try-it)",
        "above",
    ),
    "![a table](docs/a.png)": (
        "![a table](https://example.org/offbeat/raw/v1.2.3/docs/a.png)",
        "*a table*",
    ),
    "[![build](docs/b.svg)](docs/ci.md)": (
        "[![build](https://example.org/offbeat/raw/v1.2.3/docs/b.svg)]"
        "(https://example.org/offbeat/blob/v1.2.3/docs/ci.md)",
        "*build*",
    ),
    '<picture>\n<source media="(dark)" srcset="d.svg">\n<img src="l.svg" alt="Bars">\n</picture>': (
        "![Bars](https://example.org/offbeat/raw/v1.2.3/l.svg)",
        "*Bars*",
    ),
    "<!-- not run: it\nneeds a GPU -->\nText": ("Text", "Text"),
    "[torch](https://pytorch.org) and f(x) [1]": ("[torch](https://pytorch.org) and f(x) [1]",) * 2,
    "```\n[a](b)\n```\n[a](b)": (
        "```\n[a](b)\n```\n[a](https://example.org/offbeat/blob/v1.2.3/b)",
        "```\n[a](b)\n```\na",
    ),
}


@pytest.fixture(scope="module")
def build():
    """setup.py as a module. It calls `setup` only as the main program."""
    spec = importlib.util.spec_from_file_location("offbeat_setup", ROOT / "setup.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("text", CASES)
def test_relative_links_and_pictures(build, text):
    with_source, without = CASES[text]
    assert build.render_readme(text, FILES) == with_source
    assert build.render_readme(text, None) == without


def test_the_address_of_the_files(build, tmp_path, monkeypatch):
    monkeypatch.setattr(build, "ROOT", tmp_path)
    project = tmp_path / "pyproject.toml"
    project.write_text('[project]\nname = "a"\n')
    assert build.source_url("1.2.3") is None
    project.write_text('[project.urls]\nSource = "https://example.org/offbeat/"\n')
    assert build.source_url("1.2.3") == FILES
