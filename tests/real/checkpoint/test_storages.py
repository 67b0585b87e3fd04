"""Whatever saves or copies a part of a model in flat storage takes that part alone."""

from __future__ import annotations

import copy
import gc
import io
from typing import Any

import pytest
import torch
from cases.models import Case, build_model, build_optimizer, profile_of
from harness.parts import Flat, ParameterWatch, StateStore, group_parameters, place_like
from harness.ranks import run_ranks
from torch import nn

CASES = [Case("conv"), Case("tied"), Case("mixed", dtype=torch.float32)]


def flat_and_plain(case: Case) -> tuple[nn.Module, nn.Module, Flat]:
    model, plain = build_model(case), build_model(case)
    order = [n for n, p in model.named_parameters() if p.requires_grad][::-1]
    statistics = [n for n, b in model.named_buffers() if b.dim()]
    return model, plain, Flat(model, group_parameters(model, order, 1, statistics))


def saved(value: Any) -> int:
    """Bytes that torch.save writes."""
    file = io.BytesIO()
    torch.save(value, file)
    return len(file.getvalue())


def storages(tensors: Any) -> int:
    """Bytes of all memory that tensors hold."""
    found = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(found.values())


@pytest.mark.parametrize("case", CASES, ids=str)
def test_saved_like_a_plain_model(case: Case) -> None:
    model, plain, _ = flat_and_plain(case)
    # Pickles differ by a few bytes in the names of files within them.
    assert saved(model) == pytest.approx(saved(plain), abs=256)
    assert saved(model.state_dict()) == pytest.approx(saved(plain.state_dict()), abs=256)
    assert list(model.state_dict()) == list(plain.state_dict())
    ours, theirs = dict(model.named_modules()), dict(plain.named_modules())
    for name, module in ours.items():
        state, other = module.state_dict(), theirs[name].state_dict()
        assert saved(state) == pytest.approx(saved(other), abs=256), name
        for key, tensor in state.items():
            assert saved(tensor) == pytest.approx(saved(other[key]), abs=64), (name, key)
            assert tensor.stride() == other[key].stride()
            assert tensor.storage_offset() == 0
            assert tensor.untyped_storage().nbytes() == tensor.nbytes


@pytest.mark.parametrize("case", CASES, ids=str)
def test_copies_have_memory_of_their_own(case: Case) -> None:
    model, plain, flat = flat_and_plain(case)
    before = {name: t.clone() for name, t in model.state_dict().items()}
    for twin in (copy.deepcopy(model), torch.load(pickled(model), weights_only=False)):
        held = [*twin.parameters(), *twin.buffers()]
        assert storages(held) == storages([*plain.parameters(), *plain.buffers()])
        for tensor in flat.parameter_tensors():
            tensor.zero_()
        assert all(torch.equal(t, before[name]) for name, t in twin.state_dict().items())
        model.load_state_dict(before)


def pickled(value: Any) -> io.BytesIO:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return file


@pytest.mark.parametrize("case", CASES, ids=str)
def test_safetensors(case: Case, tmp_path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    model, plain, _ = flat_and_plain(case)
    safetensors.save_model(model, tmp_path / "ours")
    safetensors.save_model(plain, tmp_path / "plain")
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "plain").read_bytes()
    fresh = build_model(case, seed=3)
    safetensors.load_model(fresh, tmp_path / "ours")
    assert all(torch.equal(t, plain.state_dict()[n]) for n, t in fresh.state_dict().items())
    if case.model == "tied":  # it refuses tensors that share memory, as of a plain model
        return
    safetensors.save_file(dict(model.state_dict()), tmp_path / "file")
    assert safetensors.load_file(tmp_path / "file").keys() == plain.state_dict().keys()


