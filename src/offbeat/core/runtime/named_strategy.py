"""The strategy that a script names: written by the runtime, read by the launcher."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from offbeat.core.files import write_text
from offbeat.core.plan import Plan
from offbeat.core.profile import Profile
from offbeat.core.strategy.interface import Strategy
from offbeat.core.strategy.registry import create


@dataclass(frozen=True)
class ScriptStrategy(Strategy):
    """Stands for a strategy whose class the script defines, of which only its processes have it.

    It has no plan here. The plan that has run is in the folder of the run.
    """

    name: str  # type: ignore[misc]
    text: str
    values: dict[str, object]
    citation = "the script"

    def __str__(self) -> str:
        return self.text

    def settings(self) -> dict[str, object]:
        return self.values

    def schedule(self, profile: Profile) -> Plan:
        raise ValueError(f"strategy ({self.text}) must be planned by the script that defines it")

    def bound_s(self, profile: Profile) -> float:
        raise ValueError(f"strategy ({self.text}) must be planned by the script that defines it")


@dataclass(frozen=True)
class NamedStrategy:
    """`text`: the strategy that the script passes to `prepare`, None if it passes none. `strategy`:
    the one that runs without a launcher's choice. `own`: whether the script defines its class."""

    text: str | None
    name: str
    settings: dict[str, object]
    own: bool = False

    @property
    def strategy(self) -> Strategy:
        if self.own:
            return ScriptStrategy(self.name, self.text or self.name, self.settings)
        return create(self.name, self.settings)

    def save(self, path: str | Path) -> None:
        """Write the file in one move."""
        draft = Path(path).with_suffix(".part")
        draft.parent.mkdir(parents=True, exist_ok=True)
        data = {"text": self.text, "name": self.name, "settings": self.settings, "own": self.own}
        write_text(draft, json.dumps(data))
        draft.replace(path)

    @classmethod
    def load(cls, path: Path) -> NamedStrategy | None:
        """None without a file: the script has not reached `prepare`."""
        return cls(**json.loads(path.read_text())) if path.exists() else None
