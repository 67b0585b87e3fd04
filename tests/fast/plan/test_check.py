"""Checks of plans: every kind of fault is found, and printed with an arrow where it is."""

from dataclasses import replace

import pytest
from oracle.plan_families import (
    FAMILIES,
    deft_plan,
    diloco_plan,
    fedavg_plan,
    selsync_plan,
    topk_plan,
)

from offbeat.core.codecs import WIRES
from offbeat.core.rules import RULES
from offbeat.core.verify.check import check, raise_if_wrong, slices_of
from offbeat.plan import (
    Apply,
    Buffer,
    Moment,
    Phases,
    Plan,
    Vote,
    Wire,
    local,
    transfer,
    vote_channel,
)
from offbeat.profile import Bucket, Link, Profile
from offbeat.strategies import BSP, DeFT, DiLoCo, LocalSGD

PROFILE = Profile(
    (Bucket("a", 1.0, 2.0, 8), Bucket("b", 0.5, 1.0, 4)), (Link("net", 0.5, 4.0),), world_size=2
)
STEP, END, NEXT = Moment("step"), Moment("end"), Moment("forward", 1, 1)
ALWAYS = Phases([0])


def move(kind, start, stop, after, before, phases=(0,), link="net", **more):
    return transfer(
        kind, range(start, stop), after=after, before=before, phases=phases, link=link, **more
    )


def handed(wire, buffer="grad", ranks=(1, 0), link="net"):
    """A message over a wire to one rank."""
    after = Moment("grad", 1) if buffer == "grad" else STEP
    return move(buffer, 0, 2, after, END, link=link, verb="send", ranks=ranks, wire=wire)


def plan_of(*transfers, applies=None, **more):
    applies = (
        [local(2, STEP, range(more.get("prologue", 0) + more.get("period", 1)))]
        if (applies is None)
        else applies
    )
    return Plan("mine", 2, transfers, tuple(applies), **more)


def first(plan, profile=None):
    problems = check(plan, profile)
    assert problems, plan
    return problems[0]


ALL_GRADIENTS = move("grad", 0, 2, Moment("grad", 1), STEP)
FIRST, SECOND = (move("grad", b, b + 1, Moment("grad", b), STEP) for b in range(2))
SUM = Buffer("sum", "grad")


def apply(rule, at, run=range(2), phases=(0,), **more):
    return Apply(rule, run, at, Phases(phases), **more)


LOCAL = apply("local", STEP)

# ---- names and numbers: (plan, message, indices of its rules at fault) -----------------------

