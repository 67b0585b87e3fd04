"""Flat storage: parameters, buffers and gradients in contiguous tensors.

Adjacent buckets are adjacent in memory, so any run of buckets is one slice and one collective,
without a copy. Gradients are views of the flat tensor, so that its version counter shows whether
user code has changed one. Parameters and buffers have their own storages over the same memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.dlpack import from_dlpack

from offbeat.core.buckets.layout import BucketSpec, Key, key_of
from offbeat.core.buckets.memory import empty
from offbeat.core.buckets.shards import (
    is_sharded,
    local_of,
    place_of_shard,
    reshard,
    shard_like,
    squared_norm,
    stored_elements,
)
from offbeat.core.plan import BUILT_IN, Buffer, Payload
from offbeat.core.plan.types import moment_of

Store = dict[Key, Tensor]
ALIGNED_BYTES = 16  # alignment of vectorized loads of a GPU


class FlatBucket(NamedTuple):
    """Name and parameters of a bucket."""

    name: str
    parameters: list[nn.Parameter]


class Flat:
    """A model's trainable tensors, moved into one flat tensor per dtype and device, and buffers of
    the same layout. Shards stay in FSDP's memory, and are copied to and from the flat tensors.

    A bucket's absence counts follow its gradients in memory: for each parameter, the number of
    iterations in which this rank had no gradient for it. Both are averaged in one message. The
    averages show on every rank which parameters no rank has used.

    Attributes:
        parameters: all parameters, bucket by bucket.
        bucket_of: bucket of each parameter.
        starts: index of the first parameter of each bucket.
        sizes_bytes: bytes of the parameters of each bucket, without module buffers.
        buffer_bytes: bytes of the module buffers of each bucket.
        alignment_bytes: alignment of each parameter and each gradient within the flat tensors. Gaps
            between them are zero and are sent with them.

    Args:
        model: the model, whose parameters and buffers become views of the flat tensors.
        specs: the buckets.
        before: storage that holds the tensors so far. It is freed as soon as the parameters have
            moved, so it must not be used afterwards.
        alignment_bytes: alignment, by default that of `before`, or 1. It must be the same on all
            ranks.

    Peak memory: one additional copy of the parameters. If a GPU does not have this memory, `before`
    moves through the memory of the host.
    """

    def __init__(
        self,
        model: nn.Module,
        specs: Sequence[BucketSpec],
        before: Flat | None = None,
        alignment_bytes: int | None = None,
    ):
        if alignment_bytes is None:
            alignment_bytes = 1 if before is None else before.alignment_bytes
        self.alignment_bytes = alignment_bytes
        reshard(model)
        parameters, buffers = dict(model.named_parameters()), dict(model.named_buffers())
        trained = [[parameters[n] for n in spec.parameters] for spec in specs]
        self.parameters: list[nn.Parameter] = [p for own in trained for p in own]
        self.bucket_of: list[int] = [b for b, own in enumerate(trained) for _ in own]
        self.starts: list[int] = [self.bucket_of.index(b) for b in range(len(trained))]
        self.sizes_bytes: list[int] = [
            sum(stored_elements(p) * p.element_size() for p in own) for own in trained
        ]
        self._copies: dict[int, Tensor] = {}  # of shards, in the flat tensors, by id
        statistics = [[buffers[n] for n in spec.buffers] for spec in specs]
        self.buffer_bytes: list[int] = [sum(b.nbytes for b in more) for more in statistics]
        self.keys: list[Key] = [key_of(own[0]) for own in trained]
        self._kinds = {name: buffer.kind for name, buffer in BUILT_IN.items()}
        self._newest = {"param": 0, "grad": 0}
        self._stores: dict[str, list[Store]] = {}
        # (start, stop) of a bucket in parameters, (start, stop) in gradients, in elements.
        self._spans: list[tuple[int, int, int, int]] = []
        self._elements: list[int] = []  # elements of the parameters of each bucket, with gaps
        # Of each parameter: its tensors, and its first element in parameters and in gradients.
        self._places: list[tuple[Key, int, int]] = []
        moves: list[tuple[Tensor, Key, int]] = []
        ends: dict[Key, tuple[int, int]] = {}
        for key, own, more in zip(self.keys, trained, statistics, strict=True):
            at, grad_at = ends.get(key, (0, 0))
            alignment = self._alignment(key)
            lengths = [align(stored_elements(t), alignment) for t in (*own, *more)]
            *offsets, size = accumulate(lengths, initial=0)
            count = sum(lengths[: len(own)])
            counters = align(len(own), alignment)
            ends[key] = at + size, grad_at + count + counters
            self._spans.append((at, at + size, grad_at, ends[key][1]))
            self._elements.append(count)
            self._places += [(key, at + offset, grad_at + offset) for offset in offsets[: len(own)]]
            moves += [(t, key, at + o) for t, o in zip((*own, *more), offsets, strict=True)]
        with torch.no_grad():
            sizes = {key: size for key, (size, _) in ends.items()}
            params = self._create_tensors(sizes, may_fail=before is not None)
            if params is None:
                assert before is not None
                for tensor, *_ in moves:
                    if not is_sharded(tensor):
                        tensor.data = tensor.detach().to("cpu", copy=True)
                before.free("param")
                params = self._create_tensors(sizes)
            assert params is not None
            for tensor, key, offset in moves:
                self._move(tensor, params[key], offset)
            if before is not None:
                before.free("param")
                before.free("grad")
        self._stores = {"param": [params], "grad": []}
        self.buckets: list[FlatBucket] = [
            FlatBucket(spec.name, own) for spec, own in zip(specs, trained, strict=True)
        ]

    @property
    def is_sharded(self) -> bool:
        """Whether this rank holds shards of the parameters."""
        return is_sharded(self.parameters[0])

    def _alignment(self, key: Key) -> int:
        """Return the alignment in elements."""
        return max(1, self.alignment_bytes // key[0].itemsize)

    def _move(self, tensor: Tensor, flat: Tensor, offset: int) -> None:
        """Move a parameter or buffer into a flat tensor, or copy a shard."""
        if is_sharded(tensor):
            flat[offset : offset + stored_elements(tensor)] = 0  # the padding is sent, too
            place = self._copies[id(tensor)] = place_of_shard(flat, tensor, offset)
            place.copy_(local_of(tensor).detach())
        else:
            place = place_like(flat, tensor, offset)
            place.copy_(tensor.detach())
            tensor.data = place

    def _create_tensors(self, sizes: Mapping[Key, int], may_fail: bool = False) -> Store | None:
        """Return new flat tensors, with zeros if there are gaps. If they `may_fail`, return None if
        the memory of the device does not suffice."""
        try:
            tensors = {key: empty(size, *key) for key, size in sizes.items()}
        except torch.OutOfMemoryError:
            if may_fail:
                return None
            raise
        return {k: t.zero_() if self._alignment(k) > 1 else t for k, t in tensors.items()}

    def create_gradients(self) -> None:
        """Allocate gradients, which are zero."""
        sizes = {key: stop for key, (*_, stop) in zip(self.keys, self._spans, strict=True)}
        grads = self._create_tensors(sizes)
        assert grads is not None
        for tensor in grads.values():
            tensor.zero_()
        self._stores["grad"], self._newest["grad"] = [grads], 0

    def free(self, buffer: str) -> None:
        """Drop the references to a buffer's tensors, which have moved or are not needed."""
        self._stores[buffer] = []

    # ---- named buffers ----------------------------------------------------------------------

    def squared_norm(self, tensors: Iterable[Tensor]) -> Tensor | float:
        """Return the squared norm of tensors; of shards, that of all ranks of the node, each of
        which must call it."""
        if self.is_sharded:
            return squared_norm(tensors, self.parameters[0])
        return sum(torch.linalg.vector_norm(t).double().square() for t in tensors)

    def copy_in(self, run: range | None = None) -> None:
        """Copy shards to the flat tensors, before code uses the parameters there.

        Args:
            run: run of buckets; None for all buckets.
        """
        for own, place in self._shards_of(run):
            place.copy_(own)

    def copy_out(self, run: range) -> None:
        """Copy shards back to FSDP's memory, after code has changed the flat tensors."""
        for own, place in self._shards_of(run):
            own.copy_(place)

    def _shards_of(self, run: range | None) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield shards in FSDP's memory, and their copies in the flat tensors."""
        if self.is_sharded:
            for i in self.indices(run or range(len(self.buckets))):
                p = self.parameters[i]
                yield local_of(p).detach(), self._copies[id(p)]

    def adopt(self, buffers: Mapping[str, Buffer], *, continues: bool = False) -> None:
        """Allocate the buffers of a plan and delete all other buffers.

        Existing parameters, gradients, and buffers that start as a copy of the parameters keep
        their contents. Such copies may differ between ranks by now. All other buffers begin at
        their start value.

        Args:
            buffers: buffers by name.
            continues: all existing buffers keep their contents, such as a velocity.
        """
        self.copy_in()
        for name in set(self._stores) - set(buffers):
            del self._stores[name], self._newest[name]
        for name, buffer in buffers.items():
            if buffer.kind in ("state", "buffers") or moment_of(name) is not None:
                continue
            if name == "grad" and not self._stores["grad"]:
                continue
            kept: list[Store] = []
            if name in self._stores and (
                continues or name in BUILT_IN or buffer.start == "param"
            ):  # keep existing copies, the newest first
                first = self._newest[name]
                kept = (self._stores[name][first:] + self._stores[name][:first])[: buffer.copies]
            self._stores[name] = kept  # frees the others before new ones are allocated
            made = [self._create_store(buffer) for _ in range(buffer.copies - len(kept))]
            self._stores[name], self._newest[name] = kept + made, 0
            self._kinds[name] = buffer.kind

    def _create_store(self, buffer: Buffer) -> Store:
        like = self._stores["grad" if buffer.kind == "grad" else "param"][0]
        make = torch.clone if buffer.start == "param" else torch.zeros_like
        with torch.no_grad():
            return {key: make(tensor).detach() for key, tensor in like.items()}

    def restart(self, buffer: Buffer) -> None:
        """Reset a plan's buffer to its start value: the parameters, or zero."""
        self.copy_in()
        fresh = self._create_store(buffer)
        for copy in self._stores[buffer.name]:
            for key, tensor in copy.items():
                tensor.data.copy_(fresh[key])

    def copies(self, buffer: str) -> int:
        """Return the number of copies of a buffer."""
        return len(self._stores[buffer])

    def copy_index(self, buffer: str, age: int = 0) -> int:
        """Return the index of the copy of this age; age 0 is the newest copy."""
        return (self._newest[buffer] + age) % max(len(self._stores[buffer]), 1)  # 0 without copies

    def rotate(self, buffer: str) -> None:
        """Increase the age of every copy by one. The oldest copy becomes the newest."""
        self._newest[buffer] = (self._newest[buffer] - 1) % len(self._stores[buffer])

    def tensors(self, buffer: str, run: range, copy: int = 0) -> tuple[Tensor, ...]:
        """Return one copy of a buffer of a run of buckets: one slice per dtype and device.

        The slices have their own version counters, so that writes to them are not taken for writes
        of user code.
        """
        column = 2 if self._kinds[buffer] == "grad" else 0
        bounds: dict[Key, tuple[int, int]] = {}
        for b in run:
            key, span = self.keys[b], self._spans[b]
            first = bounds.get(key, (span[column], 0))[0]
            bounds[key] = (first, span[column + 1])
        store = self._stores[buffer][copy]
        return tuple(store[key].data[a:z] for key, (a, z) in bounds.items() if z > a)

    def parameters_of(self, buffer: str, run: range) -> list[Tensor]:
        """Return the newest copy of a buffer for each bucket, without module buffers."""
        copy = self.copy_index(buffer)
        return [self.bucket(buffer, b, copy)[: self._elements[b]] for b in run]

    def bucket(self, buffer: str, b: int, copy: int = 0) -> Tensor:
        """Return one copy of a buffer of one bucket, also of a bucket without elements."""
        column = 2 if self._kinds[buffer] == "grad" else 0
        start, stop = self._spans[b][column : column + 2]
        return self._stores[buffer][copy][self.keys[b]].data[start:stop]

    def message_tensors(
        self, payload: Payload, copy: int, into: str | None = None
    ) -> tuple[Tensor, ...]:
        """Return the tensors that a message sends from one copy of its buffer.

        Args:
            payload: buffer, buckets and slice of the message.
            copy: index of the copy.
            into: buffer to use in place of `payload.buffer`, of the same layout.

        The absence counts of a bucket are part of its last slice.
        """
        buffer = into or payload.buffer
        whole = self.tensors(buffer, payload.buckets, copy)
        if payload.parts == 1:
            return whole
        last = payload.part + payload.width == payload.parts
        sliced = []
        for t in whole:
            is_grad = self._kinds[buffer] == "grad"
            numbers = self._elements[payload.buckets.start] if is_grad else t.numel()
            part = payload.slice_of(numbers)
            sliced.append(t[part.start : t.numel() if last and is_grad else part.stop])
        return tuple(sliced)

    def split_payload(
        self, payload: Payload, copy: int, buffer: str
    ) -> list[tuple[list[Tensor], list[Tensor]]]:
        """Return the tensors of a message as (numbers, trailing elements) per dtype and device.

        Both are lists with one view per bucket. Trailing elements are the module buffers that
        follow parameters, or the absence counts that follow gradients. Trailing elements are
        part of the last slice.
        """
        by_key: dict[Key, tuple[list[Tensor], list[Tensor]]] = {}
        last = payload.part + payload.width == payload.parts
        for b in payload.buckets:
            whole = self.bucket(buffer, b, copy)
            numbers = self._elements[b]
            pieces = by_key.setdefault(self.keys[b], ([], []))
            pieces[0].append(whole[payload.slice_of(numbers)])
            if last:
                pieces[1].append(whole[numbers:])
        return list(by_key.values())

    def indices(self, run: range) -> range:
        """Return the indices into `parameters` of a run of buckets."""
        stop = self.starts[run.stop] if run.stop < len(self.starts) else len(self.parameters)
        return range(self.starts[run.start], stop)

    def parameter_tensors(self) -> list[Tensor]:
        """Return all flat parameter tensors, one per dtype and device."""
        return list(self._stores["param"][0].values())

    def restore_parameters(self) -> None:
        """Copy parameters whose `p.data` was replaced back into the flat tensors."""
        for p, (key, at, _) in zip(self.parameters, self._places, strict=True):
            flat = self._stores["param"][0][key]
            place = flat.data_ptr() + at * flat.element_size()
            if not is_sharded(p) and p.data_ptr() != place and key_of(p) == key:
                with torch.no_grad():
                    self._move(p, flat, at)

    # ---- checkpoints ------------------------------------------------------------------------

    def contents(self, buffer: str) -> list[list[Tensor]]:
        """Return all copies of a buffer, the newest first: one tensor per dtype and device."""
        if buffer == "param":
            self.copy_in()
        stores = self._stores[buffer]
        return [list(stores[self.copy_index(buffer, age)].values()) for age in range(len(stores))]

    def fill(self, buffer: str, contents: Sequence[Sequence[Tensor]]) -> None:
        """Copy the result of `contents` into the copies of a buffer, the newest first."""
        for copy, saved in zip(self.contents(buffer), contents, strict=True):
            for tensor, value in zip(copy, saved, strict=True):
                tensor.data.copy_(value)

    # ---- gradients --------------------------------------------------------------------------

    def views(self, copy: int = 0) -> list[Tensor]:
        """Return one view of a copy of the gradients per parameter, bucket by bucket."""
        store = self._stores["grad"][copy]
        return [
            shard_like(p, place_of_shard(store[key], p, at))
            if self.is_sharded
            else view_like(store[key], p, at)
            for p, (key, _, at) in zip(self.parameters, self._places, strict=True)
        ]

    def gradients(self, bucket: int, copy: int = 0) -> Tensor:
        """Return one bucket's flat gradients, without absence counts."""
        return self.bucket("grad", bucket, copy)[: self._elements[bucket]]

    def absence_counts(self, bucket: int, copy: int = 0) -> Tensor:
        """Return, per parameter of a bucket, in how many iterations it had no gradient.

        The counts are of this rank before a message of the bucket, and averages over ranks after.
        """
        start = self._elements[bucket]
        stop = start + len(self.buckets[bucket].parameters)
        return self.bucket("grad", bucket, copy)[start:stop]

    def zero_grads(self, copy: int, run: range | None = None) -> None:
        """Zero a copy of the gradients in place, for all buckets or for `run`."""
        is_all = run is None or len(run) == len(self.buckets)
        whole = self._stores["grad"][copy].values()
        for grads in whole if is_all else self.tensors("grad", run, copy):  # type: ignore[arg-type]
            grads.data.zero_()

    def grad_version(self) -> int:
        """Return a number that changes with every in-place write to a gradient by user code."""
        return sum(grads._version for copy in self._stores["grad"] for grads in copy.values())


