"""Workers of gossip, each a process of its own, to which everything happens.

    python benchmarks/gossip_chaos.py [--seconds 1200] [--round 6] [--silent 1] [--seed 0]

Round by round eight workers gossip, all with all. For some seconds connections are cut at random;
in every other round workers are killed, too, and others join or come back. Then those that live
consolidate: they must end with the same bits, and none may hang. Who was out of reach of all others
for longer than `--silent` seconds ends with an error that says so, and does not count as living.
Without kills and joins the mean must stay.
"""

from __future__ import annotations

import argparse
import multiprocessing
import random
import socket
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from gossip_runtime import SECRET, _cut, _end, _graph, _worker

WORKERS, LEAST = 8, 5
SIZE = 250_000
UNIT_S = 0.01
END_S = 60.0
GIVEN_UP = ("falls apart", "taken this worker for dead")
NO_TIME = ("is there already", "had no time", "cannot be joined")


@dataclass
class Child:
    """A worker's process, and what it says."""

    process: Any
    pipe: Connection
    address: tuple[str, int] = ("", 0)

    def hear(self, limit_s: float) -> Any:
        """Its next word; None if it says nothing."""
        if not self.pipe.poll(limit_s):
            return None
        with suppress(EOFError):
            return self.pipe.recv()
        return None