NAMES = {
    "no buckets": (Plan("mine", 0), "buckets (0) of the plan must be at least 1", []),
    "no period": (plan_of(period=0), "period (0) of the plan must be at least 1", []),
    "prologue": (plan_of(prologue=-1), "prologue (-1) of the plan must be at least 0", []),
    "deadline first": (
        plan_of(move("grad", 0, 2, END, STEP)),
        "deadline step of grad[0:2]@net comes before its release end",
        [0],
    ),
    "deadline at once": (
        plan_of(move("grad", 0, 2, Moment("grad", 1), Moment("grad", 1))),
        "deadline grad(1) of grad[0:2]@net comes before its release grad(1)",
        [0],
    ),
    "release beyond": (
        plan_of(move("grad", 0, 2, Moment("grad", 5), STEP)),
        "release grad(5) of grad[0:2]@net never fires: there are 2 buckets",
        [0],
    ),
    "deadline beyond": (
        plan_of(FIRST, move("grad", 1, 2, Moment("grad", 1), Moment("grad", 2))),
        "deadline grad(2) of grad[1:2]@net never fires: there are 2 buckets",
        [1],
    ),
    "step of a bucket": (
        plan_of(move("grad", 0, 2, Moment("grad", 1), Moment("step", 0))),
        "deadline step(0) of grad[0:2]@net must not name a bucket",
        [0],
    ),
    "late release": (
        plan_of(move("grad", 0, 2, Moment("grad", 1, 1), Moment("step", lag=1))),
        "release grad(1)+1 of grad[0:2]@net must lie in its own iteration: use phases instead",
        [0],
    ),
    "late apply": (
        plan_of(ALL_GRADIENTS, applies=[apply("local", Moment("step", lag=1))]),
        "moment step+1 of local[0:2] must lie in its own iteration: use phases instead",
        [1],
    ),
    "before its iteration": (
        plan_of(move("grad", 0, 2, Moment("grad", 1), Moment("step", lag=-1))),
        "deadline step+-1 of grad[0:2]@net must not lie before its iteration",
        [0],
    ),
    "too many buckets": (
        plan_of(move("grad", 0, 3, Moment("grad", 1), STEP)),
        "grad[0:3]@net must name a run of buckets within 0..1",
        [0],
    ),
    "no buckets in it": (
        plan_of(move("grad", 1, 1, Moment("grad", 1), STEP), ALL_GRADIENTS),
        "grad[1:1]@net must name a run of buckets within 0..1",
        [0],
    ),
    "phases just beyond": (
        plan_of(move("grad", 0, 2, Moment("grad", 1), STEP, phases=(0, 1))),
        "grad[0:2]@net never fires in phases 1: the plan has the phases 0..0",
        [0],
    ),
    "phases beyond": (
        plan_of(move("grad", 0, 2, Moment("grad", 1), STEP, phases=(0, 2))),
        "grad[0:2]@net never fires in phases 2: the plan has the phases 0..0",
        [0],
    ),
    "no phases": (
        plan_of(ALL_GRADIENTS, move("state", 0, 2, STEP, END, phases=())),
        "state[0:2]@net never fires in phases none: the plan has the phases 0..0",
        [1],
    ),
    "part beyond": (
        plan_of(FIRST, move("grad", 1, 2, Moment("grad", 1), STEP, part=2, parts=2)),
        "grad[1:2]/3of2@net must be one of its 2 parts",
        [1],
    ),
    "slices of a run": (
        plan_of(move("grad", 0, 2, Moment("grad", 1), STEP, parts=2)),
        "grad[0:2]/1of2@net cuts a run of buckets; cut one bucket, or send the run whole",
        [0],
    ),
    "age": (
        plan_of(move("grad", 0, 2, Moment("grad", 1), STEP, age=1)),
        "age (1) of grad~1[0:2]@net must be below the copies of grad (1)",
        [0],
    ),
    "age of an apply": (
        plan_of(ALL_GRADIENTS, applies=[local(2, STEP, [0], age=1)]),
        "age (1) of local[0:2] must be below the copies of grad (1)",
        [1],
    ),
    "buffer": (
        plan_of(move("gard", 0, 2, Moment("grad", 1), STEP)),
        "buffer 'gard' of gard[0:2]@net must be one of grad, param, state",
        [0],
    ),
    "broadcast of gradients": (
        plan_of(ALL_GRADIENTS, move("grad", 0, 2, Moment("grad", 1), STEP, verb="broadcast")),
        "broadcast grad[0:2]@net must carry buffers of all buckets, whole and without a vote",
        [1],
    ),
    "buffers averaged": (
        plan_of(ALL_GRADIENTS, move("buffers", 0, 2, Moment("grad", 1), STEP)),
        "buffer 'buffers' of buffers[0:2]@net must be one of grad, param, state",
        [1],
    ),
    "into": (
        plan_of(move("grad", 0, 2, Moment("grad", 1), STEP, into="sum"), buffers=(Buffer("sum"),)),
        "grad[0:2] into sum@net must go into a buffer of the same shape that has one copy",
        [0],
    ),
    "state into itself": (
        plan_of(ALL_GRADIENTS, move("state", 0, 2, STEP, END, into="state")),
        "state[0:2] into state@net must go into a buffer of the same shape that has one copy",
        [1],
    ),
    "rule": (
        plan_of(ALL_GRADIENTS, applies=[LOCAL, apply("locale", STEP)]),
        f"rule 'locale' of locale[0:2] must be one of {', '.join(sorted(RULES))}",
        [2],
    ),
    "setting": (
        plan_of(ALL_GRADIENTS, applies=[local(2, STEP, [0], merg="mean")]),
        "setting 'merg' of local[0:2] must be one of age, merge, scale",
        [1],
    ),
    "setting left out": (
        plan_of(ALL_GRADIENTS, applies=[LOCAL, apply("add", STEP, args={"source": "grad"})]),
        "target of add[0:2] must be given",
        [2],
    ),
    "word": (
        plan_of(ALL_GRADIENTS, applies=[local(2, STEP, [0], merge="max")]),
        "merge ('max') of local[0:2] must be one of sum, mean",
        [1],
    ),
    "number": (
        plan_of(ALL_GRADIENTS, applies=[local(2, STEP, [0], scale="half")]),
        "scale ('half') of local[0:2] must be a number from -inf to inf",
        [1],
    ),
    "whole number": (
        plan_of(ALL_GRADIENTS, applies=[local(2, STEP, [0], age=0.5)]),
        "age (0.5) of local[0:2] must be a whole number",
        [1],
    ),
    "numbers": (
        plan_of(
            ALL_GRADIENTS,
            applies=[LOCAL, apply("scale", STEP, args={"buffer": "param", "by": 2.0})],
        ),
        "by (2.0) of scale[0:2] must be numbers, one per rank",
        [2],
    ),
    "buffer of a setting": (
        plan_of(ALL_GRADIENTS, applies=[LOCAL, apply("clear", STEP, args={"buffer": "sum"})]),
        "buffer ('sum') of clear[0:2] must be one of grad, param, state",
        [2],
    ),
    "kinds of buffers": (
        plan_of(
            ALL_GRADIENTS,
            applies=[LOCAL, apply("copy", STEP, args={"source": "grad", "target": "param"})],
        ),
        "copy[0:2] must name buffers of one kind",
        [2],
    ),
    "kind of a buffer": (
        plan_of(
            ALL_GRADIENTS,
            applies=[LOCAL, apply("outer", END)],
            buffers=(Buffer("anchor", "grad"), Buffer("velocity")),
        ),
        "anchor ('anchor') of outer[0:2] must be a buffer like param",
        [2],
    ),
    "wire": (
        plan_of(move("grad", 0, 2, Moment("grad", 1), STEP, wire=Wire("top", {}))),
        "wire 'top' of grad[0:2]@net must be one of " + ", ".join(sorted(WIRES)),
        [0],
    ),
    "fraction": (
        plan_of(move("grad", 0, 2, Moment("grad", 1), STEP, wire=Wire("topk", {"fraction": 2}))),
        "fraction (2) of grad[0:2]@net must be a number from 0 to 1",
        [0],
    ),
    "wire of a half": (
        plan_of(
            move(
                "grad",
                0,
                2,
                Moment("grad", 1),
                STEP,
                verb="reduce_scatter",
                wire=Wire("topk", {"fraction": 0.5}),
            )
        ),
        "reduce_scatter grad[0:2]@net cannot be encoded as topk: only all_reduce and send can",
        [0],
    ),
    "codes of a send that must be summed up": (
        plan_of(handed(Wire("randomk", {"fraction": 0.5}))),
        "send grad[0:2] 1->0@net cannot be encoded as randomk: only all_reduce can",
        [0],
    ),
    "codes of a send in shards": (
        plan_of(handed(Wire("int4", {"via": "scatter"}))),
        "via ('scatter') of send grad[0:2] 1->0@net must be left out: it goes to one rank",
        [0],
    ),
    "errors twice": (
        plan_of(
            handed(Wire("int4", {}, "lost", "there"), "param"),
            buffers=(Buffer("lost"), Buffer("there", start="param")),
        ),
        "error ('lost') of send param[0:2] 1->0@net must be left out: what is lost stays in the "
        "difference to its anchor",
        [0],
    ),
    "what a receiver has, by two links": (
        plan_of(
            handed(Wire("int4", anchor="there"), "param"),
            handed(Wire("int4", anchor="there"), "param", link="net#1"),
            buffers=(Buffer("there", start="param"),),
        ),
        "send param[0:2] 1->0@net and send param[0:2] 1->0@net#1 share an anchor; give each link "
        "its own",
        [0, 1],
    ),
    "what a receiver has, and what all have": (
        plan_of(
            handed(Wire("int4", anchor="there"), "param"),
            move("param", 0, 2, STEP, END, wire=Wire("int4", anchor="there")),
            buffers=(Buffer("there", start="param"),),
        ),
        "send param[0:2] 1->0@net and param[0:2]@net share an anchor; give each link its own",
        [0, 1],
    ),
    "error in the payload": (
        plan_of(
            move(
                "grad", 0, 2, Moment("grad", 1), STEP, wire=Wire("topk", {"fraction": 0.5}, "grad")
            )
        ),
        "error ('grad') of grad[0:2]@net must be a buffer of its own",
        [0],
    ),
    "error of another kind": (
        replace(topk_plan(), buffers=(Buffer("residual"),)),
        "error ('residual') of grad[0:1]@net must be a buffer like grad that has one copy",
        [0],
    ),
    "error with copies": (
        replace(topk_plan(), buffers=(Buffer("residual", "grad", copies=2),)),
        "error ('residual') of grad[0:1]@net must be a buffer like grad that has one copy",
        [0],
    ),
    "anchor on a channel of groups": (
        plan_of(
            move("param", 0, 2, STEP, END, link="net#1", wire=Wire("int8", anchor="anchor")),
            buffers=(Buffer("anchor", start="param"),),
            groups={"net": ((0, 1), (2, 3))},
        ),
        "anchor ('anchor') of param[0:2]@net#1 must be left out: it is the same on all ranks, and "
        "'net' spans groups of them",
        [0],
    ),
    "a half alone": (
        plan_of(move("grad", 0, 2, Moment("grad", 1), STEP, verb="reduce_scatter")),
        "reduce_scatter grad[0:2]@net must come with its other half, all_gather, in the same "
        "iterations",
        [0],
    ),
    "half of the halves": (
        plan_of(
            move("grad", 0, 2, Moment("grad", 1), STEP, (0, 1), verb="reduce_scatter"),
            move("grad", 0, 2, STEP, END, (0,), verb="all_gather"),
            applies=[local(2, END, (0, 1))],
            period=2,
        ),
        "reduce_scatter grad[0:2]@net must come with its other half, all_gather, in the same "
        "iterations",
        [0],
    ),
    "twice by name": (
        plan_of(ALL_GRADIENTS, replace(ALL_GRADIENTS, before=END)),
        "grad[0:2]@net exists twice in phase 0; use another channel for one",
        [0, 1],
    ),
    "send to nobody": (
        plan_of(move("grad", 0, 2, Moment("grad", 1), STEP, verb="send")),
        "send grad[0:2]@net must name two ranks, from and to",
        [0],
    ),
    "exchange of one rank": (
        plan_of(
            move("param", 0, 2, STEP, END, verb="exchange", ranks=(1, 1), into="x"),
            buffers=(Buffer("x"),),
        ),
        "exchange param[0:2] 1<->1 into x@net must name two ranks",
        [0],
    ),
    "exchange in place": (
        plan_of(move("param", 0, 2, STEP, END, verb="exchange", ranks=(0, 1))),
        "exchange param[0:2] 0<->1@net must name the buffer that the payload of the other rank "
        "goes into",
        [0],
    ),
    "codes of an exchange": (
        plan_of(
            move(
                "param", 0, 2, STEP, END, verb="exchange", ranks=(0, 1), into="x", wire=Wire("int8")
            ),
            buffers=(Buffer("x"),),
        ),
        "exchange param[0:2] 0<->1 into x@net cannot be encoded as int8: only all_reduce and send "
        "can",
        [0],
    ),
    "send of an older copy": (
        replace(
            deft_plan(),
            transfers=(
                move("grad", 0, 3, STEP, END, age=1, verb="send", ranks=(0, 1), phases=(2,)),
            ),
        ),
        "send grad~1[0:3] 0->1@net must name the buffer that the older copy goes into",
        [0],
    ),
    "ranks of a collective": (
        plan_of(move("grad", 0, 2, Moment("grad", 1), STEP, ranks=(0, 1))),
        "grad[0:2] 0->1@net is a collective; the ranks it spans are the link's group",
        [0],
    ),
    "close of some": (
        replace(deft_plan(), applies=(*deft_plan().applies, apply("close", END, range(2)))),
        "close[0:2] must close the gradients of all buckets, on all ranks, without a vote",
        [3],
    ),
    "close in between": (
        replace(
            deft_plan(), applies=(*deft_plan().applies, apply("close", Moment("grad"), range(3)))
        ),
        "moment grad of close[0:3] must be step or end: a window ends with its iteration",
        [3],
    ),
    "close of one copy": (
        plan_of(ALL_GRADIENTS, applies=[LOCAL, apply("close", END)]),
        "copies (1) of grad must be at least 2 for close[0:2]",
        [2],
    ),
    "vote unknown": (
        plan_of(replace(ALL_GRADIENTS, when="sync")),
        "vote 'sync' of grad[0:2]@net must be one of none",
        [0],
    ),
    "vote at other times": (
        replace(
            selsync_plan(),
            period=2,
            transfers=(move("param", 0, 3, STEP, END, (0, 1), when="sync"),),
        ),
        "param[0:3]@net depends on the vote 'sync' in phases in which there is none",
        [0],
    ),
    "vote of the iteration before at other times": (
        replace(
            selsync_plan(),
            period=2,
            transfers=(move("param", 0, 3, STEP, END, when="sync", ago=1),),
        ),
        "param[0:3]@net depends on the vote 'sync' in phases in which there is none",
        [0],
    ),
    "vote due at once": (
        replace(selsync_plan(), votes=(replace(selsync_plan().votes[0], due=Moment("grad", 2)),)),
        "vote 'sync' is due grad(2), but taken only at grad(2); it must be due later",
        [1],
    ),
    "vote without a threshold": (
        replace(selsync_plan(), votes=(replace(selsync_plan().votes[0], args=()),)),
        "threshold of vote 'sync' must be given",
        [1],
    ),
    "votes of one name": (
        replace(selsync_plan(), votes=selsync_plan().votes * 2),
        "vote 'sync' must be defined once",
        [],
    ),
    "buffers of one name": (
        plan_of(ALL_GRADIENTS, buffers=(SUM, SUM)),
        "buffer 'sum' must be listed once",
        [],
    ),
    "no copies": (
        plan_of(ALL_GRADIENTS, buffers=(Buffer("sum", copies=0),)),
        "copies (0) of buffer 'sum' must be at least 1",
        [],
    ),
    "another grad": (
        plan_of(ALL_GRADIENTS, buffers=(Buffer("grad"),)),
        "buffer 'grad' is in every plan; only its copies can be set",
        [],
    ),
    "two states": (
        plan_of(ALL_GRADIENTS, buffers=(Buffer("state", "state", copies=2),)),
        "buffer 'state' has one copy",
        [],
    ),
    "groups": (
        plan_of(ALL_GRADIENTS, groups={"net": ((0, 1), (1, 2))}),
        "groups of link 'net' must hold each of the ranks 0..3 once",
        [],
    ),
    "groups of a channel": (
        plan_of(ALL_GRADIENTS, groups={"net#1": ((0, 1),)}),
        "groups of 'net#1' must be those of its link: all its channels share them",
        [],
    ),
}


