"""Checkpoints as files: whole or not there, of any job, and what is said if they cannot be."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from cases import checkpoint_jobs as jobs
from cases.models import build_model
from harness.ranks import call, one_of, run_ranks, watch_ranks
from torch.distributed.checkpoint.state_dict_loader import load

import offbeat
from offbeat.core.checkpoint import checkpoints, saving, shard
from offbeat.core.checkpoint.checkpoints import (
    _choose_checkpoint,
    _extra_state,
    _freeze_all,
    _load_extra,
)
from offbeat.core.checkpoint.folder import Folder
from offbeat.core.checkpoint.frozen import freeze
from offbeat.core.checkpoint.saving import SaveGroup, Saver, save_together
from offbeat.core.observers import Observers
from offbeat.core.rules.changed import Course
from offbeat.core.transport.topology import Topology

# ---- one shard ------------------------------------------------------------------------------


def manifest(iteration: int = 3, world_size: int = 1) -> shard.Manifest:
    return shard.Manifest(0, world_size, iteration, "bsp", alike=True)


def written(directory: Path, value: Any, **names: torch.Tensor) -> Path:
    shard.write(directory, freeze(value, names), manifest())
    return directory


class Made:
    """Its tensor exists while it is pickled only; the next one may get its place."""

    def __init__(self, i: int):
        self.i = i

    def __getstate__(self) -> torch.Tensor:
        return torch.full((100,), self.i)

    def __setstate__(self, state: torch.Tensor) -> None:
        self.i = int(state[0])


def test_any_value_comes_back(tmp_path: Path) -> None:
    weight = torch.randn(3, 4, dtype=torch.bfloat16)
    course = Course(0.5, deque([1.0, 2.0], maxlen=3), 4.0)
    value = {
        "tied": [weight, weight.detach()],
        "strided": torch.arange(6.0).reshape(2, 3).t(),
        "scalar": torch.tensor(3),
        "empty": torch.empty(0, 2),
        "empty too": torch.empty(2, 0),
        "empty again": torch.empty(0, 2),
        "bits": weight.view(torch.int16),
        "made": [Made(i) for i in range(4)],
        "course": course,
    }
    back = shard.read(written(tmp_path / "a", value, weight=weight))
    weight.zero_()
    assert back["tied"][0] is back["tied"][1]
    assert back["tied"][0].abs().sum() > 0
    assert back["strided"].stride() == (1, 3)
    assert torch.equal(back["strided"], value["strided"])
    assert back["scalar"].item() == 3
    assert [back[k].shape for k in ("empty", "empty too")] == [(0, 2), (2, 0)]
    assert back["empty"] is not back["empty again"]
    assert (back["bits"].dtype, back["bits"].shape) == (torch.int16, (3, 4))
    assert [made.i for made in back["made"]] == [0, 1, 2, 3]
    assert back["course"] == course
    assert back["course"].values.maxlen == 3


def test_frozen_is_frozen() -> None:
    value = {"list": [1], "tensor": torch.ones(2)}
    frozen = freeze(value, {})
    value["list"].append(2)
    value["tensor"].zero_()
    assert frozen.thaw()["list"] == [1]
    assert frozen.thaw()["tensor"].sum() == 2
    tied = value["tensor"]
    assert [*freeze([tied, tied], {"first": tied, "second": tied}).tensors] == ["first"]
    alike = freeze([tied, tied], {})
    assert len(alike.tensors) == 1
    assert alike.thaw()[0] is alike.thaw()[1]
    with pytest.raises(ValueError, match="extra holds something that cannot be saved"):
        freeze({"lock": threading.Lock()}, {})


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_format_is_that_of_torch(tmp_path: Path) -> None:
    """Weights can be read without offbeat."""
    model = build_model(jobs.CASE)
    names = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    shard.write(tmp_path / "a", freeze({"model": model.state_dict()}, names), manifest())
    other = build_model(jobs.CASE, seed=5)
    state = {"model": other.state_dict()}
    load(state, checkpoint_id=tmp_path / "a")
    other.load_state_dict(state["model"])
    assert all(torch.equal(t, model.state_dict()[n]) for n, t in other.state_dict().items())


def test_all_is_on_the_disk_before_it_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every file, then the directories that have the names; power may fail at any time."""
    done: list[int | str] = []
    fsync, rename = os.fsync, Path.rename

    def synced(descriptor: int) -> None:
        fsync(descriptor)
        done.append(os.fstat(descriptor).st_ino)

    def renamed(path: Path, target: Path) -> Path:
        done.append(Path(target).name)
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(Path, "rename", renamed)
    folder, name = Folder(tmp_path), "000001-iteration-3"
    written(folder.unfinished_path(name, 0), {"w": torch.ones(3)})
    folder.finish(name, 0)
    part, at = folder.shard(name, 0), done.index(name)
    manifest_, *directories = (p.stat().st_ino for p in (part / shard.MANIFEST, part, part.parent))
    assert {p.stat().st_ino for p in part.iterdir()} <= {*done[:at]}
    assert done[at - 3 : at] == [manifest_, *directories]
    assert done[at + 1 :] == [tmp_path.stat().st_ino]


