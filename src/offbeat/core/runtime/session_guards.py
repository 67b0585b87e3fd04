"""Guards of a session with a plan: before each forward, around each step, and at loads."""

from __future__ import annotations

from functools import partial

from offbeat.core.buckets.attached import UncopiedHook
from offbeat.core.buckets.module_buffers import has_buffers
from offbeat.core.buckets.shards import local_of
from offbeat.core.derive.effects import sends_only_gradients
from offbeat.core.guards.comparison import ReplicaGuard, SettingsGuard
from offbeat.core.guards.finite import FiniteGuard, require_finite_replicas
from offbeat.core.guards.foreign_step import ForeignStepGuard
from offbeat.core.guards.parameters import ParameterWatch
from offbeat.core.guards.unwritten_weights import WeightChanges
from offbeat.core.plan import Plan
from offbeat.core.plan.semantics import is_finite
from offbeat.core.runtime.engine import Engine
from offbeat.core.runtime.recording import Decisions
from offbeat.core.runtime.training_job import TrainingJob
from offbeat.core.strategy.interface import Strategy

NOTED_FORWARDS = 3  # first iterations in which writes of a forward to parameters are noted
NOTED_STEPS = 3  # first steps after which writes are found by checksums, and rarely later
MANY_PASSES = 20  # backward passes without a step after which rank 0 warns
SAME_SHAPE = "keep what grows in an attribute that is no buffer, or pass broadcast_buffers=False"