def rules(plan):
    """In the order in which they are printed."""
    return [*plan.transfers, *plan.votes, *plan.applies]


@pytest.mark.parametrize(("plan", "message", "at_fault"), NAMES.values(), ids=NAMES)
def test_names_and_numbers(plan, message, at_fault):
    # Other modules may have registered further rules.
    found = {one.message.partition(" one of add")[0]: one for one in check(plan)}
    expected = message.partition(" one of add")[0]
    assert expected in found
    printed = str(found[expected]).splitlines()
    assert printed[0] == found[expected].message
    lines = printed[len(printed) - len(rules(plan)) :]
    marked = [i for i, line in enumerate(lines) if line.startswith("->")]
    assert marked == at_fault


# ---- what plans do: (plan, message, indices of rules at fault) -------------------------------

OUTER = diloco_plan()
DOES = {
    "no gradient yet": (
        plan_of(move("grad", 0, 2, Moment("grad", 0), STEP)),
        "grad[0:2]@net touches grad of bucket 1 too early: backward still adds to it",
        [0],
    ),
    "stepped in flight": (
        plan_of(move("grad", 0, 2, Moment("grad", 1), END)),
        "grad[0:2]@net is in flight between its release grad(1) and its deadline end while "
        "local[0:2] uses grad of bucket 0",
        [0, 1],
    ),
    "stepped in backward in flight": (
        plan_of(FIRST, SECOND, applies=[local(2, Moment("grad"), [0])]),
        "grad[0:1]@net reads grad of bucket 0, which the rule local has used up since backward",
        [0],
    ),
    "forward reads it in flight": (
        plan_of(move("param", 0, 2, STEP, Moment("forward", 0, 1))),
        "param[0:2]@net is in flight between its release step and its deadline forward(0)+1 "
        "while forward uses param of bucket 1",
        [0],
    ),
    "state in flight": (
        plan_of(ALL_GRADIENTS, move("state", 0, 2, Moment("forward"), END)),
        "state[0:2]@net is in flight between its release forward and its deadline end while "
        "local[0:2] uses state of bucket 0",
        [1, 2],
    ),
    "anchor in flight": (
        plan_of(
            move("param", 0, 2, STEP, NEXT, wire=Wire("int8", anchor="anchor")),
            applies=[LOCAL, apply("copy", END, args={"source": "param", "target": "anchor"})],
            buffers=(Buffer("anchor", start="param"),),
        ),
        "param[0:2]@net is in flight between its release step and its deadline forward(1)+1 while "
        "copy[0:2] uses anchor of bucket 0",
        [0, 2],
    ),
    "averaged twice": (
        plan_of(ALL_GRADIENTS, replace(SECOND, link="aux", before=END)),
        "grad[0:2]@net is in flight between its release grad(1) and its deadline step while "
        "grad[1:2]@aux uses grad of bucket 1",
        [0, 1],
    ),
    "averaged again": (
        plan_of(
            move("grad", 0, 1, Moment("grad", 0), Moment("grad", 1)),
            move("grad", 0, 2, Moment("grad", 1), STEP),
        ),
        "grad[0:2] is moved twice: grad[0:2]@net averages it again",
        [1],
    ),
    "never moved": (
        plan_of(FIRST),
        "bucket 1 is never moved, so its replicas drift apart",
        [],
    ),
    "first slice missing": (
        plan_of(FIRST, move("grad", 1, 2, Moment("grad", 1), STEP, part=1, parts=2)),
        "bucket 1 is only averaged in part, so its replicas drift apart",
        [],
    ),
    "last slice missing": (
        plan_of(FIRST, move("grad", 1, 2, Moment("grad", 1), STEP, width=2, parts=3)),
        "bucket 1 is only averaged in part, so its replicas drift apart",
        [],
    ),
    "only in the prologue": (
        plan_of(replace(FIRST, phases=Phases([0])), replace(SECOND, phases=Phases([0, 1])),
                prologue=1),
        "bucket 0 is not averaged in every iteration, nor later, so its replicas drift apart",
        [],
    ),
    "only in some iterations": (
        plan_of(FIRST, replace(SECOND, phases=Phases([1])),
                replace(FIRST, phases=Phases([1]), link="aux"), period=2),
        None,
        None,
    ),
    "gradients in every second iteration": (
        plan_of(replace(ALL_GRADIENTS, phases=Phases([1])), period=2),
        "bucket 0 is not averaged in every iteration, nor later, so its replicas drift apart",
        [],
    ),
    "nobody steps": (
        plan_of(ALL_GRADIENTS, applies=[]),
        "backward adds to gradients of an earlier iteration in grad of bucket 0",
        [],
    ),
    "one iteration without a step": (
        plan_of(
            replace(ALL_GRADIENTS, phases=Phases([0, 1])),
            applies=[apply("local", STEP, phases=(1,))],
            period=2,
        ),
        "backward adds to gradients of an earlier iteration in grad of bucket 0",
        [],
    ),
    "half a step": (
        plan_of(ALL_GRADIENTS, applies=[local(2, STEP, [0], scale=0.5)]),
        "bucket 0 must get every gradient exactly once: some are applied twice, always late, or "
        "never",
        [],
    ),
    "gradients thrown away": (
        plan_of(
            ALL_GRADIENTS,
            applies=[
                apply("local", STEP, range(1)),
                apply("clear", STEP, range(1, 2), args={"buffer": "grad"}),
            ],
        ),
        "bucket 1 must get every gradient exactly once: some are applied twice, always late, or "
        "never",
        [],
    ),
    "thrown away beside an outer step": (
        replace(
            OUTER,
            transfers=(move("param", 0, 3, STEP, END, (2,)),),
            applies=(
                apply("clear", STEP, range(1, 3), range(3), args={"buffer": "grad"}),
                apply("local", STEP, range(1), range(3)),
                apply("outer", END, range(1), (2,)),
            ),
        ),
        "bucket 1 must get every gradient exactly once: some are applied twice, always late, or "
        "never",
        [],
    ),
    "applied twice": (
        plan_of(ALL_GRADIENTS, applies=[LOCAL, apply("local", END)]),
        "local[0:2] has no gradients to apply: they were used up since backward",
        [2],
    ),
    "blocked": (
        plan_of(move("state", 0, 2, STEP, END), FIRST, SECOND),
        "grad[0:1]@net can never meet its deadline step: state[0:2]@net of iteration 0 goes "
        "first on net and is released only after step",
        [0, 1],
    ),
    "writer one bucket off, before backward is there": (
        plan_of(
            move("param", 0, 2, STEP, END),
            applies=[
                apply("local", Moment("grad", 1), range(1)),
                apply("local", Moment("grad", 0), range(1, 2)),
            ],
        ),
        "local[1:2] touches param of bucket 1 too early: the forward has read it and backward "
        "still needs it",
        [2],
    ),
    "writer one bucket off, after the forward": (
        plan_of(
            ALL_GRADIENTS,
            applies=[
                apply("local", Moment("forward", 0, 1), range(1, 2)),
                apply("local", Moment("forward", 1, 1), range(1)),
            ],
        ),
        "local[1:2] touches param of bucket 1 too early: the forward has read it and backward "
        "still needs it",
        [1],
    ),
    "released before what lands there": (
        plan_of(
            move("param", 0, 2, Moment("forward", 1), Moment("forward", 0), link="aux"),
            move("param", 0, 2, STEP, NEXT),
        ),
        "param[0:2]@aux",
        None,
    ),
    "vote reads what is in flight": (
        replace(
            selsync_plan(),
            transfers=(
                *selsync_plan().transfers,
                move("grad", 0, 3, Moment("grad", 1), STEP, link="aux"),
            ),
        ),
        "grad[0:3]@aux",
        None,
    ),
    "a vote before all gradients": (
        replace(
            selsync_plan(), votes=(replace(selsync_plan().votes[0], at=Moment("grad", 1)),)
        ),
        "sync touches grad of bucket 2 too early: backward still adds to it",
        [1],
    ),
    "depends on a vote too early": (
        replace(
            selsync_plan(),
            votes=(replace(selsync_plan().votes[0], due=END),),
        ),
        "param[0:3]@net depends on the vote 'sync' before it is due",
        [0],
    ),
    "a step that depends on a vote": (
        replace(
            selsync_plan(), applies=(replace(selsync_plan().applies[0], when="sync"),)
        ),
        "backward adds to gradients of an earlier iteration in grad of bucket 0",
        [],
    ),
    "half of a vote": (
        # What one vote averages another one resets: fatal only if the two disagree.
        replace(
            selsync_plan(),
            votes=(
                selsync_plan().votes[0],
                replace(selsync_plan().votes[0], name="land", due=END),
            ),
            transfers=(
                move("param", 0, 3, STEP, NEXT, when="sync", into="landing"),
                move("landing", 0, 3, END, NEXT, when="land", link="aux"),
            ),
            applies=(
                *selsync_plan().applies,
                apply("reset", END, range(3), when="land"),
            ),
            buffers=(Buffer("landing"),),
        ),
        "landing[0:3]@aux is in flight",
        None,
    ),
    "stepped between the halves": (
        plan_of(
            move("grad", 0, 2, Moment("grad", 1), STEP, verb="reduce_scatter"),
            move("grad", 0, 2, END, NEXT, verb="all_gather"),
        ),
        "all_gather grad[0:2]@net reads grad of bucket 0, which the rule local has used up",
        [1],
    ),
    # Parameters are averaged, so replicas do not drift apart although zeros are averaged.
    "gradients of a node released when local has used them up": (
        plan_of(
            move("grad", 0, 1, Moment("grad", 0), STEP, phases=(0, 1), link="inside"),
            move("param", 0, 2, STEP, END, phases=(1,)),
            applies=[local(2, Moment("grad"), range(2))],
            period=2,
            groups={"inside": ((0, 1), (2, 3))},
        ),
        "grad[0:1]@inside reads grad of bucket 0, which the rule local has used up",
        [0],
    ),
    "gradients kept when local has used them up": (
        plan_of(
            move("param", 0, 2, STEP, END),
            applies=[
                local(2, Moment("grad"), [0]),
                apply("add", STEP, args={"source": "grad", "target": "sum"}),
            ],
            buffers=(SUM,),
        ),
        "add[0:2] reads grad of bucket 0, which the rule local has used up",
        [2],
    ),
    "a send between groups": (
        plan_of(
            ALL_GRADIENTS,
            move("param", 0, 2, STEP, END, link="net#1", verb="send", ranks=(0, 2), into="sum"),
            buffers=(replace(SUM, kind="param"),),
            groups={"net": ((0, 1), (2, 3))},
        ),
        "send param[0:2] 0->2 into sum@net#1 must name two ranks of one group of its link",
        [1],
    ),
    "a message on the channel of votes": (
        plan_of(replace(ALL_GRADIENTS, link=vote_channel("net"))),
        "link 'net#votes' of grad[0:2]@net#votes carries votes alone",
        [0],
    ),
    "thrown away in the second iteration": (
        plan_of(
            replace(ALL_GRADIENTS, phases=Phases([0, 1])),
            applies=[
                apply("local", STEP),
                apply("clear", STEP, phases=(1,), args={"buffer": "grad"}),
            ],
            period=2,
        ),
        "bucket 0 must get every gradient exactly once: some are applied twice, always late, or "
        "never",
        [],
    ),
    "overwritten from the second iteration on": (
        plan_of(
            ALL_GRADIENTS,
            move("nothing", 0, 2, END, Moment("step", lag=1), link="aux", into="grad"),
            buffers=(Buffer("nothing", "grad"),),
        ),
        "bucket 0 must get every gradient exactly once: some are applied twice, always late, or "
        "never",
        [],
    ),
    "votes that differ": (
        # Fatal only if the first says yes and the second one no.
        replace(
            selsync_plan(),
            votes=tuple(replace(selsync_plan().votes[0], name=name) for name in "ab"),
            transfers=(move("grad", 0, 3, Moment("grad", 2), STEP),),
            applies=(
                *selsync_plan().applies,
                apply("copy", END, range(3), when="a", args={"source": "left", "target": "grad"}),
                apply("clear", END, range(3), when="b", args={"buffer": "grad"}),
                apply(
                    "copy", Moment("grad", 2), range(3), args={"source": "grad", "target": "left"}
                ),
            ),
            buffers=(Buffer("left", "grad"),),
        ),
        "backward adds to gradients of an earlier iteration in grad of bucket 0",
        [],
    ),
    "known to others": (
        # Rank 0 knows the outcome when it sends what rank 1 waits for; rank 1 does not.
        plan_of(
            ALL_GRADIENTS,
            move(
                "sum", 0, 2, END, STEP, link="aux", verb="send", ranks=(0, 1), into="got"
            ),
            applies=[LOCAL, apply("reset", STEP, ranks=(1,), when="sync")],
            votes=(
                Vote("sync", "changed", Moment("grad", 1), END, ALWAYS, {"threshold": 1.0}),
            ),
            buffers=(SUM, Buffer("got", "grad")),
        ),
        "reset[0:2] depends on the vote 'sync' before it is due",
        [4],
    ),
    "a message that leaves early": (
        # It is of the window that closes an iteration later.
        replace(deft_plan(), transfers=(
            move("grad", 0, 3, Moment("grad", 2), Moment("step", lag=1), (2,)),
        )),
        "grad[0:3]@net is in flight between its release grad(2) and its deadline step+1 while "
        "backward uses grad of bucket 0",
        [0],
    ),
    "a message that leaves early and returns": (
        replace(deft_plan(), transfers=(move("grad", 0, 3, Moment("grad", 2), END, (2,)),)),
        "bucket 0 is not averaged in every iteration, nor later, so its replicas drift apart",
        [],
    ),
    "a message that leaves late": (
        replace(deft_plan(), transfers=(
            move("grad", 0, 3, Moment("forward", 2), Moment("step", lag=1), (3,), age=1),
        )),
        "is in flight between its release forward(2) and its deadline step+1",
        [0, 1],
    ),
    "closed and never applied": (
        replace(deft_plan(), transfers=(), applies=(
            local(3, STEP, [3], age=1), apply("close", END, range(3), (1, 2, 3)),
        )),
        "backward adds to gradients of an earlier iteration in grad of bucket 0",
        [],
    ),
    "weights thrown away": (
        replace(fedavg_plan(), applies=tuple(
            a for a in fedavg_plan().applies if a.arg("target") != "share"
        )),
        "the weights of bucket 0 change without any gradient",
        [],
    ),
    "shares that are no average": (
        replace(fedavg_plan(), applies=tuple(
            replace(a, args={"buffer": "share", "by": (2.0, 1.0, 0.0, 2.0)})
            if a.rule == "scale" else a for a in fedavg_plan().applies
        )),
        "the weights of bucket 0 change without any gradient",
        [],
    ),
}  # fmt: skip