def test_written_anew_over_what_is_left(tmp_path: Path) -> None:
    written(tmp_path / "a", {"w": torch.ones(3), "v": torch.ones(2)})
    assert [*shard.read(written(tmp_path / "a", {"w": torch.zeros(3)}))] == ["w"]


def test_of_another_time(tmp_path: Path) -> None:
    path = written(tmp_path / "a", 1) / shard.MANIFEST
    path.write_text(path.read_text().replace('"schema": 1', '"schema": 2'))
    with pytest.raises(ValueError, match=r"schema \(2\) of .*a must be 1"):
        shard.read_manifest(path.parent)
    fields = json.loads(path.read_text()) | {"schema": 1}
    for changed, name in ((fields | {"host": "a"}, "host"), ({"schema": 1}, "alike")):
        path.write_text(json.dumps(changed))
        with pytest.raises(ValueError, match=f"field '{name}' is missing or unknown in schema 1"):
            shard.read_manifest(path.parent)


def test_the_newest_shard_decides_whether_another_version_has_written_it(tmp_path: Path) -> None:
    folder, names = Folder(tmp_path), [f"{n:06d}-iteration-5" for n in (1, 2, 3)]
    texts = {}
    for name in names:
        path = written(folder.shard(name, 0), 1) / shard.MANIFEST
        texts[path] = path.read_text()
    first, second, third = texts
    for later, is_refused in ((first, False), (third, True), (second, False)):
        for path, text in texts.items():
            path.write_text(text.replace('"schema": 1', f'"schema": {1 + (path == later)}'))
        assert bool(folder.refusal(0)) == is_refused
    third.unlink()
    assert "another version" in str(folder.refusal(0))


def test_damage_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard, "CHUNK_BYTES", 64)
    directory = written(tmp_path / "a", {"w": torch.ones(100)})
    [file] = directory.glob("*.distcp")
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    assert shard.read_manifest(directory).iteration == 3, "a look compares no contents"
    with pytest.raises(ValueError, match=rf"{file}.*not what was written"):
        shard.read(directory)
    file.write_bytes(data[:-1])
    with pytest.raises(ValueError, match="must have"):
        shard.read_manifest(directory)


# ---- the folder -----------------------------------------------------------------------------


