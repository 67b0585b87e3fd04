"""Tables of claims: what five papers publish and what this project obtained.

    python benchmarks/papers/claims.py

`claims.toml` holds the claims; its figures in braces are cells of results. Commands come from the
results, minutes from the index benchmarks/README.md. Writes results/claims.json.
"""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Callable
from decimal import ROUND_HALF_UP, Decimal
from functools import cache
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # modules that benchmarks share

import tables

HERE = Path(__file__).parent
PAPERS = {
    "dreamddp": "DreamDDP",
    "deft": "DeFT",
    "cyclic": "Cyclic data parallelism",
    "selsync": "SelSync",
    "a2cid2": "A2CiD2",
}
COLUMNS = ["claim", "published", "here", "why they differ"]
NOT_RUN = "not run"

load: Callable[[str], dict[str, Any]] = cache(tables.load)


def cells(address: str) -> list[Any]:
    """Return the cells at RESULT|TABLE|ROW|COLUMN, one per row that matches.

    Args:
        address: ROW is a list of cells of the row, separated by ";"; empty for all rows.

    Raises:
        ValueError: no cell matches.
    """
    name, wanted, row, column = address.split("|")
    table = next((t for t in load(name)["tables"] if t["name"] == wanted), None)
    if table is None or column not in table["columns"]:
        raise ValueError(f"{address}: there is no such table or column")
    place = table["columns"].index(column)
    keys = {*filter(None, row.split(";"))}
    found = [cell[place] for cell in table["rows"] if keys <= {*map(str, cell)}]
    if not found:
        raise ValueError(f"{address}: no row matches")
    return found


def cell(address: str) -> Any:
    """Return the only cell at an address."""
    found = cells(address)
    if len(found) > 1:
        raise ValueError(f"{address}: {len(found)} rows match")
    return found[0]


def number(value: Any) -> Decimal:
    """Return a cell's number, or its median."""
    return Decimal(str(value[0] if isinstance(value, list) else value))


def figure(text: str) -> str:
    """Return the text of a figure in braces: a cell, a range or a quotient."""
    if text.startswith("range:"):
        values = sorted(number(value) for value in cells(text.removeprefix("range:")))
        return f"{values[0]} to {values[-1]}" if values[0] != values[-1] else str(values[0])
    if " // " in text:
        over, under = (number(cell(address)) for address in text.split(" // "))
        return str((over / under).quantize(Decimal("0.01"), ROUND_HALF_UP))
    return tables.cell_text(cell(text))


def filled(text: str) -> str:
    """Return a text with its figures."""
    return re.sub(r"\{([^{}]+)\}", lambda found: figure(found[1]), text)


def minutes() -> dict[str, str]:
    """Return the minutes of each script, as the index has them."""
    index = (tables.HERE / "README.md").read_text()
    rows = re.findall(r"^\| `([\w/]+\.py)` \|[^|]*\|[^|]*\|([^|]*)\|", index, re.MULTILINE)
    return {script: took.strip() for script, took in rows}


def row_of(claim: dict[str, Any]) -> list[str]:
    """Return one row of a table of claims."""
    sources, how = claim["from"], f"*{claim['how']}*"
    if (claim["how"] == NOT_RUN) != (not sources):
        raise ValueError(f"{claim['claim']}: a claim that was run names its results, and only it")
    links = ", ".join(f"[{name}](benchmarks.md#{name})" for name in sources)
    here = f"{how}: {filled(claim['here'])} ({links})" if sources else how
    return [claim["claim"], claim["published"], here, filled(claim["why"])]


def commands(claims: list[dict[str, Any]]) -> list[list[str]]:
    """Return the results of some claims, each with its minutes and its command."""
    took = minutes()
    rows = []
    for name in dict.fromkeys(name for claim in claims for name in claim["from"]):
        command = load(name)["command"]
        script = re.findall(r"benchmarks/([\w/]+\.py)", command)[0]
        rows.append([f"[{name}](benchmarks.md#{name})", took[script], f"`{command}`"])
    return rows


def result() -> dict[str, Any]:
    """Return the result `claims`."""
    claims = tomllib.loads((HERE / "claims.toml").read_text())
    return {
        "title": "Claims of five papers",
        "what": "What the papers publish beside what was obtained here. Figures here are cells of the results that a row names.",  # noqa: E501
        "how": ["measured", "emulated", "simulated", "predicted"],
        "date": "2026-11-20 to 24",
        "machine": "2 cores (x86-64 virtual machine); see the results",
        "command": "python benchmarks/papers/claims.py",
        "tables": [
            table
            for name, title in PAPERS.items()
            for table in (
                {
                    "name": name,
                    "title": f"Claims of {title}",
                    "columns": COLUMNS,
                    "rows": [row_of(claim) for claim in claims[name]],
                },
                {
                    "name": f"{name}-commands",
                    "title": f"Commands of the results beside {title}",
                    "columns": ["result", "minutes", "command"],
                    "rows": commands(claims[name]),
                },
            )
        ],
        "misses": [],
        "notes": [],
    }


if __name__ == "__main__":
    tables.save("claims", result())