@pytest.mark.parametrize(("plan", "message", "at_fault"), DOES.values(), ids=DOES)
def test_what_plans_do(plan, message, at_fault):
    problem = first(plan)
    if message is not None:
        assert problem.message.startswith(message) or message in problem.message
    if at_fault is not None:
        marked = [i for i, rule in enumerate(rules(plan)) if rule in problem.rules]
        assert marked == at_fault


def test_what_one_receiver_has_is_not_what_another_has():
    """Rank 0 steps with all gradients, and what it sends to two others is counted from one copy."""
    up = [move("grad", 0, 2, Moment("grad", 1), STEP)]
    wires = [Wire("int4", anchor=name) for name in ("there", "there too")]
    buffers = tuple(Buffer(wire.anchor, start="param") for wire in wires)
    steps = [
        apply("local", STEP, ranks=(0,)),
        apply("clear", END, ranks=(1, 2), args={"buffer": "grad"}),
    ]

    def plan(*chosen):
        down = [handed(w, "param", (0, r)) for r, w in enumerate(chosen, 1)]
        return plan_of(*up, *down, applies=steps, buffers=buffers)

    assert check(plan(*wires)) == []
    assert "drift apart" in first(plan(wires[0], wires[0])).message


def test_a_rank_that_evaluates_would_train_other_weights():
    """What is sent at the forward's first moment changes at its second, or before it if early."""
    end, next_ = ({"source": a, "target": b} for a, b in (("param", "c"), ("c", "a")))
    plan = plan_of(
        ALL_GRADIENTS,
        move("a", 0, 2, Moment("forward", 1), Moment("grad", 0), into="anchor", link="aux"),
        applies=[
            LOCAL,
            apply("copy", END, args=end),
            apply("copy", Moment("forward", 0, 1), args=next_),
            apply("outer", STEP),
        ],
        buffers=(
            *(Buffer(name, start="param") for name in ("a", "c", "anchor")),
            Buffer("velocity"),
        ),
    )
    assert first(plan).message.startswith(
        "a wait of the next forward changes a payload that is released before it"
    )
    late = replace(plan.transfers[1], after=Moment("grad", 0), before=STEP)
    assert check(replace(plan, transfers=(ALL_GRADIENTS, late))) == []


