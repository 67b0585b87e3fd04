"""Plain language: places that need a second reading, counted by room; no count may grow.

`OFFBEAT_REWRITE_GOLDENS=1` writes the counts anew, for when they have shrunk.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest
from support.language import PROSE, found, functions, sentences_of, unnamed

ROOT = Path(__file__).parents[1]
COUNTS = Path(__file__).parent / "golden" / "language.json"
PAGES = "docs"


def count_places() -> dict[str, list[int]]:
    """Return by room the flagged sentences and the flagged names of functions."""
    counts: dict[str, list[int]] = {}
    for path in sorted((ROOT / "src" / "offbeat").rglob("*.py")):
        room = path.parent.relative_to(ROOT / "src" / "offbeat").as_posix()
        entry = counts.setdefault(room, [0, 0])
        entry[0] += len([*found(path)])
        entry[1] += sum(unnamed(name) for _, name in functions(path))
    pages = [*ROOT.glob("*.md"), ROOT / "benchmarks" / "README.md", *(ROOT / "docs").rglob("*.md")]
    counts[PAGES] = [sum(len([*found(path)]) for path in pages), 0]
    return counts


@pytest.mark.skipif(not (ROOT / "benchmarks" / "tables.py").exists(), reason="not a checkout")
def test_no_room_gets_harder_to_read() -> None:
    counts = count_places()
    if os.environ.get("OFFBEAT_REWRITE_GOLDENS"):
        COUNTS.write_text(json.dumps(counts, indent=1) + "\n")
    allowed = json.loads(COUNTS.read_text())
    worse = {
        room: f"{now} flagged (sentences, names), {allowed.get(room, [0, 0])} allowed"
        for room, now in counts.items()
        if any(n > most for n, most in zip(now, allowed.get(room, [0, 0]), strict=True))
    }
    assert not worse


def test_patterns_flag_and_spare() -> None:
    """One place per pattern, and plain sentences that no pattern may flag."""
    flagged = {
        "person for a program part": "Wait for whoever still computes.",
        "verb of people for a program state": "The plan says when a message leaves.",
        "pronoun without its noun": "What is due at the step is waited for.",
        "number or time without its name": "A rank that is silent for so long is lost.",
    }
    for kind, sentence in flagged.items():
        assert re.search(PROSE[kind], sentence), sentence
    for sentence in (
        "Return the predicted seconds of one message on a link.",
        "Rank 0 hosts the store until every other rank has exited.",
    ):
        assert not any(re.search(pattern, sentence) for pattern in PROSE.values())
    assert unnamed("_so_many")
    assert unnamed("taken")
    assert not unnamed("release_messages")
    assert sentences_of("One. Two.") == ["One.", "Two."]
