"""Sentinels tell what hooks on every parameter tell, at the same moments."""

from __future__ import annotations

import gc
import random
from collections.abc import Sequence
from weakref import ref

import pytest
import torch
from cases.models import Case, build_model
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from offbeat.core.buckets.autograd_gradients import AutogradGradients
from offbeat.core.buckets.flat import Flat
from offbeat.core.buckets.gradients import Gradients
from offbeat.core.buckets.layout import BucketSpec
from offbeat.core.runtime.hooks import BackwardHooks
from offbeat.core.runtime.sentinels import Sentinels


class Chain(nn.Module):
    """Layers with two parameters each; some may be left out."""

    def __init__(self, layers: int = 6) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(layers))
        self.left_out: set[int] = set()
        self.reentrant = False

    def forward(self, x: Tensor) -> Tensor:
        for i, layer in enumerate(self.layers):
            if i in self.left_out:
                continue
            x = checkpoint(layer, x, use_reentrant=True) if self.reentrant else layer(x).tanh()
        return x


class Listener:
    """Notes what it is told, and how many parameters have a gradient then."""

    def __init__(self, model: nn.Module) -> None:
        self._model, self.told = model, list[tuple[str, int, int]]()
        self.end = lambda: None

    def _note(self, what: str, b: int = -1) -> None:
        fresh = sum(p.grad is not None and bool(p.grad.any()) for p in self._model.parameters())
        self.told.append((what, b, fresh))

    def on_backward_begin(self) -> None:
        self.told.append(("begins", -1, -1))

    def on_bucket_ready(self, b: int) -> None:
        self._note("ready", b)

    def on_backward_end(self) -> None:
        self.end()
        self._note("ends")

    def on_held_backward_end(self) -> None: ...

    def on_output_gradient(self) -> None: ...


def buckets(model: nn.Module, seed: int) -> list[BucketSpec]:
    """Parameters in the order of a backward pass, or in another one."""
    names = [name for name, _ in model.named_parameters()][::-1]
    if seed:
        random.Random(seed).shuffle(names)
    return [BucketSpec(str(b), tuple(names[b : b + 3])) for b in range(0, len(names), 3)]


def prepared(
    seed: int, *, few: bool, lasting: bool = True
) -> tuple[Chain, Listener, Sentinels | BackwardHooks]:
    torch.manual_seed(0)
    model = Chain()
    flat, listener = Flat(model, buckets(model, seed)), Listener(model)
    if few:
        flat.free("grad")
        hooks = Sentinels(AutogradGradients(flat), listener)
        AutogradGradients(flat).zero_grad()
    else:
        hooks = BackwardHooks(Gradients(flat, 1), listener, lasting=lasting)
    listener.end = hooks.finish
    return model, listener, hooks


def iterate(
    model: Chain,
    hooks: Sentinels | BackwardHooks,
    passes: int = 1,
    expected: Sequence[int] = range(4),
) -> None:
    hooks.begin()
    hooks.expect(expected)
    for i in range(passes):
        hooks.accumulating = i + 1 < passes
        output = model(torch.ones(2, 3))
        hooks.watch(output)
        output.sum().backward()
    for p in model.parameters():
        if isinstance(hooks, Sentinels):
            p.grad = None
        elif p.grad is not None:
            p.grad.zero_()


@pytest.mark.parametrize("seed", range(4))
def test_they_tell_what_hooks_on_every_parameter_tell(seed: int) -> None:
    told = []
    for few, lasting in ((False, True), (True, True), (False, False)):
        model, listener, hooks = prepared(seed, few=few, lasting=lasting)
        for left_out in (set(), set(), {2}, set(), {0, 5}, {3}):
            model.left_out = left_out
            iterate(model, hooks)
        told.append(listener.told)
    assert told[0] == told[1] == told[2]
    assert [b for what, b, _ in told[0] if what == "ready"] == [0, 1, 2, 3] * 6


@pytest.mark.parametrize("few", [False, True], ids=["every parameter", "few"])
def test_only_expected_buckets_are_told(few: bool) -> None:
    model, listener, hooks = prepared(0, few=few)
    for expected in ([3], [], [0, 2], range(4), [1]):
        listener.told.clear()
        iterate(model, hooks, expected=expected)
        assert [b for what, b, _ in listener.told if what == "ready"] == [*expected]