def test_folder(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    assert folder.names() == []
    assert folder.next_number() == 1
    for number in (1, 2, 12):
        written(folder.shard(f"{number:06d}-iteration-5", 0), number)
    written(folder.unfinished_path("000013-iteration-9", 0), 0)
    (tmp_path / "notes").mkdir()
    (folder.shard("000012-iteration-5", 0) / shard.MANIFEST).unlink()
    assert [int(name[:6]) for name in folder.names()] == [12, 2, 1]
    assert [int(name[:6]) for name in folder.manifests(0)] == [2, 1]
    assert not folder.manifests(1)
    assert folder.next_number() == 13
    folder.finish("000013-iteration-9", 0)
    folder.finish("000013-iteration-9", 0)  # another rank of this host
    with pytest.raises(OSError, match="000014"):
        folder.finish("000014-iteration-9", 0)
    assert next(iter(folder.manifests(0))) == "000013-iteration-9"
    for worker in range(2):
        written(folder.unfinished_path("000015-iteration-9", worker), 0)
    folder.drop("000015-iteration-9", 1)
    assert folder.unfinished_path("000015-iteration-9", 0).is_dir()  # another rank of this host
    folder.prune(2)
    left = ["000012-iteration-5", "000013-iteration-9", "notes"]
    assert sorted(path.name for path in tmp_path.iterdir()) == left
    assert Folder(tmp_path / "000013-iteration-9").names() == ["000013-iteration-9"]


def test_a_script_may_change_its_directory_while_it_saves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder, name = Folder("saved"), "000001-iteration-3"
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / "other")
    written(folder.unfinished_path(name, 0), 1)
    folder.finish(name, 0)
    assert [*Folder(tmp_path / "saved").manifests(0)] == [name]


def test_folder_of_a_million_checkpoints(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    for number in (999999, 1000000, 1000001):
        written(folder.shard(f"{number:06d}-iteration-5", 0), number)
    assert [*folder.manifests(0)] == folder.names()
    assert folder.names()[0] == "1000001-iteration-5"
    assert folder.next_number() == 1000002
    folder.prune(2)
    assert len(folder.names()) == 2
    assert folder.names()[-1] == "1000000-iteration-5"


def test_killed_at_any_time(tmp_path: Path) -> None:
    """Whatever was the last thing done to the disk: there is a whole checkpoint, of the first save
    or of the second."""
    [found] = run_ranks(1, jobs.deaths, str(tmp_path))
    newest = [whole[0] for _, whole in found]
    assert newest == sorted(newest)
    assert newest.count(1) > 3
    assert newest.count(2) > 2, "also while the old one is removed"
    assert [2, 1] in [whole for _, whole in found], "the old one goes when the new one is whole"
    assert found[-1] == (False, [2])


def test_a_process_that_ends_waits_for_it(tmp_path: Path) -> None:
    saving = Saver(None).save(Folder(tmp_path), lambda: freeze(1, {}), manifest(), 1)
    assert not saving._thread.daemon
    assert saving.wait().is_dir()


def test_ranks_save_in_turn_and_under_one_name(tmp_path: Path) -> None:
    """Above all that any host has; where their iterations differ nobody saves."""
    saver, theirs, over = Saver(None), [(7, 3, False)], []

    def gather(mine: Any) -> list[Any]:
        over.append(saver._last is None or saver._last.done)
        return [mine, *theirs]

    def gather_in_thread(mine: Any) -> list[Any]:
        time.sleep(0.05)
        return [mine]

    saver.company = Mock(gather=gather, gather_in_thread=gather_in_thread, is_lost=False)
    args = Folder(tmp_path), lambda: freeze(1, {}), manifest(), 1
    assert saver.save(*args).path.name == "000007-iteration-3"
    theirs[:] = [(1, 3, False)]
    assert saver.save(*args).wait().name == "000008-iteration-3"
    assert over == [True, True]
    theirs[:] = [(9, 4, False)]
    with pytest.raises(ValueError, match="rank 0 has 3, rank 1 4"):
        saver.save(*args)


@pytest.mark.parametrize("others", [["rank 1: full"], [None, "rank 1: full"]], ids=str)
def test_older_ones_go_only_when_all_have_the_new_one(tmp_path: Path, others: list[Any]) -> None:
    """Whether they failed to write or to give it its name; what is unfinished goes."""
    folder = Folder(tmp_path)
    written(folder.shard("000001-iteration-2", 0), 1)
    answers = iter(others)
    company: Any = Mock(gather_in_thread=lambda mine: [mine, next(answers)])
    error = save_together(folder, "000002-iteration-3", freeze(1, {}), manifest(), company, 1)
    assert error is not None
    assert error.endswith("rank 1: full); " + f"{tmp_path}/000001-iteration-2 is still whole")
    assert [*folder.manifests(0)][-1] == "000001-iteration-2"
    assert not [*tmp_path.glob(".unfinished*")]


def test_ranks_leave_the_group_of_a_checkpoint_in_which_one_has_failed(tmp_path: Path) -> None:
    """Otherwise the others would wait in it."""
    lost = Mock(side_effect=RuntimeError("connection closed"))
    company: Any = Mock(gather_in_thread=lost)
    here = Folder(tmp_path), "000001-iteration-3"
    error = save_together(*here, freeze(1, {}), manifest(), company, 1)
    assert "rank 0 lost the others: connection closed" in str(error)
    assert company.drop_group.called
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize(("has_members", "created"), [(False, 2), (True, 1)])
def test_the_next_checkpoint_has_a_new_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_members: bool, created: int
) -> None:
    """A slow disk of one rank ends a checkpoint, not all later ones. Changes of members create
    groups of their own."""
    groups = list[object]()
    monkeypatch.setattr(saving, "_create_group", lambda _: groups.append(object()) or groups[-1])
    monkeypatch.setattr(saving.dist, "is_initialized", lambda: False)
    control: Any = SimpleNamespace(
        world_size=2, rank=0, has_members=has_members, gather=lambda own: [own, own]
    )
    saver = Saver(control)
    saver.company.drop_group()
    saver.company.gather_in_thread = lambda own: [own, own]  # type: ignore[method-assign]
    saver.save(Folder(tmp_path), lambda: freeze(1, {}), manifest(), 1).wait()
    assert len(groups) == created
    assert saver.company.is_lost is False


