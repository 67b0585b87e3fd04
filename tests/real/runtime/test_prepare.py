"""prepare: what it refuses, what it agrees on with the other ranks, and what it returns."""

from __future__ import annotations

import errno
import json
import os
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import failing, workers
from cases.batches import Batch, Call
from cases.models import Case, build_model, build_optimizer, profile_of
from cases.tiny_runs import data_of
from harness.ranks import run_ranks
from torch import nn

import offbeat
from offbeat import (
    BSP,
    DDP,
    SSP,
    WFBP,
    A2CiD2,
    ByteScheduler,
    DreamDDP,
    LocalSGD,
    PartialSync,
    Profile,
)
from offbeat.core.start.launch_request import LaunchRequest
from offbeat.core.start.strategy_choice import NamedStrategy, choose_strategy

CASE = failing.CASE
ONE, TWO, THREE = Batch(1), Batch(2), Batch(3)

# ---- what it refuses ------------------------------------------------------------------------


def mlp() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = build_model(CASE)
    return model, build_optimizer(CASE, model)


def foreign() -> tuple[nn.Module, torch.optim.Optimizer]:
    model, _ = mlp()
    extra = nn.Parameter(torch.zeros(2))
    return model, torch.optim.SGD([{"params": list(model.parameters())}, {"params": [extra]}], 0.1)


def lbfgs() -> tuple[nn.Module, torch.optim.Optimizer]:
    model, _ = mlp()
    return model, torch.optim.LBFGS([p for p in model.parameters() if p.requires_grad])


def sparse() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Embedding(3, 2, sparse=True)
    return model, torch.optim.SparseAdam(model.parameters())


def shared() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].weight = nn.Parameter(model[0].weight.data)
    return model, torch.optim.SGD(model.parameters(), 0.1)


# What is prepared, with which setting, and what the error names.
REFUSED: list[tuple[Any, dict[str, Any], str]] = [
    (mlp, {"min_bucket_bytes": -5}, "min_bucket_bytes (-5)"),
    (mlp, {"observe": 0}, "observe (0)"),
    (mlp, {"observe": True}, "observe (True)"),
    (mlp, {"compare_every": -1}, "compare_every (-1)"),
    (mlp, {"timeout_s": True}, "timeout_s (True)"),
    (mlp, {"timeout_s": inf}, "timeout_s (inf)"),
    (mlp, {"links": "eth0"}, "links ('eth0')"),
    (mlp, {"links": []}, "links ([])"),
    (mlp, {"links": ["a", "a"]}, "links (['a', 'a'])"),
    (foreign, {}, "parameter 0 of the optimizer's group 1"),
    (lbfgs, {}, "optimizer (LBFGS)"),
    (sparse, {}, "optimizer (SparseAdam)"),
    (shared, {}, "parameters '0.weight' and '1.weight'"),
]


def test_refused_before_anything_is_opened() -> None:
    for build, options, named in REFUSED:
        with pytest.raises(ValueError) as caught:
            offbeat.prepare(*build(), BSP(), **options)
        assert named in str(caught.value)
    assert not torch.distributed.is_initialized()


CASE_BYTES = sum(bucket.size_bytes for bucket in profile_of(CASE, 1).buckets)
# Calls, the kind of the error on every rank, and what it names.
IN_A_WORLD: list[tuple[Call, str, list[str]]] = [
    (ONE.add(failing.sparse_gradients), "ValueError", ["Embedding(sparse=False)"]),
    (ONE.add(failing.prepare_with, None, CASE, ["none0"]), "ValueError", ["none0"]),
    *(
        (ONE.add(failing.prepare_with, profile), "ValueError", ["profile does not match", *named])
        for profile, named in (
            (profile_of(Case("backwards"), 1), ["bucket 'first'", "'first.weight'"]),
            (
                replace(profile_of(CASE, 1), model="x", element_bytes=2.0),
                [f"{CASE_BYTES // 2:,} trained parameters", f"has {CASE_BYTES // 8:,}"],
            ),
            (profile_of(CASE, 3), ["world_size (3) must be 1"]),
            (profile_of(CASE, 1, ("a", "b")), ["links (a, b)"]),
        )
    ),
    (ONE.add(failing.prepare_tuned, None), "ValueError", ["bucket_cap_mb ('tuned')", "profile="]),
    (ONE.add(failing.prepare_named, "dreamdpp", None), "ValueError", ["dreamddp"]),
    (ONE.add(failing.prepare_named, "dreamddp:perod=3", None), "ValueError", ["period"]),
    *(
        (
            THREE.add(failing.prepare_differently, what),
            "ValueError",
            ["must be the same on all ranks", *named],
        )
        for what, named in {
            "strategy": ["the strategy", "rank 0 has local-sgd"],
            "settings": ["rank 2 has local-sgd", "'period': 5"],
            "observe": ["rank 2 has observe=3"],
            "profile": ["rank 2 has observe=2", "profile=given"],
            "shape": ["rank 0 has '6.weight [3, 7] torch.float64 trainable"],
            "dtype": ["rank 2 has '0.weight [6, 5] torch.float32 frozen"],
            "frozen": ["rank 2 has '4.weight [7, 8] torch.float64 frozen"],
            "more": ["rank 2 has '7.weight [3, 3] torch.float64 trainable"],
            "strides": ["with strides [1, 8]' as parameter 2", "rank 0 has '1.weight [8, 6]"],
            "buffers": ["rank 2 has '[2] torch.float32' as buffer 'extra'"],
            "optimizer": ["the optimizer", "rank 0 has SGD {"],
            "rate": ["'lr': 0.2"],
        }.items()
    ),
]