def flatten(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Move tensors into new flat tensors, one per dtype and device, in the given order."""
    by_key: dict[Key, list[Tensor]] = {}
    for tensor in tensors:
        by_key.setdefault(key_of(tensor), []).append(tensor)
    flats: list[Tensor] = []
    with torch.no_grad():
        for key, group in by_key.items():
            *offsets, size = accumulate((tensor.numel() for tensor in group), initial=0)
            flat = empty(size, *key)
            for tensor, offset in zip(group, offsets, strict=True):
                place = place_like(flat, tensor, offset)
                place.copy_(tensor.detach())
                tensor.data = place
            flats.append(flat)
    return flats


def align(size: int, alignment: int) -> int:
    """Return a size rounded up to a multiple of `alignment`."""
    return -(-size // alignment) * alignment


def place_like(flat: Tensor, like: Tensor, offset: int) -> Tensor:
    """Return a view as `view_like` does, with its own storage and version counter.

    The storage refers to the memory of `flat` and keeps it alive. `pickle`, `deepcopy` and
    safetensors save whole storages, so with its own storage this tensor is saved without the rest
    of `flat`. On a GPU the storage begins at an aligned address, up to 15 bytes before the tensor,
    because compiled kernels assume that a storage begins at an aligned address.
    """
    before = 0
    if flat.is_cuda:
        size = flat.element_size()
        before = (flat.data_ptr() + offset * size) % ALIGNED_BYTES // size
    whole = flat[offset - before : offset + like.numel()].detach()
    return view_like(with_own_storage(whole), like, before)


def with_own_storage(flat: Tensor) -> Tensor:
    """Return a flat tensor with the same memory, and its own storage and version counter."""
    # DLPack exports tensors of the current GPU only. It does not support every dtype, so exchange
    # bytes.
    with torch.cuda.device(flat.device) if flat.is_cuda else nullcontext():
        return from_dlpack(flat.view(torch.uint8)).view(flat.dtype)


def view_like(flat: Tensor, like: Tensor, offset: int) -> Tensor:
    """Return a view of `flat` with the shape of `like`, and with its strides if they are dense."""
    if is_dense(like):
        return flat.as_strided(like.size(), like.stride(), flat.storage_offset() + offset)
    return flat[offset : offset + like.numel()].view(like.size())


def memory_of(tensor: Tensor) -> memoryview:
    """Return a memoryview of the bytes of a contiguous tensor on the host."""
    return tensor.detach().view(torch.uint8).numpy().data


def is_dense(tensor: Tensor) -> bool:
    """Return whether the elements of a tensor are without gaps, in any order of dimensions."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.size(), strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True