@pytest.mark.parametrize("rank", [0, 1])
def test_any_rank_may_be_the_one_that_evaluates(rank):
    """As above, but only one rank has something to do early."""
    end, next_ = ({"source": a, "target": b} for a, b in (("param", "c"), ("c", "a")))
    plan = plan_of(
        ALL_GRADIENTS,
        move("a", 0, 2, Moment("forward", 1), Moment("grad", 0), into="anchor", link="aux"),
        applies=[
            LOCAL,
            apply("copy", END, args=end),
            apply("copy", Moment("forward", 0, 1), ranks=(rank,), args=next_),
            apply("outer", STEP),
        ],
        buffers=(
            *(Buffer(name, start="param") for name in ("a", "c", "anchor")),
            Buffer("velocity"),
        ),
    )
    assert first(plan).message.startswith("a wait of the next forward changes")


def test_problems_are_printed_whole():
    assert str(first(plan_of(FIRST))) == (
        "bucket 1 is never moved, so its replicas drift apart\n"
        "mine: 2 buckets, period 1 iteration\n"
        "   grad[0:1]   after grad(0)  before step  in 0  on net\n"
        "   local[0:2]  at step                     in 0"
    )


def test_more_problems_are_counted():
    plan = plan_of(move("grad", 0, 3, END, STEP))
    with pytest.raises(ValueError, match=r"the plan is wrong: .*\n[\s\S]*\n\(and 1 more\)$"):
        raise_if_wrong(plan)
    raise_if_wrong(plan_of(ALL_GRADIENTS))


