"""What rules declare is what they do, and all that others know of them."""

from __future__ import annotations

import ast
from dataclasses import replace
from pathlib import Path
from random import Random

import numpy as np
import pytest
from oracle import quadratic
from oracle.random_plans import random_plan, ranks_of

import offbeat
from offbeat.core.derive import effects
from offbeat.core.derive.deferred import defer_updates
from offbeat.core.derive.lean import keeps_gradients
from offbeat.core.plan.program import Program
from offbeat.core.rules import EFFECTS, RULES, SETTINGS, rule, vote
from offbeat.core.runtime.engine import Engine
from offbeat.core.verify.check import check
from offbeat.plan import Apply, Moment, Phases, Plan

SOURCE = Path(offbeat.__file__).parent
NUMBERS = {"number": 0.5, "count": 1, "numbers": (2.0, 0.5)}


class Recording:
    """A context that remembers who touched what; every buffer has numbers of its own."""

    rank = 0

    def __init__(self, buckets: int = 2):
        self.read_, self.written, self.memory = set(), set(), {}
        self.did: list[str] = []
        self.buffers: dict[str, np.ndarray] = {}
        self.size = buckets

    def _views(self, buffer, run):
        if buffer not in self.buffers:
            rng = np.random.default_rng(sum(map(ord, buffer)))
            self.buffers[buffer] = rng.normal(size=(self.size, 3))
        return [self.buffers[buffer][run.start : run.stop].reshape(-1)]

    def read(self, buffer, buckets, age=0):
        self.read_.add(buffer)
        return self._views(buffer, buckets)

    def write(self, buffer, buckets, age=0):
        self.written.add(buffer)
        return self._views(buffer, buckets)

    parameters = read  # what is changed shows in the numbers

    def squared_norm(self, buffer, buckets):
        return float(sum((x * x).sum() for x in self.read(buffer, buckets)))

    def scale(self, buffer, buckets, factor):
        for x in self.write(buffer, buckets):
            x *= factor

    def swap(self, a, b, buckets):
        for one, other in zip(self.write(a, buckets), self.write(b, buckets), strict=True):
            one[...], other[...] = other.copy(), one.copy()

    def rotate(self, buffer):
        self.written.add(buffer)
        self.did.append("close")

    def local(self, apply):
        self.read_ |= {"grad", "param", "state"}
        self.written |= {"grad", "param", "state"}
        self.did.append("update")

    def reset(self, buckets):
        self.written.add("state")

    def recall(self, name):
        return self.memory.get(name)

    def keep(self, name, value):
        self.memory[name] = value


def applied(rule: str, run: range, *, optional: bool = True) -> Apply:
    """With a buffer of its own for every setting that needs one."""
    args = {}
    for name, setting in SETTINGS[rule].items():
        if setting.what == "buffer" and (optional or not setting.optional):
            args[name] = f"<{name}>"
        elif setting.default is None and not setting.optional:
            args[name] = NUMBERS[setting.what]
    return Apply(rule, run, Moment("step"), Phases([0]), args=tuple(args.items()))


@pytest.mark.parametrize("rule", RULES)
def test_rules_use_the_declared_buffers(rule):
    apply, context = applied(rule, range(2)), Recording()
    before: dict[str, np.ndarray] = {}
    for name in effects.reads(apply) | effects.writes(apply):
        before[name] = context._views(name, range(2))[0].copy()
    RULES[rule](context, apply)
    changed = {
        n for n, x in before.items() if not np.array_equal(context.buffers[n].reshape(-1), x)
    }
    assert context.read_ | context.written <= effects.reads(apply) | effects.writes(apply)
    assert changed <= effects.writes(apply)
    assert context.written <= effects.writes(apply)
    assert set(context.did) == ({EFFECTS[rule].role} - {None})


@pytest.mark.parametrize("rule", [r for r, e in EFFECTS.items() if e.by_bucket and not e.role])
def test_rules_by_bucket_give_equal_results_for_a_run(rule):
    whole, single = Recording(), Recording()
    RULES[rule](whole, applied(rule, range(2)))
    for b in range(2):
        RULES[rule](single, applied(rule, range(b, b + 1)))
    assert whole.memory == single.memory
    for name, values in whole.buffers.items():
        np.testing.assert_array_equal(values, single.buffers[name])


