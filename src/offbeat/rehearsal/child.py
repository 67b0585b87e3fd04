"""Process that rehearses a script under one strategy: `python -m offbeat.rehearsal.child FILE`."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from contextvars import ContextVar
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from offbeat.core.files import replace_text
from offbeat.core.profile import Profile
from offbeat.core.strategy.registry import create
from offbeat.core.transport.topology import Topology
from offbeat.jobs.reported import set_receiver
from offbeat.rehearsal.clock import simulate_run
from offbeat.rehearsal.distributed import GROUP, ScriptGroup, replace_functions
from offbeat.rehearsal.job import topology_of, train_replicas
from offbeat.rehearsal.records import write_records
from offbeat.rehearsal.rehearse import curve_of
from offbeat.rehearsal.replica import EndOfRehearsal, Replica
from offbeat.rehearsal.script import ScriptState, code_of, run_script

COUNT, CURVE = "iterations.txt", "curve.json"  # in the folder of a repetition
COUNT_EVERY_S = 0.5
MUST_PREPARE = "it must call offbeat.prepare(model, optimizer) and train some iterations"


@dataclass(frozen=True)
class Assignment:
    """Rehearsal of one strategy with one seed.

    Attributes:
        script: script or module with its arguments.
        strategy: name of the strategy, or `module:Class`.
        settings: settings of the strategy.
        profile: file of the profile of the job.
        iterations: iterations after which the script is ended; None: at its own end.
        seed: OFFBEAT_SEED; replica k starts with the random streams of seed `seed + k`.
        contestant: folder of the strategy.
        repetition: folder of the repetition.
    """

    script: tuple[str, ...]
    strategy: str
    settings: Mapping[str, Any]
    profile: str
    iterations: int | None
    seed: int
    contestant: str
    repetition: str

    def save(self, path: Path) -> None:
        """Write the assignment as JSON."""
        path.write_text(json.dumps(asdict(self)))

    @classmethod
    def load(cls, path: str | Path) -> Assignment:
        """Read the result of `save`."""
        data = json.loads(Path(path).read_text())
        return cls(**{**data, "script": tuple(data["script"])})


_replica: ContextVar[Replica] = ContextVar("replica")


def rehearse_script(assignment: Assignment) -> None:
    """Rehearse a script and write records and curve into the folder of the repetition.

    Raises:
        BaseException: the first error of a replica.
    """
    folder = Path(assignment.repetition)
    strategy = create(assignment.strategy, assignment.settings)
    profile = Profile.load(assignment.profile)
    topology = topology_of(profile)
    code, attributes = code_of(assignment.script)
    replace_functions()
    set_receiver(lambda name, value: _replica.get().recorder.add_metric(name, value))
    count = _IterationCount(folder / COUNT)
    with ExitStack() as files:
        states = [
            ScriptState(
                assignment.seed + rank,
                _environ(rank, assignment, topology),
                assignment.script,
                files.enter_context((folder / f"rank{rank}.log").open("w", buffering=1)),
            )
            for rank in range(topology.ranks)
        ]

        def live(replica: Replica) -> None:
            _replica.set(replica)
            group = ScriptGroup(replica.rank, replica.ranks, replica.exchange)
            GROUP.set(group)
            replica.on_prepared = group.init_process_group
            if replica.rank == 0:
                replica.recorder.on_iteration = count.write
            if assignment.iterations is not None:
                replica.last_iteration = assignment.iterations
            with suppress(EndOfRehearsal):
                run_script(code, attributes, states[replica.rank].main)
            if replica.session is None:
                raise ValueError(f"{assignment.script[0]} never prepared a model; {MUST_PREPARE}")

        streams = sys.stdout, sys.stderr
        try:
            run = train_replicas(
                live,
                strategy,
                profile,
                seed=assignment.seed,
                states=states,
            )
        finally:
            sys.stdout, sys.stderr = streams
    if not run.logs[0].losses:
        raise ValueError(f"{assignment.script[0]} trained no iteration; {MUST_PREPARE}")
    clock = simulate_run(run, strategy, profile, seed=assignment.seed)
    write_records(run, clock, str(strategy), Path(assignment.contestant), folder)
    curve = curve_of(strategy, run, profile, seed=assignment.seed)
    replace_text(folder / CURVE, json.dumps(curve.to_dict()))


def _environ(rank: int, assignment: Assignment, topology: Topology) -> dict[str, str]:
    """Return the variables that a launcher sets for a rank on a host for its replica."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(topology.ranks),
        "LOCAL_RANK": str(topology.member_of(rank)),
        "LOCAL_WORLD_SIZE": str(len(topology.node_of(rank))),
        "GROUP_RANK": str(topology.replica_of(rank)),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500",
        "OFFBEAT_SEED": str(assignment.seed),
    }


class _IterationCount:
    """File with the number of iterations, written at most every `COUNT_EVERY_S` seconds."""

    def __init__(self, path: Path) -> None:
        self._path, self._due_s = path, 0.0

    def write(self, iterations: int) -> None:
        now_s = time.monotonic()
        if now_s >= self._due_s:
            self._due_s = now_s + COUNT_EVERY_S
            replace_text(self._path, str(iterations))


def main(argv: list[str], run: Callable[[Assignment], None] = rehearse_script) -> None:
    """Rehearse the assignment of a file."""
    run(Assignment.load(argv[1]))


if __name__ == "__main__":
    main(sys.argv)
