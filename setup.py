"""Build step: the version, and the README as a package index shows it.

A package index serves the README alone. It resolves no relative link, and removes `<picture>`.
If `[project.urls]` of pyproject.toml has `Source`, links lead to the tag of the version there.
Without `Source`, relative links become text, and images their description.
"""

import re
import tomllib
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).parent
FENCE = re.compile(r"^(```.*?^```[^\n]*\n)", re.MULTILINE | re.DOTALL)
COMMENT = re.compile(r"^<!--.*?-->\n", re.MULTILINE | re.DOTALL)
PICTURE = re.compile(r"<picture>.*?(<img\b[^>]*>).*?</picture>", re.DOTALL)
IMG = re.compile(r"<img\b[^>]*>")
ATTRIBUTE = re.compile(r'\b(src|alt)="([^"]*)"')
LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^()\s]+)\)")
ABSOLUTE = re.compile(r"[a-z][a-z0-9+.-]*:")


def read_version() -> str:
    """Return the version that `offbeat/__init__.py` states."""
    text = (ROOT / "src" / "offbeat" / "__init__.py").read_text(encoding="utf-8")
    (version,) = re.findall(r'^__version__ = "(.+)"$', text, re.MULTILINE)
    return version


def source_url(version: str) -> str | None:
    """Return the address of the version's files, up to "blob" or "raw"; None without `Source`."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    source = tomllib.loads(text)["project"].get("urls", {}).get("Source")
    return source and f"{source.rstrip('/')}/{{}}/v{version}/"


def render_readme(text: str, files: str | None) -> str:
    """Return Markdown without relative links and `<picture>`.

    Args:
        text: the README.
        files: address of the version's files, with `{}` for "blob" (pages) and "raw" (images);
            None removes links and images.
    """
    parts = FENCE.split(text)
    parts[::2] = [_render_prose(part, files) for part in parts[::2]]
    return "".join(parts)


def _render_prose(text: str, files: str | None) -> str:
    text = PICTURE.sub(r"\1", COMMENT.sub("", text))
    text = IMG.sub(_markdown_image, text)
    return LINK.sub(lambda found: _rewrite_link(*found.groups(), files), text)


def _markdown_image(found: re.Match[str]) -> str:
    attributes = dict(ATTRIBUTE.findall(found[0]))
    return f"![{attributes.get('alt', '')}]({attributes['src']})"


def _rewrite_link(mark: str, label: str, target: str, files: str | None) -> str:
    if not mark:  # the label may be an image
        label = LINK.sub(lambda found: _rewrite_link(*found.groups(), files), label)
    if ABSOLUTE.match(target):
        return f"{mark}[{label}]({target})"
    if files is None:
        return f"*{label}*" if mark and label else label
    path = f"README.md{target}" if target.startswith("#") else target
    return f"{mark}[{label}]({files.format('raw' if mark else 'blob')}{path})"


if __name__ == "__main__":
    VERSION = read_version()
    README = (ROOT / "README.md").read_text(encoding="utf-8")
    setup(
        version=VERSION,
        long_description=render_readme(README, source_url(VERSION)),
        long_description_content_type="text/markdown",
    )
