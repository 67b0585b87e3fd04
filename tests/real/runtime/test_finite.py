"""Values that are not finite: who brought them is named, or left out."""

from __future__ import annotations

import warnings
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from cases import guards as support
from cases.batches import Batch, Call
from cases.guards import CASE, WHEN
from cases.models import batch, build_model, loss_of
from harness.ranks import run_ranks
from torch import Tensor

from offbeat import WFBP, ByteScheduler, DeAR, LocalSGD
from offbeat.core.guards.finite import FiniteGuard, all_finite, is_finite, require_policy
from offbeat.core.plan import INSIDE
from offbeat.plan import Moment, Payload, Phases, Transfer, transfer
from offbeat.strategies.methods.noloco import NoLoCo

MESSAGE = transfer(
    "param", range(2), after=Moment("step"), before=Moment("end"), phases=[0], link="net"
)
READY = Moment("grad", 1)
HANDED = Transfer(Payload("grad", range(2)), READY, READY, Phases(), "net", "send", (1, 2), "sum")
EXCHANGED = replace(MESSAGE, verb="exchange", ranks=(1, 2), into="partner")
NAN, INF = float("nan"), float("inf")
TWO, THREE = Batch(2), Batch(3)

# ---- one message ------------------------------------------------------------------------------


def test_nobody_left_to_average() -> None:
    with pytest.raises(RuntimeError, match="ranks 0, 1, 2"):
        FiniteGuard("skip", 0, 3, str).check_message(MESSAGE, 7, [0, 1, 2], [torch.tensor([NAN])])


def test_one_rank_of_an_average_warns_that_values_are_left_out() -> None:
    """Of an average inside a node, the first rank of the node."""
    for link, warning_ranks in ((INSIDE, [0, 2]), ("net", [0])):
        warned = list[int]()
        for rank in range(4):
            node = (0, 1) if rank < 2 else (2, 3)
            guard = FiniteGuard("skip", rank, 4, str, node)
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                guard.check_message(replace(MESSAGE, link=link), 7, [node[1]], [torch.zeros(2)])
            warned += [rank for _ in caught]
        assert warned == warning_ranks


def test_what_the_user_has_mended_is_used() -> None:
    guard = FiniteGuard("raise", 0, 2, str)
    guard.check_message(MESSAGE, 7, [1], [torch.zeros(3)])
    with pytest.raises(RuntimeError, match=r"rank 1 .* parameters of bucket .* in iteration 7"):
        guard.check_message(MESSAGE, 7, [1], [torch.zeros(3), torch.tensor([1.0, NAN])])


@pytest.mark.parametrize("policy", ["raise", "skip"])
def test_a_sum_that_is_handed_on_is_laid_to_whoever_sent_it(policy: Any) -> None:
    guard, sent = FiniteGuard(policy, 0, 3, str), list[Tensor]()
    for values, culprits in (([1.0, 2.0], []), ([1.0, NAN], [1])):
        tensor = torch.tensor(values)
        assert guard.run(HANDED, tensor, {"send": sent.append}) == culprits
        assert sent.pop() is tensor
    with pytest.raises(RuntimeError, match=r"rank 1 .* gradient of bucket .* in iteration 7"):
        guard.check_message(HANDED, 7, [1], [tensor])
    guard.require_finite_sum(range(2), 7, [torch.zeros(3)])
    with pytest.raises(RuntimeError, match=r"rank 0 .* gradient of bucket .* in iteration 7"):
        guard.require_finite_sum(range(2), 7, [torch.tensor([INF])])


@pytest.mark.parametrize(
    ("values", "spoilt"),
    [(([1.0], [2.0]), []), (([1.0], [NAN]), [2]), (([INF], [2.0]), [1]), (([NAN], [INF]), [1, 2])],
)
def test_both_partners_of_an_exchange_name_the_same_ranks(
    values: tuple[list[float], list[float]], spoilt: list[int]
) -> None:
    sides = (1, *values), (2, *reversed(values))
    for policy, (rank, own, theirs) in product(("raise", "skip"), sides):
        guard, tensor = FiniteGuard(policy, rank, 4, str), torch.tensor(own)  # type: ignore[arg-type]
        exchange = {"exchange": lambda t, theirs=theirs: t.copy_(torch.tensor(theirs))}
        assert guard.run(EXCHANGED, tensor, exchange) == spoilt  # type: ignore[arg-type]
        assert tensor.tolist() == pytest.approx(theirs, nan_ok=True)
        if spoilt:
            names = f"rank{'s' if len(spoilt) > 1 else ''} {', '.join(map(str, spoilt))}"
            with pytest.raises(RuntimeError, match=f"{names} exchanged .* parameters of bucket"):
                guard.check_message(EXCHANGED, 7, spoilt, [tensor])


def test_finite_is_not_misled_by_a_sum_that_overflows() -> None:
    assert is_finite(torch.full((8,), 6e4, dtype=torch.float16))
    assert is_finite(torch.full((8,), 3e38))
    assert not is_finite(torch.tensor([INF, -INF]))
    assert not is_finite(torch.tensor([1.0, NAN], dtype=torch.bfloat16))


