"""Updates of parameters by the user's optimizer, for the whole model or bucket by bucket."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from offbeat.core.buckets.checksum import checksum
from offbeat.core.buckets.flat import Flat
from offbeat.core.buckets.gradients import Gradients
from offbeat.core.derive.traits import PlanTraits
from offbeat.core.guards.finite import FiniteGuard
from offbeat.core.guards.foreign_step import ForeignStepGuard
from offbeat.core.guards.updates_without_effect import UpdateCheck
from offbeat.core.observers import Observer
from offbeat.core.plan import Apply
from offbeat.core.runtime.iteration import Iteration
from offbeat.core.runtime.stepper import BucketStepper, Settings, step_directly

AT_ONCE = "use a strategy that steps at once, such as WFBP()"
FIRST_LOOKS, LOOK_EVERY = 3, 100  # steps with checksums of weights, or of gradients


class Updates:
    """Implementation of the rule `local`, and guard against changes of gradients before their
    update.

    Args:
        traits: facts of the plan.
        optimizer: the user's optimizer.
        gradients: gradients of the model.
        flat: storage of the model.
        observers: are told of each update.
        stepping: detects optimizer steps of the script; None: nothing does.
        suspects: checks sums from other ranks before each update; None: nothing does.
    """

    in_backward = False  # whether autograd is writing gradients

    def __init__(
        self,
        traits: PlanTraits,
        optimizer: torch.optim.Optimizer,
        gradients: Gradients,
        flat: Flat,
        observers: Observer,
        stepping: ForeignStepGuard | None,
        suspects: FiniteGuard | None,
    ):
        self._stepping, self._suspects = stepping, suspects
        self._optimizer, self._gradients, self._flat = optimizer, gradients, flat
        self._observers = observers
        self._plan = plan = traits.plan
        self._everything = range(plan.buckets)
        self._traits, self._remedy = traits, traits.remedy
        self._parameters = flat.parameters
        self._noted: tuple[Settings, list[int], int | None] | None = None
        self._tried: set[int] = set()  # runs that were stepped alone, by first bucket
        self._version = flat.grad_version()
        # By bucket with a pending update: versions and checksum of its parameters at the step.
        self._weights: dict[int, tuple[list[int], int | None]] = {}
        self._asked = 0  # steps with later updates
        self._gradient_sum: int | None = None  # checksum at the end of backward, if it was taken
        self._backwards = 0  # ends of backward that were recorded
        self._revealed: set[int] = set()  # ids of applies with gradients shown in `p.grad`
        # Ids of updates of the step that are made in one call, and the buckets still to update.
        self._joined, self._joined_buckets = set[int](), list[int]()
        self._moves: UpdateCheck | None = UpdateCheck(optimizer)
        self.refresh()
        if self._remedy is not None:
            self.stepper.require_independent()

    def refresh(self) -> None:
        """Rebuild the stepper after the optimizer's groups or state were replaced."""
        parameters = [bucket.parameters for bucket in self._flat.buckets]
        remedy = self._remedy or AT_ONCE
        self.stepper = BucketStepper(self._optimizer, parameters, remedy)

    # ---- the rule ---------------------------------------------------------------------------

    def show_gradients(self, locals_: Sequence[Apply]) -> None:
        """Show the gradients that the step applies to code between backward and step, such as
        clipping and unscaling."""
        self._revealed = {id(apply) for apply in locals_}
        plain = [apply for apply in locals_ if not apply.args]
        self._joined = {id(apply) for apply in plain}
        self._joined_buckets = [b for apply in plain for b in apply.buckets]
        for apply in locals_:
            if self._has_gradients(apply):
                copy = self._gradient_copy(apply)
                self._scale(apply, copy)
                if not self._gradients.is_shown(copy):
                    self._gradients.show(apply.buckets, copy)
        if self._gradients.late and not any(map(self._has_gradients, locals_)):
            self._gradients.show_zero()
        self._version = self._flat.grad_version()

    def local(self, apply: Apply, iteration: Iteration) -> None:
        """Step some buckets with the gradients of an iteration."""
        run, copy, gradients = apply.buckets, self._gradient_copy(apply), self._gradients
        if not gradients.added_iterations(run.start, copy):
            return  # no gradients yet: the first window of a plan that applies gradients later
        in_backward, cleared = apply.at.point == "grad", []
        if apply.at.lag:
            self._require_unchanged_gradients()
            self._require_unchanged_parameters(run)
            cleared = gradients.missing(run)
        buckets: Sequence[int] = run
        if id(apply) in self._joined:  # the first of several updates of the step makes all of them
            buckets, self._joined_buckets = self._joined_buckets, []
        if buckets and not iteration.skipped:
            if id(apply) not in self._revealed:
                self._scale(apply, copy)
                if not (in_backward and gradients.is_shown(copy)):
                    gradients.show(run, copy)
            self._check_sums(run, copy, iteration)
            whole = apply.at.point in ("step", "end") and len(buckets) == len(self._everything)
            with self._own_step(buckets):
                if whole:
                    step_directly(self._optimizer)
                else:
                    self._step_buckets(buckets, apply, iteration)
            self._observers.updated(iteration, None if whole else buckets)
        gradients.mark_applied(run, copy, in_backward=in_backward)
        for p in cleared:  # by `zero_grad` after the step
            p.grad = None
        if not in_backward:  # during backward, autograd writes gradients
            self._version = self._flat.grad_version()

    def _check_sums(self, run: range, copy: int, iteration: Iteration) -> None:
        """Raise RuntimeError if a sum that passes from rank to rank is not finite."""
        if self._suspects is not None and self._plan.source is not None:
            sums = [self._flat.gradients(b, copy) for b in run]
            self._suspects.require_finite_sum(run, iteration.number, sums)

    def _has_gradients(self, apply: Apply) -> bool:
        """Return whether the rule has gradients to apply."""
        return self._gradients.added_iterations(apply.buckets.start, self._gradient_copy(apply)) > 0

    def _gradient_copy(self, apply: Apply) -> int:
        return self._flat.copy_index("grad", apply.arg("age", 0))

    def _own_step(self, run: Sequence[int]) -> AbstractContextManager[None]:
        """Return a context whose optimizer steps count as the runtime's own and not as the
        script's."""
        if self._moves is not None:
            return self._require_effect(run, self._moves)
        return nullcontext() if self._stepping is None else self._stepping.session_steps

    @contextmanager
    def _require_effect(self, run: Sequence[int], moves: UpdateCheck) -> Iterator[None]:
        """Return the context of `_own_step` that also requires that the updates change weights."""
        self._moves = None
        moves.begin(run[0], (p for b in run for p in self._flat.buckets[b].parameters))
        with self._own_step(run):
            yield
        moves.end()
        self._moves = None if moves.done else moves

    def _step_buckets(self, run: Sequence[int], apply: Apply, iteration: Iteration) -> None:
        first = self._is_first(run[0])
        if not apply.at.lag:
            self.stepper.step(run, None, compare=first)
            return
        with _default_modes(self._flat.buckets[run[0]].parameters[0].device.type):
            self.stepper.step(run, iteration.settings, compare=first)

    def _is_first(self, run: int) -> bool:
        """Return whether this run of buckets is stepped alone for the first time."""
        first = self._remedy is not None and run not in self._tried
        self._tried.add(run)
        return first

    def _scale(self, apply: Apply, copy: int) -> None:
        """Multiply gradients by the factor in the rule's settings, before other code reads them."""
        factor = apply.arg("scale", 1.0)
        if apply.arg("merge") == "mean":
            factor /= max(self._gradients.added_iterations(apply.buckets.start, copy), 1)
        if factor != 1.0:
            for b in apply.buckets:
                self._flat.gradients(b, copy).mul_(factor)

    # ---- guards -----------------------------------------------------------------------------

    def note_backward_end(self, *, contents: bool = False) -> None:
        """Record the settings and weights at the end of backward.

        Args:
            contents: also record a checksum of the weights, because writes through `p.data` change
                no version counter. Requires that no message writes weights between backward and
                step.

        A checksum of the gradients, which detects writes through `p.grad.data`, is recorded with
        that of the weights. Gradients that were applied in backward are read again in few steps.
        """
        looks = self._backwards < FIRST_LOOKS or self._backwards % LOOK_EVERY == 0
        self._backwards += 1
        taken = contents or (
            self._traits.early
            and looks
            and not any(t.payload.buffer == "grad" for t in self._plan.transfers)
        )
        taken = taken and self._plan.source is None
        self._gradient_sum = self._gradient_checksum() if taken else None
        self._noted = (
            self.stepper.settings(),
            self._weight_versions(),
            self._weight_checksum(contents),
        )

    def alteration(self) -> str | None:
        """Return what the script has changed since the end of backward, a setting or weights; None
        if nothing."""
        if self._noted is None:
            return None
        settings, versions, contents = self._noted
        for group in self._optimizer.param_groups:
            for key, value in settings.get(id(group), {}).items():
                if key in group and not _is_equal(group[key], value):
                    return f"{key!r} of a param group"
        if versions != self._weight_versions() or contents != self._weight_checksum(
            contents is not None
        ):
            return "weights"
        return None

    def _weight_versions(self) -> list[int]:
        return [p._version for p in self._parameters]

    def _weight_checksum(self, wanted: bool) -> int | None:
        return checksum(*self._parameters) if wanted else None

    def request_updates(self, iteration: Iteration, *, abandoned: bool = False) -> None:
        """Handle `optimizer.step()` for updates that run at other moments.

        Later updates use the settings at this moment, because a scheduler may change them before
        the updates run. Raise ValueError if gradients, settings or weights were changed since
        backward.
        """
        if self._remedy is None:
            return
        if not abandoned and self.has_changed_gradients():
            raise ValueError(
                "gradients were changed between backward and optimizer.step() (clipping or "
                "unscaling?), but this strategy applies them bucket by bucket, at other times; "
                f"{self._remedy}"
            )
        if self._traits.early and not abandoned and (what := self.alteration()) is not None:
            raise ValueError(
                f"{what} was changed between backward and optimizer.step(), but this strategy "
                "applies gradients bucket by bucket in backward, with the settings and weights "
                f"there; change it before backward or after the step, or {self._remedy}"
            )
        phase = self._plan.phase(iteration.planned)
        later = [apply.buckets for apply in self._traits.later_updates if phase in apply.phases]
        if later:
            iteration.settings = self.stepper.settings()
            self._gradients.apply_later(later)
            # Checksums detect writes through `p.data`. Each one reads all weights, so take few.
            # Averages of parameters write between step and update, so then take none.
            looks = self._asked < FIRST_LOOKS or self._asked % LOOK_EVERY == 0
            taken = looks and self._traits.sends_only_gradients
            self._asked += 1
            self._weights = {b: self._bucket_state(b, taken) for run in later for b in run}
            self._optimizer._opt_called = True  # type: ignore[attr-defined] # schedulers check it

    def has_changed_gradients(self) -> bool:
        """Return whether gradients were changed or replaced since backward."""
        if self._flat.grad_version() != self._version or not self._gradients.is_intact():
            return True
        return self._gradient_sum is not None and self._gradient_sum != self._gradient_checksum()

    def _gradient_checksum(self) -> int:
        found = (p.grad for p in self._parameters if p.grad is not None)
        return checksum(*(g for g in found if g.layout == torch.strided))

    def refuse_read(self) -> None:
        """Raise ValueError after a read of a gradient that is in flight or part of a sum."""
        raise ValueError(
            "a gradient was read between backward and optimizer.step() (clipping, unscaling or "
            "logging?), but until the update this strategy's messages write to it, or it holds a "
            f"sum over other ranks; {self._remedy}"
        )

    def _require_unchanged_gradients(self) -> None:
        if self._flat.grad_version() != self._version and not self.in_backward:
            raise ValueError(
                "gradients were changed while their update was still to come (zeroed in place?); "
                "use zero_grad() of the prepared model or optimizer, which waits for it, or "
                f"{self._remedy}"
            )

    def _require_unchanged_parameters(self, run: range) -> None:
        """Raise ValueError if parameters were changed since the step that requested their
        update."""
        for b in run:
            known = self._weights.pop(b, None)
            if known is not None and known != self._bucket_state(b, known[1] is not None):
                raise ValueError(
                    f"parameters of {self._flat.buckets[b].name!r} were changed between "
                    "optimizer.step() and the next forward, while their update was still to come; "
                    "call model.flush() before, or reach them through the model that "
                    f"offbeat.prepare returned, or {self._remedy}"
                )

    def _bucket_state(self, b: int, taken: bool) -> tuple[list[int], int | None]:
        """Return the versions of a bucket's parameters, and their checksum if `taken`, otherwise
        None."""
        parameters = self._flat.buckets[b].parameters
        return [p._version for p in parameters], checksum(*parameters) if taken else None


def _is_equal(a: Any, b: Any) -> bool:
    """Return whether two values of a setting are equal; tensors by their elements."""
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return torch.equal(a, b)
    return bool(a == b)


@contextmanager
def _default_modes(device_type: str) -> Iterator[None]:
    """Return a context with inference mode and autocast disabled, as after backward.

    An update may run within a forward for which the script has enabled one of these modes.
    """
    if not (torch.is_inference_mode_enabled() or torch.is_autocast_enabled(device_type)):
        yield
        return
    with torch.inference_mode(False), torch.autocast(device_type, enabled=False):
        yield
