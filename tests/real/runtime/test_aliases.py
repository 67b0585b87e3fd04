"""A rule under another name gives the same bits in real processes: training, checkpoint, restart,
consolidated weights, prediction."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.distributed as dist
from cases.models import USUAL, Case, build_model, build_optimizer, profile_of
from cases.strategy_lists import STRATEGIES
from cases.workers import User, bits, prepared
from harness.ranks import run_world

import offbeat
from offbeat.core.rules import EFFECTS, RULES, SETTINGS, VOTES
from offbeat.core.sim.prediction import predict_plan
from offbeat.core.strategy.parsing import parse
from offbeat.plan import Plan
from offbeat.profile import Profile
from offbeat.strategies import Strategy

PREFIX, SAVED, STOP = "my_", 5, 9
# One strategy per rule at least, with settings that use it.
TEXTS = (
    "cyclic:rule=v1",
    "deft",
    "diloco:delay=1",
    "dreamddp:clip=1.0",
    "dreamddp:due=delayed:clip=1.0",
    "fedavg:fraction=0.5",
    "selsync:state=reset",
)
RUN = {"add", "clear", "scale", "swap", "copy", "delta", "outer", "close", "reset", "select"}
RUN |= {"clip", "clip_early", "changed", "local"}


def renamed(plan: Plan) -> Plan:
    return replace(
        plan,
        applies=tuple(replace(a, rule=PREFIX + a.rule) for a in plan.applies),
        votes=tuple(replace(v, rule=PREFIX + v.rule) for v in plan.votes),
    )


def aliased(strategy: Strategy) -> Strategy:
    """The strategy with a plan of renamed rules."""

    class Aliased(type(strategy)):  # type: ignore[misc]
        def plan(self, profile: Profile) -> Plan:
            return renamed(super().plan(profile))

    return Aliased(**{name: getattr(strategy, name) for name in strategy.settings()})


def trained(strategy: Strategy, folder: Path, *, restarted: bool) -> list[Any]:
    """The rules that have run, and the bits after training and once consolidated; `restarted`:
    the same again from a checkpoint."""
    case = Case()
    profile, found = profile_of(case, dist.get_world_size()), []
    for begin in (0, SAVED) if restarted else (0,):
        model = build_model(case, seed=dist.get_rank() + begin)
        optimizer = build_optimizer(case, model)
        with prepared(model, optimizer, strategy, profile=profile) as (model, optimizer):
            if begin:
                assert offbeat.load(folder, model, optimizer).exact
            user = User(case, model, optimizer, USUAL)
            for t in range(begin, STOP):
                if t == SAVED and restarted and not begin:
                    offbeat.save(folder, model, optimizer).wait()
                user.iterate(t)
            plan = model._session.plan
            found.append(bits(model))
            model.consolidate(repair=True)
            found.append(bits(model))
    return [{rule.rule for rule in (*plan.applies, *plan.votes)}, *found]


def both(texts: tuple[str, ...], folder: str) -> list[tuple[str, list[Any], list[Any]]]:
    dist.init_process_group("gloo")
    for table in (RULES, SETTINGS, EFFECTS, VOTES):
        table.update({PREFIX + name: value for name, value in table.items()})
    found = []
    for number, text in enumerate(texts):
        own = trained(parse(text), Path(folder), restarted=False)
        other = trained(aliased(parse(text)), Path(folder, str(number)), restarted=True)
        found.append((text, own, other))
    return found


def test_aliases_give_the_same_bits() -> None:
    rules: set[str] = set()
    with tempfile.TemporaryDirectory() as folder:
        for text, own, other in run_world(both, 2, TEXTS, folder, timeout_s=120)[0]:
            assert other[0] == {PREFIX + name for name in own[0]}, text
            assert other[1:] == own[1:] * 2, text
            rules |= own[0]
    assert rules >= RUN


def test_aliases_have_the_same_predictions(monkeypatch: Any) -> None:
    for table in (RULES, SETTINGS, EFFECTS, VOTES):
        for name in [*table]:
            monkeypatch.setitem(table, PREFIX + name, table[name])
    profile = profile_of(Case(), 2)
    for cls in STRATEGIES.values():
        if cls.name == "ddp":
            continue
        plan = cls().plan(profile)
        own, other = (predict_plan(p, profile) for p in (plan, renamed(plan)))
        assert own.iteration_s == other.iteration_s, cls.name
