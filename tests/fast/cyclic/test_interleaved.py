"""Micro-batches interleaved on one device, beside a direct transcription of the equations."""

from __future__ import annotations

import pytest
import torch
from cases.cyclic import ITERATIONS, batch, chain, equations, optimizer_of
from torch import Tensor, nn

from offbeat.cyclic import Activations, Interleaved, split
from offbeat.cyclic.timetable import Work
from offbeat.strategies import Cyclic


@pytest.mark.parametrize("n", [1, 2, 4])
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize(
    "strategy",
    [
        Cyclic(),
        Cyclic(rule="v1"),
        Cyclic(rule="random", seed=1),
        Cyclic(start="skip"),
        Cyclic(rule="v1", clip=0.1),
    ],
    ids=str,
)
def test_equals_its_equations(n: int, optimizer: str, strategy: Cyclic) -> None:
    model = chain(n)
    trainer = Interleaved(
        list(model), optimizer_of(optimizer, model), nn.functional.mse_loss, strategy
    )
    losses = []
    for t in range(ITERATIONS):
        losses += trainer.step([batch(i, t) for i in range(1, n + 1)])
    losses += trainer.finish()
    expected, theta = equations(n, optimizer, strategy)
    torch.testing.assert_close(
        torch.stack(losses).sort().values,
        torch.tensor(expected, dtype=torch.float64).flatten().sort().values,
        rtol=0,
        atol=1e-12,
    )
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.detach(), theta[name], rtol=0, atol=1e-12)


@pytest.mark.parametrize("rule", ["v1", "v2"])
def test_goes_on_after_finish(rule: str) -> None:
    model, strategy = chain(3), Cyclic(rule=rule)
    trainer = Interleaved(list(model), optimizer_of("sgd", model), nn.functional.mse_loss, strategy)
    for t in range(ITERATIONS):
        if t == 2:
            trainer.finish()
        trainer.step([batch(i, t) for i in range(1, 4)])
    trainer.finish()
    _, theta = equations(3, "sgd", strategy, anew=2)
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.detach(), theta[name], rtol=0, atol=1e-12)


def test_older_parameters_are_kept_only_while_needed() -> None:
    """v2 never keeps any for forwards to come; v1 does for as long as there are some."""
    for rule, most in (("v2", 1), ("v1", 2)):
        model = chain(4)
        trainer = Interleaved(
            list(model), optimizer_of("sgd", model), nn.functional.mse_loss, Cyclic(rule=rule)
        )
        seen = []

        def passed(work: Work, _begin_s: float, _end_s: float, trainer=trainer) -> None:
            # The last forward of an iteration is the last that uses older ones.
            if not work.backward and work.batch % 4 == 3:
                assert len(trainer.stages[work.stage].versions) == 1

        trainer.on_work = passed
        for t in range(3):
            trainer.step([batch(i, t) for i in range(4)])
            seen.append(max(len(stage.versions) for stage in trainer.stages))
        assert max(seen) == most
        trainer.finish()


@pytest.mark.parametrize("n", [4, 8])
def test_activations_are_about_half(n: int) -> None:
    """(N+1)/2 sets of activations of N, at any time once the first micro-batches have begun."""
    torch.manual_seed(0)
    stages = [nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(n)]
    model = nn.Sequential(*stages)
    batches = [(torch.randn(64, 32), torch.randn(64, 32)) for _ in range(n)]
    with Activations(model.parameters) as parallel:
        losses = [nn.functional.mse_loss(model(x), y) for x, y in batches]
    assert parallel.live_bytes == parallel.peak_bytes
    del losses
    assert parallel.live_bytes == 0
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    trainer = Interleaved(stages, optimizer, nn.functional.mse_loss)
    # Updates put parameters elsewhere meanwhile; they must not count.
    with Activations(model.parameters) as meter:
        for _ in range(4):
            trainer.step(batches)
    trainer.finish()
    assert meter.live_bytes == 0
    assert 0.4 < meter.peak_bytes / parallel.peak_bytes <= (n + 1) / (2 * n) + 0.05


def test_stages_are_even() -> None:
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(6)))
    stages = split(model, 3, torch.randn(2, 4), balance="flops")
    assert [len(stage) for stage in stages] == [2, 2, 2]
    assert [len(stage) for stage in split(model, 2, torch.randn(2, 4), balance=[1, 5])] == [1, 5]
    assert sum(len(stage) for stage in split(model, 4, torch.randn(2, 4))) == 6
    assert stages[0][0] is model[0]


def test_timing_of_stages_leaves_gradients_and_random_numbers_as_they_are() -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Dropout(), nn.Linear(4, 4)), torch.randn(2, 4)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    state = torch.get_rng_state()
    split(model, 2, x, balance="time")
    assert torch.equal(torch.get_rng_state(), state)
    for p in model.parameters():
        assert p.grad is not None
        assert torch.equal(p.grad, torch.ones_like(p))


