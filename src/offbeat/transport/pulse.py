"""Pulse: signs of life of all ranks, and what each is doing, so that failures name their cause."""

from __future__ import annotations

import atexit
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any
from weakref import ref

from torch.distributed.distributed_c10d import PrefixStore

BEAT_S = 0.5
ANSWERS_S = 1.0  # a store that is there does so at once
SILENT_S = 2.0  # without a sign of life for so long a rank counts as dead
MOST_PER_S = 128  # signs that one rank reads per second
LINGER_S = 15.0  # whose store it is stays so long for the others to read, if it has failed
LONGEST_REASON = 200  # characters
THREAD = "offbeat-pulse"

RUNS, WAITS, GAVE_UP, TOLD, LEFT, FAILED = "runs", "waits", "gave up", "told", "left", "failed"
PRESENT = (RUNS, WAITS)
SCRIPT = "in its script"

# What a broken connection is called by gloo, NCCL and the store. Such an error is a consequence.
_CONNECTION = ("onnection", "Timed out", "timed out", "timeout", "NCCL", "ncclSystemError", "gloo")


Words = str | Callable[[], str]  # put together only when they are told


def text_of(words: Words) -> str:
    """What they say."""
    return words if isinstance(words, str) else words()


@dataclass
class Heard:
    """What a rank has last said, and when (of our monotonic clock) it was new to us."""

    beat: int = -1
    iteration: int = -1
    state: str = RUNS
    words: str = "not seen yet"
    blames: tuple[int, ...] = ()  # the ranks for which it gave up
    beat_s: float = 0.0
    since_s: float = 0.0  # of state, words and iteration

    def __str__(self) -> str:
        return self.words if self.iteration < 0 else f"iteration {self.iteration}, {self.words}"

    def take(
        self, now_s: float, beat: int, iteration: int, state: str, words: str, blames: list[int]
    ) -> None:
        """A sign; nothing new if it is the last one still."""
        if beat == self.beat:
            return
        self.blames = tuple(blames)
        if (iteration, state, words) != (self.iteration, self.state, self.words):
            self.iteration, self.state, self.words, self.since_s = iteration, state, words, now_s
        self.beat, self.beat_s = beat, now_s