def test_a_rank_without_the_others_completes_no_checkpoint() -> None:
    company = SaveGroup(None)
    assert company.gather_in_thread(3) == [3]
    company.drop_group()
    with pytest.raises(RuntimeError, match="has lost the other ranks"):
        company.gather_in_thread(3)


def test_what_rank_0_cannot_give_is_an_error_on_the_others() -> None:
    company = SaveGroup(None)
    company._control, company.size = Mock(rank=1, gather=lambda mine: ["a Path", mine]), 2
    with pytest.raises(RuntimeError, match=r"rank 0 cannot give the others .*: a Path"):
        company.share(None)


def test_a_checkpoint_that_another_rank_lacks_is_not_loaded(tmp_path: Path) -> None:
    """Rank 1 has been killed before it has renamed its shard of the newest one."""
    folder, names = Folder(tmp_path), ["000001-iteration-2", "000002-iteration-3"]
    for name in names:
        shard.write(folder.shard(name, 0), freeze(1, {}), manifest(world_size=2))

    def gather(mine: Any) -> list[Any]:
        if isinstance(mine, list):
            return [mine, mine]
        refusal, found = mine
        return [mine, (refusal, {names[0]: found[names[0]]})]

    session: Any = SimpleNamespace(worker=0, strategy="bsp")
    with pytest.warns(UserWarning, match="000002-iteration-3 is not complete on every rank"):
        chosen, _ = _choose_checkpoint(folder, session, Mock(size=2, gather=gather))
    assert chosen == names[0]


def test_load_waits_for_what_is_being_saved(tmp_path: Path) -> None:
    saver = Mock(spec=Saver)

    def gather(_: Any) -> list[Any]:
        assert saver.settle.called
        raise LookupError

    saver.company = Mock(gather=gather)
    session = Mock(saver=saver, alone=False, elsewhere=None, worker=0, has_joined=False)
    session.run_joint_call = lambda act: (act(), "")
    with pytest.raises(LookupError):
        offbeat.load(tmp_path, Mock(_session=session), Mock(_session=session))