class Skips(nn.Module):
    """No sequence, but it can be cut between its halves."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.relu(self.first(x)) + x)


def test_a_model_that_is_no_sequence_is_cut_where_it_says() -> None:
    model, x = Skips(), torch.randn(3, 4)
    one, other = split(model, 2, x, split_points=["second"])
    torch.testing.assert_close(other(one(x)), model(x))


class Together(torch.optim.SGD):
    """Clips the gradient of all its parameters within the step."""

    def step(self, closure=None):
        nn.utils.clip_grad_norm_([p for g in self.param_groups for p in g["params"]], 1e-3)
        return super().step(closure)


def coupled() -> Interleaved:
    stages = [nn.Linear(4, 4), nn.Linear(4, 4)]
    optimizer = Together([p for stage in stages for p in stage.parameters()], lr=0.1)
    return Interleaved(stages, optimizer, nn.functional.mse_loss)


TIED = nn.Linear(4, 4)
BAD = [
    (lambda: split(Skips(), 2, torch.randn(3, 4)), "must be an nn.Sequential"),
    (lambda: split(nn.Sequential(nn.Linear(2, 2)), 2, torch.randn(1, 2)), r"stages \(2\)"),
    (lambda: split(Skips(), 2, torch.randn(3, 4), split_points=["third"]), "must name a module"),
    (lambda: split(Skips(), 3, torch.randn(3, 4), split_points=["second"]), "one less than"),
    (lambda: split(nn.Sequential(TIED, TIED), 2, torch.randn(3, 4), balance=[2, 0]), "balance"),
    (lambda: trainer_of(nn.ReLU(), nn.Linear(4, 4)), "stage 1 has no parameters"),
    (lambda: trainer_of(TIED, TIED), "stage 2 shares the parameter 'weight'"),
    (lambda: trainer_of(nn.Linear(4, 4), nn.BatchNorm1d(4)), "stage 2 has batch normalization"),
    (coupled, "Together .*cannot step stage by stage"),
    (lambda: trainer_of(nn.Linear(4, 4), wire="int4"), r"wire \('int4'\) is for messages between"),
    (lambda: trainer_of(nn.Linear(4, 4)).step([]), r"batches \(0\) must be as many"),
]


def trainer_of(*stages: nn.Module, wire: str = "none") -> Interleaved:
    parameters = {p for stage in stages for p in stage.parameters()} or {
        nn.Parameter(torch.ones(1))
    }
    optimizer, strategy = torch.optim.SGD(parameters, lr=0.1), Cyclic(wire=wire)
    return Interleaved(stages, optimizer, nn.functional.mse_loss, strategy)


@pytest.mark.parametrize(("act", "words"), BAD, ids=[words for _, words in BAD])
def test_what_cannot_be(act, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        act()


def test_a_learning_rate_is_that_of_its_iteration() -> None:
    """A scheduler steps between two iterations, while the one before is still under way."""
    model = chain(3)
    optimizer = optimizer_of("sgd", model)
    trainer = Interleaved([*model], optimizer, nn.functional.mse_loss)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    for t in range(ITERATIONS):
        trainer.step([batch(i, t) for i in range(1, 4)])
        scheduler.step()
    trainer.finish()
    _, theta = equations(3, "sgd", Cyclic(), fall=0.5)
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.detach(), theta[name], rtol=0, atol=1e-12)


def test_does_not_go_on_after_a_failure() -> None:
    model = chain(2)

    def loss(output: Tensor, target: Tensor | None) -> Tensor:
        if target is None:
            raise KeyError("no target")
        return nn.functional.mse_loss(output, target)

    trainer = Interleaved([*model], optimizer_of("sgd", model), loss)
    trainer.step([batch(1, 0), batch(2, 0)])
    with pytest.raises(KeyError, match="no target"):
        trainer.step([(batch(1, 1)[0], None), batch(2, 1)])
    with pytest.raises(RuntimeError, match="last checkpoint"):
        trainer.finish()


def test_weights_used_twice_within_a_stage() -> None:
    """One stage, so that it is plain training."""

    def tied() -> nn.Module:
        torch.manual_seed(3)
        first, second = nn.Linear(5, 5), nn.Linear(5, 5)
        second.weight = first.weight
        return nn.Sequential(first, nn.Tanh(), second).double()

    plain, model = tied(), tied()
    trainer = Interleaved([model], optimizer_of("sgd", model), nn.functional.mse_loss)
    optimizer = optimizer_of("sgd", plain)
    for t in range(ITERATIONS):
        trainer.step([batch(1, t)])
        optimizer.zero_grad()
        x, y = batch(1, t)
        nn.functional.mse_loss(plain(x), y).backward()
        optimizer.step()
    trainer.finish()
    assert model[0].weight is model[2].weight
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-12)


class Mixed(nn.Module):
    """Its parameters alternate between two dtypes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.ModuleList(
            nn.Linear(5, 5, dtype=dtype) for dtype in (torch.float32, torch.float64, torch.float32)
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x.type_as(layer.weight)))
        return x.double()


def test_a_stage_whose_parameters_have_two_dtypes() -> None:
    plain, model = Mixed(), Mixed()
    trainer = Interleaved([model], optimizer_of("sgd", model), nn.functional.mse_loss)
    optimizer = optimizer_of("sgd", plain)
    for t in range(2):
        trainer.step([batch(1, t)])
        optimizer.zero_grad()
        x, y = batch(1, t)
        nn.functional.mse_loss(plain(x), y).backward()
        optimizer.step()
    trainer.finish()
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-6)
