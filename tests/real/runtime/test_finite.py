"""Values that are not finite: who brought them is named."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from cases import guards as support
from cases.batches import Batch, Call
from cases.guards import WHEN
from torch import Tensor

from offbeat import WFBP, ByteScheduler, DeAR, LocalSGD
from offbeat.core.guards.finite import FiniteGuard, require_policy
from offbeat.core.plan.semantics import is_finite
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


def test_what_the_user_has_mended_is_used() -> None:
    guard = FiniteGuard("raise", 0, 2, str)
    guard.check_message(MESSAGE, 7, [1], [torch.zeros(3)])
    with pytest.raises(RuntimeError, match=r"rank 1 .* parameters of bucket .* in iteration 7"):
        guard.check_message(MESSAGE, 7, [1], [torch.zeros(3), torch.tensor([1.0, NAN])])


def test_a_sum_that_is_handed_on_is_laid_to_whoever_sent_it() -> None:
    guard, sent = FiniteGuard("raise", 0, 3, str), list[Tensor]()
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
    for rank, own, theirs in sides:
        guard, tensor = FiniteGuard("raise", rank, 4, str), torch.tensor(own)
        exchange = {"exchange": lambda t, theirs=theirs: t.copy_(torch.tensor(theirs))}
        assert guard.run(EXCHANGED, tensor, exchange) == spoilt  # type: ignore[arg-type]
        assert tensor.tolist() == pytest.approx(theirs, nan_ok=True)
        if spoilt:
            names = f"rank{'s' if len(spoilt) > 1 else ''} {', '.join(map(str, spoilt))}"
            with pytest.raises(RuntimeError, match=f"{names} exchanged .* parameters of bucket"):
                guard.check_message(EXCHANGED, 7, spoilt, [tensor])


def test_finite_is_not_misled_by_a_sum_that_overflows() -> None:
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        large = torch.full((4,), torch.finfo(dtype).max, dtype=dtype)
        assert is_finite(large)
        assert is_finite(-large)
        assert is_finite(large[:0])
        for bad in (INF, NAN):
            assert not is_finite(torch.tensor([1.0, bad, -bad], dtype=dtype))


def test_an_unknown_policy() -> None:
    with pytest.raises(ValueError, match=r"on_nonfinite \('stop'\) must be one of raise, ignore"):
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


@TWO.given(support.spoil, NoLoCo(period=3), "raise", "weight", 5)
def test_a_pair_does_not_use_the_values_of_a_spoilt_partner(call: Call) -> None:
    for rank in call.results:
        assert rank["iteration"] == WHEN
        assert rank["words"].startswith("rank 1 exchanged values that are not finite")
        assert f"parameters of bucket '6' to '1' in iteration {WHEN}" in rank["words"]


@THREE.given(support.consolidate_spoilt, [1])
def test_consolidate_names_a_replica_that_is_not_finite(call: Call) -> None:
    for found in call.results:
        assert found["words"].startswith("rank 1 held values that are not finite")


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