def test_memory_is_one_and_stays() -> None:
    model, _, flat = flat_and_plain(Case("mlp"))
    [everything] = flat.parameter_tensors()
    everything.fill_(2.0)
    assert all((p == 2.0).all() for p in flat.parameters)
    with torch.no_grad():
        for p in flat.parameters:
            p.add_(1.0)
    assert (everything == 3.0).all()
    del flat, everything
    gc.collect()
    torch.full((10_000,), -1.0, dtype=torch.float64)  # what would take freed memory
    assert all((p == 3.0).all() for p in model.parameters() if p.requires_grad)


def test_saved_for_backward_as_before() -> None:
    """What a link writes does not look like the user's doing; what the user writes does."""
    model, _, flat = flat_and_plain(Case("mlp"))
    x = torch.ones(2, 5, dtype=torch.float64)
    output = model(x).sum()
    flat.parameter_tensors()[0].mul_(1.0)
    output.backward()
    output = model(x).sum()
    with torch.no_grad():
        flat.parameters[0].mul_(1.0)
        model.get_parameter("4.weight").mul_(1.0)
    with pytest.raises(RuntimeError, match="inplace"):
        output.backward()


def test_odd_shapes() -> None:
    flat = torch.arange(12.0)
    for like in (torch.ones(1, 5).t(), torch.ones(()), torch.ones(0, 3), torch.ones(2, 1, 3)):
        place = place_like(flat, like, 4)
        assert place.shape == like.shape
        assert place.stride() == like.stride()
        assert place.untyped_storage().nbytes() == like.nbytes
        assert place.flatten().tolist() == flat[4 : 4 + like.numel()].tolist()


def test_optimizer_state_is_saved_like_a_plain_ones() -> None:
    case = Case("mlp", "adam")
    model, _, flat = flat_and_plain(case)
    optimizer = build_optimizer(case, model)
    model(torch.ones(2, 5, dtype=torch.float64)).sum().backward()
    optimizer.step()
    plain = saved(copy.deepcopy(optimizer.state_dict()))
    store = StateStore(optimizer, flat)
    [flat_state] = store.tensors(range(len(flat.buckets)))
    assert saved(optimizer.state_dict()) == pytest.approx(plain, abs=256)
    for state in optimizer.state.values():
        moment = state["exp_avg"]
        assert moment.untyped_storage().nbytes() == moment.nbytes
        assert (
            flat_state.data_ptr() <= moment.data_ptr() < flat_state.data_ptr() + flat_state.nbytes
        )
    assert store.tensors(range(len(flat.buckets)))[0] is flat_state


def test_memory_that_was_replaced_is_noticed() -> None:
    """torch puts a storage that is shared between processes elsewhere, without a word."""
    model, _, flat = flat_and_plain(Case("mlp"))
    watch = ParameterWatch(model)
    watch.attach(flat.parameters)
    watch.require_unchanged()
    model.get_parameter("4.weight").share_memory_()
    with pytest.raises(ValueError, match=r"'4.weight' was moved to other memory.*copies"):
        watch.require_unchanged()
    watch.close()


def prepared_copies() -> list[int]:
    """Bytes of a prepared module, of its twins, and of a plain one; under a plan with hooks."""
    import offbeat

    plain, model = build_model(Case("conv")), build_model(Case("conv"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    profile = profile_of(Case("conv"), 1)
    model, optimizer = offbeat.prepare(model, optimizer, "p3", profile=profile, timeout_s=20)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.ones(6, 2, 4, 4, dtype=torch.float64)).sum().backward()
        optimizer.step()
    sizes = [
        saved(m)
        for m in (plain, model.module, copy.deepcopy(model), model.module.get_submodule("8"))
    ]
    sizes.append(saved(plain.get_submodule("8")))
    model.close()
    return sizes


def test_prepared_modules_are_saved_like_plain_ones() -> None:
    [sizes] = run_ranks(1, prepared_copies)
    plain, ours, twin, part, plain_part = sizes
    assert ours == pytest.approx(plain, abs=4096)  # hooks, which do nothing where they are loaded
    assert twin == pytest.approx(plain, abs=4096)
    assert part == pytest.approx(plain_part, abs=2048)
