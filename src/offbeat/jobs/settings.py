"""Settings of a job from its environment: record, metrics, console output and name.

Of a setting with several sources, `offbeat run` and `offbeat compare` take precedence, then the
variable, then the argument of `offbeat.prepare`.
"""

from __future__ import annotations

import os
import re
import socket
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from offbeat.core.start.launch_request import VARIABLE as JOB_VARIABLE
from offbeat.core.start.launchers import LAUNCHERS
from offbeat.core.transport.control import Control
from offbeat.core.units import parse_size

RECORD_VARIABLE = "OFFBEAT_RECORD"  # a folder, or "off"
METRICS_VARIABLE = "OFFBEAT_METRICS"  # sinks, separated by commas
LOG_VARIABLE = "OFFBEAT_LOG"
NAME_VARIABLE = "OFFBEAT_JOB_NAME"
LIMIT_VARIABLE = "OFFBEAT_RECORD_LIMIT"  # largest size of all runs, as 5GB
OFF = "off"
MASK = "***"

LogFormat = Literal["text", "json", "off"]
SinkKind = Literal["prometheus", "tensorboard"]
PACKAGES = {
    "prometheus": "prometheus_client",
    "tensorboard": "tensorboard",
}
PROBES = 3  # ranks with a problem that an error names


class SinkSetting(NamedTuple):
    """One sink of OFFBEAT_METRICS: `tensorboard:DIR` has the target DIR."""

    kind: SinkKind
    target: str


@dataclass(frozen=True)
class JobSettings:
    """Settings of a job.

    Attributes:
        record: folder of the records of all runs; None: no record.
        sinks: destinations of metrics.
        log: format of the console output of rank 0; the only setting that may differ between ranks.
        job_name: label of the job in metrics and records.
        notices: messages about settings that another source overrides.
        record_limit: largest size in bytes of all runs in `record`; None: no limit.
        every: whether every iteration is recorded, in `record` itself, as a launcher wishes.
        record_name: variable or argument that names `record`, for errors.
        metrics_name: variable or argument that names `sinks`, for errors.
    """

    record: str | None
    sinks: tuple[SinkSetting, ...]
    log: LogFormat
    job_name: str
    notices: tuple[str, ...] = ()
    record_limit: int | None = None
    every: bool = False
    record_name: str = RECORD_VARIABLE
    metrics_name: str = METRICS_VARIABLE


def read_settings(
    environment: Mapping[str, str],
    argv: Sequence[str],
    *,
    record: str | Path | None = None,
    metrics: str | None = None,
    launcher_record: str | None = None,
) -> JobSettings:
    """Return the settings of this process.

    Args:
        environment: environment variables.
        argv: command line of the script, as `sys.argv`.
        record: argument of `prepare`.
        metrics: argument of `prepare` if it is a text; a log of the script runs beside the sinks.
        launcher_record: folder in which `offbeat run` or `offbeat compare` records.

    Raises:
        ValueError: a value is invalid.
    """
    folder, notices = choose_record(environment, record, launcher_record)
    variable = environment.get(METRICS_VARIABLE)
    metrics_name = METRICS_VARIABLE if variable else "metrics"
    limit = environment.get(LIMIT_VARIABLE)
    return JobSettings(
        folder,
        parse_sinks(metrics_name, variable or metrics),
        parse_log(environment.get(LOG_VARIABLE)),
        environment.get(NAME_VARIABLE) or default_name(environment, argv),
        notices,
        int(parse_size(limit, LIMIT_VARIABLE)) if limit else None,
        launcher_record is not None,
        RECORD_VARIABLE if environment.get(RECORD_VARIABLE) else "record",
        metrics_name,
    )


def choose_record(
    environment: Mapping[str, str], argument: str | Path | None, launcher_record: str | None
) -> tuple[str | None, tuple[str, ...]]:
    """Return the folder of the record, or None, and notices about values that are not used."""
    sources = {
        "the launcher": launcher_record,
        RECORD_VARIABLE: environment.get(RECORD_VARIABLE) or None,
        "record= of the script": None if argument is None else str(argument),
    }
    given = {source: folder for source, folder in sources.items() if folder}
    if not given:
        return None, ()
    (source, folder), *others = given.items()
    notices = tuple(
        f"{other} ({unused!r}) is not used: {source} "
        + ("turns the record off" if folder == OFF else f"records in {folder}")
        for other, unused in others
        if unused != folder
    )
    return (None if folder == OFF else folder), notices