class Pulse:
    """Leaves signs of life of this rank in a store, and watches those of the others.

    A thread does it, so that a rank that computes or waits for long is alive all the same; one that
    is stopped, or was killed, is not. What was seen stays known when the store goes with rank 0.
    """

    def __init__(self, store: Any, rank: int, world_size: int):
        now_s = time.monotonic()
        self._store, self.rank = store, rank
        self.heard = [Heard(beat_s=now_s, since_s=now_s) for _ in range(world_size)]
        self.iteration, self.state = -1, RUNS
        self.words: Words = SCRIPT
        self._beats, self._blames = 0, list[int]()
        self._era = 0
        self._before: list[Any] | None = None  # the era before this one, and what it said last
        self._known: set[int] = set()  # ranks that have given a sign once
        self._lost_s: float | None = None  # when the store no longer answered
        self._began_s: float | None = None  # when it was asked, while it is
        self._users = 0
        self._ended = threading.Event()
        self._speaking = threading.Lock()
        self._every_s = max(BEAT_S, world_size / MOST_PER_S)

    @property
    def text(self) -> str:
        """What this rank does."""
        return text_of(self.words)

    # ---- speaking ---------------------------------------------------------------------------

    def enter(self, era: int | None = None) -> None:
        """One more has joined the others in this process: it is to be heard while any is in.
        `era`: how often all ranks have met so far; by default one more than the last time."""
        self._users += 1
        if self._era:  # who has not come as far is to know how this rank did
            self._before = [self._era, self._said()]
        self._era = self._era + 1 if era is None else era
        if self._users == 1 or self.state not in PRESENT:
            self.iteration, self.state, self.words, self._blames = -1, RUNS, SCRIPT, []
        if self._users == 1:
            self._ended = threading.Event()
            threading.Thread(
                target=self._run, args=(self._ended,), name=THREAD, daemon=True
            ).start()

    def exit(self, failure: str | None = None) -> None:
        """One has left, as it should, or after a failure of its own."""
        if failure is not None and self.state in PRESENT:
            self.say(FAILED, failure[:LONGEST_REASON])
        self._users -= 1
        if self._users == 0:
            self.end()

    def say(self, state: str, words: str, blames: Sequence[int] = ()) -> None:
        """Let the others know at once; without them if the store does not answer."""
        self.state, self.words, self._blames = state, words, list(blames)
        # A store that has stopped, as its rank has, never answers.
        saying = threading.Thread(target=self._beat, name=THREAD, daemon=True)
        saying.start()
        saying.join(ANSWERS_S)

    def end(self) -> None:
        """The last sign."""
        if not self._ended.is_set():
            self._ended.set()
            if self.state in PRESENT:
                self.say(LEFT, "has left")

    def stay(self, seconds: float) -> None:
        """Whose store it is stays until all others have read who it was, or have left."""
        if self.rank != 0 or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            return
        until_s = time.monotonic() + seconds
        while time.monotonic() < until_s and self.lost_s is None and self._unread():
            time.sleep(BEAT_S / 4)
            self._beat()

    def _unread(self) -> list[int]:
        now_s = time.monotonic()
        return [
            rank
            for rank, heard in enumerate(self.heard)
            if rank != self.rank
            and heard.state in (*PRESENT, GAVE_UP)
            and now_s - heard.beat_s < SILENT_S
        ]

    @property
    def lost_s(self) -> float | None:
        """Since when the store does not answer; None if it does."""
        began_s = self._began_s
        if self._lost_s is None and began_s is not None:
            return began_s if time.monotonic() - began_s > ANSWERS_S else None
        return self._lost_s

    def _run(self, ended: threading.Event) -> None:
        while self._lost_s is None and not ended.is_set():
            self._beat()
            ended.wait(self._every_s)

    def _beat(self) -> None:
        with self._speaking:
            if self._lost_s is not None:
                return
            self._beats += 1
            self._began_s = time.monotonic()
            try:
                sign = json.dumps([self._beats, self._era, self._said(), self._before])
                self._store.set(str(self.rank), sign)
                self._listen()
            except RuntimeError:
                self._lost_s = self._began_s
            self._began_s = None

    def _listen(self) -> None:
        missing = (r for r in range(len(self.heard)) if r not in self._known)
        self._known.update(r for r in missing if self._store.check([str(r)]))
        known = sorted(self._known)
        signs = self._store.multi_get([str(rank) for rank in known])
        now_s = time.monotonic()
        for rank, text in zip(known, signs, strict=True):
            beat, *sign = json.loads(text)
            self.heard[rank].take(now_s, beat, *self._of_my_era(*sign))

    def _said(self) -> list[Any]:
        return [self.iteration, self.state, self.text, self._blames]

    def _of_my_era(self, era: int, said: list[Any], before: list[Any] | None) -> list[Any]:
        """What a rank says of this one's era: it may be further, or not yet as far."""
        if era > self._era and before is not None and before[0] == self._era:
            return before[1]
        return said if era >= self._era else [-1, RUNS, SCRIPT, []]

    # ---- who it was -------------------------------------------------------------------------

    @property
    def over(self) -> bool:
        """Whether another rank has failed, or has given up waiting: nothing more will come."""
        return any(
            heard.state in (GAVE_UP, TOLD, FAILED)
            for rank, heard in enumerate(self.heard)
            if rank != self.rank
        )

    def wait(self) -> None:
        """Long enough to notice who has died just now: what is not silent yet will be."""
        until_s = time.monotonic() + SILENT_S + self._every_s
        while time.monotonic() < until_s and self.lost_s is None and not self._accused():
            time.sleep(BEAT_S / 4)
            self.say(self.state, self.text)

    def culprits(self, waited_s: float) -> list[int]:
        """The ranks that keep this one waiting, which has waited so long: those that failed or
        give no sign of life; else those that left; else those that wait for nobody themselves."""
        accused = self._accused()
        if accused:
            return accused
        if self.lost_s is not None:
            return [0] if self.heard[0].state in PRESENT and self.rank else []
        left = self._others(LEFT)
        if left:
            return left
        now_s, least_s = time.monotonic(), max(SILENT_S, waited_s / 2)
        return [r for r in self._others(RUNS) if now_s - self.heard[r].since_s >= least_s]

    def _accused(self) -> list[int]:
        lost_s = self.lost_s
        until_s = time.monotonic() if lost_s is None else lost_s
        silent = [
            rank
            for rank in self._others(*PRESENT)
            if until_s - self.heard[rank].beat_s > SILENT_S + self._every_s / 2
        ]
        blamed = {rank for heard in self.heard for rank in heard.blames}
        return sorted({*self._others(FAILED), *silent, *blamed} - {self.rank})

    def _others(self, *states: str) -> list[int]:
        return [r for r, h in enumerate(self.heard) if h.state in states and r != self.rank]

    def why(self, rank: int) -> str:
        """What is known of a rank that keeps others waiting."""
        heard, now_s = self.heard[rank], time.monotonic()
        if heard.state == FAILED:
            return heard.words
        if heard.state == LEFT:
            return f"has left after iteration {heard.iteration}"
        if heard.state == RUNS and self.lost_s is None and now_s - heard.beat_s < SILENT_S:
            return f"keeps the others waiting: {heard}, for {now_s - heard.since_s:.0f} s"
        return (
            "has died or stands still: no sign of life for "
            f"{now_s - heard.beat_s:.0f} s; last heard: {heard}"
        )


