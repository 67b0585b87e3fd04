"""Frameworks: the scripts of the examples, by two ranks, against plain offbeat."""

from __future__ import annotations

from importlib.util import find_spec
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import frameworks_workers
from cases.frameworks_nodes import CLIPPED, LIGHTNING, both_worlds
from harness.parts import Options
from harness.ranks import run_ranks

import offbeat

for package in ("accelerate", "transformers", "lightning"):
    if find_spec(package) is None:  # imported by the ranks alone, as it takes seconds
        pytest.skip(f"{package} is not installed", allow_module_level=True)

SCRIPTS = ["accelerate_script", "fabric_script", "lightning_script", "trainer_script"]
ACCUMULATING = ["accelerate_after", "trainer_accumulates", "lightning_accumulates"]
FRAMEWORKS = [
    *("accelerate", "transformers.trainer", "lightning.fabric"),
    *("lightning_fabric", "pytorch_lightning"),
]
LOSSES = "reference_losses"
LIMIT_S = 180  # importing the frameworks takes long on a busy machine


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Any], list[Any]]:
    """What each rank has seen, of two ranks and of two nodes of two."""
    where, limit_s = str(tmp_path_factory.mktemp("frameworks")), LIMIT_S - 20
    [found] = run_ranks(1, both_worlds, where, limit_s, timeout_s=LIMIT_S - 10, imports=FRAMEWORKS)
    return found


@pytest.fixture(scope="module")
def ranks(worlds: tuple[list[Any], list[Any]]) -> list[dict[str, Any]]:
    """What each rank has seen."""
    return worlds[0]


@pytest.fixture(scope="module")
def nodes(worlds: tuple[list[Any], list[Any]]) -> list[dict[str, Any]]:
    """What each rank of two nodes has seen."""
    return worlds[1]


@pytest.mark.timeout(LIMIT_S)
@pytest.mark.parametrize("what", [*SCRIPTS, *ACCUMULATING, "accelerate_half"])
def test_ranks_are_equal_in_the_end(ranks: list[dict[str, Any]], what: str) -> None:
    first, second = (rank[what]["digest"] for rank in ranks)
    assert first == second