def test_a_plan_and_a_profile():
    plan = BSP().plan(PROFILE)
    assert check(plan) == check(plan, PROFILE) == []
    more = replace(PROFILE, buckets=PROFILE.buckets * 2)
    assert first(plan, more).message == (
        "the plan has 2 buckets, the profile 4; plan again from this profile"
    )
    wifi = plan_of(FIRST, move("grad", 1, 2, Moment("grad", 1), STEP, link="wifi"))
    assert first(wifi, PROFILE).message == "link 'wifi' of grad[1:2]@wifi must be one of net"
    sent = move("grad", 0, 2, STEP, END, verb="send", ranks=(0, 2))
    assert first(plan_of(sent), PROFILE).message == (
        "send grad[0:2] 0->2@net names a rank beyond 0..1"
    )
    lonely = plan_of(ALL_GRADIENTS, applies=[LOCAL, apply("reset", END, ranks=(2,))])
    assert first(lonely, PROFILE).message == "reset[0:2] names a rank beyond 0..1"
    for numbers in ((1.0,), (1.0, 1.0, 1.0)):
        shares = apply("scale", STEP, args={"buffer": "param", "by": numbers})
        assert first(plan_of(ALL_GRADIENTS, applies=[LOCAL, shares]), PROFILE).message == (
            f"by ({numbers}) of scale[0:2] must be 2 numbers, one per rank"
        )
    grouped = plan_of(ALL_GRADIENTS, groups={"net": ((0, 1), (2, 3))})
    assert first(grouped, PROFILE).message == (
        "groups of link 'net' must hold each of the ranks 0..1 once"
    )


