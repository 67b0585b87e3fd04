"""Switch in user space for delays and losses that the kernel cannot provide, also of single pairs.

It is a process that connects the hosts' TAP devices and forwards their frames. It ends with the
supervisor, and its devices with it.
"""

import gc
import os
import select
import signal
import time
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import NoReturn

from offbeat.lab import syscalls
from offbeat.lab.channel import Channel
from offbeat.lab.switch.forwarding import Crossbar
from offbeat.lab.switch.link_state import LinkPlan
from offbeat.lab.switch.tap import HEADER_BYTES, set_segment_offload, wire_bytes

_FRAME_BYTES = HEADER_BYTES + 14 + 65536
_BATCH = 16  # largest number of frames read from one host before the others
_TO = slice(HEADER_BYTES, HEADER_BYTES + 6)


class Switch:
    """Running switch process, as the supervisor sees it."""

    def __init__(self, taps: Mapping[int, Sequence[int]], plans: Mapping[int, LinkPlan]) -> None:
        """Start forwarding between the TAP descriptors of each link's hosts, and close them
        here."""
        self._control, there = Channel.pair()
        owner = os.getpid()
        if os.fork() == 0:
            _run(there, taps, plans, owner)
        there.close()
        for fds in taps.values():
            for fd in fds:
                os.close(fd)

    def change(self, link: int, plan: LinkPlan) -> None:
        """Apply a new plan of a link; raise BrokenPipeError if the switch has ended."""
        self._control.send((link, plan))
        self._control.receive()  # one plan at a time: the switch waits for what can be read


class _Forwarder:
    """Forwarding of frames between descriptors in real time."""

    def __init__(
        self, control: Channel, taps: Mapping[int, Sequence[int]], plans: Mapping[int, LinkPlan]
    ) -> None:
        self._control = control
        self._taps = taps
        self._crossbars = {
            link: Crossbar(plan, self._writer(taps[link]), seed=link)
            for link, plan in plans.items()
        }
        self._sources = {
            fd: (link, host) for link, fds in taps.items() for host, fd in enumerate(fds)
        }
        self._ready = select.epoll()
        for fd in self._sources:
            self._ready.register(fd, select.EPOLLIN)
        self._ready.register(control.fileno(), select.EPOLLIN)

    def serve(self) -> None:
        """Forward frames. Never returns: the process ends with the supervisor."""
        while True:
            ready = self._wait_for_frames()
            now_s = time.monotonic()
            for crossbar in self._crossbars.values():
                crossbar.advance(now_s)
            for fd in ready:
                if fd in self._sources:
                    self._read_frames(fd, now_s)
                else:
                    self._apply_plan(now_s)

    def _wait_for_frames(self) -> list[int]:
        """Wait for readable descriptors, at most until the next event of a crossbar, and return
        them."""
        due = [at for c in self._crossbars.values() if (at := c.next_s()) is not None]
        limit_s = max(0.0, min(due) - time.monotonic()) if due else None
        # The timeout of epoll is in milliseconds, too coarse for short delays. That of select is in
        # microseconds.
        select.select([self._ready], [], [], limit_s)
        return [fd for fd, _ in self._ready.poll(0)]

    def _read_frames(self, fd: int, now_s: float) -> None:
        link, source = self._sources[fd]
        crossbar = self._crossbars[link]
        hosts = len(self._taps[link])
        for _ in range(_BATCH):
            try:
                frame = os.read(fd, _FRAME_BYTES)
            except BlockingIOError:
                return
            size, to = wire_bytes(frame), frame[_TO]
            if to[0] & 1:  # multicast or broadcast address
                for host in range(hosts):
                    if host != source:
                        crossbar.forward(now_s, source, host, frame, size)
            elif to[5] < hosts and to[5] != source:
                crossbar.forward(now_s, source, to[5], frame, size)

    def _apply_plan(self, now_s: float) -> None:
        link, plan = self._control.receive()
        self._crossbars[link].change(now_s, plan)
        for fd in self._taps[link]:
            set_segment_offload(fd, segments=not plan.has_loss)
        self._control.send(None)

    @staticmethod
    def _writer(fds: Sequence[int]):
        def write(host: int, frame: bytes) -> None:
            try:
                os.write(fds[host], frame)
            except OSError:  # the interface is down
                return

        return write


def _run(
    control: Channel,
    taps: Mapping[int, Sequence[int]],
    plans: Mapping[int, LinkPlan],
    owner: int,
) -> NoReturn:
    """Run the switch in the forked child. Never returns."""
    try:
        for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, signal.SIG_DFL)
        # Inherited descriptors need not be closed, as this process never outlives the supervisor.
        syscalls.set_parent_death_signal(signal.SIGKILL)
        if os.getppid() == owner:
            gc.disable()  # frames create no reference cycles
            _raise_priority()
            _Forwarder(control, taps, plans).serve()
    except BaseException:
        os.write(2, traceback.format_exc().encode())
    finally:
        os._exit(1)


def _raise_priority() -> None:
    """Raise the priority above that of compute, as the kernel's shapers have it, if permitted."""
    try:
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    except OSError:
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, 0, -20)