def parse_sinks(name: str, text: str | None) -> tuple[SinkSetting, ...]:
    """Return the sinks of a text such as "prometheus:9400,tensorboard:runs/tb".

    Args:
        name: name of the variable or argument, for errors.
        text: sinks separated by commas; None or empty: no sinks.

    Raises:
        ValueError: a sink has an unknown kind, no target, or no valid port.
    """
    return tuple(_parse_sink(name, part.strip()) for part in (text or "").split(",") if part)


def _parse_sink(name: str, text: str) -> SinkSetting:
    kind, _, target = text.partition(":")
    if kind not in get_args(SinkKind) or not target:
        raise ValueError(f"{name} ({text!r}) must be prometheus:PORT or tensorboard:DIR")
    if kind == "prometheus":
        port = target.rpartition(":")[2]
        if not port.isdecimal() or not 0 < int(port) < 1 << 16:
            raise ValueError(
                f"{name} ({text!r}) must be prometheus:PORT or prometheus:HOST:PORT with a port "
                "from 1 to 65535"
            )
    return SinkSetting(kind, target)  # type: ignore[arg-type]


def parse_log(text: str | None) -> LogFormat:
    """Return the format of the console output. Raise ValueError for unknown formats."""
    if not text:
        return "text"
    if text not in get_args(LogFormat):
        raise ValueError(f"{LOG_VARIABLE} ({text!r}) must be text, json or off")
    return text  # type: ignore[return-value]


# ---- agreement of all ranks -----------------------------------------------------------------


def require_same_settings(
    settings: JobSettings, environment: Mapping[str, str], control: Control
) -> None:
    """Require equal settings on all ranks and a record folder that every rank can write.

    Args:
        settings: settings of this rank.
        environment: environment variables; a default name of the job may differ between ranks.
        control: connection to all ranks, which must call this function together.

    Raises:
        ValueError: on every rank, if settings differ or a rank cannot use them.
    """
    sinks = ",".join(f"{sink.kind}:{sink.target}" for sink in settings.sinks)
    values = {
        "record": "as the launcher names it" if settings.every else settings.record or OFF,
        "metrics": sinks,
        "job name": environment.get(NAME_VARIABLE, ""),
    }
    text = ", ".join(f"{name} {value!r}" for name, value in values.items())
    variables = f"{RECORD_VARIABLE}, {METRICS_VARIABLE} and {NAME_VARIABLE}"
    remedy = f"set {variables}, or record and metrics of prepare, alike on every host"
    control.agree("the settings of the job", text, remedy)
    if settings.record is None and not settings.sinks:
        return
    denied = None if settings.record is None else find_write_error(settings.record)
    wrong = None
    if control.rank == 0:  # only rank 0 needs the packages
        wrong = find_missing_package(settings.sinks, settings.metrics_name)
    everyone = control.gather([socket.gethostname(), denied, wrong])
    if (error := everyone[0][2]) is not None:
        raise ValueError(error)
    problems = [
        f"rank {rank} ({host}): {problem}"
        for rank, (host, problem, _) in enumerate(everyone)
        if problem is not None
    ]
    if problems:
        more = len(problems) - PROBES
        named = ", ".join(problems[:PROBES]) + (f" and {more} more" if more > 0 else "")
        raise ValueError(
            f"{settings.record_name} ({settings.record!r}) must be a folder that every rank may "
            f"write; {named}. Give another, or {OFF}"
        )


def find_write_error(folder: str) -> str | None:
    """Write a file into a folder, which is created if necessary, and remove the file. Return the
    reason of a failure."""
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"\n")
            file.flush()  # reports a full disk
    except OSError as error:
        return error.strerror or str(error)
    return None


def find_missing_package(sinks: Sequence[SinkSetting], name: str) -> str | None:
    """Return an error about the first sink that needs a package that is not installed. `name` is
    the variable or argument with the sinks."""
    for sink in sinks:
        package = PACKAGES.get(sink.kind)
        if package is not None and find_spec(package) is None:
            return f"{name} ('{sink.kind}:{sink.target}') needs {package}; pip install it"
    return None


