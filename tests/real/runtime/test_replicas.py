"""Replicas: what drives them apart is named; consolidate refuses or repairs."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from cases import guards as support
from cases.batches import Batch, Call
from harness.ranks import run_ranks

from offbeat import (
    DDP,
    WFBP,
    ByteScheduler,
    DiLoCo,
    DreamDDP,
    LocalSGD,
    PartialSync,
    SelSync,
)
from offbeat.core.guards.comparison import ReplicaGuard, SettingsGuard
from offbeat.core.guards.replicas import dissenters, hash_text, sketch

NAMED = {
    "rate": "rank 1 has 0.1 as lr of param group 0, rank 0 has 0.05",
    "decay": "rank 1 has 0.25 as weight_decay of param group 0, rank 0 has 0.01",
    "state": "optimizer state '4.weight.momentum_buffer' of rank 1 and of rank 0",
    "loaded": "weight '4.bias' of rank 1 and of rank 0",
    "scheduler": "rank 1 has 0.05 as lr of param group 0, rank 0 has 0.0125",
    "clipping": "weight '1.weight' of rank 1 and of rank 0",
    "frozen": "rank 1 has ('0.weight', '0.bias', '4.bias') as frozen parameters, rank 0 has ",
}
SETTINGS = {cause: NAMED[cause] for cause in ("rate", "decay", "frozen")}
SETTINGS["scheduler"] = "rank 1 has 0.05 as lr of param group 0, rank 0 has"  # half, or a quarter


TWO = Batch(2)
AVERAGING = [
    *(LocalSGD(period=3), DreamDDP(period=2)),
    *(PartialSync(period=2), SelSync(), DiLoCo(period=2, fragments=1)),
]
DELAYED = DreamDDP(period=2, due="delayed")
EDITS = ["nothing", "all", "restored", "loaded", "in place", "data"]
PASSING = [
    TWO.add(support.diverge, ["nothing", "rounding"], WFBP()),
    # It averages parameters, so replicas may differ.
    TWO.add(support.diverge, ["nothing", "rounding", "loaded"], LocalSGD(period=3)),
]
IN_PREPARE = {
    what: TWO.add(support.prepare_with_other, what, WFBP())
    for what in ("settings", "members", "state")
}


@TWO.given(support.diverge, list(NAMED), WFBP())
def test_every_cause_is_named_on_every_rank(call: Call) -> None:
    for rank in call.results:
        for (cause, text), (iteration, words) in zip(NAMED.items(), rank, strict=True):
            assert iteration == support.WHEN, (cause, words)
            assert text in words
            assert ("param group" in words) == ("param group" in text), "nothing else differs"


COMPARED = [
    *((cause, AVERAGING[0]) for cause in SETTINGS),
    *(("rate", strategy) for strategy in AVERAGING[1:]),
]


@TWO.each(support.diverge, *(([cause], strategy) for cause, strategy in COMPARED))
def test_settings_are_compared_where_parameters_are_averaged(calls: list[Call]) -> None:
    """Before the update of an iteration that averages; local SGD does in the third one."""
    for (cause, strategy), call in zip(COMPARED, calls, strict=True):
        for [(iteration, words)] in call.results:
            assert SETTINGS[cause] in words, (strategy, cause)
            assert iteration >= (1 if cause == "scheduler" else support.WHEN)


@TWO.each(
    support.edit,
    [EDITS, [LocalSGD(period=2), DELAYED]],
    [["loaded", "in place", "data"], [DreamDDP(period=2), DiLoCo(period=2, fragments=1)]],
)
def test_weights_written_by_some_ranks_alone_are_named_where_parameters_are_averaged(
    calls: list[Call],
) -> None:
    """A write in place in any iteration, one through `data` in an early one."""
    first, second = ([one for call in calls for one in call.results[rank]] for rank in range(2))
    for strategy, kind, said in first:
        if strategy == str(DELAYED) and kind in ("data", "restored"):
            continue  # versions alone: messages write weights until the next forward
        if kind in ("in place", "data"):
            assert len(said) == 1, (strategy, kind)
            assert "parameter '4.bias' (1 in all)" in said[0]
            assert "by ranks [1] alone" in said[0]
        else:
            assert said == [], (strategy, kind)
    assert not any(said for _, _, said in second), "rank 0 warns for all"


def test_equal_replicas_rounding_and_averaged_parameters_pass() -> None:
    for call in PASSING:
        assert all(one == (-1, "") for rank in call.results for one in rank)


@TWO.given(support.diverge, ["nothing", "loaded", "state"], ByteScheduler())
def test_pending_updates_are_done_before_weights_are_compared(call: Call) -> None:
    [first, second] = call.results
    assert first == second
    assert first[0] == (-1, "")
    for cause, (iteration, words) in zip(("loaded", "state"), first[1:], strict=True):
        assert (iteration, NAMED[cause] in words) == (support.WHEN, True)


@TWO.given(support.prepare_with_other, "state", LocalSGD())
def test_agreed_in_prepare(call: Call) -> None:
    """Also optimizer state, unless parameters are averaged."""
    for what, kind, named in (
        ("settings", "ValueError", "rank 1 has 0.25 as weight_decay of param group 0"),
        ("members", "ValueError", "rank 1 has '6.bias' as params of param group 0"),
        ("state", "RuntimeError", "optimizer state '1.bias.momentum_buffer' of rank 1"),
    ):
        for outcome in IN_PREPARE[what].outcomes:
            assert outcome.kind == kind, outcome.error
            assert named in outcome.error
    assert call.results == [None, None]


@TWO.each(support.consolidate_twice, [WFBP()], [DDP()])
def test_consolidate_refuses_then_repairs(calls: list[Call]) -> None:
    for ranks in (call.results for call in calls):
        for rank in ranks:
            assert "'4.bias' of rank 1 and of rank 0 differ by" in rank["words"]
            assert "consolidate(repair=True)" in rank["words"]
            for i, mean in enumerate(rank["after"]):
                expected = (ranks[0]["before"][i] + ranks[1]["before"][i]) / 2
                assert torch.allclose(mean, expected, rtol=1e-14)
        assert ranks[0]["ends"] == ranks[1]["ends"], "momentum that differs would part them again"


# ---- parts ----------------------------------------------------------------------------------


def test_dissenters_are_the_minority_or_not_rank_0() -> None:
    assert list(dissenters([1, 1, 1])) == []
    assert list(dissenters([1, 2])) == [(1, 0)]
    assert list(dissenters([2, 1, 1])) == [(0, 1)]
    assert list(dissenters([1, 2, 1, 3])) == [(1, 0), (3, 0)]


def test_sketches_measure_how_far_apart_tensors_are() -> None:
    """Within a factor of the truth that four projections leave, at every size."""
    random = torch.Generator().manual_seed(1)
    for size in (1, 5, 4096, 10_000):
        x = torch.randn(size, generator=random, dtype=torch.float64)
        for distance in (1e-9, 1e-3, 1.0):
            y = x + distance * torch.randn(size, generator=random, dtype=torch.float64)
            a, b = sketch(x), sketch(y)
            assert a[0] == pytest.approx(x.norm().item())
            apart = sum((p - q) ** 2 for p, q in zip(a[1:], b[1:], strict=True)) ** 0.5 / 2
            assert 0.1 < apart / (y - x).norm().item() < 3


def test_text_is_hashed_alike_in_every_process() -> None:
    values = run_ranks(2, hash_text, "weights")
    assert values[0] == values[1] == hash_text("weights") != hash_text("weighst")


class Agreeing:
    """A control group whose other ranks always agree; counts how often it is asked."""

    world_size, asked = 2, 0

    def is_same(self, numbers: Sequence[int], _: object = ()) -> bool:
        assert all(abs(n) < 2**62 for n in numbers)
        self.asked += 1
        return True


def test_when_replicas_are_compared() -> None:
    """At the first step, then every third one; after what is pending."""
    control, settled = Agreeing(), []
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters())
    guard = ReplicaGuard(control, model, optimizer, 3, lambda: settled.append(1))  # type: ignore[arg-type]
    looks = []
    for _ in range(7):
        if guard.count_step():
            guard.compare()
        looks.append(control.asked)
    assert looks == [1, 1, 1, 2, 2, 2, 3]
    assert len(settled) == 3


def test_when_settings_are_compared() -> None:
    """At the first two averages, and at the next one that is three steps after the last."""
    control, model = Agreeing(), torch.nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters())
    averaging, asked = [step not in (0, 7) for step in range(9)], []
    averages = lambda: averaging[len(asked)]  # noqa: E731
    guard = SettingsGuard(control, model, optimizer, 3, averages, lambda _: None, {})  # type: ignore[arg-type]
    for _ in averaging:
        if guard.count_step():
            guard.compare()
        asked.append(control.asked)
    assert asked == [0, 1, 2, 2, 3, 3, 3, 3, 4]
