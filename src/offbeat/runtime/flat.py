"""Flat storage: parameters, buffers and gradients as views of contiguous tensors.

Neighbouring buckets are neighbours in memory, so any run of buckets is one slice and one
collective, without a copy.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from offbeat.plan import Payload
from offbeat.profile import Profile
from offbeat.runtime.checksum import checksum

Key = tuple[torch.dtype, torch.device]


@dataclass(frozen=True)
class BucketSpec:
    """Names of a bucket's parameters (ready order) and of the buffers that travel with them."""

    name: str
    parameters: tuple[str, ...]
    buffers: tuple[str, ...] = ()


def group_parameters(
    model: nn.Module, order: Sequence[str], min_bytes: int, buffers: Sequence[str] = ()
) -> list[BucketSpec]:
    """Buckets of whole modules in ready order, joined until they hold `min_bytes`.

    A module's parameters stay together where they are ready together; a bucket has one dtype and
    one device. `buffers` join the bucket of their module, or the last one.
    """
    tensors = dict(model.named_parameters())
    groups: list[list[str]] = []
    for name in order:
        last = groups[-1] if groups else None
        if last is not None and _belongs(tensors, last, name, min_bytes):
            last.append(name)
        else:
            groups.append([name])
    homes = {_owner(name): i for i, names in reversed(list(enumerate(groups))) for name in names}
    carried: list[list[str]] = [[] for _ in groups]
    every_buffer = dict(model.named_buffers())
    for name in buffers:
        home = homes.get(_owner(name), len(groups) - 1)
        if _key(tensors[groups[home][0]]) == _key(every_buffer[name]):
            carried[home].append(name)  # of another dtype: each rank's own until consolidate()
    specs = [
        BucketSpec(_title(tensors, names), tuple(names), tuple(more))
        for names, more in zip(groups, carried, strict=True)
    ]
    return _unique_names(specs)


def specs_of_profile(model: nn.Module, profile: Profile) -> list[BucketSpec]:
    """Buckets as a profile names them: its `tensors`, else all parameters of the module of that
    name. ValueError if they do not cover the model exactly or sizes differ."""
    parameters = {n: p for n, p in model.named_parameters() if p.requires_grad}
    buffers = dict(model.named_buffers())
    remedy = "measure the model again with `offbeat profile`"
    specs: list[BucketSpec] = []
    for bucket in profile.buckets:
        names = bucket.tensors or tuple(
            n for n in parameters if n == bucket.name or n.startswith(bucket.name + ".")
        )
        unknown = [n for n in names if n not in parameters and n not in buffers]
        if unknown or not names:
            what = f"tensor {unknown[0]!r}" if unknown else "parameters"
            raise ValueError(
                f"the profile does not match the model: its bucket {bucket.name!r} holds {what} "
                f"that the model does not have; {remedy}"
            )
        spec = BucketSpec(
            bucket.name,
            tuple(n for n in names if n in parameters),
            tuple(n for n in names if n in buffers),
        )
        _require_one_key(spec, [(parameters | buffers)[n] for n in names])
        size = sum(_nbytes(parameters[n]) for n in spec.parameters)
        if size != bucket.size_bytes:
            raise ValueError(
                f"the profile does not match the model: bucket {bucket.name!r} has "
                f"{bucket.size_bytes} bytes there and {size} in the model; {remedy}"
            )
        specs.append(spec)
    covered = [n for spec in specs for n in spec.parameters]
    if sorted(covered) != sorted(parameters):
        odd = sorted(set(parameters) ^ set(covered)) or [n for n in covered if covered.count(n) > 1]
        raise ValueError(
            f"the profile does not match the model: parameter {odd[0]!r} must be in exactly one "
            f"bucket; {remedy}"
        )
    return specs


def _require_one_key(spec: BucketSpec, tensors: Sequence[Tensor]) -> None:
    keys = dict.fromkeys(_key(t) for t in tensors)
    if not spec.parameters or len(keys) > 1:
        what = " and ".join(f"{dtype} on {device}" for dtype, device in keys)
        raise ValueError(
            f"bucket {spec.name!r} of the profile must hold parameters of one dtype on one "
            f"device, and it holds {what if spec.parameters else 'only buffers'}; split it"
        )


