"""One script on one rank: the same code with torch's DDP, with offbeat, and with references."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import offbeat
from cases.matrix import references
from offbeat import A2CiD2, Cyclic, DeFT, DreamDDP, LocalSGD, Plan, Planned, SelSync, Strategy
from offbeat.core.runtime.prepared import Model, Optimizer
from offbeat.profile import Bucket, Link, Profile

STEPS = 5
OBSERVED = 6  # iterations before these by default, where the profile is measured
TIMEOUT_S = 8.0
ROWS = 4

STRATEGIES: dict[str, Strategy] = {
    "DDP": offbeat.DDP(),
    "WFBP": offbeat.WFBP(fusion="none"),
    "P3": offbeat.P3(slice_elements=20),
    "DeAR": offbeat.DeAR(fusion_bytes=1),
    "DreamDDP": DreamDDP(period=2, solver="balanced", fill=False, split=False),
    "LocalSGD": LocalSGD(period=2),
    "SelSync": SelSync(delta=0.3),
    "A2CiD2": A2CiD2(rate=1e-9),  # no exchange falls into so short a run: what is left is certain
    "DeFT": DeFT(),
    "Cyclic": Cyclic(),
}


@dataclass(frozen=True)
class Untimed(DeFT):
    """DeFT whose windows do not depend on measured times."""

    def schedule(self, profile: Profile) -> Plan:
        buckets = [
            replace(bucket, forward_s=0.5, backward_s=1.0, communication_s={})
            for bucket in profile.buckets
        ]
        links = (link_of(profile.default_link.name, buckets),)
        made = {"links": links, "contention": (), "noise": None, "update_s": 0.1}
        return super().schedule(replace(profile, buckets=tuple(buckets), **made))


def link_of(name: str, buckets: Sequence[Bucket]) -> Link:
    return Link(name, 0.1, sum(b.size_bytes for b in buckets) / (1.5 * len(buckets)))


ON_MEASURED: dict[str, Strategy] = {"DeFT": Untimed()}


@dataclass
class Job:
    """A rank's place in a script. `strategy` None: torch's own DDP; `plainly`: the reference of
    the strategy, which runs as it `ran`: strategies with the iterations from which on.
    `measured`: a folder for the profiles, which are not given: the first iterations are
    observed."""

    strategy: Strategy | None
    plainly: bool = False
    ran: list[list[tuple[int, Strategy]]] = field(default_factory=list)
    find_unused: bool = False
    measured: Path | None = None
    steps: int = STEPS
    seen: list[float] = field(default_factory=list)
    modules: list[tuple[nn.Module, Any]] = field(default_factory=list)
    closing: list[Callable[[], None]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rank = dist.get_rank()
        self.random = torch.Generator()

    # ---- what scripts use -------------------------------------------------------------------

    def prepare(self, model: nn.Module, optimizer: Any, **options: Any) -> tuple[Any, Any]:
        """Model and optimizer that train together with those of the other rank."""
        if self.strategy is None:
            ddp = DistributedDataParallel(model, find_unused_parameters=self.find_unused)
            self.modules.append((model, None))
            return ddp, optimizer
        if self.plainly:
            reference = self._reference(model, optimizer)
            self.modules.append((model, reference))
            self.closing.append(reference.close)
            return Model(model, reference), Optimizer(optimizer, reference)
        options = {"timeout_s": TIMEOUT_S, "compare_every": 1, **options}
        if self.measured:
            options |= {"profile": self._file, "min_bucket_bytes": 1}
        elif isinstance(self.strategy, Planned) and "observe" not in options:
            options["profile"] = profile_of(model)
        mine, steps = offbeat.prepare(model, optimizer, self.strategy, **options)
        self.closing.append(mine.close)
        self.modules.append((model, mine))
        return mine, steps

    def batch(self, t: int, rows: int = ROWS) -> tuple[Tensor, Tensor]:
        """Inputs and targets of this rank in iteration t."""
        random = torch.Generator().manual_seed(100 * t + self.rank + 1)
        draw = torch.randn(rows, 8, generator=random, dtype=torch.float64)
        return draw[:, :5], draw[:, 5:]

    def loss(self, model: Any, t: int, rows: int = ROWS) -> Tensor:
        x, y = self.batch(t, rows)
        return nn.functional.mse_loss(model(x), y)

    def note(self, *numbers: Any) -> None:
        """Numbers that the script has seen."""
        self.seen += [float(number) for number in numbers]

    def skip(self, model: Any, optimizer: Any) -> None:
        """Leave this iteration without an update."""
        if self.strategy is None:
            optimizer.zero_grad()
        else:
            model.skip_step()

    # ---- what they leave --------------------------------------------------------------------

    def result(self) -> tuple[list[list[float]], list[float]]:
        """Weights of every model, and the numbers that were seen."""
        weights = []
        for module, prepared in self.modules:
            if isinstance(self.strategy, Cyclic):  # only rank 0 has the newest
                prepared.consolidate(False)
            module.state_dict()  # finishes updates that are still to come
            weights += [p.detach().flatten().tolist() for p in module.parameters()]
        return weights, self.seen

    def history(self) -> list[list[tuple[int, Strategy]]]:
        """Of every prepared model: what ran from which iteration on."""
        asked, found = self.strategy, []
        for _, prepared in self.modules:
            planner = getattr(getattr(prepared, "_session", None), "planner", None)
            now = asked if planner is None else planner.strategy
            if self.measured:
                found.append([(0, now)])  # after the observed iterations
            else:
                found.append([(0, asked)] + ([(1, now)] if now != asked else []))
        return found

    def end(self, error: BaseException | None) -> None:
        """Leave; after an error without waiting for anybody."""
        if error is not None:
            sys.last_value = error
        for close in self.closing:
            close()
        if error is not None:
            del sys.last_value

    @property
    def _file(self) -> Path:
        """Where rank 0 writes the profile of the model that is prepared next."""
        assert self.measured is not None
        return self.measured / f"{len(self.modules)}.json"

    def _reference(self, model: nn.Module, optimizer: Any) -> references.Reference:
        reference = self._planned_reference(model, optimizer)
        reference.observed = OBSERVED if self.measured else 0
        return reference

    def _planned_reference(self, model: nn.Module, optimizer: Any) -> references.Reference:
        strategy, runs = self.strategy, self.ran[len(self.modules)]
        profile = Profile.load(self._file) if self.measured else profile_of(model)
        if isinstance(strategy, LocalSGD):
            return references.Periodic(model, optimizer)
        if isinstance(strategy, DreamDDP):
            return references.Partial(model, optimizer, runs, profile)
        if isinstance(strategy, SelSync):
            return references.Selective(model, optimizer, strategy.delta)
        if isinstance(strategy, DeFT):
            return references.Late(model, optimizer, strategy, profile)
        if isinstance(strategy, Cyclic):
            return references.Handed(model, optimizer, strategy, profile)
        if isinstance(strategy, A2CiD2):
            return references.Reference(model, optimizer)
        return references.Synchronous(model, optimizer)


def profile_of(model: nn.Module) -> Profile:
    """One bucket per module with trainable parameters, last module first, with made-up times."""
    buckets, everything = [], dict(model.named_parameters())  # tied ones once
    for name, module in reversed(list(model.named_modules())):
        mine = {
            f"{name}.{n}".lstrip("."): p
            for n, p in module.named_parameters(recurse=False)
            if p.requires_grad and f"{name}.{n}".lstrip(".") in everything
        }
        buffers = {f"{name}.{n}".lstrip("."): b for n, b in module.named_buffers(recurse=False)}
        floats = {n: b for n, b in buffers.items() if b.dim() and mine}
        if mine:
            buckets.append(
                Bucket(
                    name=name or "model",
                    forward_s=0.5,
                    backward_s=1.0,
                    size_bytes=sum(p.nbytes for p in mine.values()),
                    buffer_bytes=sum(b.nbytes for b in floats.values()),
                    tensors=(*mine, *floats),
                )
            )
    links = (link_of("net", buckets),)
    return Profile(tuple(buckets), links, dist.get_world_size(), update_s=0.1)
