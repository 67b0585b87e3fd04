"""Jobs whose members are killed, join and leave: correctness, hours under disturbances, and cost.

    python benchmarks/members.py kills --out runs/members [--runs 60] [--minutes 15] [--per-node 2]
        [--seed 1] [--place update] [--codecs]
    python benchmarks/members.py joins --out runs/members [--runs 20] [--minutes 5] [--codecs]
    python benchmarks/members.py chaos --out runs/members [--minutes 30]
    python benchmarks/members.py cost --out runs/members [--repetitions 5]
    python benchmarks/members.py tables --out runs/members

`kills`: three processes on the loopback train a model of float64; one is killed with SIGKILL in
forward, in backward, in a message, at a boundary, while another member leaves or a process joins,
with `--place update` in an update, alone or together with the membership service, or only the
service is killed. The service starts again with its journal 1 s later. Wanted: all survivors end
within the limit and read all samples; after the kill each has its next iteration within `timeout_s`
+ 3 s; all weights of all iterations equal `members_equations.py` with the messages that the service
has recorded as landed. `joins`: a process joins; its weights must be those of a member bit for bit,
and the members have equal bits after the next average of each bucket. With `--codecs` the averages
of three of the strategies are encoded, and the others are left out. With `--per-node 2` the
members of both are nodes of two ranks; a rank of one is killed, and the other one must end with an
error that names it. `chaos`: hosts of the lab whose processes are killed and start again, cuts and
changing rates, then the same job undisturbed. `cost`: longest time without an iteration of the
other members when one leaves, dies or joins, by size of the model, and the same with torchft if it
is installed.

A finished case is a line of a file in `--out` and is not repeated. `tables` writes
`results/members.json` from these files and those of other seeds and places in folders of `--out`,
with the lines of `notes.txt` as notes. `kills` and `joins` need no quiet machine, the others do.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import importlib.util
import itertools
import json
import math
import multiprocessing
import os
import random
import re
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np
from members_equations import (
    LAYERS,
    WIDTH,
    Flat,
    Reference,
    averages_first,
    lost_batches,
    profile,
)
from members_worker import BATCH, SECRET, train, train_long, train_wide
from tables import machine, save

from offbeat import Strategy
from offbeat.core.plan import INSIDE, base_link
from offbeat.core.plan.program import Program
from offbeat.elastic.profile import for_members
from offbeat.membership import Epoch, MembershipClient
from offbeat.plan import Transfer
from offbeat.strategies import create

TIMEOUT_S = 10.0
ALLOWED_S = TIMEOUT_S + 3  # from a kill to the next iteration of each survivor
LIMIT_S = 90.0  # longest case, per rank of a member
BACK_S = 1.0  # from a kill of the service to its next start
FIRST = 3  # members at the start
PER_NODE = (1, 2)  # ranks of a member
SIZE = FIRST * BATCH * 40  # samples per rank of a member: 40 iterations without a change
NEAR = 1e-12
# SelSync votes only in the first iteration of a process, as no change exceeds this threshold.
CASES: dict[str, dict[str, Any]] = {
    "local-sgd": {"period": 3},
    "dreamddp": {"period": 3},
    "partial-sync": {"period": 3},
    "diloco": {"period": 3},
    "selsync": {"delta": 1e9, "max_period": 4},
    "wfbp": {},
    "p3": {"slice_elements": 40},
    "bytescheduler": {"partition_elements": 40},
}
CODED: dict[str, dict[str, Any]] = {
    "local-sgd": {"wire": "int4"},
    "diloco": {"wire": "sign"},
    "selsync": {"wire": "powersgd:1"},
}
PLACES = ("forward", "backward", "message", "message", "boundary", "leave", "join", "service")
COST_BYTES = (1e6, 1e7, 1e8)
COST_STRATEGIES = ("wfbp", "local-sgd:period=4")
EVENTS = ("leave", "join", "death")


# ---- one job ----------------------------------------------------------------------------------


class Service:
    """Process of the membership service of one job, with a journal.

    Args:
        folder: folder of journal, secret and number of the process.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        (folder / "secret").write_text(SECRET)
        (folder / "secret").chmod(0o600)
        self._reserved = socket.socket()  # so that no connection of this host gets the port
        self._reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._reserved.bind(("127.0.0.1", 0))
        self._port = self._reserved.getsockname()[1]
        self.address = f"127.0.0.1:{self._port}"
        self.starts = 0
        self.start()

    def start(self) -> None:
        options = {"--port": self._port, "--journal": "journal", "--secret": "secret"}
        arguments = [str(part) for option in options.items() for part in option]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "offbeat", "membership", "--host", "127.0.0.1", *arguments],
            cwd=self._folder,
            stdout=subprocess.DEVNULL,
            stderr=(self._folder / "service.log").open("ab"),
        )
        self._ended_s: float | None = None
        self.starts += 1
        (self._folder / "service.pid").write_text(str(self._process.pid))

    def keep(self) -> None:
        """Start the service again, `BACK_S` after it was killed."""
        if self._process.poll() is None:
            return
        if self._ended_s is None:
            self._ended_s = time.monotonic()
        elif time.monotonic() > self._ended_s + BACK_S:
            self.start()

    def epochs(self) -> list[Epoch]:
        """Return all epochs; at most the newest 16 are kept."""
        if self._process.poll() is not None:
            self.start()
        client = MembershipClient(self.address, SECRET.encode(), 20.0)
        newest = client.state().epoch
        count = 0 if newest is None else newest.number + 1
        found = [client.epoch(number) for number in range(count)]
        client.close()
        return [epoch for epoch in found if epoch is not None]

    def close(self) -> None:
        self._reserved.close()
        self._process.kill()
        self._process.wait()


