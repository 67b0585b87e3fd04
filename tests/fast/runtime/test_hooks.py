"""Hooks on a few parameters report each bucket when its gradients are complete."""

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

from offbeat.core.buckets.flat import Flat
from offbeat.core.buckets.gradients import Gradients
from offbeat.core.buckets.layout import BucketSpec
from offbeat.core.plan import BUILT_IN, Buffer
from offbeat.core.runtime.hooks import Hooks


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
        self.gradients: Gradients

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
    seed: int, *, gathers: bool = False, lasting: bool = True
) -> tuple[Chain, Listener, Hooks]:
    torch.manual_seed(0)
    model = Chain()
    flat, listener = Flat(model, buckets(model, seed)), Listener(model)
    if gathers:
        flat.create_gradients()
    listener.gradients = Gradients(flat, 1, gathers=gathers)
    hooks = Hooks(flat, listener, lasting=lasting)
    listener.end = hooks.finish
    return model, listener, hooks


def iterate(
    model: Chain, hooks: Hooks, passes: int = 1, expected: Sequence[int] = range(4)
) -> None:
    hooks.begin()
    hooks.expect(expected)
    for i in range(passes):
        hooks.accumulating = i + 1 < passes
        output = model(torch.ones(2, 3))
        hooks.watch(output)
        output.sum().backward()
    for p in model.parameters():
        p.grad = None


KINDS = [{}, {"gathers": True}, {"lasting": False}]


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("seed", range(4))
def test_a_bucket_is_ready_when_all_gradients_up_to_it_are_complete(
    seed: int, kind: dict[str, bool]
) -> None:
    model, listener, hooks = prepared(seed, **kind)
    names = [name for bucket in buckets(model, seed) for name in bucket.parameters]
    for left_out in (set(), set(), {2}, set(), {0, 5}, {3}):
        listener.told.clear()
        model.left_out = left_out
        iterate(model, hooks)
        reported = [(b, fresh) for what, b, fresh in listener.told if what == "ready"]
        assert [b for b, _ in reported] == [0, 1, 2, 3]
        used = [int(name.split(".")[1]) not in left_out for name in names]
        for b, fresh in reported:
            assert fresh >= sum(used[: 3 * b + 3])
        # Once a sentinel is at the last parameter, nothing is reported late.
        assert [what for what, *_ in listener.told] == ["begins", *["ready"] * 4, "ends"]


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_buckets_are_reported_before_backward_ends(kind: dict[str, bool]) -> None:
    model, listener, hooks = prepared(0, **kind)
    iterate(model, hooks)
    listener.told.clear()
    iterate(model, hooks)
    assert [fresh for what, _, fresh in listener.told if what == "ready"] == [3, 6, 9, 12]


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_only_expected_buckets_are_told(kind: dict[str, bool]) -> None:
    model, listener, hooks = prepared(0, **kind)
    for expected in ([3], [], [0, 2], range(4), [1]):
        listener.told.clear()
        iterate(model, hooks, expected=expected)
        assert [b for what, b, _ in listener.told if what == "ready"] == [*expected]


def test_hooks_of_a_few_iterations_leave_no_trace() -> None:
    """Of a removed post-accumulate hook, torch keeps an empty dictionary and a call into Python."""
    model, listener, hooks = prepared(0, lasting=False)
    frozen = model.layers[0].weight
    frozen.requires_grad_(False)
    again = Hooks(listener.gradients.flat, listener, lasting=False)
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
    model, listener, hooks = prepared(0)
    _, complete = doubled(model, listener)
    for _ in range(2):
        iterate(model, hooks, passes=2)
    assert complete == [True] * 8
    assert [what for what, *_ in listener.told if what != "begins"] == ["ends"] * 2


def test_gradients_that_are_set_by_hand_do_not_count() -> None:
    model, listener, hooks = prepared(0)
    once, complete = doubled(model, listener)
    for p, gradient in zip(model.parameters(), once, strict=True):
        p.grad = gradient.clone()
    iterate(model, hooks)
    assert complete == [True] * 4


def test_gradients_that_share_a_version_counter_are_complete_at_the_end() -> None:
    """Views of one tensor: what is written to one of them looks new in all."""
    model, listener, hooks = prepared(0)
    parameters = [*model.parameters()]
    whole = torch.zeros(sum(p.numel() for p in parameters))
    for p, part in zip(parameters, whole.split([p.numel() for p in parameters]), strict=True):
        p.grad = part.view_as(p)
    iterate(model, hooks)
    assert [fresh for what, _, fresh in listener.told if what == "ready"] == [12] * 4