def test_which_extra_is_loaded(tmp_path: Path) -> None:
    """Objects, not their classes; what was saved as a value is returned."""
    one, other = Mock(), Mock()
    saved = {"one": ("state", {"a": 1}), "other": ("value", 3)}
    assert _load_extra(saved, {"one": one, "other": other}, tmp_path) == {"other": 3}
    one.load_state_dict.assert_called_once_with({"a": 1})
    assert not other.load_state_dict.called
    assert _extra_state(torch.optim.SGD) == ("value", torch.optim.SGD)


def test_when_a_launcher_saves(monkeypatch: pytest.MonkeyPatch) -> None:
    """After every so many iterations, but for those that are observed: there is no plan yet."""
    monkeypatch.setattr(checkpoints, "save", lambda *_: saved.append(session.iteration))
    saved: list[int] = []
    session = SimpleNamespace(iteration=0, observing=True, observers=Observers())
    session.save_at_changes = lambda _: None  # its members do not change
    job: Any = SimpleNamespace(checkpoint="a", checkpoint_every=2, resume=False)
    model: Any = SimpleNamespace(_session=session)
    optimizer: Any = SimpleNamespace()
    checkpoints.enable_checkpoints(job, model, optimizer)
    for session.iteration in range(1, 7):
        session.observing = session.iteration < 3
        session.observers.stepped(session.iteration)
    assert saved == [4, 6]


def test_buffers_that_state_dict_leaves_out_are_saved() -> None:
    model = torch.nn.Linear(2, 2)
    model.register_buffer("hidden", torch.ones(3), persistent=False)
    frozen = _freeze_all(model, torch.optim.SGD(model.parameters()), {}, {})
    assert frozen.thaw()["buffers"]["hidden"].tolist() == [1, 1, 1]


def prepared(strategy: str) -> tuple[torch.nn.Module, torch.optim.Optimizer, Mock]:
    """Model, optimizer and session of a job of one rank."""
    model: Any = torch.nn.Linear(2, 2)
    model.register_buffer("hidden", torch.ones(3), persistent=False)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    session = Mock(saver=Saver(None), alone=False, elsewhere=None, worker=0, has_joined=False)
    session.strategy, session.cluster.where = strategy, torch.device("cpu")
    session.cluster.topology = Topology.flat(1)
    session.run_joint_call = lambda act: (act(), "")
    model._session = optimizer._session = session
    return model, optimizer, session


def save_shard(folder: Path, rank: int, shape: tuple[int, int], **changed: Any) -> None:
    """Write what a rank of a node of two ranks that shard a model saves."""
    model, optimizer, _ = prepared("bsp")
    frozen = _freeze_all(model, optimizer, {}, {})
    value = frozen.thaw() | {"model": {"weight": torch.full(shape, float(rank))}}
    given = {"nodes": {"nodes": [[0, 1], [2, 3]], "sharded": True}, **changed}
    written = replace(manifest(world_size=4), worker=rank, **given)
    shard.write(Folder(folder).shard("000001-iteration-3", rank), freeze(value, {}), written)


def test_shards_that_are_missing_are_named(tmp_path: Path) -> None:
    """Rank 0 reads those of its node."""
    model, optimizer, session = prepared("bsp")
    save_shard(tmp_path, 0, (1, 2))
    words = r"000001-iteration-3 must hold the shards of ranks 0, 1, .*, not without 1; copy these"
    with pytest.raises(RuntimeError, match=words):
        offbeat.load(tmp_path, model, optimizer)
    assert not session.resume.called


@pytest.mark.parametrize("changed", [{"strategy": "local-sgd"}, {"nodes": {}}, {"world_size": 3}])
def test_shards_of_several_jobs_are_refused(tmp_path: Path, changed: dict[str, Any]) -> None:
    """On the hosts of ranks, and where rank 0 joins the shards of its node."""
    model, optimizer, session = prepared("bsp")
    save_shard(tmp_path, 0, (1, 2))
    save_shard(tmp_path, 1, (1, 2), **changed)
    with pytest.raises(RuntimeError, match=r"rank 0 has a shard of 4 ranks \(2 nodes of 2 ranks"):
        offbeat.load(tmp_path, model, optimizer)
    assert not session.resume.called
    by_rank = [
        {name: asdict(one) for name, one in Folder(tmp_path).manifests(rank).items()}
        for rank in range(2)
    ]
    company: Any = Mock(size=4, gather=lambda _: [("", by_rank[rank]) for rank in (0, 0, 1, 0)])
    with pytest.raises(ValueError, match=r"must be of one job .*, rank 2 of [34] ranks"):
        checkpoints._choose_checkpoint(Folder(tmp_path), session, company)


