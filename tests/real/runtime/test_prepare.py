"""prepare: what it refuses, what it agrees on with the other ranks, and what it returns."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from contextvars import copy_context
from dataclasses import replace
from functools import partial
from math import inf
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import failing, workers
from cases.models import Case, build_model, build_optimizer, profile_of
from harness.ranks import run_world, watch_world
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
    Strategy,
)
from offbeat.core.runtime.launch_request import LaunchRequest
from offbeat.core.runtime.named_strategy import NamedStrategy
from offbeat.core.runtime.prepare import REHEARSAL
from offbeat.core.runtime.strategy_choice import choose_strategy
from offbeat.experiments.record.record_file import path_of, read

CASE = failing.CASE

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


@pytest.mark.parametrize(
    ("build", "options", "text"),
    [
        (mlp, {"min_bucket_bytes": -5}, "min_bucket_bytes (-5) must be an integer of at least 1"),
        (mlp, {"observe": 0}, "observe (0) must be an integer of at least 1; pass a profile"),
        (mlp, {"observe": True}, "observe (True) must be an integer of at least 1"),
        (mlp, {"compare_every": -1}, "compare_every (-1) must be an integer of at least 0"),
        (mlp, {"timeout_s": 0}, "timeout_s (0) must be a number of seconds above 0"),
        (mlp, {"timeout_s": True}, "timeout_s (True) must be a number of seconds above 0"),
        (mlp, {"timeout_s": float("inf")}, "timeout_s (inf) must be a number of seconds above 0"),
        (mlp, {"links": "eth0"}, "links ('eth0') must be a list of network interfaces"),
        (mlp, {"links": []}, "links ([]) must be a list of network interfaces, at least one"),
        (
            mlp,
            {"links": ["a", "a"]},
            "a list of network interfaces, at least one, each once",
        ),
        (foreign, {}, "parameter 0 of the optimizer's group 1 must belong to the model; build the"),
        (lbfgs, {}, "optimizer (LBFGS) must have a step() that needs no closure"),
        (sparse, {}, "optimizer (SparseAdam) must accept dense gradients, because sparse ones"),
        (shared, {}, "parameters '0.weight' and '1.weight' share memory but are two objects"),
    ],
)
def test_refused_before_anything_is_opened(
    build: Callable[[], Any], options: dict[str, Any], text: str
) -> None:
    with pytest.raises(ValueError) as caught:
        offbeat.prepare(*build(), BSP(), **options)
    assert text in str(caught.value)
    assert not torch.distributed.is_initialized()


@pytest.mark.parametrize(
    "options",
    [
        {"compare_every": -1},
        {"on_nonfinite": "stop"},
        {"members": offbeat.Members("127.0.0.1:1")},  # ranks of a rehearsal do not change
    ],
    ids=lambda options: next(iter(options)),
)
def test_refused_in_a_rehearsal(options: dict[str, Any]) -> None:
    def prepare() -> None:
        REHEARSAL.set(lambda *_, **__: pytest.fail("rehearsed"))
        offbeat.prepare(*mlp(), BSP(), **options)

    (name,) = options
    with pytest.raises(ValueError, match=rf"{name} \(.*\) must be"):
        copy_context().run(prepare)


def test_refused_when_prepared_already() -> None:
    [[model, again, optimizer]] = run_world(failing.prepare_again, 1)
    assert model == again
    assert model.startswith("the model is prepared already; call prepare once, or call model.close")
    assert optimizer.endswith("prepare model.module with optimizer.inner")


def test_a_model_that_is_closed_after_an_exception_has_failed() -> None:
    """Lightning closes it before the exception has left the script."""
    others, closed = run_world(failing.close_after_an_exception, 2)
    assert closed == "closed"
    assert "failed with KeyError" in others


@pytest.mark.parametrize("strategy", [WFBP(), LocalSGD()], ids=str)
def test_followers_are_called_after_iterations_without_an_update(strategy: Strategy) -> None:
    """Such as those that save: other ranks save in the same iteration."""
    assert run_world(failing.followed_iterations, 2, strategy) == [[1, 2, 4]] * 2


@pytest.mark.parametrize("strategy", [WFBP(), LocalSGD(), DreamDDP(period=2)], ids=str)
def test_a_loop_without_steps_is_reported_once(strategy: Strategy) -> None:
    first, second = run_world(failing.pass_without_steps, 2, strategy, 50)
    [[warning], within_no_sync] = first
    assert within_no_sync == []
    assert second == [[], []]
    assert "optimizer.step() was not called in the last 20 backward passes" in warning
    assert "call step() of the optimizer that offbeat.prepare returned" in warning
    assert run_world(failing.pass_without_steps, 2, strategy, 19) == [[[], []]] * 2


def test_an_error_leaves_nothing_behind() -> None:
    for words, *threads in run_world(failing.prepare_after_an_error, 2):
        assert "the profile does not match: its world_size (3) must be 2" in words
        assert threads == []


def test_sparse_gradients() -> None:
    [outcome] = watch_world(failing.sparse_gradients, 1)
    assert outcome.kind == "ValueError"
    assert "flat buckets need dense ones: use Embedding(sparse=False)" in outcome.error


def test_missing_interface() -> None:
    [outcome] = watch_world(failing.prepare_with, 1, None, CASE, ["nonexistent0"])
    assert "nonexistent0" in outcome.error


def test_a_model_compiled_as_a_whole_is_warned_about() -> None:
    [warned] = run_world(failing.compile_whole, 1)
    assert any("compile its blocks instead" in text for text in warned)


# ---- what ranks must have in common ---------------------------------------------------------


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("strategy", "the strategy must be the same on all ranks: rank 0 has local-sgd"),
        (
            "settings",
            "rank 2 has local-sgd {'wire': 'none', 'error_feedback': True, 'period': 5, "
            "'warmup': 0, 'state': 'local', 'outer': None}; start",
        ),
        (
            "observe",
            "rank 2 has observe=3, min_bucket_bytes=None, profile=none",
        ),
        ("profile", "rank 2 has observe=2, min_bucket_bytes=None, profile=given"),
        (
            "shape",
            "rank 0 has '6.weight [3, 7] torch.float64 trainable with strides [7, 1]'",
        ),
        ("dtype", "rank 2 has '0.weight [6, 5] torch.float32 frozen"),
        (
            "frozen",
            "rank 2 has '4.weight [7, 8] torch.float64 frozen with strides [8, 1]' as",
        ),
        (
            "more",
            "rank 2 has '7.weight [3, 3] torch.float64 trainable with strides [3, 1]' as",
        ),
        (
            "strides",
            "with strides [1, 8]' as parameter 2, rank 0 has '1.weight [8, 6] torch.",
        ),
        ("buffers", "rank 2 has '[2] torch.float32' as buffer 'extra', rank 0 has None; build"),
        ("optimizer", "the optimizer must be the same on all ranks: rank 0 has SGD {"),
        ("rate", "'lr': 0.2"),
    ],
)
def test_differences_are_named_on_every_rank(what: str, text: str) -> None:
    for outcome in watch_world(failing.prepare_differently, 3, what):
        assert outcome.kind == "ValueError", outcome.error
        assert "must be the same on all ranks" in outcome.error
        assert text in outcome.error
        assert "rank 1" not in outcome.error, "it is not at fault"


# ---- what it returns ------------------------------------------------------------------------


def test_looks_like_the_users_own() -> None:
    [seen] = run_world(failing.looks, 1)
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
    assert "'Sequential' object has no attribute 'no_such_thing'" in errors["missing"]
    assert errors["group"] == "param groups must be added before offbeat.prepare"
    assert errors["assign"].startswith("assign (True) would put tensors in the place of those")
    assert errors["double"] == "move or convert the model before offbeat.prepare, not after it"


@pytest.mark.parametrize(
    "strategy",
    [WFBP(), PartialSync(2), LocalSGD(2, state="averaged"), LocalSGD(2, state="reset"), DDP()],
    ids=str,
)
def test_loading_in_the_middle(strategy: Strategy) -> None:
    assert run_world(failing.reload_in_the_middle, 1, strategy) == [[True, True]]


def test_a_lone_process_trains_alone() -> None:
    assert run_world(failing.train_alone, 1) == [("wfbp", 1)]


@pytest.mark.parametrize(
    ("strategies", "servers"),
    [([BSP(), DDP(), A2CiD2("complete")], 0), ([SSP(s=0)], 1)],
    ids=["without servers", "served"],
)
def test_a_closed_model_says_so(strategies: list[Strategy], servers: int) -> None:
    found = run_world(failing.go_on_after_close, 2, strategies, servers)[0]
    assert len(found) == len(strategies)
    for weights, words in found:
        assert weights, "its weights can still be read"
        assert len(words) == 3
        for said in words:
            assert said.startswith("the model is closed")


@pytest.mark.parametrize("strategy", [WFBP(), ByteScheduler()], ids=str)
def test_evaluating_with_gradients_is_no_iteration(strategy: Strategy) -> None:
    assert run_world(failing.differentiate_in_evaluation, 2, strategy) == [True, True]


def test_a_rank_that_does_not_prepare_again() -> None:
    said, _ = run_world(failing.prepare_alone, 2)
    assert said.startswith("rank 0 waited 0.5 s for all 2 ranks to call offbeat.prepare")


def test_nothing_is_kept_after_close() -> None:
    """Neither sessions nor memory, nor the threads of groups."""
    strategies = [BSP(), DreamDDP(2, wire="int4"), DDP(), DreamDDP(2), A2CiD2()]
    assert run_world(failing.left_after_close, 2, strategies) == [[(0, 0)] * 5] * 2


# ---- profiles -------------------------------------------------------------------------------


def test_profile_cache(tmp_path: Path) -> None:
    """Written when missing, reused, measured anew on another model. Other load may have slowed the
    messages of the first measurement, so any network is accepted."""
    world = partial(run_world, failing.train_with_cache, 2)
    path = tmp_path / "cache" / "profile.json"
    [(first, known), _] = world(str(path), "mlp", inf)
    assert not known
    assert Profile.load(path).model == first
    assert world(str(path), "mlp", inf) == [(first, True)] * 2
    [(other, known), _] = world(str(path), "backwards", inf)
    assert not known
    assert Profile.load(path).model == other != first


def test_a_profile_of_another_network_is_measured_again_or_stated(tmp_path: Path) -> None:
    """A file that was measured is written anew; what the user wrote is used, not silently."""
    known = profile_of(CASE, 2)
    quick = tuple(replace(b, forward_s=1e-4, backward_s=1e-4) for b in known.buckets)
    slow = tuple(replace(link, latency_s=20.0) for link in known.links)
    far = replace(known, buckets=quick, links=slow)
    measured, written = tmp_path / "measured.json", tmp_path / "written.json"
    [(fingerprint, _), _] = run_world(failing.train_with_cache, 2, str(measured), CASE.model)
    replace(far, model=fingerprint).save(measured)
    replace(far, model="").save(written)
    first, second = run_world(failing.prepare_elsewhere, 2, str(measured), str(written))
    assert [used for used, *_ in first] == [used for used, *_ in second] == [False, True, True]
    assert [len(lines) for _, lines, _ in first] == [1, 1, 1]
    assert [latency_s for *_, latency_s in first[1:]] == [20.0, 20.0]
    assert first[0][2] == Profile.load(measured).links[0].latency_s < 10.0
    assert Profile.load(written).links[0].latency_s == 20.0


def test_a_cache_that_cannot_be_written_warns(tmp_path: Path) -> None:
    """And training goes on."""
    (tmp_path / "file").write_text("")
    path = tmp_path / "file" / "profile.json"
    [warned] = run_world(failing.train_without_cache, 1, str(path))
    assert any(str(path) in text and "cannot be written" in text for text in warned)


@pytest.mark.parametrize(
    ("profile", "text"),
    [
        (profile_of(Case("backwards"), 1), "bucket 'first' holds tensor 'first.weight' that the m"),
        (profile_of(CASE, 3), "its world_size (3) must be 1; measure it again with `offbeat pro"),
        (profile_of(CASE, 1, ("a", "b")), "its links (a, b) must be net; measure it again"),
    ],
)
def test_a_given_profile_must_match(profile: Profile, text: str) -> None:
    [outcome] = watch_world(failing.prepare_with, 1, profile)
    assert outcome.kind == "ValueError"
    assert "the profile does not match" in outcome.error
    assert text in outcome.error


def test_a_broken_profile_file(tmp_path: Path) -> None:
    """Only rank 0 reads it, but all ranks raise."""
    path = tmp_path / "profile.json"
    path.write_text('{"schema": 1, "world_size": ')
    for outcome in watch_world(failing.prepare_with, 2, str(path)):
        assert outcome.kind == "ValueError"
        assert f"{path} is not JSON" in outcome.error


def test_tuned_ddp_needs_a_profile() -> None:
    assert run_world(failing.prepare_tuned, 1, profile_of(CASE, 1)) == [True]
    [outcome] = watch_world(failing.prepare_tuned, 1, None)
    assert "bucket_cap_mb ('tuned') needs a profile; pass profile=" in outcome.error


# ---- jobs -----------------------------------------------------------------------------------


def test_a_job_chooses_the_strategy_and_records(tmp_path: Path) -> None:
    job = {"strategy": "dreamddp", "settings": {"period": 2}, "record_dir": str(tmp_path)}
    ranks = run_world(failing.train_as_job, 2, job, None)
    for rank, result in enumerate(ranks):
        assert result["plan"].strategy == "dreamddp"
        record = read(path_of(tmp_path, rank))
        assert record["observed"] == 2
        assert [loss for _, _, loss in record["losses"]] == pytest.approx(result["losses"])
        assert len(record["trace"]["ends_s"][0]) == 8
        moved = sum(b.size_bytes for b in result["profile"].buckets)
        assert record["bytes"]["net"] >= moved * (2 + 3)
    assert json.loads((tmp_path / "plan.json").read_text()) == ranks[0]["plan"].to_dict()


def test_a_job_counts_before_the_script(tmp_path: Path) -> None:
    job = {"strategy": "dreamddp", "settings": {"period": 2}, "record_dir": str(tmp_path)}
    for result in run_world(failing.train_as_job, 2, job, "bsp"):
        assert result["plan"].strategy == "dreamddp"
        assert result["plan"].period == 2


def test_a_job_is_of_one_model(tmp_path: Path) -> None:
    [words] = run_world(failing.prepare_two_as_job, 1, {"record_dir": str(tmp_path)})
    assert words.startswith("a second model cannot be prepared in a process that `offbeat run`")


def test_strategies_by_name() -> None:
    """The script's word, and a variable that counts before it; rank 0 says what is used."""
    said = run_world(failing.prepare_named, 2, "partial-sync:period=3", None)
    assert [name for name, _ in said] == ["partial-sync(period=3)"] * 2
    assert said[0][1].count("\n") == 1
    assert "partial-sync(period=3), 2 ranks" in said[0][1]
    assert said[1][1] == ""
    said = run_world(failing.prepare_named, 2, "ddp", "partial-sync:period=3")
    assert [name for name, _ in said] == ["partial-sync(period=3)"] * 2
    assert "so ddp of the script is not used" in said[0][1]
    for wrong, word in (("dreamdpp", "dreamddp"), ("dreamddp:perod=3", "period")):
        [outcome] = watch_world(failing.prepare_named, 1, wrong, None)
        assert outcome.kind == "ValueError"
        assert word in outcome.error


