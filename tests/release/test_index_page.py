"""The README as a package index shows it: setup.py rewrites links and pictures."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
FILES = "https://example.org/offbeat/{}/v1.2.3/"
BLOB, RAW = (FILES.format(kind) for kind in ("blob", "raw"))
CASES = [  # README, page with an address of the files, page without one
    ("[docs](docs/lab.md#pace)", f"[docs]({BLOB}docs/lab.md#pace)", "docs"),
    ("[above](#try-it)", f"[above]({BLOB}README.md#try-it)", "above"),
    ("![a table](docs/a.png)", f"![a table]({RAW}docs/a.png)", "*a table*"),
    ("[![b](b.svg)](ci.md)", f"[![b]({RAW}b.svg)]({BLOB}ci.md)", "*b*"),
    (
        '<picture>\n<source srcset="d.svg">\n<img src="l.svg" alt="Bars">\n</picture>',
        f"![Bars]({RAW}l.svg)",
        "*Bars*",
    ),
    ("<!-- not run: it\nneeds a GPU -->\nText", "Text", "Text"),
    ("[t](https://pytorch.org) and f(x) [1]", *2 * ("[t](https://pytorch.org) and f(x) [1]",)),
    ("```\n[a](b)\n```\n[a](b)", f"```\n[a](b)\n```\n[a]({BLOB}b)", "```\n[a](b)\n```\na"),
]


@pytest.fixture(scope="module")
def build() -> ModuleType:
    """setup.py as a module. It calls `setup` only as the main program."""
    spec = importlib.util.spec_from_file_location("offbeat_setup", ROOT / "setup.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_relative_links_and_pictures(build):
    for text, with_source, without in CASES:
        assert build.render_readme(text, FILES) == with_source
        assert build.render_readme(text, None) == without


def test_the_address_of_the_files(build, tmp_path, monkeypatch):
    monkeypatch.setattr(build, "ROOT", tmp_path)
    project = tmp_path / "pyproject.toml"
    project.write_text('[project]\nname = "a"\n')
    assert build.source_url("1.2.3") is None
    project.write_text('[project.urls]\nSource = "https://example.org/offbeat/"\n')
    assert build.source_url("1.2.3") == FILES