def test_there_are_no_hooks_where_nothing_is_expected() -> None:
    model, listener, hooks = prepared(0)
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
    model, listener, hooks = prepared(0)
    hooks.begin()
    hooks.expect([])
    if before != "nothing":
        hooks.accumulating = True
        output = model(torch.ones(2, 3))
        hooks.watch(output)
        output.sum().backward()
        hooks.accumulating = False
    if before == "zeroed":
        listener.gradients.zero_grad(set_to_none=False)
    x = torch.ones(2, 3, requires_grad=True)
    output = model(x)
    hooks.watch(output)
    torch.autograd.grad(output.sum(), x, create_graph=True)
    assert "ends" not in [what for what, *_ in listener.told]
    output.sum().backward()
    assert [what for what, *_ in listener.told].count("ends") == 1


def test_a_backward_without_a_forward_that_was_watched_is_found_by_a_sentinel() -> None:
    model, listener, hooks = prepared(0)
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
    model, listener, hooks = prepared(0)
    for kept, output in ((False, None), (True, None), (True, object()), (False, "tensors")):
        hooks.begin()
        hooks.expect([])
        loss = model(torch.ones(2, 3)).sum()
        hooks.watch(loss if output == "tensors" else output)
        listener.told.clear()
        loss.backward()
        assert [what for what, *_ in listener.told] == ["begins", "ends"]
        if not kept:
            listener.gradients.zero_grad()
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())


def test_a_backward_that_raises_is_broken_until_the_next_iteration() -> None:
    def fail(_: Tensor) -> None:
        raise ValueError("oh")

    model, listener, hooks = prepared(0)
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
    model, _, hooks = prepared(0)
    model.reentrant = True
    hooks.begin()
    hooks.expect([0])
    output = model(torch.ones(2, 3, requires_grad=True))
    hooks.watch(output)
    with pytest.raises(RuntimeError, match="use_reentrant=False"):
        output.sum().backward()


def stored(*, gathers: bool) -> tuple[nn.Module, Gradients]:
    """A model with a bucket for each parameter."""
    model = build_model(Case("mlp"))
    names = [n for n, p in model.named_parameters() if p.requires_grad]
    flat = Flat(model, [BucketSpec(n, (n,)) for n in names])
    if gathers:
        flat.create_gradients()
    return model, Gradients(flat, 1, gathers=gathers)


def backward(model: nn.Module, gradients: Gradients, factor: float = 1.0) -> None:
    gradients.begin_pass()
    (factor * model(torch.ones(2, 5, dtype=torch.float64)).sum()).backward()


@pytest.mark.parametrize("gathers", [True, False])
def test_gradients_add_up_until_they_are_zeroed_or_dropped(gathers: bool) -> None:
    model, gradients = stored(gathers=gathers)
    backward(model, gradients)
    once = [p.grad.clone() for p in gradients.parameters]
    gradients.gather(len(once))
    for times in (3.0, 6.0):  # as in a loop that never zeroes
        backward(model, gradients, times - 1 if times == 3 else 3.0)
        gradients.gather(len(once))
        for p, g in zip(gradients.parameters, once, strict=True):
            torch.testing.assert_close(p.grad, times * g)
    gradients.zero_grad(set_to_none=False)
    assert all(p.grad is not None and not p.grad.any() for p in gradients.parameters)
    backward(model, gradients)
    gradients.gather(len(once))
    assert all(torch.equal(p.grad, g) for p, g in zip(gradients.parameters, once, strict=True))
    gradients.zero_grad()
    assert all(p.grad is None for p in gradients.parameters)


def test_gathered_gradients_are_those_of_the_storage() -> None:
    model, gradients = stored(gathers=True)
    first = gradients.parameters[0]
    backward(model, gradients)
    own = first.grad.clone()
    gradients.gather(1)
    assert torch.equal(gradients.flat.gradients(0), own.flatten())
    gradients.flat.gradients(0).mul_(2)
    assert torch.equal(first.grad, 2 * own)
    assert not gradients.flat.gradients(1).any()  # not gathered yet