class FlatBucket:
    """One bucket: its parameters, their gradient views, and its slices of the flat tensors."""

    __slots__ = ("grad", "grad_views", "name", "param", "parameters")

    def __init__(
        self,
        name: str,
        parameters: list[nn.Parameter],
        views: list[Tensor],
        param: Tensor,
        grad: Tensor,
    ):
        self.name = name
        self.parameters = parameters
        self.grad_views = views
        self.param = param
        self.grad = grad

    def zero_grad(self) -> None:
        """Zero this bucket's gradients in place; the views stay attached."""
        self.grad.zero_()
        self.attach()

    def attach(self) -> list[Tensor]:
        """Make every parameter's gradient its view of the flat storage; the views that were not."""
        missing = []
        for p, view in zip(self.parameters, self.grad_views, strict=True):
            if p.grad is not view:
                p.grad = view
                missing.append(view)
        return missing


class Flat:
    """A model's trainable tensors re-homed into one flat tensor per dtype and device.

    Peak memory while moving: one more copy of the tensors that move; none afterwards, except the
    gradients, which exist from now on.
    """

    def __init__(self, model: nn.Module, specs: Sequence[BucketSpec]):
        parameters, buffers = dict(model.named_parameters()), dict(model.named_buffers())
        keys = [_key(parameters[spec.parameters[0]]) for spec in specs]
        self.keys: list[Key] = keys
        self._params: dict[Key, Tensor] = {}
        grads: dict[Key, Tensor] = {}
        for key in dict.fromkeys(keys):
            mine = [spec for spec, k in zip(specs, keys, strict=True) if k == key]
            moved = [parameters[n] for spec in mine for n in spec.parameters]
            count = sum(p.numel() for p in moved)
            extra = sum(buffers[n].numel() for spec in mine for n in spec.buffers)
            self._params[key] = torch.empty(count + extra, dtype=key[0], device=key[1])
            grads[key] = torch.zeros(count, dtype=key[0], device=key[1])
        self._copies = [grads]  # of the gradients; merged generations need a second one
        used: dict[Key, tuple[int, int]] = dict.fromkeys(self._params, (0, 0))
        self.buckets: list[FlatBucket] = []
        self._spans: list[tuple[int, int, int, int]] = []
        with torch.no_grad():
            for spec, key in zip(specs, keys, strict=True):
                used[key] = self._move(spec, key, used[key], parameters, buffers)

    def _move(
        self,
        spec: BucketSpec,
        key: Key,
        start: tuple[int, int],
        parameters: dict[str, nn.Parameter],
        buffers: dict[str, Tensor],
    ) -> tuple[int, int]:
        at, grad_at = start
        flat, grads = self._params[key], self._copies[0][key]
        views: list[Tensor] = []
        mine = [parameters[n] for n in spec.parameters]
        for p in mine:
            view = view_like(grads, p, grad_at)
            if p.grad is not None:
                view.copy_(p.grad)
            _rehome(flat, p, at)
            p.grad = view
            views.append(view)
            at, grad_at = at + p.numel(), grad_at + p.numel()
        for name in spec.buffers:
            _rehome(flat, buffers[name], at)
            at += buffers[name].numel()
        self._spans.append((start[0], at, start[1], grad_at))
        bucket = FlatBucket(spec.name, mine, views, flat[start[0] : at], grads[start[1] : grad_at])
        self.buckets.append(bucket)
        return at, grad_at

    def params(self, run: range) -> tuple[Tensor, ...]:
        """Parameters and buffers of a run of buckets, one slice per dtype and device."""
        return self._slices(self._params, run, 0)

    def grads(self, run: range, copy: int = 0) -> tuple[Tensor, ...]:
        """Gradients of a run of buckets, one slice per dtype and device."""
        return self._slices(self._copy(copy), run, 2)

    def tensors(self, payload: Payload, copy: int = 0) -> tuple[Tensor, ...]:
        """What a message of gradients (of one copy) or parameters carries, as views of it."""
        run = payload.buckets
        whole = self.grads(run, copy) if payload.kind == "grad" else self.params(run)
        # .data: with a version counter of their own, so that collectives do not look like the user.
        return tuple(t.data[payload.slice_of(t.numel())] for t in whole)

    def views(self, copy: int = 0) -> list[Tensor]:
        """The gradient of every parameter, bucket by bucket, as a view of a copy of them."""
        if copy == 0:
            return [view for bucket in self.buckets for view in bucket.grad_views]
        store, views = self._copy(copy), []
        for key, (_, _, at, _), bucket in zip(self.keys, self._spans, self.buckets, strict=True):
            for p in bucket.parameters:
                views.append(view_like(store[key], p, at))
                at += p.numel()
        return views

    def _copy(self, copy: int) -> dict[Key, Tensor]:
        while len(self._copies) <= copy:
            self._copies.append({k: torch.zeros_like(g) for k, g in self._copies[0].items()})
        return self._copies[copy]

    def _slices(self, store: dict[Key, Tensor], run: range, column: int) -> tuple[Tensor, ...]:
        bounds: dict[Key, tuple[int, int]] = {}
        for b in run:
            key, span = self.keys[b], self._spans[b]
            first = bounds.get(key, (span[column], 0))[0]
            bounds[key] = (first, span[column + 1])
        return tuple(store[key][a:z] for key, (a, z) in bounds.items() if z > a)

    def everything(self) -> list[Tensor]:
        """All flat parameter tensors."""
        return list(self._params.values())

    def zero_grad(self) -> None:
        """Zero every gradient in place; the views stay attached."""
        self.scale_grads(0.0, 0)
        for bucket in self.buckets:
            bucket.attach()

    def grads_attached(self) -> bool:
        """Whether every parameter's gradient is still its view of the flat storage."""
        return all(
            p.grad is view
            for bucket in self.buckets
            for p, view in zip(bucket.parameters, bucket.grad_views, strict=True)
        )

    def scale_grads(self, factor: float, copy: int) -> None:
        """Multiply a copy of all gradients; by 0 it becomes zero, whatever it held."""
        for grads in self._copy(copy).values():
            if factor:
                grads.mul_(factor)
            else:
                grads.zero_()

    def grad_version(self) -> int:
        """Changes whenever anyone writes a gradient in place."""
        return sum(grads._version for copy in self._copies for grads in copy.values())