def test_refused_on_every_rank() -> None:
    """Of differences, without naming a rank that is not at fault."""
    for call, kind, named in IN_A_WORLD:
        for outcome in call.outcomes:
            assert outcome.kind == kind, (named, outcome)
            assert [text for text in named if text not in outcome.error] == []
            assert "rank 1" not in outcome.error


@ONE.given(failing.prepare_again)
def test_refused_when_prepared_already(call: Call) -> None:
    [[model, again, optimizer]] = call.results
    assert model == again
    assert model.startswith("the model is prepared already; call prepare once, or call model.close")
    assert optimizer.endswith("prepare model.module with optimizer.inner")


def test_a_model_that_is_closed_after_an_exception_has_failed() -> None:
    """Lightning closes it before the exception has left the script."""
    others, closed = run_ranks(2, failing.close_after_an_exception)
    assert closed == "closed"
    assert "failed with KeyError" in others


FEW_PASSES = TWO.add(failing.pass_without_steps, LocalSGD(), 19)


@TWO.each(failing.followed_iterations, [WFBP()], [LocalSGD()])
def test_metrics_follow_iterations_without_an_update(calls: list[Call]) -> None:
    """As saving does: other ranks save in the same iteration."""
    for call in calls:
        assert call.results == [[1, 2, 4]] * 2


@TWO.each(failing.pass_without_steps, [WFBP(), 50], [DreamDDP(period=2), 50])
def test_a_loop_without_steps_is_reported_once(calls: list[Call]) -> None:
    for call in calls:
        first, second = call.results
        [[warning], within_no_sync] = first
        assert within_no_sync == []
        assert second == [[], []]
        assert "optimizer.step()" in warning
    assert FEW_PASSES.results == [[[], []]] * 2


def test_an_error_leaves_nothing_behind() -> None:
    for words, *threads in run_ranks(2, failing.prepare_after_an_error):
        assert "the profile does not match: its world_size (3) must be 2" in words
        assert threads == []


@ONE.given(failing.compile_whole)
def test_a_model_compiled_as_a_whole_is_warned_about(call: Call) -> None:
    [warned] = call.results
    assert any("compile its blocks instead" in text for text in warned)


# ---- what it returns ------------------------------------------------------------------------


@ONE.given(failing.looks)
def test_looks_like_the_users_own(call: Call) -> None:
    [seen] = call.results
    errors = seen.pop("errors")
    assert seen.pop("saved") < 2000, "a checkpoint holds nothing twice"
    assert seen == {
        "keys": True,
        "groups": True,
        "state": True,
        "rates": [0.02 / 8, 0.01 / 8],
        "attribute": "kept",
        "module": True,
        "training": (False, True),
        "repr": True,
        "average": True,
    }
    kinds = {"missing": "AttributeError", "assign": "ValueError"}
    assert errors == {"group": "ValueError", "double": "ValueError"} | kinds


@ONE.each(
    failing.reload_in_the_middle,
    [WFBP()],
    [PartialSync(2)],
    [LocalSGD(2, state="averaged")],
    [DDP()],
)
def test_loading_in_the_middle(calls: list[Call]) -> None:
    for call in calls:
        assert call.results == [[True, True]]


def test_a_lone_process_trains_alone() -> None:
    assert run_ranks(1, failing.train_alone) == [("wfbp", 1)]