# ---- how a process ends -----------------------------------------------------------------------

# Of this process, one at most, beside the store it is for. That one must go with its group.
_pulses: list[tuple[ref[Any], Pulse]] = []
_hook = sys.excepthook


def pulse_of(store: Any, rank: int, world_size: int) -> Pulse:
    """The one of this process among those that share the store of `torch.distributed`."""
    if not _pulses or _pulses[0][0]() is not store:  # or the process has made another group since
        # A connection of its own: others wait in theirs.
        own = PrefixStore("offbeat/pulse", store.clone() if hasattr(store, "clone") else store)
        _pulses[:] = [(ref(store), Pulse(own, rank, world_size))]
        _report_ends()
    return _pulses[0][1]


def _failing(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> Any:
    """Let the others know why this process ends, before it does."""
    words = f"failed with {kind.__name__}: {error}"[:LONGEST_REASON]
    broken = issubclass(kind, RuntimeError) and any(word in str(error) for word in _CONNECTION)
    present = [pulse for _, pulse in _pulses if pulse.state in PRESENT]
    for pulse in present:  # who gave up is not the cause
        pulse.say(GAVE_UP if broken else FAILED, words)
    result = _hook(kind, error, trace)
    for pulse in present if broken else ():  # as of torch's own DDP, whose words name nobody
        pulse.wait()
        culprits = pulse.culprits(waited_s=0.0)
        for rank in culprits:
            print(f"offbeat: rank {rank} {pulse.why(rank)}", file=sys.stderr, flush=True)
        pulse.say(TOLD, words, culprits)
    return result


def _report_ends() -> None:
    """Have uncaught exceptions told to the other ranks, and that this process ends."""
    global _hook
    if sys.excepthook is not _failing:
        _hook, sys.excepthook = sys.excepthook, _failing
        atexit.register(_leave)


def _leave() -> None:
    """The last sign, and whose store it is stays for a while."""
    failed = getattr(sys, "last_value", None) is not None
    for _, pulse in _pulses:
        pulse.end()
        pulse.stay(LINGER_S if failed else SILENT_S)
