"""Assignment of parameters and buffers to buckets."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from offbeat.core.buckets.shards import stored_elements
from offbeat.core.profile import Profile

Key = tuple[torch.dtype, torch.device]


@dataclass(frozen=True)
class BucketSpec:
    """Names of a bucket's parameters, in ready order, and of the module buffers averaged with
    them."""

    name: str
    parameters: tuple[str, ...]
    buffers: tuple[str, ...] = ()


def group_parameters(
    model: nn.Module, order: Sequence[str], min_bytes: int, buffers: Sequence[str] = ()
) -> list[BucketSpec]:
    """Return buckets of whole modules in ready order, each of at least `min_bytes`.

    Parameters of one module that follow each other in `order` stay in one bucket. A bucket has one
    dtype and one device.

    Args:
        model: the model.
        order: names of the parameters in ready order.
        min_bytes: bytes up to which a bucket is filled. A bucket before a change of dtype or
            device, and the last bucket, may be smaller.
        buffers: names of module buffers. Each buffer is added to the bucket of its module, or to
            the last bucket if no bucket has parameters of its module.
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
        if key_of(tensors[groups[home][0]]) == key_of(every_buffer[name]):
            carried[home].append(name)  # buffers of another dtype differ until consolidate()
    specs = [
        BucketSpec(_title(tensors, names), tuple(names), tuple(more))
        for names, more in zip(groups, carried, strict=True)
    ]
    return _unique_names(specs)


def specs_of_profile(model: nn.Module, profile: Profile) -> list[BucketSpec]:
    """Return the buckets of a profile.

    A bucket holds the tensors that the profile lists, otherwise all parameters of the module whose
    name the bucket has.

    Raises:
        ValueError: the buckets do not cover the model exactly, or sizes differ.
    """
    parameters = {n: p for n, p in model.named_parameters() if p.requires_grad}
    buffers = dict(model.named_buffers())
    remedy = f"{parameter_counts(model, profile)}; measure the model again with `offbeat profile`"
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
        size = _bytes_of(parameters[n] for n in spec.parameters)
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


def parameter_counts(model: nn.Module, profile: Profile) -> str:
    """Return a phrase with the parameters of a profile and of a model, those of a rank's shards."""
    there = round(sum(bucket.size_bytes for bucket in profile.buckets) / profile.element_bytes)
    here = sum(stored_elements(p) for p in model.parameters() if p.requires_grad)
    return f"it is of {there:,} trained parameters, the model has {here:,}"


def _require_one_key(spec: BucketSpec, tensors: Sequence[Tensor]) -> None:
    keys = dict.fromkeys(key_of(t) for t in tensors)
    if not spec.parameters or len(keys) > 1:
        what = " and ".join(f"{dtype} on {device}" for dtype, device in keys)
        raise ValueError(
            f"bucket {spec.name!r} of the profile must hold parameters of one dtype on one "
            f"device, and it holds {what if spec.parameters else 'only buffers'}; split it"
        )


def _belongs(tensors: dict[str, nn.Parameter], group: list[str], name: str, min_bytes: int) -> bool:
    if key_of(tensors[group[0]]) != key_of(tensors[name]):
        return False
    same_module = _owner(group[-1]) == _owner(name)
    return same_module or _bytes_of(tensors[n] for n in group) < min_bytes


def _bytes_of(parameters: Iterable[Tensor]) -> int:
    return sum(stored_elements(p) * p.element_size() for p in parameters)


def _title(tensors: dict[str, nn.Parameter], names: Iterable[str]) -> str:
    """Return the name of a bucket: the module of its largest parameter."""
    largest = max(names, key=lambda n: tensors[n].numel())
    return _owner(largest) or largest


def _unique_names(specs: list[BucketSpec]) -> list[BucketSpec]:
    counts = Counter[str]()
    unique: list[BucketSpec] = []
    for spec in specs:
        counts[spec.name] += 1
        seen = counts[spec.name]
        unique.append(spec if seen == 1 else replace(spec, name=f"{spec.name}#{seen}"))
    return unique


def _owner(name: str) -> str:
    return name.rpartition(".")[0]


def key_of(tensor: Tensor) -> Key:
    return tensor.dtype, tensor.device
