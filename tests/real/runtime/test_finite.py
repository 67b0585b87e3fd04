"""Values that are not finite: who brought them is named, or left out."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch
from cases import guards as support
from cases.guards import CASE, WHEN, Threads
from cases.models import batch, build_model, loss_of
from harness.ranks import run_world
from torch import Tensor

from offbeat import WFBP, ByteScheduler, DeAR, LocalSGD, Strategy
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

# ---- one message between three threads -------------------------------------------------------


def average(policy: Any, values: list[list[float]]) -> list[tuple[list[int], Tensor]]:
    """Culprits and result on every rank."""

    def act(rank: int, collectives: dict[str, Any]) -> tuple[list[int], Tensor]:
        guard = FiniteGuard(policy, rank, 3, str)
        tensor = torch.tensor(values[rank])
        return guard.run(MESSAGE, tensor, collectives), tensor

    return Threads(3).run(act)


@pytest.mark.parametrize("odd", [NAN, INF, -INF])
def test_raise_names_who_it_was_on_every_rank(odd: float) -> None:
    for culprits, result in average("raise", [[1.0, 2.0], [3.0, odd], [5.0, 6.0]]):
        assert culprits == [1]
        assert not is_finite(result)


@pytest.mark.parametrize("odd", [NAN, INF])
def test_skip_averages_the_others_on_every_rank(odd: float) -> None:
    for culprits, result in average("skip", [[1.0, 2.0], [3.0, odd], [5.0, 6.0]]):
        assert culprits == [1]
        assert result.tolist() == pytest.approx([3.0, 4.0])


def test_finite_values_are_averaged_as_ever() -> None:
    for policy in ("raise", "skip"):
        for culprits, result in average(policy, [[1.0, 2.0], [3.0, 4.0], [5.0, 9.0]]):
            assert (culprits, result.tolist()) == ([], [3.0, 5.0])


def test_nobody_left_to_average() -> None:
    for culprits, result in average("skip", [[NAN, 1.0]] * 3):
        assert culprits == [0, 1, 2]
        with pytest.raises(RuntimeError, match="ranks 0, 1, 2"):
            FiniteGuard("skip", 0, 3, str).check_message(MESSAGE, 7, culprits, [result])


@pytest.mark.parametrize(("link", "warning_ranks"), [(INSIDE, [0, 2]), ("net", [0])])
def test_one_rank_of_an_average_warns_that_values_are_left_out(
    link: str, warning_ranks: list[int]
) -> None:
    """Of an average inside a node, the first rank of the node."""
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


@pytest.mark.parametrize("policy", ["raise", "skip"])
@pytest.mark.parametrize(
    ("values", "spoilt"),
    [(([1.0], [2.0]), []), (([1.0], [NAN]), [2]), (([INF], [2.0]), [1]), (([NAN], [INF]), [1, 2])],
)
def test_both_partners_of_an_exchange_name_the_same_ranks(
    policy: Any, values: tuple[list[float], list[float]], spoilt: list[int]
) -> None:
    for rank, own, theirs in ((1, *values), (2, *reversed(values))):
        guard, tensor = FiniteGuard(policy, rank, 4, str), torch.tensor(own)
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


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64], ids=str)
def test_all_finite_looks_at_every_tensor(dtype: torch.dtype) -> None:
    most = torch.finfo(dtype).max
    large, small = torch.full((4,), most, dtype=dtype), torch.ones(2, dtype=dtype)
    assert all_finite([])
    assert all_finite(iter([large, -large, small]))
    for bad in (torch.inf, torch.nan):
        assert not all_finite([large, small, torch.tensor([bad, -bad], dtype=dtype)])


def test_an_unknown_policy() -> None:
    with pytest.raises(ValueError, match=r"on_nonfinite \('stop'\) must be one of raise, skip, i"):
        require_policy("stop")


# ---- in training ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("strategy", "what", "iteration", "bucket"),
    [
        (WFBP(fusion="none"), "gradient", WHEN, "'4'"),
        (ByteScheduler(), "gradient", WHEN + 1, "'4'"),  # applied in the next forward
        (DeAR(), "gradient", WHEN + 1, "'4'"),
        (LocalSGD(period=3), "weight", WHEN, "'6' to '1'"),
    ],
)
def test_every_rank_names_rank_and_bucket(
    strategy: Strategy, what: str, iteration: int, bucket: str
) -> None:
    ranks = run_world(support.spoil, 2, strategy, "raise", what, 5)
    for rank in ranks:
        assert rank["iteration"] == iteration
        assert rank["words"].startswith("rank 1 sent values that are not finite")
        assert f"of bucket {bucket} in iteration {WHEN}" in rank["words"]


@pytest.mark.parametrize("strategy", [WFBP(fusion="none"), DeAR()], ids=str)
@pytest.mark.filterwarnings("ignore:rank 1 left out")
def test_skipped_gradients_leave_the_average_of_the_others(strategy: Strategy) -> None:
    """Of the layer's bucket, in that iteration: the same as a loop that leaves rank 1 out."""
    expected = by_hand(4)
    for rank in run_world(support.spoil, 2, strategy, "skip", "gradient", 4):
        for name, value in expected.items():
            assert torch.allclose(rank["weights"][name], value, rtol=1e-12), name