def test_shards_of_another_model_are_refused(tmp_path: Path) -> None:
    model, optimizer, session = prepared("bsp")
    for rank in range(2):
        save_shard(tmp_path, rank, (3, 2))
    words = r"the saved shards of 'weight' have shapes \(3, 2\), \(3, 2\)"
    with pytest.raises(RuntimeError, match=words):
        offbeat.load(tmp_path, model, optimizer)
    assert not session.resume.called


@pytest.mark.parametrize("nodes", [{"nodes": [[0]], "sharded": False}, {}], ids=["nodes", "none"])
def test_exact_in_the_same_nodes_only(tmp_path: Path, nodes: dict[str, Any]) -> None:
    model, optimizer, session = prepared("bsp")
    session.cluster.topology = SimpleNamespace(record=lambda: nodes)
    frozen = _freeze_all(model, optimizer, {"planned": 3}, {})
    shard.write(Folder(tmp_path).shard("000001-iteration-3", 0), frozen, manifest())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of DataLoaders of other tests
        assert offbeat.load(tmp_path, model, optimizer).exact == (not nodes)
    session.resume.assert_called_once_with(3, None if nodes else {"planned": 3})


def test_the_optimizer_of_another_model_is_refused(tmp_path: Path) -> None:
    model, other = prepared("bsp")[0], prepared("bsp")[1]
    for act in (offbeat.save, offbeat.load):
        with pytest.raises(ValueError, match=r"optimizer \(SGD\) must be the one that"):
            act(tmp_path, model, other)


def test_tensors_of_model_and_optimizer_have_names_in_the_file() -> None:
    """Other programs read them by these names."""
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    tensors = _freeze_all(model, optimizer, {}, {}).tensors
    assert torch.equal(tensors["model.weight"], model.weight)
    momentum = optimizer.state[model.bias]["momentum_buffer"]
    assert torch.equal(tensors["optimizer.state.1.momentum_buffer"], momentum)


def test_all_that_is_saved_is_loaded(tmp_path: Path) -> None:
    """Also buffers that `state_dict` leaves out, and the random state."""
    model, optimizer, session = prepared("bsp")
    frozen = _freeze_all(model, optimizer, {"planned": 3}, {"epoch": 7})
    shard.write(Folder(tmp_path).shard("000001-iteration-3", 0), frozen, manifest())
    weights, drawn = model.weight.detach().clone(), torch.rand(3)
    with torch.no_grad():
        model.weight.zero_()
    model.hidden.zero_()
    optimizer.param_groups[0]["lr"] = 9.0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of DataLoaders of other tests
        found = offbeat.load(tmp_path, model, optimizer)
    assert torch.equal(model.weight, weights)
    assert model.hidden.tolist() == [1, 1, 1]
    assert optimizer.param_groups[0]["lr"] == 0.1
    assert torch.equal(torch.rand(3), drawn)
    assert (found.iteration, found.exact, found.extra) == (3, True, {"epoch": 7})
    session.resume.assert_called_once_with(3, {"planned": 3})


# ---- several ranks --------------------------------------------------------------------------


