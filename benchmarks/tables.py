"""Tables of all results, made from the files in benchmarks/results.

    python benchmarks/tables.py               writes benchmarks/tables.md and the tables of pages
    python benchmarks/tables.py paced demo    prints the tables of these results

A result is a JSON file; benchmarks/README.md describes its keys. Pages of docs/ show a table
between `<!-- table RESULT TABLE -->` and `<!-- /generated -->`, its misses and notes after
`<!-- notes RESULT -->`, and the list of all results after `<!-- list results -->`. Scripts that
measure write a result with `save`.
"""

from __future__ import annotations

import json
import os
import platform
import re
import sys
from decimal import Decimal
from importlib.metadata import version
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
RESULTS = HERE / "results"
PAGE_NAMES = ("benchmarks", "choosing", "claims", "scale")
PAGES = tuple(HERE.parent / "docs" / f"{name}.md" for name in PAGE_NAMES)
ALL_TABLES = HERE / "tables.md"
GENERATED = re.compile(
    r"(<!-- (table|list|notes) ([\w -]+) -->\n).*?(<!-- /generated -->)", re.DOTALL
)


def load(name: str) -> dict[str, Any]:
    """Return a result; numbers are decimals, which keep the digits of the file."""
    text = (RESULTS / f"{name}.json").read_text()
    result = json.loads(text, parse_float=Decimal)
    for table in result["tables"]:
        for row in table["rows"]:
            if len(row) != len(table["columns"]):
                raise ValueError(f"{name}, {table['name']}: {row} has another number of columns")
    return result


def save(name: str, result: dict[str, Any]) -> None:
    """Write a result with one row, note or miss per line."""
    (RESULTS / f"{name}.json").write_text(_as_json(result) + "\n")


def machine() -> str:
    """Return the cores and the software of this machine, for a result."""
    kernel = ".".join(platform.release().split(".")[:2])
    return (
        f"{os.cpu_count()} cores ({platform.machine()}), {platform.system()} {kernel}, Python "
        f"{platform.python_version()}, torch {version('torch')} on CPU, gloo"
    )


def names() -> list[str]:
    """Return the names of all results."""
    return sorted(path.stem for path in RESULTS.glob("*.json"))


def table_text(result: dict[str, Any], table: dict[str, Any], *, selected: bool) -> str:
    """Return a table with its caption; `selected`: only the rows and columns of `page`."""
    columns, rows = table["columns"], table["rows"]
    chosen = table.get("page", {}) if selected else {}
    if "rows" in chosen:
        by_name = {cell_text(row[0]): row for row in rows}
        rows = [by_name[name] for name in chosen["rows"]]
    if "columns" in chosen:
        places = [columns.index(name) for name in chosen["columns"]]
        columns = [columns[place] for place in places]
        rows = [[row[place] for place in places] for row in rows]
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    lines += [f"| {' | '.join(map(cell_text, row))} |" for row in rows]
    drawn = "\n".join(lines)
    how = table.get("how", result["how"])
    facts = [f"*{', '.join(how)}*", table.get("spread"), table.get("date", result["date"])]
    return f"{table['title']} ({'; '.join(fact for fact in facts if fact)}):\n\n{drawn}\n"


def result_text(name: str) -> str:
    """Return a result as a section of Markdown: method, tables, misses and notes."""
    result = load(name)
    parts = [f"## {name}: {result['title']}\n", f"{result['what']}\n", f"`{result['command']}`\n"]
    parts += [f"{result['date']}; {result['machine']}\n"]
    parts += [table_text(result, table, selected=False) for table in result["tables"]]
    return "\n".join([*parts, *remark_texts(result)])


def remark_texts(result: dict[str, Any]) -> list[str]:
    """Return the misses and the notes of a result as lists of Markdown."""
    titles = {"misses": "Missed", "notes": "Notes"}
    lists = ((title, result[key]) for key, title in titles.items())
    return [
        "\n".join([f"{title}:\n", *(f"- {text}" for text in texts)]) + "\n"
        for title, texts in lists
        if texts
    ]


def list_text() -> str:
    """Return a list of all results, each with an anchor."""
    lines = []
    for name in names():
        result = load(name)
        how = ", ".join(result["how"])
        lines.append(f'- <span id="{name}"></span>**{name}**: {result["title"]} (*{how}*)')
    return "\n".join(lines) + "\n"


def page_text(text: str) -> str:
    """Return a page with its generated parts made anew."""

    def made(found: re.Match[str]) -> str:
        start, kind, words, end = found.groups()
        if kind == "list":
            return f"{start}\n{list_text()}\n{end}"
        name, *wanted = words.split()
        texts = list[str]()  # none if it is not measured yet
        if name in names() and kind == "notes":
            texts = ["\n".join(remark_texts(load(name)))]
        elif name in names():
            result = load(name)
            tables = (table for table in result["tables"] if [table["name"]] == wanted)
            texts = [table_text(result, table, selected=True) for table in tables]
        return "".join([start, *(f"\n{text}\n" for text in texts), end])

    return GENERATED.sub(made, text)


def cell_text(value: Any) -> str:
    """Return a number, a text, nothing, or a median with its spread as text."""
    if value is None:
        return "–"
    if isinstance(value, list):
        median, least, most = value
        return f"{median} [{least}, {most}]"
    return str(value)


def _as_json(value: Any, depth: int = 0, *, per_line: bool = False) -> str:
    inside, outside = "\n" + " " * (depth + 1), "\n" + " " * depth
    if isinstance(value, dict):
        items = [
            f"{json.dumps(key)}: {_as_json(item, depth + 1, per_line=key in LONG)}"
            for key, item in value.items()
        ]
        return f"{{{inside}{f',{inside}'.join(items)}{outside}}}"
    if isinstance(value, list):
        items = [_as_json(item, depth + 1) for item in value]
        if per_line and items:
            return f"[{inside}{f',{inside}'.join(items)}{outside}]"
        return f"[{', '.join(items)}]"
    return str(value) if isinstance(value, Decimal) else json.dumps(value, ensure_ascii=False)


LONG = {"tables", "rows", "notes", "misses"}


def main(argv: list[str]) -> None:
    """Print the results that are named; without names write all tables, and the pages."""
    if argv:
        print("\n".join(result_text(name) for name in argv))
        return
    ALL_TABLES.write_text("\n".join(result_text(name) for name in names()))
    for page in PAGES:
        page.write_text(page_text(page.read_text()))


if __name__ == "__main__":
    main(sys.argv[1:])
