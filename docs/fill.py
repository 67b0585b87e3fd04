"""Fill the generated parts of the pages from the code.

    python docs/fill.py            all pages and pictures
    python docs/fill.py PAGE ...   these pages

A marker is a comment alone on a line. The generated text follows it, up to `<!-- /generated -->`:

    <!-- output: offbeat plan --profile example.json --strategy bsp -->   a command and its output
    <!-- picture: dreamddp:period=3 -->     simulated timeline of a strategy, in pictures/
    <!-- settings: dreamddp -->             settings, from the dataclass
    <!-- source: dreamddp -->               names and publication
    <!-- strategies -->                     table of all strategies
    <!-- names: offbeat.plan -->            table of a module's public names, with links
    <!-- series -->                         table of the series of Prometheus

A new marker needs no end: this script adds it. Tables of results are filled by `make tables`.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from _views import DOCS, PICTURES, VIEWS, drawn, file_name

END = "<!-- /generated -->\n"
MARKER = re.compile(
    rf"^<!-- (?!parsed:)(\w+)(?:: (.*?))? -->\n(?:(?:(?!<!-- ).*\n)*?{END})?", re.MULTILINE
)
SHOWN = re.compile(r"^<!-- picture: (.*?) -->$", re.MULTILINE)


def filled(text: str, page: Path) -> str:
    """Return the text of a page with its generated parts made anew."""
    root = "../" * (len(page.relative_to(DOCS).parts) - 1)

    def part(found: re.Match[str]) -> str:
        view, argument = found.groups()
        marker = found.group().partition("\n")[0]
        if view not in VIEWS:
            raise ValueError(f"{page.name}: {marker}: views are {', '.join(VIEWS)}")
        try:
            made = VIEWS[view](argument).replace("](pictures/", f"]({root}pictures/")
        except (ValueError, TypeError, KeyError, AssertionError) as error:
            raise ValueError(f"{page.name}: {marker}: {error}") from error
        return f"{marker}\n\n{made}\n{END}"

    return MARKER.sub(part, text)


def pages() -> list[Path]:
    """Return all pages that have markers of this script."""
    return [page for page in sorted(DOCS.rglob("*.md")) if MARKER.search(page.read_text())]


def pictures() -> dict[str, str]:
    """Return the content of `pictures/`: SVG files by name."""
    texts = {text for page in pages() for text in SHOWN.findall(page.read_text())}
    return {file_name(text): drawn(text)[0] for text in sorted(texts)}


def main(names: list[str]) -> None:
    """Write pages, and with all pages their pictures."""
    for page in [Path(name).resolve() for name in names] or pages():
        page.write_text(filled(page.read_text(), page))
    if not names:
        PICTURES.mkdir(exist_ok=True)
        made = pictures()
        for file in PICTURES.glob("*.svg"):
            if file.name not in made:
                file.unlink()
        for name, picture in made.items():
            (PICTURES / name).write_text(picture)


if __name__ == "__main__":
    main(sys.argv[1:])
