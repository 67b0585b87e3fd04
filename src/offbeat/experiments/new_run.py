"""Files of a new run: its folder, run.json, and the conditions for resuming it."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from offbeat.core.files import replace_text, require_schema
from offbeat.core.profile import Profile
from offbeat.experiments.comparison import NO_LIMIT_S, Comparison, Contestant
from offbeat.experiments.profile_for_network import ConvertedProfile
from offbeat.experiments.record.run_directory import SCHEMA
from offbeat.lab import Lab, NoLab

SKIP = 2  # first iterations of a repetition that are not measured; rounded up to whole periods
# fields of run.json that are equal in an interrupted run and in the one that resumes it
SETTINGS_OF_A_RUN = (
    *("script", "contestants", "seeds", "repetitions", "cluster", "lab", "links", "servers"),
    *("target_loss", "target", "options", "rehearsed", "iterations"),
)


def default_run_dir(script: str, prefix: str = "") -> Path:
    """Return runs/<UTC time>-<prefix><script's stem or module>, a path that does not exist yet."""
    stamp = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
    name = Path(script).name
    base = Path("runs") / f"{stamp}-{prefix}{name.removesuffix('.py')}"
    names = [base, *(base.with_name(f"{base.name}-{n}") for n in range(2, 1000))]
    return next(path for path in names if not path.exists())


def require_unused_directory(run_dir: Path) -> None:
    """Raise ValueError if a folder is not empty."""
    if run_dir.exists() and (not run_dir.is_dir() or any(run_dir.iterdir())):
        raise ValueError(f"run directory ({run_dir}) must be new or empty; choose another --out")


def read_record(run_dir: Path, kind: str = "comparison") -> dict[str, Any]:
    """Return run.json of an interrupted run.

    Raises:
        ValueError: the folder has none, or one of another kind; a rehearsal has `rehearsed`.
    """
    path = run_dir / "run.json"
    record = json.loads(path.read_text()) if path.is_file() else None
    if record is None or bool(record.get("rehearsed")) != (kind == "rehearsal"):
        raise ValueError(
            f"run directory ({run_dir}) must hold the run.json of an interrupted {kind}; leave "
            "--resume out to begin one"
        )
    require_schema(record.get("schema"), SCHEMA, path)
    return record


def require_same(record: dict[str, Any], before: dict[str, Any], run_dir: Path) -> None:
    """Raise ValueError unless two runs have the same settings.

    The resumed run may have further repetitions, whose seeds follow those of the interrupted run.
    """
    now, was = map(_settings_in, (json.loads(json.dumps(record)), before))
    seeds = was.get("seeds", [])
    if not now["contestants"]:  # named by the script, and known only later
        was.pop("contestants", None)
    if now["seeds"][: len(seeds)] == seeds:
        was |= {"seeds": now["seeds"], "repetitions": now["repetitions"]}
    for name in now:
        if name in was and now[name] != was[name]:
            raise ValueError(
                f"{name} ({json.dumps(now[name])}) must be that of {run_dir} "
                f"({json.dumps(was[name])}); repeat the command that began it and add --resume, or "
                "begin another run"
            )


def _settings_in(record: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of a run by name."""
    settings = {name: record[name] for name in SETTINGS_OF_A_RUN if name in record}
    return settings | settings.pop("options", {})


def require_same_profile(given: ConvertedProfile | None, known: Path) -> None:
    """Raise ValueError unless the given profile is the one in the run directory."""
    if given is not None and given.profile.to_dict() != Profile.load(known).to_dict():
        raise ValueError(
            f"profile ({given.file}) must be {known}, from which the interrupted run was planned; "
            "leave --profile out, or begin another run"
        )


def changed_limits(record: dict[str, Any], before: dict[str, Any]) -> list[str]:
    """Return a remark on each limit of time that differs from the interrupted run's."""
    was = before.get("limits", {})
    return [
        f"{name} is {_limit_text(now)}; it was {_limit_text(was[name])} in the repetitions that "
        "are kept"
        for name, now in record["limits"].items()
        if was.get(name, now) != now
    ]


def _limit_text(seconds: float) -> str:
    return "unlimited" if seconds == NO_LIMIT_S else f"{seconds:g} s"


def describe(
    script: Sequence[str],
    contestants: Iterable[Contestant],
    seeds: Sequence[int],
    command: Sequence[str],
    target_loss: float | None,
) -> dict[str, Any]:
    """Return the fields of run.json that all runs have."""
    return {
        "schema": SCHEMA,
        "command": list(command),
        "script": list(script),
        "versions": {
            "offbeat": metadata.version("offbeat"),
            "torch": _installed_version("torch"),
            "python": platform.python_version(),
            "kernel": platform.release(),
        },
        "cpus": os.cpu_count(),
        "seeds": list(seeds),
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "contestants": contestant_entries(contestants),
        "repetitions": len(seeds),
        "target_loss": target_loss,
    }


def describe_run(comparison: Comparison, lab: Lab | NoLab) -> dict[str, Any]:
    """Return run.json of a comparison."""
    setup, target = comparison.setup, comparison.target
    return {
        **describe(
            setup.script,
            comparison.contestants or (),
            comparison.seeds,
            comparison.command,
            comparison.target_loss,
        ),
        "cluster": setup.cluster.record(),
        "links": list(setup.links),
        "servers": setup.servers,
        "lab": "netns" if setup.shaped else "none",
        "note": lab.note,
        "emulated": False,
        "congestion_control": lab.congestion_control,
        "seed": setup.seed,
        "target": target and dict(zip(("name", "value"), target, strict=True)),
        "skip": SKIP,
        "options": {
            "pace": setup.pace,
            "min_bucket_bytes": setup.min_bucket_bytes,
            "device_speed": comparison.device and asdict(comparison.device),
        },
        "limits": {"timeout_s": setup.timeout_s, "wait_s": setup.wait_s},
        **comparison.facts,
    }


def contestant_entries(contestants: Iterable[Contestant]) -> list[dict[str, Any]]:
    """Return the contestants as JSON types."""
    return [
        {
            "label": c.label,
            "strategy": c.strategy.name,
            "settings": c.strategy.settings(),
            "arguments": list(c.arguments),
        }
        for c in contestants
    ]


def _installed_version(package: str) -> str | None:
    """Return the version of an installed package without importing it."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def write_json(path: Path, data: Mapping[str, Any]) -> None:
    """Replace a JSON file."""
    replace_text(path, json.dumps(data, indent=1))
