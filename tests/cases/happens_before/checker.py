"""Happens-before checker: finds unordered accesses of a GPU's streams, on a host without a GPU.

`Streams` replaces offbeat's `CUDA` device. All operations run at once on the CPU, and each is noted
as if it were launched on a stream: main and autograd threads on one, each thread of a link on its
own, a thread of gossip on its own, each stream of FSDP on its own. A vector clock per stream
follows events (`mark`, `run`, `follow`), a clock per host thread follows waits of the host. The
result does not depend on timing.

Found are

- two accesses to the same bytes, one of them a write, of which none is ordered before the other;
- memory that returns to its stream's pool while another stream uses it, when that stream allocates
  again before it has waited for the use;
- host memory that the host reads, writes or frees before copies to or from it have ended.

Knowledge that passes between host threads by Python's locks is not an order of the device here.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from itertools import count as numbers
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

import offbeat
from offbeat.core.transport.device import Device

COMPUTE = "compute"
PACKAGE = f"{Path(offbeat.__file__).parent}/"
PAGE_BITS = 10
FRAMES = 14  # of the stack, in which the place of an operation is searched
SYNCHRONIZES = {"_local_scalar_dense", "equal", "is_nonzero", "nonzero", "masked_select"}
COPIES = {"copy_", "_foreach_copy_"}
UNSEEN = {"_unsafe_view", "_reshape_alias", "set_", "resize_", "lift_fresh"}
"""Operations that access no elements, although their schemas do not say so."""
LIKE = {"new_zeros", "new_empty", "new_full", "zeros_like", "empty_like", "ones_like", "full_like"}
"""Operations that access no elements of their arguments."""

Clock = dict[str, int]  # by stream: number of the last operation that has happened before


def merge(into: Clock, other: Clock) -> None:
    for stream, count in other.items():
        if into.get(stream, 0) < count:
            into[stream] = count


class Place(NamedTuple):
    """An operation, and the files and lines from which it was launched."""

    operation: str
    lines: tuple[tuple[str, int], ...]

    def __str__(self) -> str:
        lines = ", from ".join(f"{name}:{line}" for name, line in self.lines)
        return f"{self.operation} at {lines or 'script or autograd'}"


@dataclass(slots=True)
class Access:
    low: int
    high: int
    stream: str
    count: int
    writes: bool
    where: Place
    allocation: Allocation


@dataclass(slots=True)
class Allocation:
    """Memory of one storage.

    `stream` is the pool to which it returns, None if unknown. `owns` is whether the memory is free
    when the storage is: other storages may share the memory of a storage that was not seen when it
    was created. `start` is its address, which changes when FSDP frees and fills a storage.
    """

    ref: StorageWeakRef
    stream: str | None
    where: Place
    start: int
    is_host: bool = False
    owns: bool = True
    uses: Clock = field(default_factory=dict)
    kept: set[str] = field(default_factory=set)  # streams of which the allocator has been told

    def has_left(self, address: int) -> bool:
        """Whether the memory at an address does not belong to the storage any more."""
        storage = torch.UntypedStorage._new_with_weak_ptr(self.ref.cdata)
        if storage is None:
            return self.owns
        return not storage.data_ptr() <= address < storage.data_ptr() + storage.nbytes()


@dataclass(frozen=True)
class Moment:
    """A mark: what has happened before on the device, what the host knew, and the time."""

    order: Clock
    host: Clock
    at_s: float


class Checker:
    """Clocks, accesses and allocations of one process, and the races found so far."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.threads = threading.local()
        self.reset()

    def reset(self) -> None:
        with self.lock:
            self.races: Counter[str] = Counter()
            self.waits: Counter[Place] = Counter()  # of the host for compute, by place
            self.operations: Counter[str] = Counter()  # by stream
            self._clocks: dict[str, Clock] = {}
            self._hosts: dict[int, Clock] = {}
            self._pages: dict[int, list[Access]] = {}
            self._known: dict[int, Allocation] = {}
            self._shared: dict[int, Allocation] = {}  # used by a stream other than their own
            self._freed: dict[str, list[tuple[Clock, Place]]] = {}

    # ---- streams and hosts ----------------------------------------------------------------------

    @property
    def stream(self) -> str:
        return getattr(self.threads, "stream", COMPUTE)

    def clock(self, stream: str | None = None) -> Clock:
        return self._clocks.setdefault(stream or self.stream, {})

    def host(self) -> Clock:
        return self._hosts.setdefault(threading.get_ident(), {})

    def mark(self, stream: str | None = None) -> Moment:
        """Return a mark of a stream; by default of the current one."""
        with self.lock:
            order, host = dict(self.clock(stream)), dict(self.host())
            merge(order, host)
            return Moment(order, host, time.perf_counter())

    def follow(self, moment: Moment, stream: str | None = None) -> None:
        """Let a stream wait for a mark; by default the current one."""
        with self.lock:
            merge(self.clock(stream), moment.order)
            merge(self.host(), moment.host)

    def synchronize(self, where: Place) -> None:
        """Let the host wait for the current stream."""
        with self.lock:
            merge(self.host(), self.clock())
            if self.stream == COMPUTE:
                self.waits[where] += 1

    def finish(self) -> None:
        """Let the host wait for all streams."""
        with self.lock:
            for clock in self._clocks.values():
                merge(self.host(), clock)
            self.waits[place_of("finish")] += 1

    def _is_seen(self, stream: str, count: int) -> bool:
        """Return whether any host thread has seen the end of an operation."""
        return any(host.get(stream, 0) >= count for host in self._hosts.values())

    # ---- memory ---------------------------------------------------------------------------------

    def allocation(self, tensor: Tensor) -> Allocation | None:
        """Return the allocation of a tensor; None if it is not known."""
        key = tensor.untyped_storage()._cdata
        found = self._known.get(key)
        if found is not None and found.ref.expired():  # its address has a new storage
            self._forget(key)
            return None
        return found

    def _forget(self, key: int) -> None:
        gone = self._known.pop(key)
        self._shared.pop(key, None)
        uses = {s: c for s, c in gone.uses.items() if s not in (gone.stream, *gone.kept)}
        if gone.stream is not None and uses:
            self._freed.setdefault(gone.stream, []).append((uses, gone.where))

    def add(self, tensor: Tensor, where: Place, *, is_host: bool = False) -> Allocation:
        """Note new memory of the current stream, or of the host."""
        low, high = span_of(tensor)
        self._pages_without(low, high)
        made = self._allocate(tensor, where)
        made.is_host, made.stream = is_host, None if is_host else self.stream
        if not is_host:
            self._check_reuse(where)
        return made

    def _check_reuse(self, where: Place) -> None:
        for key in [key for key, shared in self._shared.items() if shared.ref.expired()]:
            self._forget(key)
        now = self.clock()
        for uses, owner in self._freed.pop(self.stream, ()):
            for stream, count in uses.items():
                if now.get(stream, 0) < count and not self._is_seen(stream, count):
                    self.races[
                        f"memory of {owner} was freed on {self.stream} while {stream} uses it, and "
                        f"is allocated again by {where}"
                    ] += 1

    def free_on_host(self, key: int) -> None:
        """Note that memory of the host returns to the system. No copy may use it."""
        with self.lock:
            found = self._known.get(key)
            for stream, number in {} if found is None else found.uses.items():
                if not self._is_seen(stream, number):
                    self.races[f"memory of the host was freed while {stream} uses it"] += 1

    def keep(self, tensors: Iterable[Tensor]) -> None:
        """Tell the allocator that the current stream uses tensors."""
        with self.lock:
            for tensor in tensors:
                if (found := self.allocation(tensor)) is not None:
                    found.kept.add(self.stream)

    def set_host(self, tensor: Tensor, where: Place) -> None:
        """Note that memory belongs to the host, and so did all operations on it."""
        found = self.allocation(tensor) or self._allocate(tensor, where)
        if not found.is_host:
            found.is_host, found.stream = True, None
            storage = tensor.untyped_storage()
            self._pages_without(storage.data_ptr(), storage.data_ptr() + storage.nbytes())

    def is_host(self, tensor: Tensor) -> bool:
        found = self.allocation(tensor)
        return found is not None and found.is_host

    # ---- accesses -------------------------------------------------------------------------------

    def _accesses(self, low: int, high: int) -> Iterator[Access]:
        for page in range(low >> PAGE_BITS, (high - 1 >> PAGE_BITS) + 1):
            yield from self._pages.get(page, ())

    def fill(self, tensor: Tensor) -> None:
        """Note that a storage without memory has some again, perhaps that which it had before."""
        storage = tensor.untyped_storage()
        with self.lock:
            self._pages_without(storage.data_ptr(), storage.data_ptr() + storage.nbytes())

    def _pages_without(self, low: int, high: int) -> None:
        """Forget the accesses to memory that has a new owner."""
        for page in range(low >> PAGE_BITS, (high - 1 >> PAGE_BITS) + 1):
            if page in self._pages:
                self._pages[page] = [a for a in self._pages[page] if a.high <= low or high <= a.low]

    def touch(self, tensor: Tensor, writes: bool, where: Place) -> None:  # noqa: C901
        """Note an access of the current operation on the current stream."""
        if tensor.layout != torch.strided or not tensor.numel():
            return
        stream, now = self.stream, self.clock()
        found = self.allocation(tensor)
        if found is None:
            found = self._allocate(tensor, where)
            found.owns = False
        storage = tensor.untyped_storage()
        if found.start != storage.data_ptr():
            found.start = storage.data_ptr()
            self._pages_without(found.start, found.start + storage.nbytes())
        found.uses[stream] = now[stream]
        if found.stream not in (None, stream):
            self._shared[storage._cdata] = found
        low, high = span_of(tensor)
        mine = Access(low, high, stream, now[stream], writes, where, found)
        for page in range(low >> PAGE_BITS, (high - 1 >> PAGE_BITS) + 1):
            kept = []
            for a in self._pages.get(page, ()):
                if a.high <= low or high <= a.low:
                    kept.append(a)
                    continue
                before = a.stream == stream or now.get(a.stream, 0) >= a.count
                if not before and a.allocation.has_left(a.low):  # the memory has a new owner
                    continue
                if not before and (writes or a.writes):
                    self.races[f"{_words(a)} and {_words(mine)}"] += 1
                if not before or a.low < low or high < a.high or (a.writes and not writes):
                    kept.append(a)
            self._pages[page] = [*kept, mine]

    def _allocate(self, tensor: Tensor, where: Place) -> Allocation:
        storage = tensor.untyped_storage()
        made = Allocation(StorageWeakRef(storage), None, where, storage.data_ptr())
        self._known[storage._cdata] = made
        return made

    def touch_by_host(self, tensor: Tensor, where: Place, writes: bool = True) -> None:
        """Note an access of the host, which may write unless `writes` is False."""
        if not tensor.numel():
            return
        with self.lock:
            low, high = span_of(tensor)
            for a in self._accesses(low, high):
                overlaps = a.low < high and low < a.high and (writes or a.writes)
                if overlaps and not (
                    self._is_seen(a.stream, a.count) or a.allocation.has_left(a.low)
                ):
                    self.races[f"{_words(a)} and access by the host [{where}]"] += 1


