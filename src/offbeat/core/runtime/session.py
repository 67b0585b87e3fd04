"""Interface of the sessions behind a prepared model and optimizer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from offbeat.core.console import console
from offbeat.core.observers import Observers
from offbeat.core.transport.cluster import Cluster

if TYPE_CHECKING:
    from offbeat.core.checkpoint.saving import Saver
    from offbeat.core.runtime.recording import Recorder
    from offbeat.elastic.samples import MemberSamples, Stream
    from offbeat.jobs.stopping import StopRequest

T = TypeVar("T")
NO_MEMBERS = (
    "members (None) must be given to offbeat.prepare for a job whose members change; give "
    "members=offbeat.Members(service), with the address of a membership service"
)

REPLICAS_DIFFER = (
    "replicas differ, because no average followed their last updates; call model.consolidate() on "
    "all ranks after training, which makes all replicas equal to their average"
)


@dataclass(frozen=True)
class Position:
    """Position of a session between two iterations.

    Attributes:
        iteration: number of finished iterations.
        alike: whether all ranks have the same weights and need no other state to continue, so that
            a job of any size can continue from here.
        state: state that only the same strategy can continue from.
    """

    iteration: int
    alike: bool
    state: dict[str, Any] = field(default_factory=dict)


class Session(ABC):
    """Implementation of a prepared model and optimizer for one strategy.

    Attributes:
        strategy: name and settings of the requested strategy.
        elsewhere: reason why the session cannot be saved, and the alternative; None if it can.
        alone: whether ranks do not wait for each other, so that each one saves and loads
            separately.
        saver: background writer of this session's checkpoints; None before the first request.
        stop_request: handler of SIGTERM; None if the signal has its default action.
    """

    _cluster: Cluster
    strategy: str = ""
    elsewhere: ClassVar[str | None] = None
    alone: ClassVar[bool] = False
    saver: Saver | None = None
    stop_request: StopRequest | None = None
    _recorder: Recorder | None = None
    keeps_replicas_equal: bool = False

    @property
    def record(self) -> str | None:
        """Id of the record of this run; None if it is not recorded."""
        return self._recorder.id if self._recorder is not None else None

    def note_loaded(self, record: str | None) -> None:
        """Handle the load of a checkpoint of a run with the id `record`; None: it was not
        recorded."""
        if self._recorder is not None:
            self._recorder.on_load(record, self.iteration)

    @abstractmethod
    def forward(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a forward pass of the model: a call of the module or of one of its methods."""

    def drive(
        self, call: Callable[..., Any], closure: Any = None, /, *args: Any, **kwargs: Any
    ) -> Any:
        """Call a method of the user's optimizer that may step, or may evaluate `closure` several
        times.

        Returns:
            The result of the call, and whether the optimizer has stepped.
        """
        if closure is not None:
            raise ValueError(
                f"{self.strategy} steps the optimizer without a closure; use a strategy that steps "
                "at once, such as WFBP()"
            )
        self.flush()
        return call(*args, **kwargs), False

    @property
    def awaits_step(self) -> bool:
        """Whether a backward has ended and the step that ends its iteration is still to come."""
        return False

    def note_forward(self, output: object) -> None:  # noqa: B027 - nothing to do by default
        """Handle a call that was not announced as a forward and has returned tensors with a
        graph."""

    def note_reading(self, what: str) -> None:  # noqa: B027 - nothing to do by default
        """Handle a use of the weights outside of training, such as an evaluation."""

    def before_call(self) -> None:
        """Complete all updates of weights before a method of the model reads the weights."""
        self.flush()

    @abstractmethod
    def step(self, skip_update: bool) -> None:
        """Handle `optimizer.step()`: end one iteration, with or without an update."""

    @abstractmethod
    def zero_grad(self, set_to_none: bool) -> None:
        """Handle `optimizer.zero_grad()`."""

    @abstractmethod
    def no_sync(self) -> AbstractContextManager[None]:
        """Return a context in which gradients only accumulate locally."""

    @abstractmethod
    def consolidate(self, repairing: bool) -> None:
        """Make all replicas bit-identical; see `Model.consolidate`."""

    @abstractmethod
    def close(self) -> None:
        """Leave the job: write the record, stop the links and destroy their process groups."""

    @property
    @abstractmethod
    def iteration(self) -> int:
        """Number of finished iterations, including those before a resume."""

    @abstractmethod
    def capture_position(self) -> Position:
        """Return the position between two iterations: all state outside of the model and the
        optimizer.

        The call does not affect later results.

        Raises:
            ValueError: the session has no position that can be saved.
            RuntimeError: an iteration is in progress.
        """

    @abstractmethod
    def resume(self, iteration: int, state: Mapping[str, Any] | None) -> None:
        """Continue from a position, after the states of model and optimizer were loaded. Every rank
        must call this method.

        Args:
            iteration: number of finished iterations.
            state: `Position.state`; None: the plan restarts.
        """

    def _print_difference(self) -> None:
        """Print on rank 0 that replicas differ at the end of a job that closes at exit."""
        if self._cluster.leave is not None and self._cluster.control.rank == 0:
            console.print("replicas", REPLICAS_DIFFER, "notice", iteration=self.iteration)

    def capture_samples(self) -> tuple[Any, Any] | None:
        """Return settings and unread positions of the stream that the members of the job read;
        None without one."""
        return None

    def resume_samples(self, saved: tuple[Any, Any] | None) -> None:  # noqa: B027
        """Continue from a result of `capture_samples`, after `resume`."""

    def run_joint_call(self, act: Callable[[], T]) -> tuple[T | None, str]:
        """Return the result of a call that every rank makes between two iterations, and "". If the
        members of the job change and one fails meanwhile: None and the failed members, as text."""
        return act(), ""

    def save_at_changes(self, save: Callable[[], Any]) -> None:  # noqa: B027
        """Save a checkpoint by `save` when the members of the job have changed."""

    @property
    def has_joined(self) -> bool:
        """Whether this process has joined a running job, whose members have sent their state."""
        return False

    def request_leave(self, reason: str) -> None:
        """Request to leave the job; see `Model.request_leave`."""
        raise ValueError(NO_MEMBERS)

    def read_samples(self, stream: Stream) -> MemberSamples:
        """Return the batches of this member; see `Model.read_samples`."""
        raise ValueError(NO_MEMBERS)

    @property
    def has_left(self) -> bool:
        """Whether this process has left the job at its own request."""
        return False

    @property
    def observing(self) -> bool:
        """Whether the session is measuring a profile and has no plan yet."""
        return False

    @property
    def worker(self) -> int:
        """Id of this worker in the job."""
        return self._cluster.control.rank

    @property
    def replica(self) -> int:
        """Index of the replica that this rank trains."""
        cluster = self._cluster
        return self.worker if cluster.topology.is_flat else cluster.replica

    @property
    def cluster(self) -> Cluster:
        """Links and control of this process."""
        return self._cluster

    @property
    def scaler_remedy(self) -> str | None:
        """Reason why GradScaler cannot unscale the gradients, and the alternative; None if it
        can."""
        return None

    @abstractmethod
    def traffic(self) -> dict[str, int]:
        """Return the bytes sent so far, by link."""

    def on_scaler_step(self, *, steps: bool) -> None:  # noqa: B027 - nothing to do by default
        """Handle the start of a step by a gradient scaler."""

    def skip_step(self) -> None:
        """End one iteration without an update; see `Model.skip_step`."""
        self.step(skip_update=True)

    @cached_property
    def observers(self) -> Observers:
        """Observers of the iterations of this rank. A session without a plan may tell them less."""
        return Observers()

    def finish_iteration(self) -> None:
        """Tell the observers that `optimizer.step()` or `skip_step()` has ended, and end the
        process if the iteration is the last one after SIGTERM."""
        self.observers.stepped(self.iteration)
        if self.stop_request is not None:
            self.stop_request.on_iteration_end(self.iteration)

    def flush(self) -> None:  # noqa: B027 - nothing to do by default
        """Complete all updates that earlier steps have requested."""

    def optimizer_reloaded(self) -> None:  # noqa: B027 - nothing to do by default
        """Handle the replacement of the optimizer's state and groups."""