class SessionGuards:
    """Guards of one session, and the hooks by which they act.

    Args:
        job: objects of this rank.
        engine: engine of this rank.
        strategy: requested strategy.
        decisions: reports of the session.

    Attributes:
        replicas: comparison of replicas or of settings; None: none.
        parameters: guard against parameters that are added or moved.
        stepping: guard against steps of other optimizers.
        has_loaded: whether a load since the last iteration restarts the plan on this rank.
        shares_optimizer: see `note_plan`.
        shares_buffers: whether the model has buffers, and replicas on other ranks.
    """

    def __init__(
        self, job: TrainingJob, engine: Engine, strategy: Strategy, decisions: Decisions
    ) -> None:
        self._model, self._cluster, self._watch = job.model, job.cluster, job.watch
        self._engine, self._strategy, self._decisions = engine, strategy, decisions
        self.replicas: ReplicaGuard | SettingsGuard | None = None
        self.has_loaded = False
        self._agreed_on_buffers = 0  # calls of `agree_on_buffers`
        self._reports_missing_step = True  # until the warning about it
        self.shares_optimizer = False
        # From a step to the next forward, and within the first forwards.
        self._changes, self._in_forward, self._steps = WeightChanges(job.model), False, 0
        # Names of parameters that a forward has written, or the script where it may not.
        self._written: dict[str, None] = {}
        self.shares_buffers = job.cluster.control.world_size > 1 and has_buffers(job.model)
        if self.shares_buffers:
            engine.module_buffers.before_packing = self.agree_on_buffers
        self.parameters = ParameterWatch(job.model, engine.flush)
        self.parameters.attach(engine.flat.parameters)
        self.create_finite_guard()
        self.stepping = ForeignStepGuard(job.optimizer, lambda: self.shares_optimizer)
        engine.stepping = self.stepping
        # Hooks on the bare modules, so that reads and loads of their weights see all updates, too.
        flush, discard = UncopiedHook(engine.flush), UncopiedHook(self._discard)
        self._handles = [job.model.register_load_state_dict_pre_hook(discard)]
        self._handles += [m.register_state_dict_pre_hook(flush) for m in job.model.modules()]

    # ---- plans and links --------------------------------------------------------------------

    def create_finite_guard(self) -> None:
        """Check messages for values that are not finite, on the ranks of the present members."""
        control, policy = self._cluster.control, self._watch.on_nonfinite
        place = control.rank, control.world_size
        refuse = self._engine.waiting.fail_with
        self._finite = FiniteGuard(policy, *place, self._describe_buckets, refuse)
        self._engine.suspects = self._finite

    def _describe_buckets(self, run: range) -> str:
        """Return the names of the first and the last bucket of a run."""
        names = [self._engine.flat.buckets[b].name for b in (run.start, run.stop - 1)]
        return repr(names[0]) if len(run) == 1 else f"{names[0]!r} to {names[1]!r}"

    def require_finite_replicas(self) -> None:
        """Raise RuntimeError on all ranks if parameters of a rank are not finite, before replicas
        are averaged as a whole."""
        if not self._finite.active:
            return
        trained = (local_of(p.detach()) for p in self._model.parameters() if p.requires_grad)
        everyone = enumerate(self._cluster.control.gather(all(map(is_finite, trained))))
        require_finite_replicas([rank for rank, finite in everyone if not finite])

    def note_plan(self, *, observes: bool = False) -> None:
        """Note that the engine has adopted a plan, whose links are open.

        Other optimizers may use the gradients between backward and step if the plan only averages
        gradients and applies them in the step. Parameters may be in any memory then. If
        `observes`, the strategy's plan follows, which may do otherwise.
        """
        for link in self._cluster.links.values():
            link.keeps_last = self._engine.has_members
            guard = partial(self._finite.run, is_any=link.collectives.is_any)
            link.guard = guard if self._finite.active else None
        traits = self._engine.traits
        follows = observes and not self._strategy.synchronous
        self.shares_optimizer = traits.averages_gradients and traits.remedy is None and not follows

    def compare_ranks(self, plan: Plan) -> None:
        """Compare replicas from now on, or only settings if a plan averages parameters."""
        self.replicas, cluster = None, self._cluster
        every = self._watch.compare_every if cluster.control.world_size > 1 else 0
        compared = cluster.control, self._model, self._engine.optimizer, every
        if every and sends_only_gradients(plan):
            settle, holders = self._engine.flush, cluster.topology.holders
            self.replicas = guard = ReplicaGuard(*compared, settle, holders, self._written)
            guard.compare()
        elif every:
            nodes = () if cluster.inside is None else cluster.topology.nodes
            self._written.clear()
            how = self._averages_parameters_now, self._decisions.warn, self._written
            self.replicas = SettingsGuard(*compared, *how, nodes)

    def _averages_parameters_now(self) -> bool:
        """Return whether all ranks average parameters in this iteration, or may do so after a vote.

        Ranks that pass sums and parameters on are iterations apart, so they make no common average.
        """
        transfers = self._engine.run.program.transfers(self._engine.cursor.planned)
        return any(t.payload.buffer != "grad" and t.ranks is None for t in transfers)

    # ---- iterations -------------------------------------------------------------------------

    def before_forward(self) -> None:
        """Raise if the script has changed parameters that it must not change; warn if it does not
        step."""
        engine = self._engine
        if self.shares_buffers:
            engine.module_buffers.note()
        self.parameters.require_unchanged(may_move=self.shares_optimizer)
        passes_on = engine.plan.source is not None and engine.cursor.now is None
        for name in self._changes.changed_names()[:1] if passes_on else ():
            raise RuntimeError(
                f"parameter {name!r} was changed outside of optimizer.step(), but this strategy "
                "sends parameters from rank to rank, so other ranks would not receive the change; "
                "change it in optimizer.register_step_post_hook, load with model.load_state_dict, "
                "or use a strategy that steps at once, such as WFBP()"
            )
        if self._reports_missing_step and engine.passes_without_step >= MANY_PASSES:
            self._reports_missing_step = False
            self._decisions.warn(
                f"optimizer.step() was not called in the last {MANY_PASSES} backward passes, so "
                f"{self._strategy} runs no updates; call step() of the optimizer that "
                "offbeat.prepare returned, or wrap backward passes that only accumulate in "
                "`with model.no_sync():`"
            )

    def begin_iteration(self) -> None:
        """Act before the first forward of an iteration."""
        engine = self._engine
        if isinstance(self.replicas, SettingsGuard):
            self._written.update(dict.fromkeys(self._changes.changed_names()))
            self._changes.forget()
        elif engine.iteration < NOTED_FORWARDS and not engine.traits.on_arrival:
            self._in_forward = True
            self._changes.note()

    def after_forward(self) -> None:
        """Note the parameters that a forward has written."""
        if self._in_forward:
            self._written.update(dict.fromkeys(self._changes.changed_names()))
            self._changes.forget()
            self._in_forward = False

    def note_step(self) -> None:
        """Note the weights after a step."""
        engine, every = self._engine, self._watch.compare_every
        if engine.plan.source is not None and self._cluster.control.world_size > 1:
            self._changes.note()
        elif isinstance(self.replicas, SettingsGuard):
            rare = self._steps < NOTED_STEPS or self._steps % every == 0
            # Otherwise messages write weights before the next forward.
            self._changes.note(contents=rare and not engine.traits.moves_at_forward)
            self._steps += 1

    def agree_on_buffers(self, *, only_alike: bool = False) -> None:
        """Agree on the buffers that forward writes.

        Runs in the first iteration and then every `compare_every` iterations. All ranks call this
        method at the same point of an iteration.

        Args:
            only_alike: whether buffers whose shapes differ between ranks are left out, not refused.
        """
        every, iteration = self._watch.compare_every, self._agreed_on_buffers
        if iteration and not (every and iteration % every == 0):
            self._agreed_on_buffers += 1
            return
        buffers, control = self._engine.module_buffers, self._cluster.control
        everyone = control.gather(buffers.changed_names())
        if all(changed is None for changed in everyone):  # no forward yet
            return
        self._agreed_on_buffers += 1
        names = {name for changed in everyone for name in changed or ()}
        if only_alike:
            first, *others = control.gather(buffers.shapes(names))
            names = {name for name in first if all(first[name] == o.get(name) for o in others)}
        new = buffers.share(names)
        if new:
            shapes = buffers.shapes(buffers.names)
            control.agree("the buffers that forward writes", shapes, SAME_SHAPE)
        if new and iteration:
            self._decisions.print(
                f"forward has begun to write buffer {new[0]!r}, so rank 0's is broadcast"
            )

    # ---- loads ------------------------------------------------------------------------------

    def _discard(self) -> None:
        """Prepare for a load of other weights."""
        self.has_loaded |= self._engine.discard()
        self._engine.module_buffers.forget()
        self.forget_weights()

    def forget_weights(self) -> None:
        """Suspend the guards of weights until the next step, because weights may change."""
        self._changes.forget()

    def restart(self) -> None:
        """Begin as in the first iteration, for another position of the run."""
        self._agreed_on_buffers = 0
        self.forget_weights()

    def require_all_loaded(self) -> None:
        """Raise RuntimeError unless all ranks have loaded weights.

        The plan restarts after a load. A rank that continues would send other messages than this
        rank, for which the backend may end the process.
        """
        self.has_loaded, control = False, self._cluster.control
        try:
            with control.waiting("loading weights"):
                control.meet(f"loaded/{control.met}/{self._engine.iteration}")
        except RuntimeError as error:
            raise RuntimeError(
                f"weights were loaded on rank {control.rank}, and {self._strategy} begins "
                "anew then; load them on all ranks in the same place, or on none, and evaluate "
                f"others on copy.deepcopy(model): {error}. {control.report_failure()}"
            ) from error

    def close(self) -> None:
        """Remove every hook of the guards."""
        self.parameters.close()
        self.stepping.close()
        for handle in self._handles:
            handle.remove()