def main() -> None:
    """So many rounds as there is time for."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--seconds", type=float, default=1200.0)
    parser.add_argument("--round", type=float, default=6.0)
    parser.add_argument("--silent", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "offbeat.gossip.worker", "offbeat.gossip.joining"])
    end_s, rounds, totals, drifts = time.monotonic() + args.seconds, 0, [0] * 5, []
    while time.monotonic() < end_s:
        one = Round(context, args.silent, f"{args.seed} {rounds}")
        try:
            one.live(args.round, quiet=rounds % 2 == 0)
            drift = one.end()
        finally:
            one.close()
        if rounds % 2 == 0 and not one.counts[3]:
            drifts.append(drift)
        totals = [a + b for a, b in zip(totals, one.counts, strict=True)]
        rounds += 1
    cuts, kills, joins, away, exchanges = totals
    print(
        f"{rounds} rounds with {exchanges // 2} exchanges, {cuts} cuts, {kills} kills, {joins} "
        f"joins; {away} were out of reach. The living end alike, none hangs; without kills and "
        f"joins the mean is off by {max(drifts):.1e} at most"
    )


class Round:
    """One job."""

    def __init__(self, context: Any, silent_s: float, seed: str) -> None:
        self.context, self.silent_s, self.seed = context, silent_s, seed
        self.choose = random.Random(seed)
        self.counts = [0] * 5  # cuts, kills, joins, out of reach, exchanges
        self.living: dict[int, Child] = {}
        self.dead: list[int] = []
        for n in range(WORKERS):
            self.living[n] = self._born("first", n, seed)
        addresses = {}
        for n, child in self.living.items():
            child.address = addresses[n] = child.hear(END_S)
        for child in self.living.values():
            child.pipe.send(addresses)
        for n, child in self.living.items():
            if child.hear(END_S) != "up":
                sys.exit(f"round {seed}: worker {n} does not come up")

    def live(self, seconds: float, *, quiet: bool) -> None:
        """Something happens now and then."""
        until_s = time.monotonic() + seconds
        while time.monotonic() < until_s:
            time.sleep(self.choose.uniform(0.0, 0.2))
            n, what = self.choose.choice([*self.living]), self.choose.random()
            if not quiet and what < 0.05 and len(self.living) > LEAST:
                self.living.pop(n).process.kill()
                self.dead.append(n)
                self.counts[1] += 1
            elif not quiet and what < 0.1:
                self._join()
            else:
                self.living[n].pipe.send("cut")
                self.counts[0] += 1

    def _join(self) -> None:
        through = self.living[self.choose.choice([n for n in self.living if n < WORKERS])]
        back = self.choose.choice([None, *self.dead])
        child = self._born("join", back, through.address)
        said = child.hear(END_S)
        if said is None:
            sys.exit(f"round {self.seed}: who joins hangs")
        me, child.address = said
        if me is None:
            return  # nobody has noticed yet that it has died, or there is no unit yet
        self.living[me] = child
        self.dead = [n for n in self.dead if n != me]
        self.counts[2] += 1

    def end(self) -> float:
        """All consolidate; what the mean is off from that of the beginning, by its norm."""
        import torch

        for child in self.living.values():
            child.pipe.send("end")
        ends: dict[int, Any] = {}
        for n, child in self.living.items():
            said = child.hear(END_S)
            if said is None:
                sys.exit(f"round {self.seed}: worker {n} hangs")
            words, exchanges, flat = said
            self.counts[4] += exchanges
            if words is None:
                ends[n] = torch.frombuffer(bytearray(flat), dtype=torch.float32)
            elif any(known in words for known in GIVEN_UP):
                self.counts[3] += 1
            else:
                sys.exit(f"round {self.seed}: worker {n}: {words}")
        first = next(iter(ends.values()))
        odd = [n for n, flat in ends.items() if not torch.equal(flat, first)]
        if odd:
            sys.exit(f"round {self.seed}: {odd} differ from {next(iter(ends))}")
        mean = torch.stack([_start(self.seed, n) for n in range(WORKERS)]).double().mean(0)
        return float((first - mean).norm() / mean.norm())

    def close(self) -> None:
        """End what is left."""
        for child in self.living.values():
            child.process.join(2.0)
            child.process.kill()

    def _born(self, what: str, *about: Any) -> Child:
        here, there = self.context.Pipe()
        args = (there, what, self.silent_s, *about)
        process = self.context.Process(target=_life, args=args, daemon=True)
        process.start()
        there.close()
        return Child(process, here)


# ---- in the worker's process ----------------------------------------------------------------


def _life(pipe: Connection, what: str, silent_s: float, *about: Any) -> None:
    import torch

    torch.set_num_threads(1)
    settings = {"silent_s": silent_s, "timeout_s": 20.0, "rate": 5.0}
    door = socket.create_server(("127.0.0.1", 0))
    if what == "first":
        me, seed = about
        pipe.send(door.getsockname())
        flat = _start(seed, me)
        worker = _worker(me, _graph("complete", WORKERS), flat, pipe.recv(), door, **settings)
        worker.gossip.connect()
        worker.warm(UNIT_S)
        pipe.send("up")
    else:
        worker, flat = _joined(pipe, door, *about, **settings)
        if worker is None:
            return
    while True:
        if pipe.poll(UNIT_S):
            if pipe.recv() == "end":
                break
            _cut(worker)
        with suppress(RuntimeError):  # said at the end
            worker.state.refresh()
            worker.state.step(worker.clock.now(), lambda: None)
            worker.gossip.record_gradient(UNIT_S)
    words = None
    try:
        _end(worker, flat)
    except RuntimeError as error:
        words = str(error)
    exchanges = sum(worker.gossip.counts.exchanges.values())
    pipe.send((words, exchanges, flat.numpy().tobytes()))


def _joined(
    pipe: Connection,
    door: socket.socket,
    back: int | None,
    through: tuple[str, int],
    **settings: Any,
) -> Any:
    """One more worker; None if it is not time for it."""
    import networkx as nx
    import torch

    from offbeat.gossip.joining import get_place

    try:
        about = {"layout": "", "strategy": "", "id": back}
        place = get_place(through, SECRET, about, 1.0)
    except RuntimeError as error:
        if any(words in str(error) for words in NO_TIME):
            pipe.send((None, None))
            return None, None
        raise
    flat = place.luggage.view(torch.float32).clone()
    worker = _worker(place.me, nx.Graph(place.first), flat, place.near, door, place, **settings)
    worker.gossip.connect()
    worker.warm(UNIT_S)
    pipe.send((place.me, door.getsockname()))
    return worker, flat


def _start(seed: str, n: int) -> Any:
    import torch

    own = random.Random(f"{seed} {n}").getrandbits(32)
    return torch.randn(SIZE, generator=torch.Generator().manual_seed(own))


if __name__ == "__main__":
    main()
