"""Choice of a job's strategy among launcher, environment and script, its fit to the job, and the
file that tells a launcher the script's strategy."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from offbeat.core.files import replace_text, write_or_warn
from offbeat.core.profile import Profile
from offbeat.core.start.launch_request import (
    JOIN_VARIABLE,
    STRATEGY_VARIABLE,
    LaunchRequest,
    current_join_request,
)
from offbeat.core.strategy.interface import Needs, Planned, Strategy
from offbeat.core.strategy.parsing import parse
from offbeat.core.strategy.registry import create, is_registered
from offbeat.core.transport.job_place import current_place

if TYPE_CHECKING:
    from offbeat.core.transport.topology import Topology

DEFAULT_STRATEGY = "wfbp"


def choose_strategy(
    strategy: Strategy | str | None, job: LaunchRequest
) -> tuple[Strategy, str | None]:
    """Return the strategy to run, and a notice if it is not the script's.

    If the launcher requests it, also write the script's strategy to a file.
    """
    script = parse(strategy) if isinstance(strategy, str) else strategy
    if script is not None and not isinstance(script, Strategy):
        raise ValueError(
            f"strategy ({script!r}) must be a strategy, or its name and settings as "
            "'dreamddp:period=8'"
        )
    if job.save_strategy is not None:
        _save_strategy(script, job, job.save_strategy)
    requested = os.environ.get(STRATEGY_VARIABLE)
    if job.strategy is not None:
        chosen, by = create(job.strategy, job.settings), "the launcher"
    elif requested:
        chosen, by = parse(requested), STRATEGY_VARIABLE
    else:
        return script if script is not None else create(DEFAULT_STRATEGY), None
    if script is None or script == chosen or job.stop_after_profile:
        return chosen, None
    return chosen, f"{by} selects {chosen}, so {script} of the script is not used"


def _save_strategy(script: Strategy | None, job: LaunchRequest, path: str) -> None:
    """On rank 0, write the strategy that would run without the launcher's choice, for the
    launcher."""
    chosen, _ = choose_strategy(script, replace(job, strategy=None, save_strategy=None))
    if "RANK" not in os.environ or current_place()[0] == 0:
        text = None if script is None else str(script)
        named = NamedStrategy(text, chosen.name, chosen.settings(), not is_registered(chosen))
        write_or_warn(named.save, path, "strategy", needed=job.stop_after_strategy)
    if job.stop_after_strategy:
        raise SystemExit(0)


def require_fitting_strategy(strategy: Strategy, job: LaunchRequest) -> None:
    """Raise ValueError if a strategy does not support an option of the launcher or the
    environment."""
    if current_join_request() is not None and not strategy.needs.allows_joining:
        raise ValueError(
            f"strategy ({strategy}) must be the job's, one of gossip, where {JOIN_VARIABLE} is "
            "set; name it in the script, or as in `offbeat join --strategy a2cid2`"
        )
    if job.checkpoint is not None and strategy.needs.no_checkpoint is not None:
        raise ValueError(strategy.needs.no_checkpoint)


def require_fitting_topology(strategy: Strategy, topology: Topology) -> None:
    """Raise ValueError on every rank if replicas have several ranks and the strategy has a session
    of its own, which supports one rank per replica only, or if it requires early updates and the
    model is sharded."""
    if topology.sharded and isinstance(strategy, Planned) and strategy.requires_early_updates:
        raise ValueError(
            f"strategy ({strategy}) must not require updates in backward where the model is "
            "sharded (fully_shard), because FSDP gathers weights at moments of its own; use "
            "average='before_update', or leave average out"
        )
    supports = type(strategy).open is Planned.open or strategy.needs.nodes
    if not topology.is_flat and not supports:
        raise ValueError(
            f"strategy ({strategy}) must be one with a plan where replicas have several ranks "
            f"({topology.source}: {topology}), because its workers exchange whole models at times "
            "of their own, and the ranks of a replica train in step; use one such as dreamddp or "
            "wfbp, or leave mesh and nodes out, so that every rank trains a replica of its own"
        )


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