@pytest.mark.parametrize("what", [*SCRIPTS, *ACCUMULATING])
def test_weights_are_those_of_plain_offbeat(ranks: list[dict[str, Any]], what: str) -> None:
    for rank in ranks:
        found, expected = rank[what]["weights"], rank[what]["plain"]
        assert len(found) == len(expected) == 11  # the output layer is the embedding
        for name, weight in found.items():
            torch.testing.assert_close(weight, expected[name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("what", SCRIPTS)
def test_losses_are_those_of_plain_offbeat(ranks: list[dict[str, Any]], what: str) -> None:
    losses, plain = ([rank[what][of] for rank in ranks] for of in ("losses", "plain_losses"))
    if what == "trainer_script":  # rank 0 logs the mean
        losses = losses[:1]
        plain = [[sum(both) / 2 for both in zip(*plain, strict=True)]]
    for found, expected in zip(losses, plain, strict=True):
        assert len(found) == 12
        assert found == pytest.approx(expected, abs=1e-4)
        assert found[-1] < 0.9 * found[0]


def test_what_is_saved(ranks: list[dict[str, Any]]) -> None:
    """Nothing is dropped, tied weights are tied again, and replicas are averaged before."""
    assert ranks[0]["accelerate_script"]["saved"]
    first, second = (rank["accelerate_script"] for rank in ranks)
    assert first["after_save"] == second["after_save"] != first["digest"]
    assert ranks[0]["fabric_script"]["saved"]
    assert ranks[0]["fabric_script"]["state"] == 11  # parameters with momentum
    assert ranks[0]["trainer_script"]["loaded"]
    assert ranks[0]["trainer_script"]["tied"]


def test_trainer_goes_on_from_its_checkpoint(ranks: list[dict[str, Any]]) -> None:
    first, second = (rank["trainer_script"] for rank in ranks)
    assert first["steps"] == list(range(1, 19))
    assert first["resumed"] == second["resumed"] != first["digest"]


def test_mixed_precision_is_accelerates_own(ranks: list[dict[str, Any]]) -> None:
    half = ranks[0]["accelerate_half"]
    assert half["inside"] == [torch.bfloat16]
    assert half["outside"] == torch.float32


@pytest.mark.timeout(LIMIT_S)
@pytest.mark.parametrize("script", CLIPPED)
def test_shards_inside_nodes_train_as_with_torch_alone(
    nodes: list[dict[str, Any]], script: str
) -> None:
    """Frameworks train shards of a replica per node, and offbeat averages between the nodes."""
    for rank in nodes:
        found = rank[script]
        assert found["weights"].keys() == found["reference"].keys()
        for name, weight in found["weights"].items():
            torch.testing.assert_close(weight, found["reference"][name], rtol=1e-4, atol=1e-5)
    losses, expected = ([rank[script][of] for rank in nodes] for of in ("losses", LOSSES))
    if "trainer" in script:  # rank 0 logs the mean
        losses, expected = losses[:1], [[sum(each) / 4 for each in zip(*expected, strict=True)]]
    for found, wanted in zip(losses, expected, strict=True):
        assert len(found) == 12
        assert found == pytest.approx(wanted, abs=1e-4)
        assert found[-1] < 0.9 * found[0]


def test_lightning_saves_the_average_of_sharded_replicas(nodes: list[dict[str, Any]]) -> None:
    """torch reads it in a single process; the optimizer's state is in it by the same names."""
    for rank in nodes:
        found = rank[LIGHTNING]
        assert {*found["averaged"]} <= {*found["read"]}
        for name, weight in found["averaged"].items():
            torch.testing.assert_close(found["read"][name], weight, rtol=0, atol=0)
        for moment in ("exp_avg", "exp_avg_sq"):
            kept = [name for name in found["states"] if name.endswith(f".{moment}")]
            assert len(kept) == len(found["averaged"])


@pytest.mark.parametrize("script", sorted(Path(frameworks_workers.SCRIPTS).glob("with_*.py")))
def test_few_lines_are_changed(script: Path) -> None:
    assert 1 <= sum("# <-" in line for line in script.read_text().splitlines()) <= 5


def test_what_integrations_refuse(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        model_alone, module_alone, none, sharded = rank["others"]["refused"]
        assert "one model with its optimizer (1 and 0 here)" in model_alone
        assert "fabric.setup(model, optimizer)" in module_alone
        assert "one optimizer (0 here)" in none
        assert "distributed_type (DEEPSPEED) must be that of one process per device" in sharded


def test_label_smoothing_gives_the_weights_of_ddp(ranks: list[dict[str, Any]]) -> None:
    """The Trainer shifts labels for classes of causal language models only, so it must see the
    class of the unwrapped model."""
    for rank in ranks:
        smoothed = rank["trainer_smooths_labels"]
        assert smoothed["unwrapped"]
        for name, weight in smoothed["weights"].items():
            torch.testing.assert_close(weight, smoothed["ddp"][name], rtol=1e-5, atol=1e-6)


def test_lightning_saves_the_mean_while_gradients_accumulate(ranks: list[dict[str, Any]]) -> None:
    first, second = (rank["lightning_saves_between_micro_batches"] for rank in ranks)
    apart = 0.0
    for name, weight in first["before"].items():
        mean = (weight.double() + second["before"][name].double()) / 2
        torch.testing.assert_close(first["saved"][name].double(), mean, rtol=1e-6, atol=1e-7)
        apart = max(apart, float((weight - mean).abs().max()))
    assert apart > 1e-3  # replicas differed


def test_both_packages_of_lightning(ranks: list[dict[str, Any]]) -> None:
    assert all(rank["others"]["subclasses"] for rank in ranks)


def test_options_are_those_of_prepare() -> None:
    parameters = signature(offbeat.prepare).parameters.items()
    given = [n for n, p in parameters if p.kind is p.KEYWORD_ONLY and p.annotation != "None"]
    assert list(Options.__annotations__) == given
