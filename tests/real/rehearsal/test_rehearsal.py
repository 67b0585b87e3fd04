"""A rehearsal computes what the interpreter and real processes compute, in the simulator's time."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from cases import rehearsed
from cases.rehearsed import SIZES, K, T, quadratic_profile, rehearse_quadratic
from harness.parts import Interpreter, coupled_links, parse
from harness.ranks import run_ranks
from oracle.quadratic import Quadratic, interpreted, model_of

import offbeat
from offbeat import Profile
from offbeat.sim import predict, simulate

# Each kind of step between messages: gradients at once, in halves, in windows and handed on;
# averages of sets, late, with an outer step, of state, in pairs and by votes.
INTERPRETED = [
    "wfbp:wire=powersgd:2",
    "dear",
    "cyclic:stages=3",
    "deft:preserver=false",
    "diloco:period=2:fragments=2:delay=1",
    "dreamddp:period=3:due=delayed:wire=int4",
    "dreamddp:period=3:due=forward",
    "local-sgd:period=2:state=averaged",
    "noloco:period=2:gamma=0.5",
    "selsync:delta=.2",
]
PREDICTED = [
    "dear",
    "cyclic:stages=3",
    "deft:preserver=false",
    "dreamddp:period=3:due=forward",
    "noloco:period=2",
    "selsync:delta=.2",
]


@pytest.mark.parametrize("name", INTERPRETED)
def test_equals_the_interpreter(name):
    curve, seen = rehearse_quadratic(name)
    assert all(sum(rank.sent_bytes.values()) for rank in curve.run.ranks)
    expected = interpreted(curve.run.plan, Quadratic(SIZES, K, T))
    np.testing.assert_allclose(np.array(seen), np.array(expected), rtol=0, atol=1e-12)


# Each kind of message, and codecs whose codes are added on every rank. The sum of three numbers
# depends on their order.
# Of FedAvg and PartialSync without settings these are those of LocalSGD and DreamDDP.
PROCESSES = [
    "ddp",
    "wfbp",
    "p3",
    "dear",
    "cyclic",
    "deft:preserver=false",
    "demo",
    "des-loc:period=2:first=1:second=2",
    "diloco:period=3:fragments=1:due=forward:delay=1:alpha=0.5",
    "dreamddp:period=3:due=delayed:gain=0.5:wire=int4",
    "dreamddp:period=3:due=forward",
    "local-sgd:period=2:state=averaged",
    "local-sgd:period=2:wire=topk:0.3",
    "noloco:period=2",
    "selsync:delta=.2",
    "sparseloco:period=3:fraction=0.2",
    "wfbp:wire=powersgd:2",
]


def test_equals_real_processes_with_the_same_seeds():
    real = run_ranks(3, rehearsed.train_here, PROCESSES, 5, timeout_s=150.0)
    for name in PROCESSES:
        models, curve = rehearsed.rehearse(name, ranks=3, seed=5)
        for rank, model in enumerate(models):
            losses, tensors = real[rank][name]
            np.testing.assert_allclose(
                curve.run.losses[rank], losses, rtol=0, atol=1e-12, err_msg=name
            )
            names = [n for n, t in model.state_dict().items() for _ in range(t.numel())]
            # torch's DDP copies the statistics of rank 0 at the next forward, a plan at the end.
            ours = [name != "ddp" or rank == 0 or "running" not in n for n in names]
            found, wanted = rehearsed.flat(model)[ours], tensors[ours]
            torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12, msg=name)


@pytest.mark.parametrize("name", ["wfbp", "dreamddp:period=3", "selsync:delta=.2"])
def test_clock_is_the_simulators(name):
    curve, _ = rehearse_quadratic(name, jitter=0.1)
    profile = quadratic_profile(K)
    profile = Profile.from_dict({**profile.to_dict(), "jitter": 0.1})
    strategy = parse(name)
    votes = {vote: list(outcomes) for vote, outcomes in curve.votes.items()}
    ran = curve.run.plan
    trace = simulate(ran, profile, iterations=T, votes=votes)
    np.testing.assert_allclose(np.diff(curve.ends_s, prepend=0), trace.iteration_seconds())
    assert curve.prediction is not None
    expected = predict(strategy, profile, votes=votes or None, ran=ran)
    assert curve.prediction.iteration_s == expected.iteration_s


STEADY = 4  # periods after which the timeline of each plan repeats


@pytest.mark.parametrize("name", PREDICTED)
def test_the_last_period_takes_the_predicted_time(name):
    """Without jitter: the mean of the last period of the rehearsal, whose clock is a simulation of
    all its iterations, beside the steady state that `predict` finds by itself. With votes: of all
    iterations after the prologue."""
    strategy, profile = parse(name), quadratic_profile(K)
    plan = strategy.plan(profile)
    count = plan.prologue + STEADY * plan.period + T
    count -= (count - plan.prologue) % plan.period
    curve, _ = rehearse_quadratic(name, iterations=count)
    votes = {vote: list(outcomes) for vote, outcomes in curve.votes.items()}
    last = count - plan.prologue if votes else plan.period
    # Where sends share links, a prediction of no given length varies the times of messages.
    length = count if coupled_links(plan, profile) else None
    ran = curve.run.plan
    expected = predict(strategy, profile, votes=votes or None, iterations=length, ran=ran)
    seconds = np.diff(curve.ends_s, prepend=0.0)[-last:].mean()
    assert seconds == pytest.approx(expected.iteration_s, rel=1e-9)


def test_votes_are_those_of_the_interpreter():
    curve, _ = rehearse_quadratic("selsync:delta=.2")
    task = Quadratic(SIZES, K, T)
    interpreter = Interpreter(curve.run.plan, model_of(task), K)
    interpreter.run(T)
    decided = {(name, i): yes for name, all_ in curve.votes.items() for i, yes in enumerate(all_)}
    assert decided == interpreter.decisions
    assert len({*decided.values()}) == 2  # some yes, some no


def draws() -> tuple[float, float, float]:
    return torch.rand(1).item(), random.random(), float(np.random.rand())


def test_random_streams_of_the_caller_stay():
    profile = rehearsed.profile_of(2)
    found = []
    for rehearses in (False, True):
        torch.manual_seed(3)
        random.seed(3)
        np.random.seed(3)
        if rehearses:
            rehearsed.rehearse("bsp", profile=profile)
        found.append(draws())
    assert found[0] == found[1]


def test_forked_processes_equal_this_one():
    """One replica, which a plain loop of this process trains likewise."""
    for name in ("bsp", "local-sgd:period=2"):
        _, curve = rehearsed.rehearse(name, ranks=1, seed=5)
        random.seed(5)
        np.random.seed(5)
        torch.manual_seed(5)
        model = rehearsed.make_model(name)
        optimizer = rehearsed.make_optimizer(model)
        losses = []
        for batch in rehearsed.batches(0):
            optimizer.zero_grad()
            loss = model(*batch)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        np.testing.assert_allclose(curve.losses, losses, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ["a2cid2", "ssp"])
def test_a_strategy_without_a_plan_is_refused(name):
    with pytest.raises(ValueError, match="strategy"):
        rehearsed.rehearse(name)


def test_held_out_losses_are_of_the_average_of_all_replicas(tmp_path):
    """Replicas that never average: the average is taken without changing them. What `evaluate`
    draws is not missing in training."""
    seen: list[torch.Tensor] = []

    def evaluate(model: torch.nn.Module) -> float:
        seen.append(rehearsed.flat(model))
        torch.save(seen, tmp_path / "seen.pt")
        return torch.rand(1).item() + len(seen)

    name = "local-sgd:period=100"
    models, curve = rehearsed.rehearse(name, ranks=3, evaluate=evaluate, evaluate_every=3)
    _, without = rehearsed.rehearse(name, ranks=3)
    assert curve.losses == without.losses
    assert [iteration for iteration, _ in curve.held_out] == [2, 5]
    assert [int(value) for _, value in curve.held_out] == [1, 2]
    models, curve = rehearsed.rehearse(
        name, ranks=3, iterations=6, evaluate=evaluate, evaluate_every=6
    )
    seen = torch.load(tmp_path / "seen.pt")
    replicas = torch.stack([rehearsed.flat(model) for model in models[:3]])
    assert (replicas[0] - replicas[1]).abs().max() > 1e-3
    numbers = [t.dtype.is_floating_point for t in models[0].state_dict().values()]
    assert not all(numbers)
    torch.testing.assert_close(seen[-1], replicas.mean(dim=0), rtol=0, atol=1e-12)


def test_progress_counts_the_iterations_of_each_strategy():
    counted: dict[str, list[int]] = {}
    offbeat.rehearse(
        rehearsed.make_model,
        rehearsed.make_optimizer,
        rehearsed.batches,
        ["bsp", "local-sgd:period=2"],
        rehearsed.profile_of(2),
        iterations=3,
        progress=lambda strategy, count: counted.setdefault(strategy, []).append(count),
    )
    assert counted == {"bsp": [1, 2, 3], "local-sgd(period=2)": [1, 2, 3]}