def changed_buffers(model: nn.Module, before: dict[str, int]) -> list[str]:
    """Floating-point buffers that were written since `buffer_checksums`: running statistics."""
    now = buffer_checksums(model)
    return [name for name in now if now[name] != before.get(name, now[name])]


def buffer_checksums(model: nn.Module) -> dict[str, int]:
    """Checksums of the floating-point buffers, to see later which of them training writes.

    Version counters would not do: batch norm writes its statistics past them.
    """
    return {
        name: checksum(buffer)
        for name, buffer in model.named_buffers()
        if buffer.is_floating_point() and buffer.numel()
    }


def require_supported(model: nn.Module) -> None:
    """ValueError for a model that cannot be re-homed into flat storage."""
    trainable = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    if not trainable:
        raise ValueError("the model has no parameter that requires a gradient; nothing to train")
    seen: dict[tuple[int, torch.device], str] = {}
    for name, p in trainable:
        if isinstance(p, nn.parameter.UninitializedParameter):
            raise ValueError(f"parameter {name!r} is lazy; run one forward pass before prepare")
        if not p.is_floating_point():
            raise ValueError(
                f"parameter {name!r} has dtype {p.dtype}; only real floats are supported"
            )
        place = (p.data_ptr(), p.device)
        if p.numel() and place in seen:
            raise ValueError(
                f"parameters {seen[place]!r} and {name!r} share memory but are two objects; "
                "tie them by assigning the same Parameter"
            )
        seen[place] = name


def _rehome(flat: Tensor, tensor: Tensor, offset: int) -> None:
    view = view_like(flat, tensor, offset)
    view.copy_(tensor.detach())
    tensor.data = view


def view_like(flat: Tensor, like: Tensor, offset: int) -> Tensor:
    """View of `flat` with the shape of `like`, and its memory format where that is dense."""
    if _is_dense(like):
        return flat.as_strided(like.size(), like.stride(), offset)
    return flat[offset : offset + like.numel()].view(like.size())


def _is_dense(tensor: Tensor) -> bool:
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.size(), strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


def _belongs(tensors: dict[str, nn.Parameter], group: list[str], name: str, min_bytes: int) -> bool:
    if _key(tensors[group[0]]) != _key(tensors[name]):
        return False
    same_module = _owner(group[-1]) == _owner(name)
    return same_module or sum(_nbytes(tensors[n]) for n in group) < min_bytes


def _title(tensors: dict[str, nn.Parameter], names: Iterable[str]) -> str:
    """A bucket is called after the module of its largest parameter."""
    largest = max(names, key=lambda n: tensors[n].numel())
    return _owner(largest) or largest


def _unique_names(specs: list[BucketSpec]) -> list[BucketSpec]:
    counts: dict[str, int] = {}
    unique: list[BucketSpec] = []
    for spec in specs:
        counts[spec.name] = seen = counts.get(spec.name, 0) + 1
        name = spec.name if seen == 1 else f"{spec.name}#{seen}"
        unique.append(BucketSpec(name, spec.parameters, spec.buffers))
    return unique


def _owner(name: str) -> str:
    return name.rpartition(".")[0]


def _key(tensor: Tensor) -> Key:
    return tensor.dtype, tensor.device


def _nbytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