Found = Callable[[str], list[Any]]
GOSSIP = {
    str(strategy): strategy for strategy in (offbeat.A2CiD2("complete"), offbeat.ADPSGD("complete"))
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("saved")


@pytest.fixture(scope="module")
def saved_by(folders: Path) -> Found:
    """A function of a name, which is that of a folder, too: what each rank has found. Jobs that
    save share a world."""
    calls = {
        "full disk": (jobs.full_disk,),
        "refused": (jobs.refused,),
        "two optimizers": (jobs.resume_two_optimizers,),
        "observed": (jobs.observed, False),
        "watched": (jobs.watched, False),
        **{name: (jobs.gossiping, strategy, False) for name, strategy in GOSSIP.items()},
    }
    return lambda name: together(folders, calls, name)


@pytest.fixture(scope="module")
def resumed_by(saved_by: Found, folders: Path) -> Found:
    """As `saved_by`, of jobs that resume in new processes."""
    calls = {
        "observed": (jobs.observed, True),
        "watched": (jobs.watched, True),
        **{name: (jobs.gossiping, strategy, True) for name, strategy in GOSSIP.items()},
    }

    def resumed(name: str) -> list[Any]:
        saved_by(name)
        return together(folders, calls, name)

    return resumed


def together(folders: Path, calls: dict[str, tuple[Any, ...]], name: str) -> list[Any]:
    given = tuple((act, str(folders / key), *more) for key, (act, *more) in calls.items())
    return one_of(2, call, given, [*calls].index(name))


def test_full_disk(saved_by: Found, folders: Path) -> None:
    folder = folders / "full disk"
    for found in saved_by("full disk"):
        assert f"{folder}/000002-iteration-2 was not saved (rank 1: " in found["error"]
        assert "File too large" in found["error"]
        assert f"{folder}/000001-iteration-1 is still whole" in found["error"]
        assert "rank 0" not in found["error"]
        assert found["left"] == ["000001-iteration-1"]
        assert found["after"] == "000002-iteration-3"
        assert found["kept"] == ["000002-iteration-3"]


def test_a_rank_that_dies_while_saving(tmp_path: Path) -> None:
    zero, one = watch_ranks(2, jobs.killed_while_saving, str(tmp_path), doomed=[1])
    assert one.exitcode == -signal.SIGKILL
    assert f"{tmp_path}/000002-iteration-2 was not saved" in zero.result
    assert list(Folder(tmp_path).manifests(0)) == ["000001-iteration-1"]
    found = run_ranks(2, jobs.goes_on, str(tmp_path), offbeat.LocalSGD(period=3))
    assert [(at, exact) for at, _, exact in found] == [(1, True)] * 2


def test_what_cannot_be(saved_by: Found, folders: Path) -> None:
    for said in saved_by("refused"):
        assert f"there is no checkpoint in {folders / 'refused'} on any rank" in said["nothing"]
        assert "model (Sequential) must be the one that offbeat.prepare" in said["module"]
        assert "optimizer (SGD) must be the one that offbeat.prepare" in said["optimizer"]
        assert "keep (0) must be at least 1" in said["keep"]
        assert "RuntimeError: an iteration is under way" in said["within"]
        assert "extra holds something that cannot be saved" in said["extra"]
        assert "must be the folder of checkpoints" in said["one"]
        assert "extra ('sampler') must be one of what" in said["missing"]
        assert "local-sgd(period=3), whose ranks have states of their own" in said["strategy"]
        assert "there is no plan yet in iteration 1" in said["observing"]
        assert "the model is closed" in said["closed"]


def test_a_data_loader_without_a_generator_is_named(tmp_path: Path) -> None:
    """Its next iterator draws from the random stream that `load` has restored."""
    ((equal, named),) = run_ranks(1, jobs.resume_within_a_pass, str(tmp_path / "a"), False)
    assert not equal
    assert len(named) == 1
    assert run_ranks(1, jobs.resume_within_a_pass, str(tmp_path / "b"), True) == [(True, [])]


def test_a_checkpoint_without_batches_is_noted_once(tmp_path: Path) -> None:
    assert run_ranks(1, jobs.count_notices_about_batches, str(tmp_path)) == [[1, 0, 0]]


def test_several_optimizers(saved_by: Found) -> None:
    """A list of optimizers is saved and loaded; their groups are the ones that step afterwards."""
    for whole, resumed, rates, refused in saved_by("two optimizers"):
        assert whole == resumed
        assert rates == [0.01, 0.02]
        assert [words.split(" must")[0] for words in refused] == [
            f"optimizer (a list of {n})" for n in (0, 2, 1)
        ]


def test_servers_keep_their_own() -> None:
    words, _ = run_ranks(2, jobs.served)
    assert len(words) == 2
    assert all("not for strategies with servers" in text for text in words)


def test_other_worlds(tmp_path: Path) -> None:
    """A consolidated checkpoint is any job's; one of replicas that differ only its own."""
    saved = run_ranks(2, jobs.save_consolidated, str(tmp_path))
    (_, weights) = saved[0]
    for size, strategy in (
        (3, offbeat.LocalSGD(period=10)),
        (1, offbeat.WFBP()),
        (2, offbeat.BSP()),
    ):
        found = run_ranks(size, jobs.load_elsewhere, str(tmp_path), strategy)
        assert len({digest for digest, _, _, _ in found}) == 1
        for digest, mine, (exact, iteration, extra), said in found:
            assert digest == saved[0][0], "weights, and rank 0's optimizer state"
            assert all(torch.equal(t, weights[n]) for n, t in mine.items())
            assert (exact, iteration) == (False, 3)
            assert extra == {"epoch": 7, "rank": 0}
            assert "is of 2 ranks under local-sgd(period=10)" in said
            assert f"and here are {size} ranks under {strategy}" in said


def test_plans_that_were_measured(saved_by: Found, resumed_by: Found) -> None:
    whole, resumed = saved_by("observed"), resumed_by("observed")
    assert [r[:2] for r in resumed] == [w[:2] for w in whole]
    assert resumed[0][2] == 5


def test_what_was_seen_of_the_loss(saved_by: Found, resumed_by: Found) -> None:
    whole = saved_by("watched")
    assert resumed_by("watched") == whole
    assert "noise=None" not in whole[0][1]


@pytest.mark.parametrize("strategy", GOSSIP)
def test_gossip(
    strategy: str,
    saved_by: Found,
    resumed_by: Found,
) -> None:
    """Every worker saves when it likes, and goes on from its own."""
    saved, loaded = saved_by(strategy), resumed_by(strategy)
    for rank, ((at, state), (back, found)) in enumerate(zip(saved, loaded, strict=True)):
        assert at == back == 4 + rank
        assert all(torch.equal(t, found[n]) for n, t in state.items())


def test_a_launcher_saves_and_resumes(tmp_path: Path) -> None:
    def job(**more: Any) -> str:
        file = tmp_path / "job.json"
        file.write_text(json.dumps({"schema": 1, **more}))
        return str(file)

    folder = str(tmp_path / "saved")
    plain = run_ranks(2, jobs.launched, job(), 8)
    asked = {"checkpoint": folder, "checkpoint_every": 2, "resume": True}
    assert [at for at, _ in run_ranks(2, jobs.launched, job(**asked), 5)] == [0, 0]
    assert [m.iteration for m in Folder(folder).manifests(1).values()] == [4, 2]
    assert run_ranks(2, jobs.launched, job(**asked), 8) == [(4, digest) for _, digest in plain]
    assert [m.iteration for m in Folder(folder).manifests(0).values()] == [8, 6]
    require_sound(folder)


def require_sound(folder: str) -> None:
    """What has become shorter is passed over; what has changed is an error on every rank."""
    newest, before = Folder(folder).manifests(1)
    [file] = Folder(folder).shard(newest, 1).glob("*.distcp")
    file.write_bytes(file.read_bytes()[:-1])
    for at, said in run_ranks(2, jobs.reloads, folder):
        assert at == 6
        assert any(f"{newest} is not complete on every rank; {before} is loaded" in s for s in said)
    [file] = Folder(folder).shard(before, 1).glob("*.distcp")
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    for at, said in run_ranks(2, jobs.reloads, folder):
        assert at == -1
        assert f"rank 1: {file} is not what was written" in said[0]
