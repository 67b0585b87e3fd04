"""Training with servers, in processes of their own, against BSP's equations."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cases.comparing import assert_close
from cases.models import Case
from cases.server_jobs import job, until
from cases.server_workers import Worked, refused, sparsely, work
from harness.ranks import run_ranks, watch_ranks
from oracle.training import bsp, replicas

from offbeat import BSP, PSBSP, SSP, Profile
from offbeat.core.runtime.iteration import Iteration, Timestamps
from offbeat.core.runtime.recording import Recorder
from offbeat.core.transport.device import CPU
from offbeat.experiments.record.run_directory import load_rank
from offbeat.jobs.iteration_log import IterationLog
from offbeat.jobs.record_lines import LineWriter, rank_file
from offbeat.profile import Bucket, Link
from offbeat.server.serving import _free_model
from offbeat.server.session import SSPSession
from offbeat.sim import predict

ITERATIONS = 6


def both(results: list[Worked | int], workers: int) -> list[Worked]:
    assert results[workers:] == [0] * (len(results) - workers)
    return [worked for worked in results[:workers] if isinstance(worked, Worked)]


@pytest.mark.parametrize(
    ("case", "strategy", "servers", "bare"),
    [
        (Case("mlp", "nesterov", "step"), SSP(s=0), 2, False),
        (Case("conv", "adam"), PSBSP(), 1, True),
    ],
    ids=str,
)
def test_without_staleness_it_is_bsp(case: Case, strategy: SSP, servers: int, bare: bool) -> None:
    results = run_ranks(2 + servers, work, case, strategy, ITERATIONS, servers, None, bare)
    world = replicas(case, 2)
    bsp(world, range(ITERATIONS))
    expected = dict(world[0].model.named_parameters())
    for worked in both(results, 2):
        assert_close({n: worked.model[n] for n in expected}, expected, str(case))
        assert_close({n: worked.evaluated[n] for n in expected}, expected, "evaluated")
        assert_close(worked.optimizer["state"], world[0].optimizer.state_dict()["state"], "state")
        assert worked.clock == ITERATIONS


@pytest.mark.parametrize("strategy", [SSP(s=3), SSP(s=1, apply="push", accumulate=2)], ids=str)
def test_replicas_agree_in_the_end(strategy: SSP) -> None:
    """With staleness the path depends on timing; what consolidate leaves does not differ."""
    results = run_ranks(3, work, Case("conv", "sgd"), strategy, ITERATIONS, 1)
    a, b = both(results, 2)
    assert all(torch.equal(a.model[name], b.model[name]) for name in a.model)
    assert a.clock == ITERATIONS // strategy.accumulate
    start = replicas(Case("conv", "sgd"), 1)[0].model.state_dict()
    assert any(not torch.equal(a.model[name], start[name]) for name in start)


def test_gradients_of_several_iterations_are_pushed_as_their_average() -> None:
    pushes: list[Any] = []
    outgoing = {torch.float32: torch.tensor([4.0, 6.0])}
    session: Any = SimpleNamespace(
        _collected=2,
        _waiting=2,
        _absent=[0, 1, 2],
        _known=[frozenset({"lr"})],
        _optimizer=torch.optim.SGD([torch.zeros(1)], lr=0.5),
        _client=SimpleNamespace(outgoing=outgoing, push=lambda *about: pushes.append(about)),
    )
    SSPSession._push(session)
    assert outgoing[torch.float32].tolist() == [2.0, 3.0]
    assert pushes == [([{"lr": 0.5}], [2])]
    assert (session._collected, session._waiting) == (0, 0)


@pytest.mark.parametrize(
    ("arriving", "pulling", "pulls"),
    [
        ([2], True, []),  # new enough: the next pull follows the next push
        ([1, 2], True, [2]),  # too old
        ([2], False, [2]),  # nothing was pulled, as in the first iteration
    ],
)
def test_an_iteration_pulls_only_what_it_needs(
    arriving: list[int], pulling: bool, pulls: list[int]
) -> None:
    found: list[int] = []
    client: Any = SimpleNamespace(pulling=pulling)
    client.arrived_clock = lambda: arriving[0] if client.pulling else None

    def pull(need: int) -> None:
        found.append(need)
        client.pulling = True

    def load() -> None:
        session._low, client.pulling = arriving.pop(0), False

    client.pull = pull
    session: Any = SimpleNamespace(
        _open=False,
        _waiting=0,
        _low=1,
        _needed_clock=2,
        _recorder=None,
        _client=client,
        _cluster=SimpleNamespace(device=CPU()),
        _load_pulled=load,
    )
    session._refresh_if_old = lambda: SSPSession._refresh_if_old(session)
    SSPSession._await_parameters(session)
    assert found == pulls
    assert (session._low, arriving) == (2, [])


def test_a_clock_without_gradients_waits_for_the_push_before() -> None:
    order: list[str] = []
    client = SimpleNamespace(
        settle=lambda: order.append("settle"), push=lambda _, *, skip: order.append(f"skip={skip}")
    )
    session: Any = SimpleNamespace(_collected=0, _waiting=1, _client=client)
    SSPSession._push(session)
    assert order == ["settle", "skip=True"]


def test_no_worker_pushes_before_all_have_the_united_parameters() -> None:
    """Rank 1 pulls when rank 0 waits for it, or has trained on."""
    with job(5, 1, 2, rule="push") as j:
        clients, sessions = [j.client(0), j.client(1)], []
        for client in clients:
            session: Any = SSPSession.__new__(SSPSession)
            session._cluster = SimpleNamespace(require_open=lambda: None, device=CPU())
            session._model, session._client = torch.nn.Module(), client
            session._held = [torch.full((5,), 7.0, dtype=torch.float64)]
            session._incoming = client.layout.views(client.incoming)
            session._low = session._waiting = 0
            sessions.append(session)
        has_trained, pull = threading.Event(), sessions[1]._pull_newest

        def pull_late(need: int) -> None:
            until(lambda: clients[0]._averages == 2 or has_trained.is_set())
            pull(need)

        def train_on() -> None:
            sessions[0].consolidate(False)
            j.push(clients[0], 1.0)
            has_trained.set()

        sessions[1]._pull_newest = pull_late
        first = threading.Thread(target=train_on)
        first.start()
        sessions[1].consolidate(False)
        first.join()
        for session, client in zip(sessions, clients, strict=True):
            assert session._held[0].tolist() == [0.0] * 5
            client.close()


def test_a_server_frees_the_memory_of_its_model() -> None:
    model = torch.nn.BatchNorm1d(3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.randn(4, 3)).square().sum().backward()
    optimizer.step()
    _free_model(model, optimizer)
    assert not any(t.numel() for t in (*model.parameters(), *model.buffers()))
    assert all(p.grad is None for p in model.parameters())
    assert not optimizer.state


def test_sparse_gradients_become_dense() -> None:
    for before, after in run_ranks(3, sparsely, SSP(s=0))[:2]:
        mean = torch.tensor([[0.5, 0.5], [0.5, 0.5], [0, 0]]).double()
        torch.testing.assert_close(after, before - 0.5 * mean)


def test_a_killed_worker_leaves_the_other_running() -> None:
    strategy = SSP(s=1, silent_s=1.0)
    outcomes = watch_ranks(
        3, work, Case("mlp", "sgd"), strategy, ITERATIONS, 1, 1, doomed=[1], timeout_s=40
    )
    assert outcomes[1].kind == "silent"
    assert outcomes[0].error == outcomes[2].error == ""
    assert outcomes[0].result.clock == ITERATIONS


@pytest.mark.parametrize(
    ("servers", "strategy", "words"),
    [
        (0, SSP(), "servers (0) must be at least 1"),
        (2, SSP(), "servers (2) must be below the number of ranks (2)"),
        (1, BSP(), "servers (1) must be 0"),
        (1, SSP(), "OFFBEAT_SECRET must be the same on all ranks"),
    ],
    ids=str,
)
def test_jobs_that_cannot_be(servers: int, strategy: object, words: str) -> None:
    for said in run_ranks(2, refused, servers, strategy):
        assert words in said


def test_a_new_job_begins_from_the_last_snapshot_of_all_servers(tmp_path: Path) -> None:
    """Parameters and momentum: two jobs of four and two clocks are one of six."""
    case = Case("mlp", "nesterov")
    strategy = SSP(s=0, snapshot=str(tmp_path), snapshot_every=2)
    (first,) = both(run_ranks(3, work, case, strategy, 5, 2), 1)  # its fifth clock is lost
    (again,) = both(run_ranks(3, work, case, strategy, 2, 2), 1)
    assert (first.begun, again.begun) == (0, 4)
    assert "resume" not in first.said
    said = " ".join(again.said.split())
    assert f"clock 4 in {tmp_path}; training goes on from iteration 4" in said
    world = replicas(case, 1)
    bsp(world, [0, 1, 2, 3, 0, 1])
    expected = dict(world[0].model.named_parameters())
    assert_close({n: again.model[n] for n in expected}, expected, "continued")


@pytest.mark.parametrize(
    ("strategy", "is_uneven"), [(SSP(s=2), True), (SSP(s=0), False), (PSBSP(), False)], ids=str
)
def test_a_predicted_trace_is_uneven_if_workers_do_not_wait(strategy: SSP, is_uneven: bool) -> None:
    facts = Profile((Bucket("a", 0.1, 0.2, 4000),), (Link("net", 0.0, 1e5),), 4)
    assert predict(strategy, facts, servers=1).trace.uneven is is_uneven


@pytest.mark.parametrize("is_uneven", [False, True])
def test_a_record_states_whether_iterations_are_uneven(is_uneven: bool, tmp_path: Path) -> None:
    recorder, writer = Recorder(), LineWriter(tmp_path, 0)
    recorder.is_uneven = is_uneven
    log = IterationLog(recorder, writer.line, 0, CPU())
    log.start("ssp", 0)
    names = ("forward", "forward_end", "backward_end", "waited", "step", "stepped")
    marks = Timestamps(**dict.fromkeys(names, 0.5), begin=0.0, end=1.0)
    log.add(Iteration(0, marks, []))
    log.end()
    assert load_rank(rank_file(tmp_path, 0)).trace.uneven is is_uneven