def test_a_job_that_only_measures(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    job = {"save_profile": str(path), "stop_after_profile": True, "record_dir": str(tmp_path)}
    for outcome in watch_world(failing.train_as_job, 2, job, None):
        assert (outcome.kind, outcome.error) == ("SystemExit", "0")
    profile = Profile.load(path)
    assert profile.world_size == 2
    assert sum(b.size_bytes for b in profile.buckets) == sum(
        p.nbytes for p in build_model(CASE).parameters() if p.requires_grad
    )
    assert profile.links[0].bytes_per_s > 0


def test_the_world_may_be_destroyed_before_the_model_is_closed() -> None:
    assert run_world(workers.destroys_the_world_first, 2) == [False, False]


@pytest.mark.parametrize(
    ("script", "text", "name"),
    [("dreamddp:period=3", "dreamddp(period=3)", "dreamddp"), (None, None, "wfbp")],
)
def test_the_launcher_learns_what_the_script_names(script, text, name, tmp_path, monkeypatch):
    path = tmp_path / "strategy.json"
    job = {"schema": 1, "save_strategy": str(path), "stop_after_strategy": True}
    (tmp_path / "job.json").write_text(json.dumps(job))
    monkeypatch.setenv("OFFBEAT_JOB", str(tmp_path / "job.json"))
    model = torch.nn.Linear(1, 1)
    with pytest.raises(SystemExit) as ended:
        offbeat.prepare(model, torch.optim.SGD(model.parameters(), 0.1), script)
    named = NamedStrategy.load(path)
    assert (ended.value.code, named.text, named.name) == (0, text, name)
    assert str(named.strategy) == (text or name)


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