def test_a_closed_model_says_so() -> None:
    for strategies, servers in (([BSP(), DDP(), A2CiD2("complete")], 0), ([SSP(s=0)], 1)):
        found = run_ranks(2, failing.go_on_after_close, strategies, servers)[0]
        assert len(found) == len(strategies)
        for weights, words in found:
            assert weights, "its weights can still be read"
            assert len(words) == 3
            for said in words:
                assert said.startswith("the model is closed")


@TWO.each(failing.differentiate_in_evaluation, [WFBP()], [ByteScheduler()])
def test_evaluating_with_gradients_is_no_iteration(calls: list[Call]) -> None:
    for call in calls:
        assert call.results == [True, True]


def test_a_rank_that_does_not_prepare_again() -> None:
    said, _ = run_ranks(2, failing.prepare_alone)
    assert said.startswith("rank 0 waited 0.5 s for all 2 ranks to call offbeat.prepare")


def test_nothing_is_kept_after_close() -> None:
    """Neither sessions nor memory, nor the threads of groups."""
    strategies = [BSP(), DreamDDP(2, wire="int4"), DDP(), DreamDDP(2), A2CiD2()]
    assert run_ranks(2, failing.left_after_close, strategies) == [[(0, 0)] * 5] * 2


# ---- profiles -------------------------------------------------------------------------------


JOB = {"strategy": "dreamddp", "settings": {"period": 2}}
ONLY_MEASURES = {"stop_after_profile": True}


class Written:
    """Files of calls that share a world, each in a folder of its own."""

    def __init__(self, folder: Path):
        self.folder = folder
        batch = Batch(2)
        self.cached = [
            batch.add(failing.train_with_cache, str(self.of("cache") / file), name, inf)
            for file, name in zip(
                ("one.json", "one.json", "two.json", "two.json"),
                ("mlp", "mlp", "mlp", "backwards"),
                strict=True,
            )
        ]
        self.measured = batch.add(failing.train_with_cache, str(self.of("measured")), CASE.model)
        self.of("broken").write_text('{"schema": 1, "world_size": ')
        self.broken = batch.add(failing.prepare_with, str(self.of("broken")))
        self.chosen = self.add_job(batch, "chosen", None, JOB)
        self.before = self.add_job(batch, "before", "bsp", JOB)
        only = ONLY_MEASURES | {"save_profile": str(self.of("only.json"))}
        self.only = self.add_job(batch, "only", None, only)

    def of(self, name: str) -> Path:
        return self.folder / name

    def add_job(self, batch: Batch, name: str, script: str | None, job: dict[str, Any]) -> Call:
        self.of(name).mkdir()
        return batch.add(failing.train_as_job, {"record_dir": str(self.of(name)), **job}, script)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Written:
    return Written(tmp_path_factory.mktemp("written"))


def test_profile_cache(written: Written) -> None:
    """Written when missing, reused, measured anew on another model. Other load may have slowed the
    messages of the first measurement, so any network is accepted."""
    again = written.cached[1:]
    [(first, known), _] = written.cached[0].results
    assert not known
    assert Profile.load(written.of("cache") / "one.json").model == first
    assert again[0].results == [(first, True)] * 2
    assert again[1].results == [(first, False)] * 2
    [(other, known), _] = again[2].results
    assert not known
    assert Profile.load(written.of("cache") / "two.json").model == other != first


def test_a_profile_of_another_network_is_measured_again_or_stated(
    written: Written, tmp_path: Path
) -> None:
    """A file that was measured is written anew; what the user wrote is used, not silently."""
    known = profile_of(CASE, 2)
    quick = tuple(replace(b, forward_s=1e-4, backward_s=1e-4) for b in known.buckets)
    slow = tuple(replace(link, latency_s=20.0) for link in known.links)
    far = replace(known, buckets=quick, links=slow)
    measured, by_hand = tmp_path / "measured.json", tmp_path / "by_hand.json"
    [(fingerprint, _), _] = written.measured.results
    replace(far, model=fingerprint).save(measured)
    replace(far, model="").save(by_hand)
    first, second = run_ranks(2, failing.prepare_elsewhere, str(measured), str(by_hand))
    assert [used for used, *_ in first] == [used for used, *_ in second] == [False, True, True]
    assert [len(lines) for _, lines, _ in first] == [1, 1, 1]
    assert [latency_s for *_, latency_s in first[1:]] == [20.0, 20.0]
    assert first[0][2] == Profile.load(measured).links[0].latency_s < 10.0
    assert Profile.load(by_hand).links[0].latency_s == 20.0


def test_a_cache_that_cannot_be_written_warns(tmp_path: Path) -> None:
    """And training goes on."""
    (tmp_path / "file").write_text("")
    path = tmp_path / "file" / "profile.json"
    [warned] = run_ranks(1, failing.train_without_cache, str(path))
    assert any(str(path) in text and "cannot be written" in text for text in warned)