def test_hooks_of_a_few_iterations_leave_no_trace() -> None:
    """Of a removed post-accumulate hook, torch keeps an empty dictionary and a call into Python."""
    model, listener, hooks = prepared(0, few=False, lasting=False)
    frozen = model.layers[0].weight
    frozen.requires_grad_(False)
    again = BackwardHooks(Gradients(hooks._gradients.flat, 1), listener, lasting=False)
    assert not frozen.requires_grad
    hooks.remove()
    listener.end = again.finish
    frozen.requires_grad_(True)
    iterate(model, again)
    assert [what for what, *_ in listener.told] == ["begins", *["ready"] * 4, "ends"]
    again.remove()
    kept = ref(again)
    del hooks, again
    listener.end = lambda: None
    gc.collect()
    assert kept() is None
    listener.told.clear()
    model(torch.ones(2, 3)).sum().backward()
    assert not listener.told
    assert all(p._post_accumulate_grad_hooks is None for p in model.parameters())


def doubled(model: Chain, listener: Listener) -> tuple[list[Tensor], list[bool]]:
    """Gradients of one pass, and for each bucket that is ready, whether it has twice of them."""
    once = torch.autograd.grad(model(torch.ones(2, 3)).sum(), [*model.parameters()])
    wanted = {n: 2 * g for (n, _), g in zip(model.named_parameters(), once, strict=True)}
    complete: list[bool] = []

    def ready(b: int) -> None:
        names = buckets(model, 0)[b].parameters
        complete.append(all(torch.equal(model.get_parameter(n).grad, wanted[n]) for n in names))

    listener.on_bucket_ready = ready
    return [*once], complete


def test_gradients_that_are_there_already_do_not_count() -> None:
    """Backward passes that add up: buckets are ready when the last pass has reached them."""
    model, listener, hooks = prepared(0, few=True)
    _, complete = doubled(model, listener)
    for _ in range(2):
        iterate(model, hooks, passes=2)
    assert complete == [True] * 8
    assert [what for what, *_ in listener.told if what != "begins"] == ["ends"] * 2


def test_gradients_that_are_set_by_hand_do_not_count() -> None:
    model, listener, hooks = prepared(0, few=True)
    once, complete = doubled(model, listener)
    assert isinstance(hooks, Sentinels)
    hooks._gradients.zero_grad()
    assert hooks._gradients.empty
    for p, gradient in zip(model.parameters(), once, strict=True):
        p.grad = gradient.clone()
    iterate(model, hooks)
    assert complete == [True] * 4


def test_gradients_that_share_a_version_counter_are_complete_at_the_end() -> None:
    """Views of one tensor: what is written to one of them looks new in all."""
    model, listener, hooks = prepared(0, few=True)
    parameters = [*model.parameters()]
    whole = torch.zeros(sum(p.numel() for p in parameters))
    for p, part in zip(parameters, whole.split([p.numel() for p in parameters]), strict=True):
        p.grad = part.view_as(p)
    iterate(model, hooks)
    assert [fresh for what, _, fresh in listener.told if what == "ready"] == [12] * 4


def test_there_are_no_hooks_where_nothing_is_expected() -> None:
    model, listener, hooks = prepared(0, few=True)
    hooks.begin()
    hooks.expect([])
    output = model(torch.ones(2, 3))
    hooks.watch(output)
    output.sum().backward()
    assert [what for what, *_ in listener.told] == ["begins", "ends"]
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())
    hooks.expect([1])
    assert sum(bool(p._post_accumulate_grad_hooks) for p in model.parameters()) == 1
    hooks.remove()
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())


@pytest.mark.parametrize("before", ["nothing", "added", "zeroed"])
def test_a_derivative_of_something_else_is_no_backward(before: str) -> None:
    model, listener, hooks = prepared(0, few=True)
    hooks.begin()
    hooks.expect([])
    if before != "nothing":
        hooks.accumulating = True
        output = model(torch.ones(2, 3))
        hooks.watch(output)
        output.sum().backward()
        hooks.accumulating = False
    if before == "zeroed":
        hooks._gradients.zero_grad(set_to_none=False)
    x = torch.ones(2, 3, requires_grad=True)
    output = model(x)
    hooks.watch(output)
    torch.autograd.grad(output.sum(), x, create_graph=True)
    assert "ends" not in [what for what, *_ in listener.told]
    output.sum().backward()
    assert [what for what, *_ in listener.told].count("ends") == 1


