"""Facts of a plan that several parts of the runtime need."""

from __future__ import annotations

from offbeat.core.derive import effects
from offbeat.core.derive.deferred import early_remedy
from offbeat.core.derive.windows import Windows
from offbeat.core.plan.types import INSIDE, Apply, Plan, base_link


class PlanTraits:
    """Facts of one plan, each computed once.

    Attributes:
        plan: the plan.
        late: whether gradients are applied in later iterations, see `Windows`.
        remedy: advice for scripts that need updates in `step()`, if the plan applies gradients at
            other moments; otherwise None.
        early: whether updates run in backward.
        on_arrival: whether updates run before the next forward of their bucket.
        updates_at_end: whether all updates have the moment `end`, and no rule has `step`.
        later_updates: updates that run in a later iteration than the step.
        allows_own_steps: whether an optimizer may step by itself, outside of the plan.
        broadcasts: whether module buffers are broadcast.
        sends_only_gradients: see `effects.sends_only_gradients`.
        averages_gradients: whether the plan averages only gradients, in the iteration that computes
            them.
        averages_inside: whether the plan averages gradients inside nodes of several ranks.
        has_delayed_averages: whether the plan averages snapshots of parameters while training
            continues.
        moves_at_forward: whether parameters are in flight or change between the end of an iteration
            and the next forward.
        splits_forward: whether the forward of a single bucket has a moment of its own.
        moves_in_backward: whether averages change parameters during backward.
        moves_at_end: whether the end of an iteration changes parameters by more than its update.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan, transfers, applies = plan, plan.transfers, plan.applies
        updates = [a for a in applies if effects.is_update(a)]
        points = {a.at.point for a in updates}
        moments = [m for t in transfers for m in (t.before, t.after)]
        self.late, self.remedy = Windows(plan).late, early_remedy(plan)
        self.early, self.on_arrival = "grad" in points, "forward" in points
        self.updates_at_end = points == {"end"} and all(a.at.point != "step" for a in applies)
        self.later_updates = [a for a in updates if a.at.lag]
        self.allows_own_steps = not (self.late or self.updates_at_end or plan.source)
        self.broadcasts = any(t.verb == "broadcast" for t in transfers)
        self.sends_only_gradients = effects.sends_only_gradients(plan)
        self.averages_gradients = self.sends_only_gradients and not self.late
        self.averages_inside = any(base_link(t.link) == INSIDE for t in transfers)
        self.has_delayed_averages = bool(effects.delayed_applies(plan))
        self.moves_at_forward = self.has_delayed_averages or any(
            t.in_place and t.payload.buffer == "param" and t.before.point == "forward"
            for t in transfers
        )
        self.splits_forward = any(a.at.point == "forward" for a in applies) or any(
            m.point == "forward" and m.bucket is not None for m in moments
        )
        ending = [t.target != "grad" for t in transfers if t.after.point in ("step", "end")]
        ending += [_moves_parameters(a) for a in applies if a.at.point in ("step", "end")]
        self.moves_at_end = any(ending)
        self.moves_in_backward = plan.source is not None or any(
            t.payload.buffer == "param" and t.after.point == "grad" for t in transfers
        )


def _moves_parameters(apply: Apply) -> bool:
    """Return whether a rule changes more than an update and its optimizer state do."""
    own = effects.is_update(apply) or effects.is_window_end(apply)
    return not own and not effects.writes_only(apply, ("state",))
