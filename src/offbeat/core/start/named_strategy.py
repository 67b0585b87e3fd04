"""Strategy that a script passes to `prepare`, in a file for the launcher."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NoReturn

from offbeat.core.files import replace_text
from offbeat.core.profile import Profile
from offbeat.core.strategy.interface import Needs, Planned, Strategy
from offbeat.core.strategy.registry import create


@dataclass(frozen=True)
class ScriptStrategy(Planned):
    """Placeholder for a strategy whose class is defined in the script and cannot be imported here.

    It cannot be planned. The run directory contains the executed plan.
    """

    name: str  # type: ignore[misc]
    text: str
    values: dict[str, object]
    citation = "the script"
    needs = Needs(script=True)

    def __str__(self) -> str:
        return self.text

    def settings(self) -> dict[str, object]:
        return self.values

    def schedule(self, profile: Profile) -> NoReturn:
        raise ValueError(f"strategy ({self.text}) must be planned by the script that defines it")

    bound_s = schedule


@dataclass(frozen=True)
class NamedStrategy:
    """Name and settings of the strategy that a script passes to `prepare`.

    Attributes:
        text: strategy as text; None if the script passes none.
        name: name of the strategy that runs without a launcher's choice.
        settings: settings of that strategy.
        own: whether the script defines the class of the strategy.
    """

    text: str | None
    name: str
    settings: dict[str, object]
    own: bool = False

    @property
    def strategy(self) -> Strategy:
        """Strategy that runs without a launcher's choice."""
        if self.own:
            return ScriptStrategy(self.name, self.text or self.name, self.settings)
        return create(self.name, self.settings)

    def save(self, path: str | Path) -> None:
        """Write the file atomically."""
        replace_text(path, json.dumps(asdict(self)))

    @classmethod
    def load(cls, path: Path) -> NamedStrategy | None:
        """Read the file. Return None if it is missing, because the script has not reached
        `prepare`."""
        return cls(**json.loads(path.read_text())) if path.exists() else None