def test_a_backward_without_a_forward_that_was_watched_is_found_by_a_sentinel() -> None:
    model, listener, hooks = prepared(0, few=True)
    hooks.begin()
    hooks.expect([1])
    model(torch.ones(2, 3)).sum().backward()
    assert [(what, fresh) for what, _, fresh in listener.told] == [
        ("begins", -1),
        ("ready", 12),  # nobody knows which gradients are this pass's before it ends
        ("ends", 12),
    ]


def test_a_forward_without_tensors_is_followed_by_hooks_on_all_parameters() -> None:
    """Until another one returns tensors again. Gradients of an earlier pass are no backward."""
    model, listener, hooks = prepared(0, few=True)
    for kept, output in ((False, None), (True, None), (True, object()), (False, "tensors")):
        hooks.begin()
        hooks.expect([])
        loss = model(torch.ones(2, 3)).sum()
        hooks.watch(loss if output == "tensors" else output)
        listener.told.clear()
        loss.backward()
        assert [what for what, *_ in listener.told] == ["begins", "ends"]
        if not kept:
            hooks._gradients.zero_grad()
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())


def test_a_backward_that_raises_is_broken_until_the_next_iteration() -> None:
    def fail(_: Tensor) -> None:
        raise ValueError("oh")

    model, listener, hooks = prepared(0, few=True)
    hooks.begin()
    hooks.expect(range(4))
    handle = model.layers[0].weight.register_hook(fail)
    output = model(torch.ones(2, 3))
    hooks.watch(output)
    with pytest.raises(ValueError, match="oh"):
        output.sum().backward()
    assert hooks.is_broken
    hooks.begin()
    assert not hooks.is_broken
    handle.remove()
    for p in model.parameters():
        p.grad = None
    listener.told.clear()
    iterate(model, hooks)
    assert [what for what, *_ in listener.told] == ["begins", *["ready"] * 4, "ends"]


def test_a_backward_within_another_is_refused_where_buckets_leave_early() -> None:
    model, _, hooks = prepared(0, few=True)
    model.reentrant = True
    hooks.begin()
    hooks.expect([0])
    output = model(torch.ones(2, 3, requires_grad=True))
    hooks.watch(output)
    with pytest.raises(RuntimeError, match="use_reentrant=False"):
        output.sum().backward()


def test_gradients_that_nobody_had_are_none_again() -> None:
    model = Chain()
    model.left_out = {1}
    flat = Flat(model, buckets(model, 0))
    gradients = Gradients(flat, 1)
    gradients.drop_unused()
    assert all(p.grad is None for p in gradients.parameters)
    flat.take_gradients()
    model(torch.ones(2, 3)).sum().backward()
    Gradients(flat, 1).drop_unused()
    without = {n for n, p in model.named_parameters() if p.grad is None}
    assert without == {"layers.1.weight", "layers.1.bias"}


def test_gradients_are_dropped_or_zeroed() -> None:
    model = build_model(Case("mlp"))
    flat = Flat(
        model, [BucketSpec(n, (n,)) for n, p in model.named_parameters() if p.requires_grad]
    )
    flat.free("grad")
    gradients = AutogradGradients(flat)
    gradients.zero_grad(set_to_none=False)
    assert all(not p.grad.any() for p in gradients.parameters)
    gradients.zero_grad()
    assert all(p.grad is None for p in gradients.parameters)
    model(torch.ones(2, 5, dtype=torch.float64)).sum().backward()
    kept = [p.grad.clone() for p in gradients.parameters]
    flat.take_gradients()
    assert all(p.grad is view for p, view in zip(flat.parameters, flat.views(), strict=True))
    assert all(torch.equal(p.grad, g) for p, g in zip(gradients.parameters, kept, strict=True))


def test_what_was_applied_in_backward_may_not_be_changed() -> None:
    model = build_model(Case("mlp"))
    flat = Flat(
        model, [BucketSpec(n, (n,)) for n, p in model.named_parameters() if p.requires_grad]
    )
    gradients = AutogradGradients(flat)
    gradients.mark_applied_in_backward(range(1))
    gradients.parameters[1].grad.add_(1)
    assert gradients.is_intact()
    gradients.parameters[0].grad.add_(1)
    assert not gradients.is_intact()
    gradients.on_iteration_begin()
    gradients.mark_applied_in_backward(range(1))
    gradients.parameters[0].grad = None
    assert not gradients.is_intact()