@pytest.mark.parametrize("rule", [r for r, e in EFFECTS.items() if not e.by_bucket and not e.role])
def test_rules_not_by_bucket_give_other_results_for_a_run(rule):
    whole, single = Recording(), Recording()
    RULES[rule](whole, applied(rule, range(2)))
    for b in range(2):
        RULES[rule](single, applied(rule, range(b, b + 1)))
    same = all(np.array_equal(v, single.buffers[n]) for n, v in whole.buffers.items())
    assert not (same and whole.memory == single.memory)


def test_no_second_rule_or_vote_takes_a_name():
    def local(context, apply): ...

    for register in (rule(conserves=True), vote()):
        with pytest.raises(ValueError, match="another name"):
            register(local)
    assert EFFECTS["local"].role == "update"


@pytest.mark.long
def test_no_other_room_names_a_rule():
    found = []
    for path in SOURCE.rglob("*.py"):
        where = path.relative_to(SOURCE)
        if where.parts[0] == "numerics":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Compare):
                sides = (node.left, *node.comparators)
                names = {n.attr for n in sides if isinstance(n, ast.Attribute)}
                texts = {n.value for n in ast.walk(node) if isinstance(n, ast.Constant)}
                if "rule" in names and texts & RULES.keys():
                    found.append(f"{where}:{node.lineno}")
            indexes = isinstance(node, ast.Subscript) and getattr(node.value, "id", "") == "RULES"
            if indexes and isinstance(node.slice, ast.Constant):
                found.append(f"{where}:{node.lineno}")
    assert not found


# ---- under another name -------------------------------------------------------------------------


@pytest.fixture
def aliased(monkeypatch):
    """Every rule is also there as `my_...`; a plan with those."""
    for table in (RULES, SETTINGS, EFFECTS):
        for name in [*RULES] if table is not RULES else [*EFFECTS]:
            if not name.startswith("my_"):
                monkeypatch.setitem(table, f"my_{name}", table[name])

    def renamed(plan: Plan) -> Plan:
        return replace(plan, applies=tuple(replace(a, rule=f"my_{a.rule}") for a in plan.applies))

    return renamed


def accepted(count: int, start: int = 0):
    seed = start
    while count:
        plan = random_plan(Random(seed), broken=0.0)
        if not check(plan):
            count -= 1
            yield seed, plan
        seed += 1


@pytest.mark.long
def test_check_and_transforms_do_not_know_names(aliased):
    for _, plan in accepted(40):
        other = aliased(plan)
        assert not check(other)
        assert keeps_gradients(other) is keeps_gradients(plan)
        put_off, theirs = defer_updates(plan), defer_updates(other)
        assert (put_off and aliased(put_off)) == theirs
        assert effects.delayed_buffers(other) == effects.delayed_buffers(plan)
        assert effects.common_buffers(other) == effects.common_buffers(plan)


def interrupted(plan, task, monkeypatch, at, how):
    """What forwards see in the runtime if it is drained, or weights are loaded, before some
    iterations."""
    count = [0] * task.ranks

    class Interrupted(Engine):
        def zero_grad(self, set_to_none=True):
            super().zero_grad(set_to_none)
            rank = self.control.rank
            if count[rank] in at:
                if how == "drain":
                    self.drain()
                else:
                    self.discard()
                for tensor in self.flat.tensors("param", range(self.plan.buckets), 0):
                    tensor.mul_(0.5 if how == "load" else 1.0)
            count[rank] += 1

    monkeypatch.setattr(quadratic, "Engine", Interrupted)
    return np.array(quadratic.ran(plan, task))


@pytest.mark.long
@pytest.mark.parametrize("how", ["drain", "load"])
def test_the_runtime_does_not_know_names(aliased, monkeypatch, how):
    for seed, plan in accepted(10, start=1000):
        if how == "load" and any(t.wire and t.wire.anchor for t in plan.transfers):
            continue  # anchors are told apart by loads, which a session counts, and not this test
        weighted = any(a.arg("by") or a.arg("samples") for a in plan.applies)
        ranks = 2 if plan.uniform and not weighted else 0
        ranks = max(ranks, ranks_of(plan))
        sizes = tuple(Random(seed).choice((1, 3, 5)) for _ in range(plan.buckets))
        iterations = plan.prologue + 2 * plan.period + Program(plan).lag + 2
        task = quadratic.Quadratic(sizes, ranks, iterations, seed)
        at = {plan.prologue + 1, plan.prologue + plan.period + 1}
        own = interrupted(plan, task, monkeypatch, at, how)
        other = interrupted(aliased(plan), task, monkeypatch, at, how)
        np.testing.assert_array_equal(own, other, err_msg=f"seed {seed}\n{plan}")
