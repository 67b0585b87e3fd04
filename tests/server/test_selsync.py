"""SelSync over servers, in processes of its own: against SelSync's and BSP's equations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from comparing import assert_close
from models import Case, Loop, build_model
from reference.training import Piece, bsp, names_of, replicas, selective
from server_workers import Worked, refused, selected, work
from worlds import run_world, watch_world

from offbeat import PSSelSync, SelSync
from offbeat.testing.equations import Changes

ITERATIONS = 10
SGD = Case("mlp", "nesterov", "step")


def results(tmp_path: Path, case: Case, strategies: list[Any], servers: int, loop: Loop) -> Any:
    """Per strategy what two workers have and have recorded."""
    found = run_world(
        selected, 2 + servers, str(tmp_path), case, strategies, ITERATIONS, servers, loop
    )
    assert found[2:] == [[0] * len(strategies)] * servers
    return zip(*found[:2], strict=True)


def voted(record: dict[str, Any]) -> list[list[int]]:
    return record["votes"]["by_vote"]["sync"]["yes"]


def assert_model(worked: Worked, expected: dict[str, Any]) -> None:
    assert_close({name: worked.model[name] for name in expected}, expected, "model")


@pytest.mark.parametrize(
    ("case", "aggregate", "servers", "loop"),
    [
        (Case("conv", "nesterov", "step"), "parameters", 2, Loop(clip=0.05)),
        (Case("branches", "adam"), "gradients", 1, Loop(idle=frozenset({(1, 4)}))),
    ],
    ids=["parameters", "gradients"],
)
def test_it_is_selsync(
    case: Case, aggregate: Any, servers: int, loop: Loop, tmp_path: Path
) -> None:
    """The same votes, weights, running statistics and optimizer states as with all-reduces."""
    how: dict[str, Any] = {"delta": 0.5, "window": 2, "aggregate": aggregate}
    [mine] = results(tmp_path, case, [PSSelSync(**how)], servers, loop)
    [theirs] = results(tmp_path, case, [SelSync(**how)], 0, loop)
    for (worked, record), (other, told) in zip(mine, theirs, strict=True):
        assert voted(record) == voted(told)
        assert 1 < sum(map(bool, voted(record))) < ITERATIONS
        assert_close(worked.model, other.model, "model")
        assert_close(worked.optimizer["state"], other.optimizer["state"], "state")
        sent = [number > 0 for number in record["votes"]["sent_bytes"]]
        assert sent == list(map(bool, voted(record)))
        assert [number > 0 for number in record["votes"]["spared_bytes"]] == [not s for s in sent]
    assert mine[0][0].united == mine[1][0].united


def test_the_ends_of_delta(tmp_path: Path) -> None:
    """0 is BSP, infinity is training alone after the first iteration; as the equations say."""
    always = [PSSelSync(delta=0), PSSelSync(delta=0, aggregate="gradients")]
    *synchronous, alone = results(
        tmp_path, SGD, [*always, PSSelSync(delta=float("inf"))], 1, Loop()
    )
    world = replicas(SGD, 2)
    bsp(world, range(ITERATIONS))
    expected = dict(world[0].model.named_parameters())
    for pair in synchronous:
        for worked, _ in pair:
            assert_model(worked, expected)
            assert worked.clock == ITERATIONS + 1  # consolidate's is one
    world = replicas(SGD, 2)
    change = Changes("norm", 25, 0.02).change
    pieces = [Piece(tuple(names_of(world)))]
    told: dict[str, Any] = {"lag": 0, "aggregate": "parameters"}
    selective(
        world, range(ITERATIONS), pieces=pieces, forced=[[]], change=change, delta=1e9, **told
    )
    for (worked, record), replica in zip(alone, world, strict=True):
        assert_model(worked, dict(replica.model.named_parameters()))
        assert voted(record) == [[0, 1], *[[]] * (ITERATIONS - 1)]
        assert worked.clock == 2


def test_a_killed_worker_leaves_the_other_running() -> None:
    strategy = PSSelSync(delta=0, silent_s=1.0)
    outcomes = watch_world(
        work, 3, Case("mlp", "sgd"), strategy, ITERATIONS, 1, 1, doomed=[1], timeout_s=40
    )
    assert outcomes[1].kind == "silent"
    assert outcomes[0].error == outcomes[2].error == ""
    assert outcomes[0].result.clock == ITERATIONS
    start = build_model(Case("mlp", "sgd")).state_dict()
    assert any(not t.equal(start[name]) for name, t in outcomes[0].result.model.items())


def test_without_servers_it_cannot_be() -> None:
    for said in run_world(refused, 2, 0, PSSelSync()):
        assert "servers (0) must be at least 1 for ps-selsync" in said