def _words(access: Access) -> str:
    return f"{'write' if access.writes else 'read'} on {access.stream} [{access.where}]"


def span_of(tensor: Tensor) -> tuple[int, int]:
    size = 1 + sum((n - 1) * s for n, s in zip(tensor.size(), tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + max(size, 0) * tensor.element_size()


def place_of(operation: str) -> Place:
    """Return an operation and the first places of offbeat on the stack."""
    frame, found = sys._getframe(1), []
    for _ in range(FRAMES):
        if frame is None or len(found) == 2:
            break
        if (name := own_file(frame.f_code.co_filename)) is not None:
            found.append((name, frame.f_lineno))
        frame = frame.f_back
    return Place(operation, tuple(found))


@cache
def own_file(name: str) -> str | None:
    """Return the path of a file within the package, or None."""
    return name.removeprefix(PACKAGE) if name.startswith(PACKAGE) else None


CHECKER = Checker()


class _Schema:
    """What an operation does to its arguments: (position, name, whether it writes).

    `non_blocking` is the position of the argument of that name, or a position after all.
    """

    __slots__ = ("arguments", "communicates", "name", "non_blocking", "unseen")

    def __init__(self, func: Any) -> None:
        schema = func._schema
        self.name = schema.name.rpartition("::")[2]
        self.communicates = func.namespace == "c10d"
        aliases = [r.alias_info for r in schema.returns]
        views = bool(aliases) and all(a is not None and not a.is_write for a in aliases)
        self.unseen = views or self.name in UNSEEN
        self.arguments = [
            (i, a.name, a.alias_info is not None and a.alias_info.is_write)
            for i, a in enumerate(schema.arguments)
        ]
        places = [i for i, a in enumerate(schema.arguments) if a.name == "non_blocking"]
        self.non_blocking = places[0] if places else len(schema.arguments)

    def blocks(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Return whether a copy between host and device waits for its end."""
        at = self.non_blocking
        return not (args[at] if at < len(args) else kwargs.get("non_blocking", False))


_schemas: dict[Any, _Schema] = {}


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)


class Watch(TorchDispatchMode):
    """Notes every operation of this thread."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(hasattr(kind, "placements") for kind in types):
            return NotImplemented  # a DTensor runs the operation on its local tensor
        if (schema := _schemas.get(func)) is None:
            schema = _schemas[func] = _Schema(func)
        if schema.unseen or any(hasattr(kind, "fake_mode") for kind in types):
            return func(*args, **kwargs)
        given = []
        for i, name, writes in () if schema.name in LIKE else schema.arguments:
            value = args[i] if i < len(args) else kwargs.get(name)
            given += [(tensor, writes) for tensor in _tensors(value)]
        with CHECKER.lock:
            hosts = [CHECKER.is_host(tensor) for tensor, _ in given]
            if schema.communicates:  # gloo orders its copies of device memory on the current stream
                given = [(tensor, True) for tensor, _ in given]
                hosts = [any(hosts)] * len(hosts)
            elif schema.name not in COPIES and any(
                is_host and tensor.dim() for (tensor, _), is_host in zip(given, hosts, strict=True)
            ):  # of tensors of one device, which is the host's
                for tensor, _ in given:
                    CHECKER.set_host(tensor, place_of(schema.name))
                hosts = [True] * len(hosts)
            for tensor, writes in given if all(hosts) else ():
                CHECKER.touch_by_host(tensor, place_of(schema.name), writes)
        result = func(*args, **kwargs)
        with CHECKER.lock:
            self._note(schema, given, hosts, result, blocks=schema.blocks(args, kwargs))
        return result

    def _note(
        self,
        schema: _Schema,
        given: list[tuple[Tensor, bool]],
        hosts: list[bool],
        result: Any,
        *,
        blocks: bool,
    ) -> None:
        where = place_of(schema.name)
        if hosts and all(hosts):  # the host computes at once
            for tensor in _tensors(result):
                if CHECKER.allocation(tensor) is None:
                    CHECKER.add(tensor, where, is_host=True)
            return
        stream, now = CHECKER.stream, CHECKER.clock()
        merge(now, CHECKER.host())
        now[stream] = now.get(stream, 0) + 1
        CHECKER.operations[stream] += 1
        for tensor in _tensors(result):
            if CHECKER.allocation(tensor) is None:
                CHECKER.add(tensor, where)
                given = [*given, (tensor, True)]
        for tensor, writes in given:
            CHECKER.touch(tensor, writes, where)
        crosses = any(hosts) and schema.name in COPIES
        if schema.name in SYNCHRONIZES or (crosses and blocks):
            CHECKER.synchronize(where)


def host_copy(given: Tensor, result: Tensor, *, blocks: bool) -> Tensor:
    """Return the result of a copy to the host, which may be the given tensor itself, as host memory
    with the accesses of the copy noted."""
    if CHECKER.is_host(given):
        return result
    result = given.detach().clone() if result is given else result
    with CHECKER.lock:
        found = CHECKER.allocation(result)
        assert found is not None
        found.is_host, found.stream = True, None
        if blocks:
            CHECKER.synchronize(place_of("copy to the host"))
    return result


def device_copy(given: Tensor, *, blocks: bool) -> Tensor:
    """Return a copy of host memory on the device."""
    result = given.detach().clone()
    with CHECKER.lock:
        where, now = place_of("copy to the device"), CHECKER.clock()
        merge(now, CHECKER.host())
        now[CHECKER.stream] = now.get(CHECKER.stream, 0) + 1
        CHECKER.add(result, where)
        CHECKER.touch(given, False, where)
        CHECKER.touch(result, True, where)
        if blocks:
            CHECKER.synchronize(where)
    return result


class Streams(Device):
    """offbeat's interface to a device, on the checker."""

    def mark(self) -> Moment:
        return CHECKER.mark()

    def run(self, after: Moment, work: Callable[..., None], *args: Any) -> tuple[Moment, Moment]:
        _name_stream()
        with CHECKER.lock:
            merge(CHECKER.clock(), after.order)
        start = self.mark()
        with Watch():
            work(*args)
        return start, self.mark()

    def follow(self, mark: Moment) -> None:
        watch_thread()
        CHECKER.follow(mark)

    def seconds(self, mark: Moment) -> float:
        self.await_mark(mark)
        return mark.at_s

    def has_reached(self, mark: Moment) -> bool:
        return True

    def await_mark(self, mark: Moment) -> None:
        with CHECKER.lock:
            merge(CHECKER.host(), mark.order)

    def keep(self, tensors: Iterable[Tensor]) -> None:
        CHECKER.keep(tensors)

    def free_bytes(self) -> int | None:
        return None

    def finish(self) -> None:
        CHECKER.finish()


_numbers = numbers(1)


class SideStream:
    """A stream of FSDP, in place of `torch.cpu.Stream`."""

    def __init__(self, priority: int = 0, *, name: str | None = None) -> None:
        self.name = name or f"stream {next(_numbers)} of FSDP"

    def wait_stream(self, other: SideStream) -> None:
        CHECKER.follow(CHECKER.mark(other.name), self.name)

    def wait_event(self, event: SideEvent) -> None:
        CHECKER.follow(event.moment, self.name)

    def record_event(self) -> SideEvent:
        event = SideEvent()
        event.record(self)
        return event


class SideEvent:
    """An event of FSDP, in place of `torch.cpu.Event`."""

    moment: Moment

    def record(self, stream: SideStream | None = None) -> None:
        self.moment = CHECKER.mark(None if stream is None else stream.name)


@contextmanager
def on_stream(stream: SideStream) -> Iterator[None]:
    """Launch the operations of the body on a stream."""
    before = CHECKER.stream
    CHECKER.threads.stream = stream.name
    try:
        yield
    finally:
        CHECKER.threads.stream = before


def current_stream(_: object = None) -> SideStream:
    return SideStream(name=CHECKER.stream)


def _name_stream() -> None:
    thread = threading.current_thread()
    CHECKER.threads.stream = f"{thread.name}/{thread.ident}"


def watch_thread() -> None:
    """Note the operations of a thread that is neither the main one nor that of a link from now on,
    on a stream of its own."""
    if threading.current_thread() is threading.main_thread():
        return
    if not hasattr(CHECKER.threads, "stream"):
        _name_stream()
        CHECKER.threads.watch = Watch()
        CHECKER.threads.watch.__enter__()


def _read_elements(self: Tensor) -> Any:
    """Return `tolist` of a tensor, for which the host waits."""
    with CHECKER.lock:
        where = place_of("tolist")
        if CHECKER.is_host(self):
            CHECKER.touch_by_host(self, where)
        else:
            stream, now = CHECKER.stream, CHECKER.clock()
            merge(now, CHECKER.host())
            now[stream] = now.get(stream, 0) + 1
            CHECKER.touch(self, False, where)
            CHECKER.synchronize(where)
    return _tolist(self)


def _read_memory(self: Tensor, *args: Any, **kwargs: Any) -> Any:
    CHECKER.touch_by_host(self, place_of("numpy"))
    return _numpy(self, *args, **kwargs)


def _copy_to_host(self: Tensor) -> Tensor:
    return host_copy(self, self, blocks=True)


def _move(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    result, blocks = _to(self, *args, **kwargs), not kwargs.get("non_blocking")
    where = args[0] if args else kwargs.get("device")
    if isinstance(where, torch.device) and CHECKER.is_host(self):
        return device_copy(result, blocks=blocks)
    return host_copy(self, result, blocks=blocks) if isinstance(where, str) else result


def _created(make: Callable[..., Tensor], *, always: bool) -> Callable[..., Tensor]:
    """Return a function that notes the tensors that it creates on the host.

    offbeat names the host as "cpu", and the device of other tensors by `torch.device`.
    """

    def create(*args: Any, **kwargs: Any) -> Tensor:
        made = make(*args, **kwargs)
        if always or kwargs.get("device") == "cpu":
            with CHECKER.lock:
                CHECKER.add(made, place_of("host memory"), is_host=True)
        return made

    return create


_tolist, _numpy, _to = Tensor.tolist, Tensor.numpy, Tensor.to
_MAKERS = "empty", "zeros", "ones", "full", "tensor", "arange", "empty_strided", "empty_like"


@contextmanager
def host_memory_noted() -> Iterator[None]:
    """Note the memory of the host, and accesses to tensors by the host, in the body."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tensor, "tolist", _read_elements)
        patch.setattr(Tensor, "numpy", _read_memory)
        patch.setattr(Tensor, "cpu", _copy_to_host)
        patch.setattr(Tensor, "to", _move)
        for name in _MAKERS:
            patch.setattr(torch, name, _created(getattr(torch, name), always=False))
        for name in ("frombuffer", "from_numpy"):
            patch.setattr(torch, name, _created(getattr(torch, name), always=True))
        yield