def test_groups_that_never_meet_drift_apart():
    grouped = plan_of(ALL_GRADIENTS, groups={"net": ((0, 1), (2, 3))})
    assert first(grouped).message == (
        "bucket 0 is not averaged in every iteration, nor later, so its replicas drift apart"
    )
    channels = plan_of(replace(ALL_GRADIENTS, link="net#1"), groups={"net": ((0, 1), (2, 3))})
    assert first(channels).message == first(grouped).message


@pytest.mark.parametrize(("share", "apart"), [(0.0, False), (0.99, False), (1.0, True)])
def test_averages_that_are_not_blended_in_at_all(share, apart):
    """Any share of the average brings replicas together in the end; none never does."""
    plan = DiLoCo(period=3, fragments=2, delay=1, alpha=0.5).plan(PROFILE)
    assert any(one.rule == "blend" for one in plan.applies)
    blended = [
        replace(one, args={"share": share}) if one.rule == "blend" else one for one in plan.applies
    ]
    problems = check(replace(plan, applies=tuple(blended)))
    assert bool(problems) == apart
    assert not apart or "its replicas drift apart" in problems[0].message


@pytest.mark.parametrize("ranks", [(0,), (1,)])
def test_only_some_ranks(ranks):
    """Whoever does not step drifts apart from who does."""
    plan = plan_of(ALL_GRADIENTS, applies=[replace(LOCAL, ranks=ranks)])
    assert check(plan)


def test_names_may_come_again_in_another_phase():
    """As the windows of late plans do."""
    again = [replace(ALL_GRADIENTS, phases=Phases([p])) for p in (1, 0)]
    assert check(plan_of(*again, period=2)) == []


def test_links_have_an_order_each():
    late = move("state", 0, 2, STEP, END)
    assert check(plan_of(late, ALL_GRADIENTS))
    assert check(plan_of(replace(late, link="net#1"), ALL_GRADIENTS)) == []


def test_what_takes_longer_than_a_period_is_sound():
    """A snapshot's average that comes three periods later."""
    snapshot = {"source": "param", "target": "snapshot"}
    plan = Plan(
        "late",
        1,
        (move("snapshot", 0, 1, STEP, Moment("grad", 0, 1), (1,), into="average"),),
        (
            apply("local", STEP, range(1), (0, 1)),
            apply("copy", STEP, range(1), (1,), args=snapshot),
            apply("delta", Moment("grad", 0), range(1), (0,)),
        ),
        buffers=(Buffer("snapshot"), Buffer("average")),
        period=2,
    )
    assert check(plan) == []
    missing = replace(plan, applies=plan.applies[:2])
    assert check(missing)


