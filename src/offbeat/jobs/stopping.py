"""End of a job by SIGTERM: a last common iteration, a checkpoint, and the end of the record.

A rank that learns of the signal publishes the number of the iteration in progress, and does not
begin another one before all ranks have done so. The largest number is the last iteration of the
job. No rank has gone beyond it, and no rank waits for messages of a later iteration.

The main thread stops at the end of an iteration. A thread of its own receives the signal, agrees
with other ranks, and ends a rank that cannot stop, because torch's C++ code may block the main
thread.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from typing import Any

from offbeat.core.checkpoint.saving import Saving
from offbeat.core.console import console
from offbeat.core.runtime.session import Session
from offbeat.core.transport.control import Control
from offbeat.core.transport.failure_detector import ACTIVE, STORE_TIMEOUT_S
from offbeat.core.words import count_text
from offbeat.jobs.loader_workers import protect_workers, unprotect_workers

STOP_S = 20.0  # longest time from the signal to the end; launchers kill 30 s after SIGTERM
SECOND_S = 2.0  # an earlier second signal counts as the first one, sent by another launcher
WATCH_EVERY_S = 0.1  # seconds between two looks at the other ranks after the signal
LOOK_EVERY_S = 1.0  # seconds between two looks at the store for a signal of another rank
MOST_LOOKS_PER_S = 2048  # limit of the looks of all ranks, with a pause of at most 4 s
LONGEST_LOOK_S = 4.0
END_S = 2.0  # longest wait for another thread that writes the end
STORE_LINGER_S = 0.5  # time in which the other ranks read the store that rank 0 may host
THREAD_NAME = "offbeat-stopping"

REQUESTED = "requested"  # key of the rank that received the signal
STOPPING = "waiting for all ranks to stop"


class StopRequest:
    """Handler of SIGTERM on one rank.

    The handler is installed if SIGTERM has its default action and the main thread creates the
    object. On every rank, the object also takes part in the stop that another rank requests.

    Args:
        control: control of the job.
        on_end: called once with `how="signal"` and `text` before the signal is passed on. It may be
            called by any thread. By default, rank 0 prints the text.
    """

    def __init__(self, control: Control, on_end: Callable[..., Any] | None = None):
        self._control = control
        self.on_end: Callable[..., Any] = on_end or self._print_end
        self._session: Session | None = None
        self._save: Callable[[], Saving] | None = None
        self._has_workers: Callable[[], bool] | None = None  # of a server
        self._store: Any = None  # if the ranks stop after the same iteration
        self._lock = threading.Lock()  # of `_ended` and `_last`
        self._ended = 0  # number of finished iterations
        self._last: int | None = None  # number of iterations at the end; may grow until `_agreed`
        self._requester: int | None = None  # rank that received the signal
        self._requested_s = 0.0  # local monotonic time at which this rank learned of the signal
        self._signal_s: float | None = None  # time of the first signal of this rank
        self._has_second_signal = self._is_last_ended = False
        self._outcome: str | None = None
        self._agreed = threading.Event()  # `_last` is final
        self._closed = threading.Event()
        self._ending = threading.Lock()  # held from the start of `on_end`
        self._signals, self._wakeup = socket.socketpair()
        self._wakeup.setblocking(False)
        self._process_id = os.getpid()
        self._install()
        self._thread = threading.Thread(target=self._watch, name=THREAD_NAME, daemon=True)
        self._thread.start()

    def attach(self, session: Session, save: Callable[[], Saving] | None) -> None:
        """Begin to finish iterations before a stop. Until this call, a signal ends the rank at
        once.

        Args:
            session: session of this rank.
            save: begins to save a checkpoint; None: no checkpoint is configured.
        """
        with self._lock:
            if self._requester is not None:  # `_watch` ends this rank
                return
            self._session, self._save, self._ended = session, save, session.iteration
            # Ranks that do not wait for each other, as with gossip and servers, stop separately.
            is_separate = session.alone or session.elsewhere is not None
            if self._control.world_size > 1 and not is_separate:
                store: Any = self._control.store(f"stop{self._control.met}")
                # A blocking wait of another thread occupies the connection, so use a clone.
                self._store = store.clone() if hasattr(store, "clone") else store

    def attach_server(self, is_connected: Callable[[], bool]) -> None:
        """Serve on after a signal, so that the workers can end their iterations.

        Args:
            is_connected: whether a worker is connected.
        """
        self._has_workers = is_connected

    def on_iteration_end(self, iteration: int) -> None:
        """Save, write the end and pass the signal on, if this iteration is the last one.

        Args:
            iteration: number of finished iterations.
        """
        with self._lock:
            self._ended = iteration
            if self._last is None or iteration < self._last:
                return
        with self._control.waiting(STOPPING):
            self._agreed.wait()
        if iteration == self._last:
            self._is_last_ended = True
            self._outcome = f"Stopped after {count_text(iteration, 'iteration')}{self._saved()}"
            self._linger(iteration)
            with suppress(Exception):  # an exit by a signal does not flush
                sys.stdout.flush()
            self._end(self._outcome)

    def close(self) -> None:
        """Restore the default action of SIGTERM. If this rank has received the signal, write the
        end and pass the signal on."""
        if self._closed.is_set() or os.getpid() != self._process_id:
            return
        self._closed.set()
        self._wake()
        self._thread.join(STORE_TIMEOUT_S)
        if self._signal_s is not None:
            self._end("the model was closed")
        self._uninstall()

    # ---- signal -----------------------------------------------------------------------------

    def _install(self) -> None:
        is_default = signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
        if not is_default or threading.current_thread() is not threading.main_thread():
            return
        protect_workers()
        signal.signal(signal.SIGTERM, self._handle)
        signal.siginterrupt(signal.SIGTERM, False)
        previous = signal.set_wakeup_fd(self._wakeup.fileno(), warn_on_full_buffer=False)
        if previous != -1:  # used by other code, so `_handle` alone wakes the thread
            signal.set_wakeup_fd(previous)
        _installed[:] = [self]
        _restore_in_forks()

    def _uninstall(self) -> None:
        with suppress(ValueError):  # not in the main thread: `_handle` passes the signal on
            if self._is_installed:
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
            previous = signal.set_wakeup_fd(-1)
            if previous != self._wakeup.fileno():
                signal.set_wakeup_fd(previous)
            if self in _installed:
                _installed.clear()
                unprotect_workers()

    @property
    def _is_installed(self) -> bool:
        """Whether SIGTERM still has this handler, and not a later one of the script."""
        return signal.getsignal(signal.SIGTERM) == self._handle

    def _handle(self, *_: object) -> None:
        if self._closed.is_set():
            self._pass_on()
        self._wake(signal.SIGTERM)

    def _wake(self, value: int = 0) -> None:
        with suppress(BlockingIOError):
            self._wakeup.send(bytes([value]))

    def _watch(self) -> None:
        """Receive signals, agree on the last iteration, and end this rank if it cannot stop."""
        while not self._closed.is_set():
            self._signals.settimeout(self._pause_s())
            numbers = b""
            with suppress(TimeoutError):
                numbers = self._signals.recv(4096)
            with suppress(RuntimeError):  # the failure detector also reports a lost store
                if signal.SIGTERM in numbers and self._is_installed:
                    self._receive()
                self._exchange()
            if self._requester is not None and (why := self._reason_to_end_now()) is not None:
                ended = f"Ended after {count_text(self._ended, 'iteration')}: {why}"
                self._end(self._outcome or ended)
                return

    def _pause_s(self) -> float:
        """Return the seconds between two looks at the store."""
        least_s = LOOK_EVERY_S if self._requester is None else WATCH_EVERY_S
        return max(least_s, min(self._control.world_size / MOST_LOOKS_PER_S, LONGEST_LOOK_S))

    def _receive(self) -> None:
        if self._signal_s is None:
            self._signal_s = time.monotonic()
            self._request(self._control.rank)
        elif time.monotonic() - self._signal_s > SECOND_S:
            self._has_second_signal = True

    # ---- agreement --------------------------------------------------------------------------

    def _request(self, rank: int) -> None:
        """Let this rank stop after the iteration in progress, or a later one of another rank."""
        with self._lock:
            if self._requester is not None:
                return
            self._requested_s, self._requester = time.monotonic(), rank
            self._last = self._ended + 1
        if self._store is None:
            self._agreed.set()
        else:
            self._store.set(REQUESTED, str(rank))
            self._publish("last", self._last)

    def _exchange(self) -> None:
        """Look for the signal of another rank, then for the last iteration."""
        store = self._store
        if store is None or self._agreed.is_set():
            return
        if self._requester is None:
            if store.check([REQUESTED]):
                self._request(int(store.get(REQUESTED)))
        elif store.check(["last/largest"]):
            with self._lock:  # the requester is that of all ranks
                self._last, self._requester = map(int, store.multi_get(["last/largest", REQUESTED]))
            self._agreed.set()

    def _publish(self, name: str, number: int) -> None:
        """Publish a number of this rank. The last rank that does so publishes the largest one."""
        ranks = range(self._control.world_size)
        self._store.set(f"{name}/{self._control.rank}", str(number))
        if self._store.add(name, 1) == len(ranks):
            numbers = self._store.multi_get([f"{name}/{rank}" for rank in ranks])
            self._store.set(f"{name}/largest", str(max(map(int, numbers))))

    def _linger(self, iteration: int) -> None:
        """Wait until all ranks have saved the checkpoint."""
        if self._store is None:
            return
        with suppress(RuntimeError):  # the store is lost
            self._publish("saved", iteration)
            self._store.wait(["saved/largest"])  # `_watch` limits the time
            if self._control.rank == 0:
                time.sleep(STORE_LINGER_S)

    def _reason_to_end_now(self) -> str | None:
        """Return why this rank ends without the end of the iteration; None if it does not."""
        if self._session is None and self._has_workers is None:
            return "training has not begun"
        if self._has_workers is not None and not self._has_workers():
            return "no worker is connected"
        if self._has_second_signal:
            return "a second SIGTERM has arrived"
        if time.monotonic() - self._requested_s > STOP_S:
            return f"the job did not stop within {STOP_S:g} s"
        if self._is_last_ended or self._store is None:
            return None
        detector = self._control.detector
        assert detector is not None
        states = enumerate(detector.statuses)
        ended = [r for r, status in states if status.state not in ACTIVE and r != detector.rank]
        if lost := detector.failed_peers() or ended:
            return f"rank {lost[0]} {detector.describe_suspect(lost[0])}"
        return None

    # ---- end --------------------------------------------------------------------------------

    def _saved(self) -> str:
        """Save the checkpoint, if one is configured. Return the rest of the sentence."""
        assert self._session is not None
        if self._save is None:
            return ""
        if self._session.observing:
            return ", without a checkpoint: the measurement of the profile has not ended"
        try:
            return f"; the checkpoint is {self._save().wait()}"
        except Exception as error:
            return f", without a checkpoint: {error}"

    def _end(self, text: str) -> None:
        """Write the end and pass the signal on."""
        if self._ending.acquire(timeout=END_S):
            with suppress(Exception):  # the process ends in any case
                self.on_end(how="signal", text=f"Rank {self._requester} received SIGTERM. {text}")
        self._pass_on()

    def _print_end(self, how: str, text: str) -> None:
        if self._control.rank == 0:
            console.print("end", text, "warning", how=how)

    def _pass_on(self) -> None:
        """Send SIGTERM to this process, with its default action or the script's handler."""
        if not self._is_installed:
            self._last = None
            os.kill(os.getpid(), signal.SIGTERM)
            return
        with suppress(Exception):
            # Python sets a handler only in the main thread.
            ctypes.CDLL(None).signal(int(signal.SIGTERM), None)
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(END_S)
        os._exit(128 + signal.SIGTERM)  # the first process of a container has no default action


_installed: list[StopRequest] = []  # the request whose handler this process has installed


@cache
def _restore_in_forks() -> None:
    """Restore the default action of SIGTERM in forks of this process, such as those of a
    DataLoader.

    The signal is blocked meanwhile. Otherwise the handler of the fork could write to the socket of
    this process.
    """
    masks = threading.local()

    def block() -> None:
        masks.before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])

    def unblock() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, masks.before)

    def restore() -> None:
        for request in [*_installed]:
            request._uninstall()
        unblock()

    os.register_at_fork(before=block, after_in_parent=unblock, after_in_child=restore)
