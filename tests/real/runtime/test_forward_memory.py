"""What forwards keep for backward: closed forms, and models that want no hooks."""

from __future__ import annotations

import tempfile
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness.ranks import run_ranks
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

import offbeat
from offbeat.core.measuring import forward_memory
from offbeat.core.measuring.forward_memory import ForwardMemory
from offbeat.core.measuring.kept_activations import Activations
from offbeat.profile import Profile

WIDTH, ROWS = 5, 3
ONE = ROWS * WIDTH * 8  # bytes of one layer's input


def chain(layers: int = 2) -> nn.Sequential:
    """Linear, Tanh, ...: a linear layer keeps its input, which is the output that Tanh keeps."""
    torch.manual_seed(1)
    made = [m for _ in range(layers) for m in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
    return nn.Sequential(*made).double()


def rows(seed: int = 0, count: int = ROWS) -> Tensor:
    made = torch.Generator().manual_seed(seed)
    return torch.randn(count, WIDTH, generator=made, dtype=torch.float64)


def meter_of(model: nn.Module) -> ForwardMemory:
    """A meter that is told which module with parameters runs."""
    memory = ForwardMemory(model)
    for name, module in model.named_modules():
        if next(module.parameters(recurse=False), None) is not None:
            module.register_forward_pre_hook(lambda *_, name=name: setattr(memory, "place", name))
    return memory


def measured(
    model: nn.Module, x: Tensor, memory: ForwardMemory | None = None
) -> tuple[Any, list[Tensor]]:
    """What is kept, and the gradients; no hooks may be left."""
    memory = memory or meter_of(model)
    with memory.forward():
        y = model(x)
    y.sum().backward()
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    assert memory._meter is None or memory._meter.live_bytes == 0
    return memory.activation_bytes, [p.grad for p in model.parameters() if p.grad is not None]


def gradients(model: nn.Module, x: Tensor) -> list[Tensor]:
    model.zero_grad()
    model(x).sum().backward()
    return [p.grad for p in model.parameters() if p.grad is not None]


def same(ours: list[Tensor], plain: list[Tensor]) -> bool:
    return len(ours) == len(plain) > 0 and all(map(torch.equal, ours, plain))


def test_a_chain_in_closed_form() -> None:
    """The input and the first Tanh's output, which the second layer keeps too; then the last."""
    kept, ours = measured(chain(), rows())
    assert kept == {"0": 2 * ONE, "2": ONE}
    assert same(ours, gradients(chain(), rows()))


def test_the_most_that_was_kept_at_once_counts() -> None:
    """Micro-batches that are used up one after the other count once, two at the same time twice."""
    model = chain()
    memory = meter_of(model)
    for t in range(3):
        with memory.forward():
            y = model(rows(t))
        y.sum().backward()
    assert memory.activation_bytes == {"0": 2 * ONE, "2": ONE}
    with memory.forward():
        one = model(rows(3))
    with memory.forward():
        other = model(rows(4))
    (one + other).sum().backward()
    assert memory.activation_bytes == {"0": 4 * ONE, "2": 2 * ONE}


def test_only_training_counts_and_only_until_it_is_closed() -> None:
    model = chain()
    memory = meter_of(model)
    with memory.forward(), torch.no_grad():
        model(rows())
    with torch.no_grad(), memory.forward():
        model(rows())
    model.eval()
    with memory.forward():
        y = model(rows())
    model.train()
    assert memory.activation_bytes == {}
    memory.close()
    with memory.forward():
        y = model(rows())
    assert memory.activation_bytes == {}
    assert y.requires_grad


class Frozen(nn.Module):
    """The first layers run without gradients, so they keep nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = chain(3), chain(1)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            x = self.first(x)
        return self.second(x)


def test_layers_without_gradients_keep_nothing() -> None:
    kept, ours = measured(Frozen(), rows())
    assert kept == {"second.0": 2 * ONE}
    assert same(ours, gradients(Frozen(), rows()))


class Checkpointed(nn.Module):
    """Keeps the input of each of three layers, and computes the rest again."""

    def __init__(self, reentrant: bool = False) -> None:
        super().__init__()
        self.layers, self.reentrant = chain(3), reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = x.requires_grad_(self.reentrant)
        for n in range(0, 6, 2):
            x = checkpoint(self.layers[n : n + 2], x, use_reentrant=self.reentrant)
        return x


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_keeps_inputs(reentrant: bool) -> None:
    kept, ours = measured(Checkpointed(reentrant), rows())
    assert kept is not None
    assert sum(kept.values()) == 3 * ONE
    assert same(ours, gradients(Checkpointed(reentrant), rows()))


class Hooked(nn.Module):
    """A user's own hooks around the second of three layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.packed = chain(3), 0

    def forward(self, x: Tensor) -> Tensor:
        def pack(tensor: Tensor) -> Tensor:
            self.packed += 1
            return tensor.clone()

        x = self.layers[:2](x)
        with saved_tensors_hooks(pack, lambda kept: kept):
            x = self.layers[2:4](x)
        return self.layers[4:](x)


def test_what_users_hooks_keep_within_is_theirs() -> None:
    plain = Hooked()
    expected = gradients(plain, rows())
    model = Hooked()
    kept, ours = measured(model, rows())
    # The last layer's input is kept by itself; the first Tanh's output as well, as its own result.
    assert kept == {"layers.0": 2 * ONE, "layers.4": 2 * ONE}
    assert model.packed == plain.packed > 0
    assert same(ours, expected)


def test_users_hooks_around_the_model_stay_in_effect() -> None:
    model, packed = chain(), []
    memory = meter_of(model)
    hooks = saved_tensors_hooks(lambda t: packed.append(1) or t, lambda t: t)
    with hooks, memory.forward():
        y = model(rows())
    assert packed
    assert memory.activation_bytes is None
    y.sum().backward()
    with save_on_cpu():
        again = model(rows())
    assert torch.equal(again, y)


class Transformed(nn.Module):
    """`torch.func` works only without any hooks; Tanh follows it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = chain(2)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layers[0](x)
        slope = torch.func.grad(lambda z: torch.tanh(z).sum())(y)
        return self.layers[1:](y * slope)


class Sparse(nn.Module):
    """Keeps a matrix that has no storage."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = chain(1)

    def forward(self, x: Tensor) -> Tensor:
        return torch.sparse.mm(torch.eye(ROWS, dtype=x.dtype).to_sparse(), self.layers(x))


@pytest.mark.parametrize("build", [Transformed, Sparse])
def test_where_it_cannot_be_known_training_goes_on(build: Any) -> None:
    disable = torch._C._autograd._saved_tensors_hooks_disable
    kept, ours = measured(build(), rows())
    assert kept is None
    assert same(ours, gradients(build(), rows()))
    assert torch._C._autograd._saved_tensors_hooks_disable is disable


class Leaving(nn.Module):
    """Leaves its own hooks behind."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = chain(1)
        self.pair = (lambda t: t.clone(), lambda t: t)

    def forward(self, x: Tensor) -> Tensor:
        torch._C._autograd._push_saved_tensors_default_hooks(*self.pair)
        return self.layers(x)


def test_hooks_that_a_model_leaves_behind_stay() -> None:
    model = Leaving()
    memory = meter_of(model)
    with memory.forward():
        model(rows())
    try:
        assert torch._C._autograd._top_saved_tensors_default_hooks(True) == model.pair
    finally:
        torch._C._autograd._pop_saved_tensors_default_hooks()
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    assert memory.activation_bytes is None


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # the compiler asks for it
@pytest.mark.parametrize("way", ["whole", "part"])
def test_compiled_models(way: str) -> None:
    """Hooks are no part of what is compiled, nor a reason to compile anything again."""
    graphs, found = [], []
    for hooked in (False, True):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        module = compiled(way)
        for again in (False, True):
            if hooked and not again:
                kept, ours = measured(module, rows(), ForwardMemory(module))
                assert sum(kept.values()) >= 3 * ONE
            else:
                ours = gradients(module, rows())
            found.append(ours)
            graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert graphs == graphs[:1] * 4
    assert all(same(ours, found[0]) for ours in found)


def compiled(way: str) -> nn.Module:
    model = chain()
    if way == "whole":
        return torch.compile(model, backend="aot_eager")  # type: ignore[return-value]
    model[2] = torch.compile(model[2], backend="aot_eager")  # type: ignore[assignment]
    return model


def test_gradients_of_gradients() -> None:
    found = []
    for hooked in (True, False):
        model, x = chain(), rows().requires_grad_()
        with ForwardMemory(model).forward() if hooked else nullcontext():
            y = model(x)
        [slope] = torch.autograd.grad(y.sum(), x, create_graph=True)
        slope.pow(2).sum().backward()
        found.append([p.grad for p in model.parameters() if p.grad is not None])
    assert same(*found)


def test_two_forwards_through_running_statistics() -> None:
    found = []
    for hooked in (True, False):
        model = nn.Sequential(chain(1), nn.BatchNorm1d(WIDTH).double())
        memory = meter_of(model)
        outputs = []
        for t in range(2):
            with memory.forward() if hooked else nullcontext():
                outputs.append(model(rows(t)).pow(2).sum())
        sum(outputs).backward()
        found.append([p.grad for p in model.parameters()] + [*model.buffers()])
    assert same(*found)


class Overwriting(nn.Module):
    """Changes what backward needs."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = chain(1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layers(x)
        y.mul_(2)
        return y


def test_errors_are_those_without_hooks() -> None:
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        measured(Overwriting(), rows())
    model, memory = chain(), ForwardMemory(chain())
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"), memory.forward():
        model(rows()[:, :2])
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None


def test_what_is_missed_is_counted() -> None:
    model = Sparse()
    with Activations(model.parameters) as meter:
        y = model(rows())
    assert meter.missed > 0
    assert meter.live_bytes == 2 * ONE
    y.sum().backward()
    assert meter.live_bytes == 0


# ---- through prepare ------------------------------------------------------------------------


def observed(measure: bool, micro: int, path: str) -> list[str]:
    """Train; the bits of losses and parameters. Rank 1 has twice as many rows."""
    if not measure:
        forward_memory.ForwardMemory.forward = lambda _: nullcontext()  # type: ignore[assignment]
    model = chain(3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model, optimizer = offbeat.prepare(
        model, optimizer, offbeat.WFBP(), observe=2, min_bucket_bytes=1, profile=path
    )
    bits = []
    for t in range(4):
        optimizer.zero_grad()
        for m in range(micro):
            x = rows(10 * t + m, ROWS * (1 + dist.get_rank()))
            with model.no_sync() if m < micro - 1 else nullcontext():
                loss = model(x).pow(2).sum()
                loss.backward()
        optimizer.step()
        bits.append(loss.item().hex())
    model.close()
    return bits + [v.hex() for p in model.parameters() for v in p.flatten().tolist()]


def both_ways(micro: int, folder: str) -> list[list[str]]:
    dist.init_process_group("gloo")
    paths = [f"{folder}/{name}.json" for name in ("measured", "plain")]
    return [observed(path == paths[0], micro, path) for path in paths]


@pytest.mark.parametrize("micro", [1, 2])
def test_the_profile_has_the_mean_over_ranks_and_numbers_stay(micro: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        for ours, plain in run_ranks(2, partial(both_ways, micro, folder)):
            assert ours == plain
        profiles = [Profile.load(Path(folder, f"{name}.json")) for name in ("measured", "plain")]
    kept, nothing = ([b.activation_bytes for b in p.buckets] for p in profiles)
    # From the output. The ranks keep 1 and 2 times as much.
    assert kept == [1.5 * ONE, 1.5 * ONE, 3 * ONE]
    assert nothing == [0, 0, 0]