# ---- launcher and name ----------------------------------------------------------------------


def launcher_name(environment: Mapping[str, str]) -> str:
    """Return the launcher of this process: "offbeat run", "TrainJob", "torchrun", "Ray", "srun",
    "mpirun", "mpiexec" or "none"."""
    if JOB_VARIABLE in environment:
        return "offbeat run"
    if "TORCHELASTIC_RUN_ID" in environment:
        # Kubeflow passes the options of torchrun by variables with this prefix.
        return "TrainJob" if "PET_NNODES" in environment else "torchrun"
    if "RAY_JOB_ID" in environment and "RAY_RAYLET_PID" in environment:
        return "Ray"
    for names in LAUNCHERS:
        if names.rank in environment:
            return names.launcher
    return "none"


def torchrun_attempt(environment: Mapping[str, str]) -> dict[str, Any] | None:
    """Return the attempt of torchrun that this process belongs to, for run.json: id of the job,
    process of the agent, and number of restarts; None without torchrun."""
    if launcher_name(environment) not in ("torchrun", "TrainJob"):
        return None
    restarts = environment.get("TORCHELASTIC_RESTART_COUNT", "0")
    return {
        "job": environment["TORCHELASTIC_RUN_ID"],
        "agent": f"{socket.gethostname()}:{os.getppid()}",
        "restarts": int(restarts) if restarts.isdecimal() else 0,
    }


def default_name(environment: Mapping[str, str], argv: Sequence[str]) -> str:
    """Return the job's name in SLURM, Kubernetes or torchrun, otherwise the name of the script."""
    if name := environment.get("SLURM_JOB_NAME"):
        return name
    if "KUBERNETES_SERVICE_HOST" in environment:
        # Operators name the pod of rank 0 after the job: JOB-node-0-0 (TrainJob), JOB-master-0.
        address = environment.get("PET_MASTER_ADDR") or environment.get("MASTER_ADDR", "")
        if match := re.match(r"([a-z0-9][a-z0-9-]*?)-(?:node-0-0|master-0)(?:\.|$)", address):
            return match[1]
    run_id = environment.get("TORCHELASTIC_RUN_ID", "none")
    if run_id != "none" and not re.fullmatch(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", run_id):
        return run_id
    if launcher_name(environment) == "Ray":  # its script is Ray's own
        return "ray"
    script = Path(argv[0] if argv else "")
    stem = script.parent.name if script.name == "__main__.py" else script.stem
    return "python" if stem in ("", "-c") else stem


# ---- secrets --------------------------------------------------------------------------------

_SECRET = r"(?:key|token|password|secret|credential|auth)"
_SECRET_OPTION = re.compile(rf"-[^=:\s]*?{_SECRET}[^=:\s]*", re.IGNORECASE)
_SECRET_VALUE = re.compile(
    # The bound of a name keeps the search in a long word linear.
    rf"({_SECRET}[^\s=:]{{0,64}}\s*[=:]\s*)(?!//)\S.*",
    re.IGNORECASE | re.DOTALL,
)
_URL_USER = re.compile(r"(://)(?:[^\s:/@]*:\S*|[^\s/@]*)@")
_OPTION = re.compile(r"--\S|-\D$")  # a longer word after a single dash may be a secret


def mask_secrets(argv: Sequence[str]) -> list[str]:
    """Return a command line without the values of options and variables whose names contain "key",
    "token", "password", "secret", "credential" or "auth", and without users of URLs.

    Too much is masked rather than too little: all words after such an option up to the next option,
    and the rest of a word after such a name and "=" or ":".
    """
    masked, is_value = [], False
    for word in argv:
        if is_value and not _OPTION.match(word):
            masked.append(MASK)
            continue
        is_value = _SECRET_OPTION.fullmatch(word) is not None
        without_user = _URL_USER.sub(rf"\1{MASK}@", word) if "@" in word else word
        masked.append(_SECRET_VALUE.sub(rf"\1{MASK}", without_user))
    return masked
