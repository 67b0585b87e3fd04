"""Output of `offbeat advise`, and the strategies of `offbeat compare --strategies advised`."""

from __future__ import annotations

import shlex
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from offbeat.cli import texts
from offbeat.cli.sweep import align_columns
from offbeat.core.profile import Profile
from offbeat.core.profile.elsewhere import network_rate_bps
from offbeat.core.strategy.interface import require_choice
from offbeat.core.strategy.parsing import pairs, parse_value, text_of
from offbeat.experiments.advice import Advice, Option, advise, describe_change
from offbeat.experiments.report.table import wrap

if TYPE_CHECKING:
    from offbeat.experiments.compare import Contestant, Outcome, Setup

SHOWN = 12  # largest number of options in the table; the JSON output has all options
MEGA = 1e6
DEFAULT_LINK = "net"  # name of the only link of a cluster that is given by options, not by a file
MEASURES = ("change", "staleness", "iteration_s", "update_s")  # fields in the JSON output
COLUMNS = ("", "ms per update", "MB", "stale", "mathematics")
NARROW_COLUMNS = ("", "ms", *COLUMNS[2:])
MARKS = (
    "* advised: the gentlest strategy that is nearly as fast as the fastest one",
    "+ also worth comparing on your model",
    "ms per update: predicted; MB: sent by a host per iteration",
    "stale: iterations until a gradient has reached all hosts; DDP's 0",
    "mathematics: same numbers as DDP, averaged (rarely), late, or lossy (encoded)",
)


def advice_text(advice: Advice, command: str, compute: str | None, width: int) -> str:
    """Return the text of `offbeat advise`: table of options, advice, notes, compare command.

    If a line of the table is longer than `width`, the last column names only the kind of change.
    Lines of the command break between options.
    """
    shown = list(advice.options[:SHOWN])
    shown += [option for option in advice.compared if option not in shown]
    left = len(advice.options) - len(shown)
    table = _table([COLUMNS, *(_row(o, advice, describe_change(o)) for o in shown)])
    if any(len(line) > width for line in table):
        table = _table([NARROW_COLUMNS, *(_row(o, advice, o.change) for o in shown)])
    lines = table + [f"and {left} more that are slower (--json has all)"] * (left > 0)
    chosen = advice.chosen
    notes = [f"advised: {text_of(chosen.strategy)} ({describe_change(chosen)})"]
    notes += [f"note: {note}" for note in (*advice.notes, *filter(None, [compute]))]
    notes.append("losses are not predicted; compare on your model:")
    for text in ("", *MARKS, "", *notes):
        lines += wrap(text, width, "  ") or [""]
    return "\n".join([*lines, *_command_lines(command, width)])


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return lines with aligned columns, except for the last one."""
    numbers = align_columns([row[:-1] for row in rows]).splitlines()
    return [f"{a}  {row[-1]}" for a, row in zip(numbers, rows, strict=True)]


def _row(option: Option, advice: Advice, change: str) -> list[str]:
    mark = "*" if option == advice.chosen else "+" if option in advice.compared else " "
    name = f"{mark} {text_of(option.strategy)}"
    numbers = [f"{1e3 * option.update_s:.4g}", f"{option.bytes / MEGA:.3g}"]
    return [name, *numbers, str(option.staleness), change]


def _command_lines(command: str, width: int) -> list[str]:
    """Return a shell command on one line, or with an option per line if it is too long."""
    if len(command) + 2 <= width:
        return [f"  {command}"]
    return f"  {command}".replace(" --", " \\\n    --").splitlines()


def compare_command(
    advice: Advice, profile: Profile, file: Path, device_speed: str | None = None
) -> str:
    """Return the command that compares the advised options on the cluster of `profile`.

    It reuses the profile in `file`. `--hosts` and `--rate` can describe one link without delay;
    other clusters need a cluster file.
    """
    names = ",".join(text_of(option.strategy) for option in advice.compared)
    place = _place(profile) or ["--cluster", "cluster.toml"]
    place += ["--profile", str(file)]
    place += ["--device-speed", device_speed] if device_speed else []
    return shlex.join(["offbeat", "compare", *place, "--strategies", names, "train.py"])


def _place(profile: Profile) -> list[str] | None:
    from offbeat.lab.units import MAX_RATE_BPS, MIN_RATE_BPS, format_rate

    link, hosts = profile.default_link, ["--hosts", str(profile.world_size)]
    uneven = profile.pace and (profile.rank_scale or profile.rank_jitter or profile.jitter)
    plain = link.name == DEFAULT_LINK and not link.asked_latency_s and not link.asked_loss
    if len(profile.links) > 1 or uneven or not plain:
        return None
    if profile.world_size < 2:
        return hosts
    rate_bps = network_rate_bps(link, profile.world_size)
    if not MIN_RATE_BPS <= rate_bps <= MAX_RATE_BPS:
        return hosts
    return [*hosts, "--rate", format_rate(round(float(f"{rate_bps:.3g}")))]


def to_dict(advice: Advice, command: str) -> dict[str, Any]:
    """Return the JSON output of `offbeat advise`."""
    return {
        "command": command,
        "advised": text_of(advice.chosen.strategy),
        "compared": [text_of(option.strategy) for option in advice.compared],
        "notes": list(advice.notes),
        "options": [
            {
                "strategy": text_of(option.strategy),
                **{name: getattr(option, name) for name in MEASURES},
                "bytes_per_iteration": option.bytes,
            }
            for option in advice.options
        ],
    }


# --- compare -------------------------------------------------------------------------------------


@contextmanager
def open_profile(
    setup: Setup, given: Path | None, *, stderr: bool
) -> Iterator[tuple[Path | None, Outcome]]:
    """Yield the path of the given or a newly measured profile, and the outcome of the measurement.

    The path is None if the measurement has failed. A new profile is deleted on exit.
    """
    from offbeat.experiments.compare import Outcome, Progress, measure_profile

    if given is not None:
        texts.require_file(given, "measure one with `offbeat profile`")
        yield given, Outcome(given.parent)
        return
    with tempfile.TemporaryDirectory(prefix="offbeat-advised-") as folder:
        path = Path(folder, "profile.json")
        outcome = measure_profile(setup, path, Progress(stderr=stderr))
        yield (path if outcome.measured else None), outcome


def advised_contestants(
    profile: Profile, asked: str, settings: Sequence[str]
) -> tuple[Contestant, ...]:
    """Return the advised contestants for a profile.

    `asked` is "advised", possibly with a setting: "advised:max_staleness=19".
    """
    limit = pairs(asked.split(":")[1:])
    for name in limit:
        require_choice("setting of advised", name, ("max_staleness",))
    known = {name: parse_value(name, value, int) for name, value in limit.items()}
    advice = advise(profile, **known)
    names = ",".join(text_of(option.strategy) for option in advice.compared)
    return texts.contestants(names, settings)
