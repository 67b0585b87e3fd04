"""The strategy that a script names: written by the runtime, read by the launcher."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from offbeat.files import write_text
from offbeat.strategies import Strategy, create, methods


@dataclass(frozen=True)
class Named:
    """`text`: the strategy that the script passes to `prepare`, None if it passes none. `strategy`:
    the one that runs without a launcher's choice; ValueError if it is not one of offbeat's."""

    text: str | None
    name: str
    settings: dict[str, object]

    @property
    def strategy(self) -> Strategy:
        if self.name not in methods():
            raise ValueError(
                f"strategy ({self.name}) of the script must be one of offbeat's to be predicted; "
                "start the script with torchrun, or choose another one with --strategy"
            )
        return create(self.name, self.settings)

    def save(self, path: str | Path) -> None:
        """Write the file in one move."""
        draft = Path(path).with_suffix(".part")
        draft.parent.mkdir(parents=True, exist_ok=True)
        data = {"text": self.text, "name": self.name, "settings": self.settings}
        write_text(draft, json.dumps(data))
        draft.replace(path)

    @classmethod
    def load(cls, path: Path) -> Named | None:
        """None without a file: the script has not reached `prepare`."""
        return cls(**json.loads(path.read_text())) if path.exists() else None
