"""Types of the promised names: complete, as pyright reads them in an installed package."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from cases.promised import promised

# These follow from the type of another symbol, which has a message of its own if it is promised.
DERIVED = ("No docstring found", "is partially unknown")


@pytest.fixture(scope="module")
def symbols() -> dict[str, dict[str, Any]]:
    """All symbols of the package with the complaints about their types, by full name."""
    # pyright looks for the package with the Python that is first on the path.
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    command = ["-m", "pyright", "--verifytypes", "offbeat", "--ignoreexternal", "--outputjson"]
    done = subprocess.run(
        [sys.executable, *command],
        env=os.environ | {"PATH": path, "PYRIGHT_PYTHON_IGNORE_WARNINGS": "1"},
        capture_output=True,
        text=True,
    )
    report = json.loads(done.stdout)
    assert not report["generalDiagnostics"], report["generalDiagnostics"]
    return {symbol["name"]: symbol for symbol in report["typeCompleteness"]["symbols"]}


def owners() -> Iterator[str]:
    """Yield the full names of the promised names, where they are defined, and of base classes."""
    for module, name in promised():
        yield f"{module}.{name}"
        thing = getattr(import_module(module), name)
        for part in thing.__mro__ if isinstance(thing, type) else [thing]:
            home = str(getattr(part, "__module__", ""))
            if home.startswith("offbeat"):
                yield f"{home}.{part.__qualname__}"


@pytest.mark.timeout(400)  # half a minute of processor time
def test_types_of_promised_names(symbols: dict[str, dict[str, Any]]) -> None:
    """Each name and each public attribute has a type that all type checkers infer alike."""
    names = set(owners())
    assert not sorted(names - set(symbols))
    assert not [
        f"{name}: {complaint['message']}"
        for name, symbol in symbols.items()
        if name in names or any(name.startswith(f"{owner}.") for owner in names)
        for complaint in symbol["diagnostics"]
        if not any(words in complaint["message"] for words in DERIVED)
    ]