def test_what_settles_late_is_sound():
    """Without any lag: a snapshot's average is used nearly a period after it was taken."""
    snapshot = {"source": "param", "target": "snapshot"}
    plan = Plan(
        "late",
        1,
        (move("snapshot", 0, 1, STEP, END, (1,), into="average"),),
        (
            apply("local", STEP, range(1), range(4)),
            apply("copy", STEP, range(1), (1,), args=snapshot),
            apply("delta", STEP, range(1), (0,)),
        ),
        buffers=(Buffer("snapshot"), Buffer("average")),
        period=4,
    )
    assert check(plan) == []


def test_a_vote_of_the_prologue_may_say_no():
    """It is taken once: a no in between would come too late."""
    for name in "abcdefgh":
        vote = Vote(name, "changed", Moment("grad", 1), STEP, ALWAYS, {"threshold": 1.0})
        plan = plan_of(
            replace(ALL_GRADIENTS, phases=Phases([0, 1])),
            applies=[apply("local", STEP, when=name), apply("local", STEP, phases=(1,))],
            votes=(vote,),
            prologue=1,
        )
        assert first(plan).message.startswith("backward adds to gradients of an earlier iteration")


def test_warm_up_and_average_are_no_conflict():
    assert check(LocalSGD(period=3, warmup=2, state="averaged").plan(PROFILE), PROFILE) == []


def test_long_periods_cost_nothing():
    """Steps are counted, not seconds: with a table per iteration this would not end."""
    period = 10**9
    plan = Plan(
        "long",
        3,
        (move("param", 0, 3, STEP, END, [period - 1]),),
        (local(3, STEP, range(period)),),
        period=period,
    )
    assert check(plan) == []
    assert check(replace(plan, transfers=()))
    halves = [
        move("grad", 0, 3, Moment("grad", 2), STEP, range(period), verb="reduce_scatter"),
        move("grad", 0, 3, STEP, NEXT, range(period), verb="all_gather", link="net#1"),
    ]
    late = Moment("forward", 2, 1)
    gradients = replace(
        plan,
        transfers=(halves[0], replace(halves[1], before=late)),
        applies=(local(3, Moment("forward", lag=1), range(period)),),
    )
    assert check(gradients) == []


def test_gradients_may_be_two_windows_old():
    """Sent while the next window is open, applied in the one after that."""
    sent = move("grad", 0, 2, Moment("forward"), Moment("step", lag=1), age=1)
    closed = apply("close", END)

    def late(age):
        buffers = (Buffer("grad", "grad", copies=3),)
        return plan_of(sent, applies=[local(2, STEP, [0], age=age), closed], buffers=buffers)

    assert check(late(2)) == []
    assert "is in flight" in first(late(1)).message


def test_slices_of_a_bucket_may_share_what_was_lost():
    """Each has a part of the buffer, so links need no order; with more in common they would."""

    def shared(part):
        wire = Wire("int8", error="residual")
        more = {"wire": wire, "parts": 3}
        return plan_of(
            move("grad", 0, 1, Moment("grad", 0), STEP, part=0, width=2, **more),
            move("grad", 0, 1, Moment("grad", 0), STEP, part=part, width=1, link="aux", **more),
            SECOND,
            buffers=(Buffer("residual", "grad"),),
        )

    assert check(shared(2)) == []
    assert "share an error buffer; give each link its own" in first(shared(1)).message


def test_halves_are_cut_into_a_piece_for_each_of_two_ranks():
    """So that whoever lacks the other's half is found out."""
    halves = [
        move("grad", 0, 2, Moment("grad", 1), STEP, verb="reduce_scatter"),
        move("grad", 0, 2, STEP, END, verb="all_gather"),
    ]
    assert slices_of(plan_of(*halves, applies=[local(2, END, [0])])) == [2, 2]
    assert slices_of(plan_of(ALL_GRADIENTS)) == [1, 1]


def test_every_slice_counts():
    """Of every bucket of a late plan, whatever its slice: left out, it is missed."""
    profile = replace(PROFILE, buckets=tuple(
        replace(b, size_bytes=40_000, forward_s=0.01, backward_s=0.02) for b in PROFILE.buckets
    ), links=(Link("net", 1e-4, 1e6),))  # fmt: skip
    plan = DeFT(partition_elements=2_500, preserver=False).plan(profile)
    assert check(plan, profile) == []
    assert len(plan.transfers) > 5
    for t in plan.transfers:
        missing = replace(plan, transfers=tuple(o for o in plan.transfers if o is not t))
        assert check(missing, profile), t


@pytest.mark.parametrize("name", FAMILIES)
def test_every_message_of_a_family_counts(name):
    plan = FAMILIES[name].plan
    for t in plan.transfers:
        if (name, t.payload.buffer) == ("paired", "grad"):
            continue  # then it is another method, sound as well
        assert check(replace(plan, transfers=tuple(o for o in plan.transfers if o is not t))), t


@pytest.mark.parametrize("name", sorted(set(FAMILIES) - {"cyclic"}))
def test_every_apply_of_a_family_counts(name):
    plan = FAMILIES[name].plan
    for a in plan.applies:
        if (name, a.rule) in {("diloco", "outer"), ("fedavg", "scale")}:
            continue  # then it is another method, sound as well
        assert check(replace(plan, applies=tuple(o for o in plan.applies if o is not a))), a


def test_a_vote_of_another_plan_is_unknown():
    vote = Vote("sync", "chnaged", Moment("grad", 1), STEP, ALWAYS, {"threshold": 1.0})
    assert first(plan_of(ALL_GRADIENTS, votes=(vote,))).message == (
        "rule 'chnaged' of vote 'sync' must be one of changed"
    )
