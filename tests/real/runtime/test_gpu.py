"""The same numbers on a GPU: streams, events and NCCL in place of threads, clocks and gloo.

Two ranks share a GPU if there is only one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from cases import gpu_jobs, oddities
from cases.comparing import assert_close
from harness.ranks import run_ranks, watch_ranks

from offbeat import BSP, DDP, WFBP, LocalSGD, PartialSync, Strategy
from offbeat.core.buckets.flat import Flat
from offbeat.core.buckets.layout import BucketSpec
from offbeat.core.codecs import codec
from offbeat.core.codecs.tensor_codecs import code

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
BEFORE = PartialSync(period=2, average="before_update")


@pytest.mark.parametrize(
    "strategy",
    [
        BSP(),
        WFBP(fusion="none"),
        DDP(),
        LocalSGD(period=2, state="averaged"),
        PartialSync(period=2),
        BEFORE,
    ],
    ids=str,
)
def test_alone_it_is_plain_training(strategy: Strategy) -> None:
    """An average over one rank changes nothing, so every strategy is plain training."""
    [(plain, ours)] = run_ranks(1, oddities.train_on_gpu, strategy, False, timeout_s=100)
    assert_close(ours, plain, str(strategy))


@pytest.mark.parametrize("strategy", [WFBP(), BEFORE], ids=str)
def test_gradient_scaler(strategy: Strategy) -> None:
    [(plain, ours)] = run_ranks(1, oddities.train_on_gpu, strategy, True, timeout_s=100)
    assert_close(ours, plain, str(strategy))


def test_compiled_kernels_find_parameters_aligned() -> None:
    """They conclude it from offsets within storages; those of odd sizes push others out of line."""
    model = torch.nn.Sequential(torch.nn.Linear(7, 3), torch.nn.Linear(3, 5)).cuda()
    expected = model(torch.ones(2, 7, device="cuda"))
    names = [name for name, _ in model.named_parameters()]
    Flat(model, [BucketSpec(name, (name,)) for name in names])
    for p in model.parameters():
        assert p.data_ptr() % 16 == p.storage_offset() * p.element_size()
        assert p.untyped_storage().nbytes() < p.nbytes + 16
    compiled = torch.compile(model)(torch.ones(2, 7, device="cuda"))
    assert_close(compiled, expected, "compiled", 1e-5)


@pytest.mark.parametrize("wire", ["bf16", "fp16", "int8", "int4", "sign"])
def test_codes_mean_the_same_on_a_gpu_and_on_the_host(wire: str) -> None:
    """Bit for bit."""
    used = codec(wire, {})
    x = torch.randn(2, (1 << 21) + 300, device="cuda")
    lost, codes = x.clone(), torch.empty(2, used.bytes_of(x.shape[-1]), dtype=torch.uint8).cuda()
    code(used).encode(lost, codes)
    on_gpu, on_host = torch.zeros_like(x[0]), torch.zeros(x.shape[-1])
    code(used).add_all(codes, on_gpu)
    code(used).add_all(codes.cpu(), on_host)
    assert torch.equal(on_gpu.cpu(), on_host)
    assert_close(on_gpu + lost.sum(0), x.sum(0), wire, 1e-5)


def test_profile_is_measured_with_events() -> None:
    [profile] = run_ranks(1, oddities.observe_on_gpu, timeout_s=100)
    assert profile.forward_s > 0
    assert profile.backward_s > 0
    assert profile.update_s > 0


def test_gloo_through_pinned_memory() -> None:
    """Two processes may share one GPU, which NCCL refuses."""
    for same in run_ranks(2, gpu_jobs.send_over_gloo, timeout_s=100):
        assert same == gpu_jobs.ALL_SAME


# ---- two ranks --------------------------------------------------------------------------------

STRATEGIES = ["wfbp", "selsync:delta=0.0", "p3", "dear", "local-sgd:period=2", "wfbp:wire=int8"]


def assert_alike(ranks: list[list[dict[str, Any]]], expected: list[dict[str, Any]]) -> None:
    """All ranks have the same bits, and weights close to those of a job on CPUs."""
    for strategy, own, other, plain in zip(STRATEGIES, *ranks, expected, strict=True):
        assert own["bits"] == other["bits"], strategy
        if "wire" not in strategy:  # codecs see other blocks, because of gaps
            assert_close(own["weights"], plain["weights"], strategy, 1e-3)


@pytest.fixture(scope="module")
def on_cpu() -> list[dict[str, Any]]:
    return run_ranks(2, gpu_jobs.train, STRATEGIES, ["lo"], "cpu", timeout_s=100)[0]


@pytest.mark.parametrize("links", [["lo"], ["nccl:lo"]], ids=lambda links: links[0])
def test_two_ranks_compute_what_cpus_compute(
    links: list[str], on_cpu: list[dict[str, Any]]
) -> None:
    assert_alike(run_ranks(2, gpu_jobs.train, STRATEGIES, links, timeout_s=110), on_cpu)


def test_a_link_of_nccl_beside_one_of_gloo() -> None:
    """NCCL requires one order of launches over all groups of a process, and each link and channel
    has a thread of its own. A deadlock would end in the timeout of the world."""
    one, other = run_ranks(2, gpu_jobs.train_beside, timeout_s=110)
    assert [found["bits"] for found in one] == [found["bits"] for found in other]


def test_blocks_that_were_compiled_before_their_buckets_changed() -> None:
    """The parameters move twice. Compiled kernels load 16 bytes at a time."""
    [(compiled,)] = run_ranks(1, compiled_blocks, True, timeout_s=110)
    [(plain,)] = run_ranks(1, compiled_blocks, False, timeout_s=110)
    assert_close(compiled["weights"], {k: plain["weights"][k] for k in plain["weights"]}, "", 1e-3)


def compiled_blocks(compiled: bool) -> list[dict[str, Any]]:
    found = gpu_jobs.train(["wfbp"], ["lo"], compiled=compiled)
    for one in found:
        one["weights"] = {k.replace("_orig_mod.", ""): v for k, v in one["weights"].items()}
    return found


def test_a_checkpoint_of_a_codec_with_memory(tmp_path: Path) -> None:
    for saved, resumed in run_ranks(2, gpu_jobs.resume, str(tmp_path), timeout_s=110):
        assert saved == resumed


def test_workers_of_a_server_accumulate() -> None:
    *workers, server = run_ranks(3, gpu_jobs.serve, timeout_s=110)
    assert server is None
    assert all(loss is not None and loss < 10 for loss in workers)


# ---- failures ---------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["is killed", "is stopped", "raises"])
@pytest.mark.parametrize("nonfinite", ["raise", "ignore"])
@pytest.mark.parametrize("link", ["lo", "nccl:lo"])
def test_survivors_name_the_lost_rank(link: str, nonfinite: str, how: str) -> None:
    """With NCCL neither torch's watchdog nor a communicator that the lost rank has destroyed ends
    them before, and a message that never arrives has a timeout."""
    arguments = ([link], how, 1, "cuda", nonfinite)
    outcomes = watch_ranks(2, fail, *arguments, timeout_s=90.0, doomed=[1])
    survivor = outcomes[0]
    assert survivor.kind == "", survivor.traceback
    words, seconds = survivor.result
    assert "rank 1" in " ".join(words.split())
    assert seconds < gpu_jobs.TIMEOUT_S + (1.0 if how == "is stopped" else 0.0)
    assert survivor.exitcode == 0, "not aborted, and its script can destroy the groups"


def fail(links: list[str], how: str, who: int, device: str, nonfinite: str) -> tuple[str, float]:
    return gpu_jobs.fail(links, how, who, device, on_nonfinite=nonfinite)