def test_a_parameter_without_gradient_counts_as_absent_and_has_none() -> None:
    model, gradients = stored(gathers=True)
    backward(model, gradients)
    gradients.parameters[1].grad = None
    gradients.gather(len(gradients.parameters))
    gradients.show(range(len(gradients.parameters)), 0)
    assert [i for i, p in enumerate(gradients.parameters) if p.grad is None] == [1]
    assert gradients.is_intact()
    gradients.flat.absence_counts(1)[0] = 0.0  # another rank had one
    gradients.show(range(1, 2), 0)
    assert gradients.parameters[1].grad is not None


def test_a_gradient_of_an_earlier_pass_counts_in_a_pass_without_one() -> None:
    model, gradients = stored(gathers=True)
    backward(model, gradients)
    once = gradients.parameters[1].grad.clone()
    gradients.gather(len(gradients.parameters))
    backward(model, gradients)
    gradients.parameters[1].grad = None  # this pass has left none
    gradients.gather(len(gradients.parameters))
    assert torch.equal(gradients.flat.gradients(1), once.flatten())
    assert not gradients.flat.absence_counts(1).any()


def test_a_message_of_other_ranks_leaves_no_counts_and_no_values() -> None:
    model, gradients = stored(gathers=True)
    for own in (True, False):
        gradients.flat.absence_counts(0).fill_(0.5)  # as in the average of the last message
        gradients.flat.gradients(0).fill_(7.0)
        gradients.begin()
        gradients.zero_grad()
        backward(model, gradients)
        gradients.gather(len(gradients.parameters), empty=not own)
        assert gradients.flat.absence_counts(0).tolist() == [0.0 if own else 1.0]
        assert gradients.flat.gradients(0).any() == own
    assert all(p.grad is None for p in gradients.parameters), "nothing to show"


def test_late_gradients_add_up_over_iterations() -> None:
    model = build_model(Case("mlp"))
    names = [n for n, p in model.named_parameters() if p.requires_grad]
    flat = Flat(model, [BucketSpec(n, (n,)) for n in names])
    flat.create_gradients()
    flat.adopt({**BUILT_IN, "grad": Buffer("grad", "grad", copies=2)})
    gradients, last = Gradients(flat, 1, gathers=True), len(names) - 1
    for times in (1, 2, 3):
        gradients.begin()
        backward(model, gradients)
        own = gradients.parameters[0].grad.clone()
        if times == 2:
            gradients.parameters[last].grad = None
        gradients.gather(len(names))
        torch.testing.assert_close(flat.gradients(0), times * own.flatten())
        assert gradients.added_iterations(0, 0) == times
        assert all(p.grad is None for p in gradients.parameters)
    assert flat.absence_counts(last).tolist() == [1.0]
    restored = Gradients(flat, 1, gathers=True)
    restored.restore(gradients.flags())
    assert restored.flags() == gradients.flags()
    gradients.mark_applied(range(1), 0, in_backward=False)
    assert gradients.added_iterations(0, 0) == 0


def test_a_gradient_whose_update_is_delayed_is_dropped_and_not_zeroed() -> None:
    model, gradients = stored(gathers=True)
    backward(model, gradients)
    gradients.gather(len(gradients.parameters))
    gradients.apply_later([range(1)])
    gradients.zero_grad(set_to_none=False)
    assert gradients.parameters[0].grad is None
    assert gradients.flat.gradients(0).any()
    assert gradients.parameters[1].grad is not None
    assert not gradients.flat.gradients(1).any()


def test_a_pass_that_leaves_no_gradients_changes_nothing() -> None:
    model, gradients = stored(gathers=True)
    backward(model, gradients)
    gradients.gather(len(gradients.parameters))
    kept = [p.grad for p in gradients.parameters]
    gradients.begin_pass()
    assert all(p.grad is None for p in gradients.parameters)
    gradients.cancel_pass()
    assert all(p.grad is g for p, g in zip(gradients.parameters, kept, strict=True))


def test_what_was_applied_in_backward_may_not_be_changed() -> None:
    model, gradients = stored(gathers=False)
    backward(model, gradients)
    gradients.mark_applied(range(1), 0, in_backward=True)
    gradients.parameters[1].grad.add_(1)
    assert gradients.is_intact()
    gradients.parameters[0].grad.add_(1)
    assert not gradients.is_intact()
    gradients.begin()
    gradients.mark_applied(range(1), 0, in_backward=True)
    gradients.parameters[0].grad = None
    assert not gradients.is_intact()
