"""Control: agreement between ranks by small messages, and reports of failed ranks."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.distributed_c10d import PrefixStore, Store

import offbeat
from offbeat.core.plan import Groups
from offbeat.core.transport import packed
from offbeat.core.transport.agreement import StoreAgreement, compare_versions
from offbeat.core.transport.gloo_devices import share_devices
from offbeat.core.transport.heartbeat import open_heartbeat
from offbeat.core.transport.interfaces import LinkSpec, connects_lazily, group_environment
from offbeat.core.transport.rendezvous import missing_keys, run_checked
from offbeat.core.transport.reports import Reports

_met = 0  # number of `Control` objects that this process has created together with all ranks
COUNT, COMPLETE = "count", "complete"  # keys of a wait of all ranks


class Control(Reports):
    """Process group for agreement between ranks, and heartbeat of this rank.

    The group is separate from those of links, so that large messages do not delay it. It is the
    default process group if offbeat has created that one. Messages have a tag of their own, so that
    collectives of the script in that group do not mix with them.

    Args:
        timeout_s: timeout of waits in seconds.
        interface: network interface of the group; None lets gloo choose.
        protocol: protocol of the members of the job, which change while it runs, so that counts of
            a process may differ; each of their process groups has a store of its own. None: all
            ranks must have the same version of offbeat.
        require_members: raises RuntimeError if a member is gone or has given up, where the members
            change.
        owns_default: whether offbeat has created the default process group, with this timeout and
            on this interface. Then control messages use it, if it is one of gloo.

    Attributes:
        timeout_s: timeout of waits in seconds.
        interface: network interface of the group; None: gloo has chosen it.
        rank: rank of this process.
        world_size: number of ranks.
        group: gloo group of all ranks.
        met: number of `Control` objects that all ranks have created, including this one.
        hosts: host name of each rank.
        on_wait_end: called after each collective of all ranks.
    """

    _protocol: str | None = None
    on_wait_end: Callable[[], None] = staticmethod(lambda: None)

    def __init__(
        self,
        timeout_s: float,
        interface: str | None = None,
        protocol: str | None = None,
        *,
        require_members: Callable[[], None] | None = None,
        owns_default: bool = False,
    ):
        self.timeout_s, self.interface, self._protocol = timeout_s, interface, protocol
        self._require_members, self._owns_default = require_members, owns_default
        self.connect()

    def connect(self) -> None:
        """Meet all ranks of the default process group, which may be a new one after `close`."""
        self.rank: int = dist.get_rank()
        self.world_size: int = dist.get_world_size()
        self.group: dist.ProcessGroup
        self._heartbeat = None
        self.hosts = ()
        if self._protocol is None:
            self.met = self._meet_all()
        else:  # the ranks have met in the default process group of their epoch
            self.group, self.met = self._open_group(), 1
        if self.world_size > 1:
            store = distributed_c10d._get_default_store()
            ends = self.rank, self.world_size, self.run_checked
            self._heartbeat = open_heartbeat(store, str(self.met), *ends)
        self._joint_calls: dict[str, int] = {}
        if self._protocol is not None:
            self.hosts = compare_versions(self, f"with {self._protocol}", torch.__version__)

    def _meet_all(self) -> int:
        """Meet all ranks, compare their versions and open the group. Return how often they have
        met.

        torch numbers groups: a rank that has begun one more group than the other ranks can never
        create a group with them again. So all ranks meet before.
        """
        global _met
        try:
            with self.waiting("waiting for all ranks to call prepare"):
                self.meet(f"prepare/{_met}")
                _met += 1
                part = self.store(f"versions/{_met}")
                with StoreAgreement(part, self.rank, self.world_size, self.timeout_s) as ranks:
                    self.hosts = compare_versions(ranks, offbeat.__version__, torch.__version__)
                self.group = self._open_group()
        except RuntimeError as error:
            raise RuntimeError(
                f"rank {self.rank} waited {self.timeout_s:g} s for all {self.world_size} ranks to "
                f"call offbeat.prepare: {error}. See the logs of the other ranks: one may have "
                "failed, or have ended, as a server does when all workers have closed their model"
            ) from error
        return _met

    def _open_group(self) -> dist.ProcessGroup:
        default = dist.group.WORLD
        if self._owns_default and default is not None and dist.get_backend() == "gloo":
            return default
        return self.create_group()

    def create_group(self) -> dist.ProcessGroup:
        """Return a new gloo group of all ranks on the interface for control messages."""
        with group_environment(LinkSpec("", self.interface), self.world_size):
            return self.new_group("gloo", like=getattr(self, "group", None))

    def run_checked(self, act: Callable[[], Any]) -> Any:
        """Return the result of a call that waits for other ranks. Where the members change, it
        fails as soon as one has failed or given up: connections to that rank may remain open."""
        return run_checked(act, self.timeout_s, self._require_members)

    def new_group(
        self, backend: str, parts: Groups = (), like: dist.ProcessGroup | None = None
    ) -> dist.ProcessGroup:
        """Return a new process group of all ranks, or of the part that holds this rank; see the
        function of this name. Where the members change, it fails as soon as one has failed."""
        return new_group(backend, self.timeout_s, parts, like, self._require_members)

    def meet(self, what: str) -> None:
        """Wait in the store until all ranks have called it. It may be repeated after a failure.

        Args:
            what: name of the wait, which must not have succeeded before.

        Raises:
            RuntimeError: names the ranks that are missing after `timeout_s`, or else the ranks that
                stopped waiting earlier.
        """
        if self.world_size == 1:
            return
        store, mine, stopped = self.store(what), str(self.rank), "stopped/"
        store.delete_key(stopped + mine)
        store.set(mine, "")
        # Each rank waits for one key. If it waited for those of all ranks, the work of the store
        # would grow with the square of their number.
        if store.add(COUNT, 1) == self.world_size:
            store.set(COMPLETE, "")
        try:
            store.wait([COMPLETE], timedelta(seconds=self.timeout_s))
        except RuntimeError as error:
            absent = missing_keys(store, [str(rank) for rank in range(self.world_size)])
            if not absent:  # the last rank has come after the end of the wait
                return
            missing = [rank for rank in absent if not store.check([stopped + rank])]
            store.set(stopped + mine, "")
            store.add(COUNT, -1)
            store.delete_key(mine)
            how = f"did not within {self.timeout_s:g} s" if missing else "stopped waiting earlier"
            raise RuntimeError(f"rank {', '.join(missing or absent)} {how}") from error

    def abandon(self) -> None:
        """Stop the heartbeat and drop the process group. `connect` creates the next one."""
        if self._heartbeat is not None:
            self._heartbeat.stop()
            self._heartbeat = None
        with suppress(AttributeError):
            del self.group

    def gather(self, value: Any, activity: str = "exchanging values") -> list[Any]:
        """Return every rank's value, by rank. Equal values are one object.

        Args:
            value: value of types that JSON supports, or tuples.
            activity: what ranks are doing that wait for others.

        Raises:
            RuntimeError: names the missing ranks after a timeout.
            ValueError: on every rank, if a value has another type.
        """
        with self.collective(activity):
            return self.run_checked(lambda: packed.gather(value, self.group))

    def share_first(self, value: Any) -> Any:
        """Return rank 0's value on every rank; see `gather`. Other ranks send nothing."""
        return self.gather(value if self.rank == 0 else None)[0]

    def is_same(self, numbers: Sequence[int], groups: Groups = ()) -> bool:
        """Whether all ranks have the same numbers.

        Args:
            numbers: numbers of this rank.
            groups: ranks to compare with each other, in groups; () for all ranks.
        """
        everyone = self.gather([*numbers], "comparing values")
        together = groups or [range(self.world_size)]
        return all(everyone[rank] == everyone[own[0]] for own in together for rank in own)

    def store(self, name: str) -> Store:
        """Return a part of the job's store, for keys with the prefix `name`."""
        return PrefixStore(f"offbeat/{name}", distributed_c10d._get_default_store())

    @contextmanager
    def collective(self, words: str) -> Iterator[None]:
        """Run a collective of all ranks in the body. An error of the backend names the suspects."""
        begun_s = time.monotonic()
        with self.waiting(words):
            try:
                yield
            except RuntimeError as error:
                if self._protocol is not None:  # the survivors meet, and need no report
                    raise
                why = self.report_failure(waited_s=time.monotonic() - begun_s)
                raise RuntimeError(
                    f"a collective of all ranks failed, {words}: {error}. {why}"
                ) from error
        self.on_wait_end()

    @property
    def has_members(self) -> bool:
        """Whether the members of the job change while it runs."""
        return self._protocol is not None

    @contextmanager
    def joint_call(self, name: str) -> Iterator[None]:
        """Run a call that every rank must make in the body.

        If a wait for other ranks fails in it, the error names the ranks without this call.

        Args:
            name: name of the call, such as "consolidate".
        """
        if self.world_size == 1:
            yield
            return
        number = self._joint_calls.get(name, 0)
        self._joint_calls[name] = number + 1
        store, own = self.store(f"{name}/{self.met}"), f"/{self.rank}"
        store.set(f"{number}{own}", "")
        if number:
            store.delete_key(f"{number - 1}{own}")  # every rank has made that call
        try:
            yield
        except RuntimeError as error:
            absent = self._absent_ranks(store, number)
            if not getattr(error, "is_peer_error", False) or not absent:
                raise
            raise RuntimeError(
                f"{name}() was called on rank {self.rank}, but not on rank {', '.join(absent)}; "
                f"call it on every rank, in the same place of the script: {error}"
            ) from error

    def _absent_ranks(self, store: Store, number: int) -> list[str]:
        """Return the live ranks that have not begun a joint call.

        None are known if a rank is dead, which explains the failure, or if the store is lost.
        """
        detector = self.detector
        if detector is None or detector.store_lost_s is not None or detector.dead_peers():
            return []
        try:
            keys = [f"{number}/{rank}" for rank in range(self.world_size)]
            return [key.partition("/")[2] for key in missing_keys(store, keys)]
        except RuntimeError:
            return []


def new_group(
    backend: str,
    timeout_s: float,
    parts: Sequence[Sequence[int]] = (),
    like: dist.ProcessGroup | None = None,
    check: Callable[[], None] | None = None,
) -> dist.ProcessGroup:
    """Return a new process group of all ranks, or of the part that holds this rank.

    Args:
        backend: "gloo" or "nccl".
        timeout_s: timeout of its collectives in seconds.
        parts: ranks of each part; () for one group of all ranks.
        like: group of gloo whose thread and listening socket a new group of gloo shares; None: it
            has its own.
        check: see `share_devices`.
    """
    mine, timeout = None, timedelta(seconds=timeout_s)
    # Groups of one device could not distinguish connections that begin with a message.
    with share_devices(None if connects_lazily() else like, check):
        for part in parts or [range(dist.get_world_size())]:  # every rank must create every group
            group = dist.new_group(list(part), backend=backend, timeout=timeout)
            mine = group if dist.get_rank() in part else mine
    assert isinstance(mine, dist.ProcessGroup)
    return mine