@contextmanager
def service(folder: Path) -> Iterator[Service]:
    """Yield a running membership service."""
    one = Service(folder)
    try:
        yield one
    finally:
        one.close()


def context() -> Any:
    """Return a context whose processes are forked from one that has torch and offbeat."""
    # The server of the forks does not get the path of this process.
    paths = [str(Path(__file__).resolve().parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)
    found = multiprocessing.get_context("forkserver")
    found.set_forkserver_preload(
        ["torch", "torch._dynamo", "offbeat.core.runtime.prepare", "members_worker"]
    )
    return found


def run_case(case: dict[str, Any], how: Any) -> dict[str, Any]:
    """Run a case, and compare it with the equations."""
    per_node = per_node_of(case)
    members = FIRST + ("join_at" in case)
    with tempfile.TemporaryDirectory() as name, service(Path(name)) as membership:
        folder = Path(name)
        job = {
            "folder": name,
            "case": case,
            "first": FIRST,
            "per_node": per_node,
            "ports": free_ports(members),
            "address": membership.address,
            "size": SIZE * per_node,
            "timeout_s": TIMEOUT_S,
        }
        processes = {
            who: how.Process(target=train, args=(job, who), daemon=True)
            for who in range(members * per_node)
        }
        for process in processes.values():
            process.start()
        hanging = _await_ends(processes, membership, folder, case)
        killed = (folder / "killed").exists()
        found: dict[str, Any] = {"hanging": hanging, "killed": killed}
        found["errors"] = errors = _texts(_unexpected_errors(folder, case))
        found["orphans"] = _texts({*folder.glob("error*")} - {*_unexpected_errors(folder, case)})
        found["codes"] = [process.exitcode for process in processes.values()]
        if hanging or errors:
            tails = {p.name: p.read_text(errors="replace")[-1500:] for p in folder.glob("log*")}
            return {**found, "logs": tails, "verdict": "hangs" if hanging else "error"}
        found["starts of the service"] = membership.starts
        try:
            found |= Examination(case, folder, membership.epochs()).result()
        except (KeyError, IndexError, ValueError) as error:
            return {**found, "verdict": f"the records do not fit: {error!r}"}
        return {**found, "verdict": _verdict(case, found)}


def per_node_of(case: dict[str, Any]) -> int:
    """Return the number of ranks of each member in a case."""
    return case.get("per_node", 1)


def free_ports(count: int) -> list[int]:
    """Return free ports, which are below those of outgoing connections."""
    draw, found = random.SystemRandom(), list[int]()
    while len(found) < count:
        port = draw.randrange(20000, 32000)
        with socket.socket() as sock, contextlib.suppress(OSError):
            sock.bind(("127.0.0.1", port))
            found.append(port)
    return found


def _unexpected_errors(folder: Path, case: dict[str, Any]) -> list[Path]:
    """Return the errors of processes, without those of ranks whose member has lost a rank."""
    per_node, victim, orphans = per_node_of(case), case.get("victim"), set[str]()
    if victim is not None and case["place"] != "service" and (folder / "killed").exists():
        first = victim // per_node * per_node
        orphans = {f"error{who}" for who in range(first, first + per_node)}
    return [path for path in sorted(folder.glob("error*")) if path.name not in orphans]


def _texts(paths: Iterable[Path]) -> dict[str, str]:
    """Return the ends of files by their names."""
    return {path.name: path.read_text()[-1500:] for path in sorted(paths)}


def _await_ends(
    processes: dict[int, BaseProcess], membership: Service, folder: Path, case: dict[str, Any]
) -> list[int]:
    """Wait until all processes have ended. Return those that had to be killed."""
    end_s = time.monotonic() + LIMIT_S * per_node_of(case)
    try:
        while any(process.is_alive() for process in processes.values()):
            membership.keep()
            if time.monotonic() > end_s or _unexpected_errors(folder, case):
                break
            time.sleep(0.02)
        if _unexpected_errors(folder, case):
            time.sleep(0.5)  # the others may report, too
            return []
        return [who for who, process in processes.items() if process.is_alive()]
    finally:
        for process in processes.values():
            process.kill()
            process.join()


def _verdict(case: dict[str, Any], found: dict[str, Any]) -> str:
    """Return "right", or what is wrong first."""
    if case.get("victim") is not None and not found["killed"]:
        return "nothing was killed"
    if "join_at" in case and case.get("place") is None and not found["joined"]:
        return "nobody has joined"
    checks = {
        "weights differ from the equations": found["difference"] > NEAR,
        "samples are read twice": found["twice"] > 0,
        "samples are left out": found["unread"] > FIRST * per_node_of(case),
        "late": found["gap_s"] > ALLOWED_S,
        "a joining process has other weights": found["joined bits"] is False,
        "bits differ after an average": found["average bits"] is False,
        "a rank of the killed member ends without a reason": not all(
            re.search("has failed|has ended", text) for text in found["orphans"].values()
        ),
    }
    return next((text for text, is_wrong in checks.items() if is_wrong), "right")


class Examination:
    """Comparison of what the processes of a case have recorded with the equations.

    Args:
        case: the case.
        folder: files of the processes.
        epochs: epochs as the service has recorded them.
    """

    def __init__(self, case: dict[str, Any], folder: Path, epochs: Sequence[Epoch]) -> None:
        self._case, self._folder, self._epochs = case, folder, epochs
        self._per_node, self._size = per_node_of(case), SIZE * per_node_of(case)
        self._strategy: Strategy = create(case["strategy"], case["settings"])
        names = dict.fromkeys(name for epoch in epochs for name in epoch.members)
        self._number_of = {name: min(member, FIRST) for member, name in enumerate(names)}
        self._batches = dict(self._read_batches())
        self._records = {
            who: self._read_weights(f"weights{who}")
            for member in {*self._number_of.values()}
            for who in self._processes_of(member)
        }

    def _processes_of(self, member: int) -> range:
        return range(member * self._per_node, (member + 1) * self._per_node)

    def _read_batches(self) -> Iterator[tuple[tuple[int, int], list[int]]]:
        members = {*self._number_of.values()}
        for who in (who for member in members for who in self._processes_of(member)):
            path = self._folder / f"batches{who}"
            for line in path.read_text().splitlines() if path.exists() else ():
                t, batch = json.loads(line)
                yield (who, t), batch

    def _read_weights(self, name: str) -> Any:
        path, width = self._folder / name, 2 + LAYERS * (WIDTH * WIDTH + WIDTH)
        content = path.read_bytes() if path.exists() else b""
        whole = len(content) // (8 * width)
        return np.frombuffer(content[: 8 * width * whole]).reshape(whole, width)

    def result(self) -> dict[str, Any]:
        """Return everything that is compared."""
        difference = min(self._difference(united=True), self._difference(united=False))
        lost = lost_batches(self._epochs, self._number_of, self._batches, self._per_node)
        read = Counter(i for key, b in self._batches.items() if key not in lost for i in b)
        landed = [e.details["landed"] for e in self._epochs if "landed" in e.details]
        return {
            "epochs": [[len(e.members), e.first_iteration] for e in self._epochs],
            "changes": [
                {name: e.details.get(name) for name in ("lost_from", "united", "landed")}
                for e in self._epochs
            ],
            "difference": difference,
            "compared": sum(map(len, self._records.values())),
            "twice": sum(count - 1 for count in read.values()),
            "unread": self._size - len(read),
            "dealt again": sum(len(self._batches[key]) for key in lost),
            "missing results": sum(len(one["missing"]) for each in landed for one in each.values()),
            "gap_s": self._gap_s(),
            **self._joined(),
        }

    def _difference(self, *, united: bool) -> float:
        """Return the largest difference of a weight from the equations, of all survivors, and of
        the killed member as far as its training was not lost."""
        stop = 1 + max(t for _, t in self._batches)
        reference = Reference(
            self._strategy, self._epochs, self._number_of, self._batches, stop, self._size,
            united=united, per_node=self._per_node,
        )  # fmt: skip
        gone = {self._number_of[n] for n in self._number_of if not self._is_last_member(n)}
        lost = [e.details["lost_from"] for e in self._epochs if "lost_from" in e.details]
        least = min([*lost, *(e.first_iteration - 1 for e in self._epochs[1:])], default=stop)
        largest = 0.0
        for who, rows in self._records.items():
            member = who // self._per_node
            for row in rows:
                t = int(row[0])
                if member in gone and t >= least:
                    continue
                right = np.concatenate(reference.weights[member, t])
                largest = max(largest, float(np.abs(right - row[2:]).max()))
        return largest

    def _is_last_member(self, name: str) -> bool:
        return name in self._epochs[-1].members

    def _gap_s(self) -> float:
        """Return the longest time from an iteration to the next one after the kill."""
        path = self._folder / "killed"
        killed_s = float(path.read_text() or 0) if path.exists() else 0.0
        gaps, victim = [0.0], self._case.get("victim")
        lost = None if victim is None else victim // self._per_node
        for who, rows in self._records.items():
            if who // self._per_node != lost or self._case["place"] == "service":
                times = rows[:, 1].tolist()
                gaps += [b - a for a, b in pairwise(times) if b > killed_s]
        return round(max(gaps), 3)

    def _joined(self) -> dict[str, Any]:
        """Compare the bits of a process that has joined with those of the members."""
        new = self._processes_of(FIRST)
        firsts = [self._read_weights(f"joined{who}") for who in new]
        if not all(len(one) and len(self._records.get(who, one))
                   for who, one in zip(new, firsts, strict=True)):  # fmt: skip
            return {"joined": False, "joined bits": None, "average bits": None}
        begin = int(firsts[0][0, 0])
        epoch = next(e for e in reversed(self._epochs) if e.first_iteration == begin)
        others = [
            who for name in epoch.members for who in self._processes_of(self._number_of[name])
        ]
        bits = [self._row(who, begin - 1) for who in others if who not in new]
        bits = [row[2:].tobytes() for row in bits if row is not None]
        same = [one[0, 2:].tobytes() == row for one in firsts for row in bits]
        alike = list[bool]()
        if self._case.get("place") is None:  # nothing else happens
            facts = for_members(profile(FIRST, self._per_node), len(epoch.members))
            plan = self._strategy.plan(facts)
            program = Program(plan)
            # No record has the weights between an average and a later update.
            count = 0 if averages_first(plan) else plan.prologue + 2 * plan.period
            for t in range(begin, begin + count):
                flats = [self._flat(who, t) for who in others]
                for transfer in program.transfers(t - begin):
                    if transfer.when is None and base_link(transfer.link) != INSIDE:
                        alike.append(len({_content(transfer, flat) for flat in flats}) == 1)
        return {
            "joined": True,
            "joined bits": bool(same) and all(same),
            "average bits": all(alike) if alike else None,
        }

    def _row(self, who: int, t: int) -> Any:
        rows = self._records[who]
        return next((row for row in rows if row[0] == t), None)

    def _flat(self, who: int, t: int) -> Flat:
        if (row := self._row(who, t)) is None:
            raise KeyError((who, t))
        return np.split(row[2:], LAYERS)


def _content(transfer: Transfer, flat: Flat) -> bytes:
    """Return the bytes of the weights that a message averages, or whose gradients it averages."""
    joined = np.concatenate([flat[b] for b in transfer.payload.buckets])
    return joined[transfer.payload.slice_of(joined.size)].tobytes()


# ---- kills and joins --------------------------------------------------------------------------


def settings_of(*, codecs: bool) -> dict[str, dict[str, Any]]:
    """Return the settings of the strategies by their names."""
    return {name: CASES[name] | more for name, more in CODED.items()} if codecs else CASES


def kill_cases(
    runs: int, seed: int, per_node: int, at: str | None = None, *, codecs: bool = False
) -> list[dict[str, Any]]:
    """Return the cases of `kills`, each with all random draws.

    Args:
        runs: number of cases.
        seed: seed of the draws.
        per_node: number of ranks of each member.
        at: place of all kills; None for all places in turn.
        codecs: whether averages are encoded.
    """
    draw, found = random.Random(seed), list[dict[str, Any]]()
    settings = settings_of(codecs=codecs)
    strategies = [*settings]
    for n in range(runs):
        place = at or PLACES[(n // len(strategies) + n) % len(PLACES)]
        case: dict[str, Any] = {
            "number": n,
            "seed": seed,
            "per_node": per_node,
            "strategy": strategies[n % len(strategies)],
            "place": place,
            "victim": draw.randrange(FIRST * per_node),
            "iteration": draw.randrange(4, 14),
            "layer": draw.randrange(LAYERS),
            "skip": 0,
            "delay_s": draw.choice([0.0, draw.uniform(0, 0.002)]),
            "service": place == "service" or draw.random() < 0.2,
        }
        if place in ("message", "update"):
            case["skip"] = draw.randrange(6)
        elif place == "leave":
            case |= {"leaver": draw.randrange(FIRST), "leave_at": case["iteration"]}
            case["delay_s"] = draw.choice([0.0, draw.uniform(0, 0.02)])
        elif place == "join":
            case |= {"join_at": case["iteration"], "victim": draw.randrange((FIRST + 1) * per_node)}
            case["delay_s"] = draw.choice([0.0, draw.uniform(0, 0.05)])
            case["skip"] = draw.randrange(2)
        case["settings"] = settings[case["strategy"]]
        found.append(case)
    return found


def join_cases(
    runs: int, seed: int, per_node: int, *, codecs: bool = False
) -> list[dict[str, Any]]:
    """Return the cases of `joins`."""
    draw, settings = random.Random(seed), settings_of(codecs=codecs)
    strategies = [*settings]
    return [
        {
            "number": n,
            "seed": seed,
            "per_node": per_node,
            "strategy": strategies[n % len(strategies)],
            "settings": settings[strategies[n % len(strategies)]],
            "place": None,
            "join_at": draw.randrange(2, 16),
            "service": False,
        }
        for n in range(runs)
    ]


def run_cases(name: str, cases: Sequence[dict[str, Any]], options: argparse.Namespace) -> None:
    """Run the cases that are not in the file of `--out`, as far as there is time."""
    path = file_of(options.out, name, options.per_node)
    end_s = time.monotonic() + 60 * options.minutes
    done = {one["case"]["number"] for one in read(path)}
    how = context()
    for case in cases:
        if case["number"] in done or options.only not in (None, case["number"]):
            continue
        if time.monotonic() > end_s:
            print("the time is over; the same command goes on")
            break
        begun_s = time.monotonic()
        found = run_case(case, how)
        line = {"case": case, "s": round(time.monotonic() - begun_s, 1), **found}
        with path.open("a") as file:
            file.write(f"{json.dumps(line)}\n")
        what = case.get("place") or "join"
        print(f"{case['number']:3} {case['strategy']:13} {what:8} {found['verdict']}: "
              f"{found.get('epochs')} {found.get('difference', math.nan):.1e}, "
              f"{found.get('gap_s')} s, {line['s']} s in all", flush=True)  # fmt: skip
    lines = read(path)
    print(Counter(line["verdict"] for line in lines))


def file_of(out: Path, name: str, per_node: int) -> Path:
    """Return the file with the results of `kills` or `joins`."""
    return out / (f"{name}.jsonl" if per_node == 1 else f"{name}-{per_node}-per-node.jsonl")


def read(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a file of results."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


# ---- cost -------------------------------------------------------------------------------------


def cost(options: argparse.Namespace) -> None:
    """Measure the time without an iteration when a member leaves, dies or joins."""
    path = options.out / "cost.jsonl"
    done = {tuple(one["key"]) for one in read(path)}
    libraries = ["offbeat"]
    if importlib.util.find_spec("torchft") is not None:
        libraries.append("torchft")
    else:
        print("torchft is not installed, so only offbeat is measured")
    how = context()
    for repetition in range(options.repetitions):
        for size_bytes in options.sizes or COST_BYTES:
            for strategy in COST_STRATEGIES:
                for library in libraries:
                    key = (library, strategy, size_bytes, repetition)
                    if key in done:
                        continue
                    found = _cost_of(library, strategy, size_bytes, how)
                    with path.open("a") as file:
                        file.write(f"{json.dumps({'key': key, **found})}\n")
                    print(*key, found, flush=True)


def _cost_of(library: str, strategy: str, size_bytes: float, how: Any) -> dict[str, Any]:  # noqa: C901
    """Run one job in which a member leaves, another one joins, and one is killed."""
    with tempfile.TemporaryDirectory() as name, service(Path(name)) as membership:
        folder, lighthouse = Path(name), None
        if library == "torchft":
            from torchft.coordination import LighthouseServer  # pyright: ignore[reportMissingImports]

            lighthouse = LighthouseServer(bind="[::]:0", min_replicas=1, join_timeout_ms=100)
        job = {
            "folder": name,
            "library": library,
            "strategy": strategy,
            "size_bytes": size_bytes,
            "first": FIRST,
            "address": membership.address,
            "timeout_s": TIMEOUT_S,
            "lighthouse": lighthouse and lighthouse.address(),
        }
        processes = dict[int, BaseProcess]()

        def start(who: int) -> None:
            processes[who] = how.Process(target=train_wide, args=(job, who), daemon=True)
            processes[who].start()

        try:
            for who in range(FIRST):
                start(who)
            present, result = set(range(FIRST)), dict[str, Any]()
            _await_times(folder, present, 40, processes)
            for event in EVENTS:
                at_s = time.time()
                if event == "leave":
                    present.remove(FIRST - 1)
                    (folder / f"leave{FIRST - 1}").touch()
                elif event == "join":
                    start(FIRST)
                    _await_times(folder, {FIRST}, 1, processes)
                    result["joined_after_s"] = round(time.time() - at_s, 3)
                else:
                    present.remove(1)
                    processes[1].kill()
                _await_times(folder, present, 40, processes)
                gaps = [_longest_gap(folder / f"times{who}", at_s) for who in present]
                result[event] = round(max(gaps), 4)
                if event == "join":
                    present.add(FIRST)
            every = np.diff(np.fromfile(folder / "times0"))
            return {**result, "iteration_s": round(float(np.median(every)), 4)}
        except RuntimeError as error:
            return {"error": str(error)[-600:]}
        finally:
            (folder / "stop").touch()
            for process in processes.values():
                process.join(5.0)
                process.kill()
                process.join()
            if lighthouse is not None:
                lighthouse.shutdown()


def _await_times(
    folder: Path, present: set[int], more: int, processes: dict[int, BaseProcess]
) -> None:
    """Wait until all present members have run more iterations."""
    paths = [folder / f"times{who}" for who in present]

    def counts() -> list[int]:
        return [path.stat().st_size // 8 if path.exists() else 0 for path in paths]

    goals, end_s = [count + more for count in counts()], time.monotonic() + 4 * LIMIT_S
    while any(count < goal for count, goal in zip(counts(), goals, strict=True)):
        ended = [who for who in present if not processes[who].is_alive()]
        if ended or time.monotonic() > end_s:
            log = (folder / f"log{[*ended, *present][0]}").read_text(errors="replace")
            raise RuntimeError(f"processes {ended or sorted(present)} do not train: {log[-500:]}")
        time.sleep(0.02)


def _longest_gap(path: Path, since_s: float) -> float:
    """Return the longest time between two iterations since an event, above the usual time."""
    times = np.fromfile(path)
    every = np.diff(times)
    return float(every[times[1:] > since_s].max() - np.median(every))


# ---- chaos ------------------------------------------------------------------------------------

HOSTS = 4  # that train; one more has the service
CHAOS_STRATEGY = "dreamddp:period=8"
PORT = 29600
KILL_S, CUT_S, CHANGE_S = 60.0, 45.0, 12.0  # mean times between two kills per host, cuts, rates
RATES_MBIT = (20.0, 200.0)
NEAREST = 8  # validations of which the loss at a number of samples is the mean


def chaos(options: argparse.Namespace) -> None:
    """Train in the lab with disturbances, then without them."""
    options.out.mkdir(parents=True, exist_ok=True)
    minutes, samples = options.minutes, math.inf
    for name in ("disturbed", "undisturbed"):
        folder = options.out / name
        if (folder / "done").exists():
            print(f"{name}: done before")
        else:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            counts = _train_in_lab(folder, name == "disturbed", minutes, samples)
            (folder / "done").write_text(json.dumps(counts))
        samples = max((line["samples"] for line in sizes_of(folder)), default=0)
        print(name, json.loads((folder / "done").read_text()), f"{samples:,} samples", flush=True)


def sizes_of(folder: Path) -> list[dict[str, Any]]:
    """Return the lines of all processes, in the order of time."""
    lines = [line for path in folder.glob("sizes*") for line in read(path)]
    return sorted(lines, key=lambda line: line["t"])


def _train_in_lab(folder: Path, disturbed: bool, minutes: float, samples: float) -> dict[str, Any]:
    """Run the job until the time is over, or all its samples are read. Return counts."""
    from offbeat.lab import Cluster, Lab, launch

    rate = sum(RATES_MBIT) / 2
    draw, counts, over = random.Random(0), Counter[str](), threading.Event()
    end_s = time.time() + 60 * minutes
    with Lab(Cluster.simple(HOSTS + 1, 1e6 * rate), "members") as lab:
        job = {
            "folder": str(folder.resolve()),
            "strategy": CHAOS_STRATEGY,
            "address": f"{lab.address(0)}:{PORT}",
            "first": HOSTS - 1,
            "timeout_s": TIMEOUT_S,
            "kills": disturbed,
            "half_s": time.time() + 30 * minutes,
        }
        (folder / "job.json").write_text(json.dumps(job))
        (folder / "secret").write_text(SECRET)
        (folder / "secret").chmod(0o600)

        def disturb() -> None:
            cut_s, change_s = (time.time() + draw.expovariate(1 / s) for s in (CUT_S, CHANGE_S))
            look_s = 0.0
            while not over.wait(0.2):
                now_s = time.time()
                if not disturbed and now_s > look_s:
                    look_s = now_s + 5.0
                    if any(line["samples"] >= samples for line in sizes_of(folder)[-HOSTS:]):
                        (folder / "stop").touch()
                if now_s > end_s:
                    (folder / "stop").touch()
                if disturbed and now_s > cut_s:
                    host, length_s = draw.randrange(1, HOSTS + 1), draw.choice([0.5, 2.0, 8.0])
                    lab.set_rate(host, "net", 1e3)
                    over.wait(length_s)
                    lab.set_rate(host, "net", 1e6 * rate)
                    counts["cuts"] += 1
                    cut_s = time.time() + draw.expovariate(1 / CUT_S)
                if disturbed and now_s > change_s:
                    low, high = map(math.log, RATES_MBIT)
                    now = math.exp(draw.uniform(low, high))
                    lab.set_rate(draw.randrange(1, HOSTS + 1), "net", 1e6 * now)
                    counts["changes of a rate"] += 1
                    change_s = time.time() + draw.expovariate(1 / CHANGE_S)

        thread = threading.Thread(target=disturb, daemon=True)
        thread.start()
        result = launch(
            lab,
            [sys.executable, str(Path(__file__).resolve()), "keep", "--out", str(folder)],
            log_dir=folder / "logs",
            timeout_s=60 * minutes + 300,
        )
        over.set()
        thread.join()
    kept = Counter[str](counts)
    for path in folder.glob("kept*.json"):
        kept.update(json.loads(path.read_text()))
    return {**kept, "problem": result.problem}


def keep(folder: Path) -> None:
    """Keep the processes of one host: start, kill and start them again until `stop` exists."""
    job, host = json.loads((folder / "job.json").read_text()), int(os.environ["RANK"])
    draw, counts = random.Random(host), Counter[str]()
    begin = _serving(folder) if host == 0 else _training(job, host)
    process, stop = begin(), folder / "stop"
    kill_s = time.time() + draw.expovariate(1 / KILL_S)
    while not stop.exists():
        time.sleep(0.1)
        if process.exitcode is not None:
            counts["ends by an error" if process.exitcode > 0 else "other ends"] += 1
            time.sleep(draw.uniform(0.5, 5.0))
            process = begin()
        elif job["kills"] and time.time() > kill_s and _may_kill(job, host):
            process.kill()
            process.join()
            counts["kills of the service" if host == 0 else "kills"] += 1
            time.sleep(1.0 if host == 0 else draw.uniform(0.5, 5.0))
            process = begin()
            counts["joins"] += host != 0
            kill_s = time.time() + draw.expovariate(1 / KILL_S)
    (folder / f"kept{host}.json").write_text(json.dumps(counts))
    process.kill()
    process.join()


def _training(job: dict[str, Any], host: int) -> Callable[[], Any]:
    how, numbers = context(), iter(range(10**6))

    def begin() -> Any:
        name = f"{host}-{next(numbers)}"
        process = how.Process(target=train_long, args=(job, host - 1, name), daemon=True)
        process.start()
        return process

    return begin


def _serving(folder: Path) -> Callable[[], Any]:
    how = multiprocessing.get_context("fork")

    def begin() -> Any:
        process = how.Process(target=_serve, args=(str(folder),), daemon=True)
        process.start()
        return process

    return begin


def _serve(folder: str) -> None:
    os.chdir(folder)
    options = ["--host", "0.0.0.0", "--port", str(PORT), "--journal", "journal"]
    command = [sys.executable, "-m", "offbeat", "membership", *options, "--secret", "secret"]
    os.execv(sys.executable, command)


def _may_kill(job: dict[str, Any], host: int) -> bool:
    """Return whether two other members train. One process of each half is never killed, so that
    its memory can be followed."""
    if host == 0:
        return True
    kept = 1 if time.time() < job["half_s"] else 2
    if host == kept:
        return False
    others = [Path(job["folder"]) / f"alive{n - 1}" for n in range(1, HOSTS + 1) if n != host]
    now_s = time.time()
    return sum(p.exists() and now_s - p.stat().st_mtime < 10 for p in others) >= 2


# ---- tables -----------------------------------------------------------------------------------


def tables(options: argparse.Namespace) -> None:
    """Write results/members.json from the files of `--out`."""
    found: list[dict[str, Any]] = []
    misses, kills = list[str](), list[dict[str, Any]]()
    folders = [options.out, *sorted(path for path in options.out.iterdir() if path.is_dir())]
    for name, per_node in itertools.product(("kills", "joins"), PER_NODE):
        files = [file_of(folder, name, per_node) for folder in folders]
        if lines := [line for file in files for line in read(file)]:
            found.append(_case_table(name, lines, per_node))
            kills += lines if name == "kills" else []
            misses += [
                f"{name}, case {line['case']['number']} of seed {line['case']['seed']} "
                f"({line['case']['strategy']}, {line['case'].get('place') or 'join'}): "
                f"{line['verdict']}."
                for line in lines
                if line["verdict"] != "right"
            ]
    if lines := read(options.out / "cost.jsonl"):
        found.append(_cost_table(lines))
        misses += _failed_jobs(lines)
    if (options.out / "undisturbed" / "done").exists():
        found.append(_chaos_table(options.out))
    save(
        "members",
        {
            "title": "Members that are killed, join and leave",
            "what": " ".join((__doc__ or "").split("\n\n")[2].split()),
            "how": ["measured"],
            "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
            "machine": machine(),
            "command": "; ".join(f"python benchmarks/members.py {name}" for name in COMMANDS),
            "tables": found,
            "misses": misses,
            "notes": [*_notes(kills), *_lines(options.out / "notes.txt")],
        },
    )


def _case_table(name: str, lines: Sequence[dict[str, Any]], per_node: int) -> dict[str, Any]:
    whole = [line for line in lines if "difference" in line]
    right = sum(line["verdict"] == "right" for line in lines)
    gaps = sorted(line["gap_s"] for line in whole if line["case"].get("victim") is not None)
    rows: list[list[Any]] = [["cases in which everything is right", f"{right} of {len(lines)}"]]
    if name == "kills":
        of_ranks = [line for line in lines if line["case"]["place"] != "service"]
        rows.append(_right_row("kills of a rank", of_ranks))
        for place, text in KILLED.items():
            here = [line for line in of_ranks if line["case"]["place"] == place]
            if here:
                rows.append(_right_row(f"of these, {text}", here))
        both = [line for line in of_ranks if line["case"]["service"]]
        rows.append(["of these, together with the service", len(both)])
        first = [line for line in of_ranks if line["case"]["victim"] == 0]
        rows.append(["of these, rank 0", len(first)])
        alone = [line for line in lines if line["case"]["place"] == "service"]
        rows.append(_right_row("kills of the service alone", alone))
    else:
        bits = sum(line["joined bits"] is True for line in whole)
        rows.append(["weights of the joining process are a member's, bit for bit", bits])
        compared = [line["average bits"] for line in whole if line["average bits"] is not None]
        text = f"{sum(compared)} of {len(compared)} whose weights are recorded after averages"
        rows.append(["equal bits after the next average of each bucket", text])
    largest = max((line["difference"] for line in whole), default=0.0)
    states = sum(line["compared"] for line in whole)
    rows.append(["states of a process compared with the equations", states])
    rows.append(["largest difference of a weight", f"{largest:.1e}"])
    rows.append(["samples read twice", sum(line["twice"] for line in whole)])
    rows.append(["samples left unread, most", max((line["unread"] for line in whole), default=0)])
    if gaps:
        middle = statistics.median(gaps)
        shown = [f"{s:.2f}" for s in (middle, gaps[0], gaps[-1])]
        rows.append([f"s from the kill to the next iteration (limit {ALLOWED_S:g})", shown])
        again = sum(line["dealt again"] for line in whole)
        rows.append(["samples of killed processes that are dealt again", again])
    titles = {"kills": "Kills", "joins": "Joins"}
    return {
        "name": name if per_node == 1 else f"{name}_of_nodes",
        "title": f"{titles[name]} under {len(CASES)} strategies, {RANKS[per_node]}",
        "spread": "median [least, greatest]",
        "columns": ["quantity", "result"],
        "rows": rows,
    }


def _right_row(text: str, lines: Sequence[dict[str, Any]]) -> list[Any]:
    """Return a row with the number of cases in which everything is right."""
    return [text, f"{sum(line['verdict'] == 'right' for line in lines)} of {len(lines)}"]


COMMANDS = (
    *("kills", "kills --seed 1", "kills --seed 3 --place update", "joins"),
    *("kills --per-node 2", "kills --per-node 2 --seed 2", "joins --per-node 2"),
    *("chaos", "cost", "tables"),
)
RANKS = {1: "members of one rank", 2: "nodes of two ranks"}
KILLED = {
    "forward": "in forward",
    "backward": "in backward",
    "message": "in a message",
    "update": "in an update",
    "boundary": "at a boundary",
    "leave": "while a member leaves",
    "join": "while a process joins",
}


def _notes(kills: Sequence[dict[str, Any]]) -> Iterator[str]:
    texts = [f"{name} {settings or ''}".strip() for name, settings in CASES.items()]
    yield f"Strategies: {', '.join(texts)}; three members, `timeout_s={TIMEOUT_S:g}`."
    coded = [line for line in kills if "wire" in line["case"]["settings"]]
    if coded:
        texts = [f"{name} {more['wire']}" for name, more in CODED.items()]
        yield f"{len(coded)} of the kills are of jobs with codecs: {', '.join(texts)}."
    if kills:
        places = Counter((line["case"]["strategy"]) for line in kills)
        counts = ", ".join(f"{name} {count}" for name, count in sorted(places.items()))
        yield f"Kills by strategy: {counts}."
        places = Counter(f"seed {line['case']['seed']}: {RANKS[per_node_of(line['case'])]}"
                         for line in kills)  # fmt: skip
        yield f"Kills by seed: {', '.join(f'{text} {n}' for text, n in sorted(places.items()))}."
    yield (
        "Between nodes, DreamDDP, PartialSync and DiLoCo update from the average, and no record "
        "has the weights between the average and the update. Their weights after the update are "
        "compared with the equations."
    )
    yield "Kills and joins ran beside other programs, which makes their times longer."


def _lines(path: Path) -> list[str]:
    """Return the lines of a file, if it exists."""
    return path.read_text().splitlines() if path.exists() else []


def _cost_table(lines: Sequence[dict[str, Any]]) -> dict[str, Any]:
    rows = list[list[Any]]()
    keys = dict.fromkeys(tuple(line["key"][:3]) for line in lines)
    for library, strategy, size_bytes in keys:
        same = [x for x in lines if x["key"][:3] == [library, strategy, size_bytes]]
        good = [line for line in same if "error" not in line]
        row: list[Any] = [f"{size_bytes / 1e6:g} MB, {strategy}", library]
        for name in (*EVENTS, "joined_after_s"):
            values = sorted(line[name] for line in good)
            middle = statistics.median(values) if values else None
            row.append(None if middle is None else [
                f"{s:.2f}" for s in (middle, values[0], values[-1])
            ])  # fmt: skip
        rows.append(row)
    return {
        "name": "cost",
        "title": "Seconds without an iteration when one of three members leaves, when a process "
        "joins, and when one of three dies; and seconds from the start of a process to its first "
        "iteration",
        "spread": "median [least, greatest]",
        "columns": ["model", "library", "leave", "join", "death", "start"],
        "rows": rows,
    }


def _failed_jobs(lines: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yield a text for each library and strategy whose jobs have ended with an error."""
    jobs = Counter(tuple(line["key"][:2]) for line in lines)
    errors = {tuple(line["key"][:2]): line["error"] for line in lines if "error" in line}
    failed = Counter(tuple(line["key"][:2]) for line in lines if "error" in line)
    for key, error in errors.items():
        last = error.strip().splitlines()[-1]
        yield (
            f"cost: {failed[key]} of {jobs[key]} jobs of {key[0]} with {key[1]} ended with an "
            f"error ({last}); the table has the others."
        )


def _chaos_table(out: Path) -> dict[str, Any]:
    rows = list[list[Any]]()
    counts = json.loads((out / "disturbed" / "done").read_text())
    both = {name: sizes_of(out / name) for name in ("disturbed", "undisturbed")}
    common = min(max(line["samples"] for line in lines) for lines in both.values())
    for name, lines in both.items():
        near = sorted(lines, key=lambda line: abs(line["samples"] - common))[:NEAREST]
        loss = statistics.fmean(line["loss"] for line in near)
        least = min(lines, key=lambda line: line["validation"])
        rows.append([f"training loss, {name}, after {common:,} samples", f"{loss:.3f}"])
        rows.append([f"least validation loss, {name}", f"{least['validation']:.3f}"])
        rows.append([f"samples until the least, {name}", f"{least['samples']:,}"])
    rows += [[name, value] for name, value in sorted(counts.items()) if name != "problem"]
    lives = {p: read(p) for p in (out / "disturbed").glob("sizes*")}
    longest = sorted(lives.values(), key=lambda one: one[-1]["t"] - one[0]["t"] if one else 0)
    for lines in longest[-2:]:
        minutes = (lines[-1]["t"] - lines[0]["t"]) / 60
        middle = max(1, len(lines) // 2)
        for name, scale in (("rss", 1e6), ("descriptors", 1), ("threads", 1)):
            early, late = (
                max(line[name] for line in part) / scale
                for part in (lines[:middle], lines[middle:])
            )
            unit = " MB" if name == "rss" else ""
            rows.append([f"most {name}, process of {minutes:.0f} minutes: first half, second",
                         f"{early:.0f}{unit}, {late:.0f}{unit}"])  # fmt: skip
    return {
        "name": "chaos",
        "title": f"{HOSTS} hosts under kills, joins, cuts and changing rates",
        "columns": ["quantity", "result"],
        "rows": rows,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("what", choices=["kills", "joins", "chaos", "cost", "tables", "keep"])
    parser.add_argument("--out", type=Path, default=Path("runs/members"))
    parser.add_argument("--runs", type=int)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, help="number of one case")
    parser.add_argument("--place", choices=[*KILLED, "service"], help="place of all kills")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--sizes", type=float, nargs="*", help="bytes of the models of cost")
    parser.add_argument(
        "--per-node", type=int, default=1, choices=PER_NODE, help="ranks of a member"
    )
    parser.add_argument("--codecs", action="store_true", help="kills and joins with codecs")
    options = parser.parse_args()
    if options.per_node != 1 and options.what not in ("kills", "joins"):
        parser.error(f"--per-node ({options.per_node}) must be 1 beside kills and joins")
    options.out.mkdir(parents=True, exist_ok=True)
    if options.place is not None and options.what != "kills":
        parser.error(f"--place ({options.place}) must be left out beside kills")
    if options.what == "kills":
        how = options.runs or 64, options.seed, options.per_node, options.place
        run_cases(options.what, kill_cases(*how, codecs=options.codecs), options)
    elif options.what == "joins":
        how = options.runs or 24, options.seed, options.per_node
        run_cases(options.what, join_cases(*how, codecs=options.codecs), options)
    elif options.what == "keep":
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        keep(options.out)
    else:
        {"chaos": chaos, "cost": cost, "tables": tables}[options.what](options)


if __name__ == "__main__":
    main()