def test_all_finite_looks_at_every_tensor() -> None:
    for dtype in (torch.float16, torch.float64):
        large = torch.full((4,), torch.finfo(dtype).max, dtype=dtype)
        small = torch.ones(2, dtype=dtype)
        assert all_finite([])
        assert all_finite(iter([large, -large, small]))
        for bad in (torch.inf, torch.nan):
            assert not all_finite([large, small, torch.tensor([bad, -bad], dtype=dtype)])


def test_an_unknown_policy() -> None:
    with pytest.raises(ValueError, match=r"on_nonfinite \('stop'\) must be one of raise, skip, i"):
        require_policy("stop")


# ---- in training ----------------------------------------------------------------------------


# Strategy, what is spoilt, the iteration that fails, and its bucket.
SPOILT = [
    (WFBP(fusion="none"), "gradient", WHEN, "'4'"),
    (ByteScheduler(), "gradient", WHEN + 1, "'4'"),  # applied in the next forward
    (DeAR(), "gradient", WHEN + 1, "'4'"),
    (LocalSGD(period=3), "weight", WHEN, "'6' to '1'"),
    # codes cannot hold such values; so a rank says that it had some
    *((WFBP(wire=wire), "gradient", WHEN, "") for wire in ("int8", "sign", "randomk:0.5")),
    (WFBP(wire="powersgd:1"), "gradient", WHEN, ""),
]
NAMED = [TWO.add(support.spoil, one[0], "raise", one[1], 5) for one in SPOILT]


def test_every_rank_names_rank_and_bucket() -> None:
    for (*_, iteration, bucket), call in zip(SPOILT, NAMED, strict=True):
        for rank in call.results:
            assert rank["iteration"] == iteration
            assert rank["words"].startswith("rank 1 sent values that are not finite")
            assert f"of bucket {bucket}" in rank["words"]
            assert f"in iteration {WHEN}" in rank["words"]


@THREE.each(
    support.spoil, [WFBP(fusion="none"), "skip", "gradient", 4], [DeAR(), "skip", "gradient", 4]
)
def test_skipped_gradients_leave_the_average_of_the_others(calls: list[Call]) -> None:
    """Of the layer's bucket, in that iteration: the same as a loop that leaves rank 1 out."""
    expected = by_hand(4)
    for call in calls:
        for rank in call.results:
            for name, value in expected.items():
                assert torch.allclose(rank["weights"][name], value, rtol=1e-12), name


@TWO.each(
    support.spoil, [NoLoCo(period=3), "raise", "weight", 5], [NoLoCo(period=3), "skip", "weight", 5]
)
def test_a_pair_does_not_use_the_values_of_a_spoilt_partner(calls: list[Call]) -> None:
    for call in calls:
        for rank in call.results:
            assert rank["iteration"] == WHEN
            assert rank["words"].startswith("rank 1 exchanged values that are not finite")
            assert f"parameters of bucket '6' to '1' in iteration {WHEN}" in rank["words"]


def by_hand(iterations: int) -> dict[str, Tensor]:
    """Plain SGD on the averages; bucket '4' without rank 1 in iteration WHEN."""
    model = build_model(CASE)
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    parameters = [model.get_parameter(name) for name in names]
    for t in range(iterations):
        grads = [
            torch.autograd.grad(loss_of(model, *batch(CASE, rank, t)), parameters)
            for rank in range(3)
        ]
        with torch.no_grad():
            for name, p, first, spoilt, last in zip(names, parameters, *grads, strict=True):
                left_out = t == WHEN and name in ("4.weight", "4.bias")
                mean = (first + last) / 2 if left_out else (first + spoilt + last) / 3
                p -= 0.1 * mean
    return {name: p.detach() for name, p in zip(names, parameters, strict=True)}


@TWO.given(support.spoil, LocalSGD(period=3), "skip", "weight", 3)
def test_a_skipped_replica_takes_over_the_others_weights(call: Call) -> None:
    first, second = call.results
    for name, value in first["weights"].items():
        assert torch.isfinite(value).all()
        assert torch.equal(value, second["weights"][name])


def test_consolidate_leaves_out_a_replica_that_is_not_finite() -> None:
    ranks = run_ranks(3, support.consolidate_spoilt, [1])
    for found in ranks:
        assert found["raise"].startswith("parameters of rank 1 are not finite")
        for name, value in found["skip"].items():
            mean = (ranks[0]["before"][name] + ranks[2]["before"][name]) / 2
            assert torch.allclose(value, mean, rtol=1e-12, atol=0), name
            assert torch.equal(value, ranks[0]["skip"][name])


@TWO.given(support.consolidate_spoilt, [0, 1])
def test_consolidate_needs_a_finite_replica(call: Call) -> None:
    for found in call.results:
        assert found["skip"].startswith("parameters of ranks 0, 1 are not finite")


@TWO.each(
    support.spoil,
    [WFBP(wire="none"), "ignore", "gradient", 4],
    [WFBP(wire="int8"), "ignore", "gradient", 4],
    [WFBP(wire="randomk:0.5"), "ignore", "gradient", 4],
)
def test_ignored_values_spread(calls: list[Call]) -> None:
    for call in calls:
        for rank in call.results:
            assert not torch.isfinite(rank["weights"]["4.weight"]).any()