def test_a_broken_profile_file(written: Written) -> None:
    """Only rank 0 reads it, but all ranks raise."""
    for outcome in written.broken.outcomes:
        assert outcome.kind == "ValueError"
        assert f"{written.of('broken')} is not JSON" in outcome.error


@ONE.given(failing.prepare_tuned, profile_of(CASE, 1))
def test_tuned_ddp_has_a_profile(call: Call) -> None:
    assert call.results == [True]


# ---- jobs -----------------------------------------------------------------------------------


def test_a_job_chooses_the_strategy_and_records(written: Written) -> None:
    ranks, folder = written.chosen.results, written.of("chosen")
    for rank, result in enumerate(ranks):
        assert result["plan"].strategy == "dreamddp"
        record = data_of(folder, rank)
        assert record["observed"] == 2
        assert [loss for _, _, loss in record["losses"]] == pytest.approx(result["losses"])
        assert len(record["trace"]["ends_s"][0]) == 8
        moved = sum(b.size_bytes for b in result["profile"].buckets)
        assert record["bytes"]["net"] >= moved * (2 + 3)
    assert json.loads((folder / "plan.json").read_text()) == ranks[0]["plan"].to_dict()


def test_a_job_counts_before_the_script(written: Written) -> None:
    for result in written.before.results:
        assert (result["plan"].strategy, result["plan"].period) == ("dreamddp", 2)


def test_a_job_is_of_one_model(tmp_path: Path) -> None:
    [words] = run_ranks(1, failing.prepare_two_as_job, {"record_dir": str(tmp_path)})
    assert words.startswith("a second model cannot be prepared in a process that `offbeat run`")


BY_NAME = TWO.add(failing.prepare_named, "partial-sync:period=3", None)
BY_VARIABLE = TWO.add(failing.prepare_named, "ddp", "partial-sync:period=3")


def test_strategies_by_name() -> None:
    """The script's word, and a variable that counts before it; rank 0 says what is used."""
    for call in (BY_NAME, BY_VARIABLE):
        assert [used for used, _ in call.results] == [("partial-sync", 3)] * 2
    (_, said), (_, other) = BY_NAME.results
    assert said.count("\n") == 1
    assert "partial-sync(period=3), 2 ranks" in said
    assert other == ""
    assert "ddp of the script is not used" in BY_VARIABLE.results[0][1]


def test_a_job_that_only_measures(written: Written) -> None:
    for outcome in written.only.outcomes:
        assert (outcome.kind, outcome.error) == ("SystemExit", "0")
    profile = Profile.load(written.of("only.json"))
    assert profile.world_size == 2
    assert sum(b.size_bytes for b in profile.buckets) == sum(
        p.nbytes for p in build_model(CASE).parameters() if p.requires_grad
    )
    assert profile.links[0].bytes_per_s > 0


def test_the_world_may_be_destroyed_before_the_model_is_closed() -> None:
    assert run_ranks(2, workers.destroys_the_world_first) == [False, False]


@pytest.mark.parametrize(
    ("script", "name"), [("dreamddp:period=3", "dreamddp(period=3)"), (None, "wfbp")]
)
def test_the_launcher_learns_what_the_script_names(script, name, tmp_path, monkeypatch):
    path = tmp_path / "strategy.json"
    job = {"schema": 1, "save_strategy": str(path), "stop_after_strategy": True}
    (tmp_path / "job.json").write_text(json.dumps(job))
    monkeypatch.setenv("OFFBEAT_JOB", str(tmp_path / "job.json"))
    model = torch.nn.Linear(1, 1)
    with pytest.raises(SystemExit) as ended:
        offbeat.prepare(model, torch.optim.SGD(model.parameters(), 0.1), script)
    named = NamedStrategy.load(path)
    assert (ended.value.code, named.text) == (0, name if script else None)
    assert str(named.strategy) == name


def test_a_full_disk_of_the_launcher_ends_no_training(tmp_path, monkeypatch) -> None:
    """Nobody needs the strategy's name while training; a launch that asks for it alone fails."""
    path = tmp_path / "strategy.json"

    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.warns(UserWarning, match="No space left") as said:
        choose_strategy("wfbp", LaunchRequest(save_strategy=str(path)))
    assert [str(w.message).count(str(tmp_path)) for w in said] == [1]
    with pytest.raises(OSError, match=str(tmp_path)):
        choose_strategy("wfbp", LaunchRequest(save_strategy=str(path), stop_after_strategy=True))