@pytest.mark.parametrize("policy", ["raise", "skip"])
def test_a_pair_does_not_use_the_values_of_a_spoilt_partner(policy: str) -> None:
    for rank in run_world(support.spoil, 2, NoLoCo(period=3), policy, "weight", 5):
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
            for rank in range(2)
        ]
        with torch.no_grad():
            for name, p, mine, other in zip(names, parameters, *grads, strict=True):
                alone = t == WHEN and name in ("4.weight", "4.bias")
                p -= 0.1 * (mine if alone else (mine + other) / 2)
    return {name: p.detach() for name, p in zip(names, parameters, strict=True)}


@pytest.mark.filterwarnings("ignore:rank 1 left out")
def test_a_skipped_replica_takes_over_the_others_weights() -> None:
    first, second = run_world(support.spoil, 2, LocalSGD(period=3), "skip", "weight", 3)
    for name, value in first["weights"].items():
        assert torch.isfinite(value).all()
        assert torch.equal(value, second["weights"][name])


@pytest.mark.filterwarnings("ignore:rank 1 left out")
def test_consolidate_leaves_out_a_replica_that_is_not_finite() -> None:
    ranks = run_world(support.consolidate_spoilt, 3, [1])
    for found in ranks:
        assert found["raise"].startswith("parameters of rank 1 are not finite")
        for name, value in found["skip"].items():
            mean = (ranks[0]["before"][name] + ranks[2]["before"][name]) / 2
            assert torch.allclose(value, mean, rtol=1e-12, atol=0), name
            assert torch.equal(value, ranks[0]["skip"][name])


def test_consolidate_needs_a_finite_replica() -> None:
    for found in run_world(support.consolidate_spoilt, 2, [0, 1]):
        assert found["skip"].startswith("parameters of ranks 0, 1 are not finite")


@pytest.mark.parametrize("wire", ["int8", "sign", "randomk:0.5", "powersgd:1"])
def test_codes_hide_no_values(wire: str) -> None:
    """They cannot hold them; so a rank says that it had some."""
    strategy = WFBP(wire=wire)
    for rank in run_world(support.spoil, 2, strategy, "raise", "gradient", 4):
        assert rank["iteration"] == support.WHEN
        assert "rank 1 sent values that are not finite" in rank["words"]


@pytest.mark.parametrize("wire", ["none", "int8", "randomk:0.5"])
def test_ignored_values_spread(wire: str) -> None:
    for rank in run_world(support.spoil, 2, WFBP(wire=wire), "ignore", "gradient", 4):
        assert not torch.isfinite(rank["weights"]["4.weight"]).any()
