"""State machine of an iteration: where a rank is, and what each event does there.

Every call of the script and every pass of autograd that the engine hears of is one call of
`Machine.fire`. The table gives the engine's actions for it, each with the state after it. A pair
of state and event that the table leaves out raises `OutOfOrderError` and changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any

from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

from offbeat.core.runtime.transforms import is_transforming
from offbeat.core.transport.cluster import CLOSED


class State(Enum):
    """Where a rank is in its iteration."""

    IDLE = "between iterations"
    FORWARD = "before the first gradient"
    BACKWARD = "in backward"
    HELD = "after a backward pass that only accumulates"
    READY = "between backward and step"
    STEPPED = "after a step that the script's own optimizer has made"
    FAILED = "stopped by a failure"
    CLOSED = "closed"


class Event(Enum):
    """What has happened."""

    FORWARD = "a training forward"
    CALL = "a call of another method of the model"
    READ = "a read of the weights"
    GRADIENT = "the first gradient of a backward pass"
    MORE = "the first gradient of a backward pass that adds to the last one's, which was not sent"
    REPEAT = "another backward pass after gradients that were averaged"
    HOLD = "the end of a backward pass that only accumulates"
    COMPLETE = "the end of a backward pass before a step"
    NEED = "a use of averaged gradients, whether a backward has ended or not"
    SKIP = "a step without its update"
    STEP = "optimizer.step()"
    OWN_STEP = "a step of the script's own optimizer"
    ZERO = "optimizer.zero_grad()"
    PAUSE = "an exchange or a change between iterations"
    LEAVE = "the end of the job"


class OutOfOrderError(RuntimeError):
    """An event that the state does not allow."""


BROKEN = (
    "optimizer.step() follows a backward pass that ended with an exception, so only some "
    "parameters have gradients; call optimizer.zero_grad() and run forward and backward again, or "
    "start again from the last checkpoint"
)
AGAIN = "again"  # fire the event once more, in the new state

_I, _F, _B, _H = State.IDLE, State.FORWARD, State.BACKWARD, State.HELD
_R, _S = State.READY, State.STEPPED
_END = (("update", _I), (AGAIN, _I))
_ABANDON = (("abandon", _R), *_END)
_CLOSE = (("end_stepped", _S), *_END)
_STEP = (("conclude", _R), ("update", _I))
_OWN_STEP = (("conclude", _R), ("allow_own_step", _S))

Go = tuple[str, State]  # action of the engine, and the state after it; "" for no action

# Before the backward pass that ends the iteration.
_OPEN: Mapping[Event, tuple[Go, ...]] = {
    Event.GRADIENT: (("enter_backward", _B),),
    Event.NEED: (("conclude", _R),),
    Event.STEP: _STEP,
    Event.OWN_STEP: _OWN_STEP,
    Event.ZERO: (("clear", _F),),
    Event.PAUSE: (("drop", _I), ("settle", _I)),
    Event.LEAVE: (("forget", _I), ("settle", _I)),
}

TABLE: Mapping[State, Mapping[Event, tuple[Go, ...]]] = {
    _I: {
        Event.FORWARD: (("require_unchanged", _I), ("begin_iteration", _F)),
        Event.CALL: (("flush_updates", _I),),
        Event.READ: (("flush_updates", _I),),
        # Of a forward that was not announced.
        Event.GRADIENT: (("begin_iteration", _F), ("enter_backward", _B)),
        Event.REPEAT: (("begin_iteration", _F), ("pass_forward", _F)),
        Event.NEED: (("begin_iteration", _F), ("conclude", _R)),  # of a rank without a batch
        Event.SKIP: (("begin_iteration", _F), ("leave_out", _F)),
        Event.STEP: (("begin_iteration", _F), *_STEP),
        Event.OWN_STEP: (("begin_iteration", _F), *_OWN_STEP),
        Event.ZERO: (("clear", _I),),
        Event.PAUSE: (("settle", _I),),
        Event.LEAVE: (("settle", _I),),
    },
    _F: {
        **_OPEN,
        Event.FORWARD: (("", _F),),  # several forwards, one backward
        Event.CALL: (("", _F),),
        Event.READ: (("", _F),),
        Event.SKIP: (("leave_out", _F),),
    },
    # Outside of autograd, BACKWARD means that the pass has ended with an exception.
    _B: {
        Event.FORWARD: (("drop", _I), (AGAIN, _I)),
        Event.CALL: (("", _B),),
        Event.READ: (("", _B),),
        Event.HOLD: (("hold", _H),),
        Event.COMPLETE: (("complete_backward", _R),),
        Event.ZERO: (("drop", _I), (AGAIN, _I)),
        Event.PAUSE: (("drop", _I), ("settle", _I)),
        Event.LEAVE: (("forget", _I), ("settle", _I)),
    },
    _H: {
        **_OPEN,
        Event.FORWARD: (("", _F),),
        Event.CALL: (("", _H),),
        Event.READ: (("", _H),),
        Event.SKIP: (("leave_out", _H),),
    },
    _R: {
        Event.FORWARD: (("receive", _R),),  # another backward may follow before the step
        Event.CALL: (("receive", _R),),
        Event.READ: (("", _R),),
        Event.GRADIENT: (("abandon_adding", _R), *_END),
        Event.MORE: (("reopen", _F), ("enter_backward", _B)),
        Event.REPEAT: (("average_again", _R), *_END),
        Event.NEED: (("", _R),),
        Event.SKIP: (("leave_out", _R),),
        Event.STEP: (("update", _I),),
        Event.OWN_STEP: (("allow_own_step", _S),),
        Event.ZERO: _ABANDON,
        Event.PAUSE: _ABANDON,
        Event.LEAVE: (("forget", _I), ("settle", _I)),
    },
    _S: {
        Event.FORWARD: _CLOSE,
        Event.CALL: _CLOSE,
        Event.READ: (("", _S),),
        Event.GRADIENT: (("abandon_adding", _S), *_END),
        Event.NEED: (("", _S),),
        Event.SKIP: (("leave_out", _S),),
        Event.STEP: (("update", _I),),
        Event.OWN_STEP: (("allow_own_step", _S),),
        Event.ZERO: _CLOSE,
        Event.PAUSE: _CLOSE,
        Event.LEAVE: (("forget", _I), ("settle", _I)),
    },
    State.FAILED: {
        Event.READ: (("flush_updates", State.FAILED),),  # raises if a message is missing
        Event.LEAVE: (("", State.FAILED),),
    },
    State.CLOSED: {
        Event.READ: (("", State.CLOSED),),
        Event.ZERO: (("clear", State.CLOSED),),
        Event.LEAVE: (("", State.CLOSED),),
    },
}


class Machine:
    """State of one rank.

    An action may run code of the user, such as hooks of the optimizer. A read of the weights means
    nothing new there; any other event raises. Actions run outside of the transforms of torch.func
    that the script computes, which forbid in-place writes of other tensors, such as updates.

    Args:
        actions: has a method for every action of the table, and `is_broken`: whether a backward
            pass has begun and was ended by an exception.

    Attributes:
        state: the state.
        failure: what has stopped the rank; None if nothing has.
    """

    def __init__(self, actions: Any) -> None:
        self.state = State.IDLE
        self.failure: BaseException | None = None
        self._actions, self._acting = actions, ""  # name of the action that runs
        self._table = {
            state: {event: [_bound(actions, *go) for go in row] for event, row in rows.items()}
            for state, rows in TABLE.items()
        }

    def fire(self, event: Event) -> None:
        """Act on an event. Raise `OutOfOrderError` if the state does not allow it."""
        if is_transforming():
            with temporarily_clear_interpreter_stack():
                return self.fire(event)
        if self._acting:
            if event is not Event.READ:
                raise OutOfOrderError(f"{event.value} within {self._acting!r} of this rank")
            return None
        if self.state in (State.FORWARD, State.HELD) and self._actions.is_broken:
            self.state = State.BACKWARD
        name = AGAIN
        while name == AGAIN:
            row = self._table[self.state].get(event)
            if row is None:
                return self._refuse(event)
            try:
                for name, act, then in row:
                    self._acting = name
                    act()
                    if self.state is not State.FAILED:
                        self.state = then
            finally:
                self._acting = ""
        return None

    def fail(self, failure: BaseException) -> None:
        """Stop this rank for good."""
        self.state, self.failure = State.FAILED, failure

    def close(self) -> None:
        """End the training of this rank, unless it has failed."""
        if self.state is not State.FAILED:
            self.state = State.CLOSED

    def require_alive(self) -> None:
        """Raise RuntimeError after a failure or the end."""
        if self.state is State.CLOSED:
            raise RuntimeError(CLOSED)
        if self.state is State.FAILED:
            raise RuntimeError("this worker has failed; start it again") from self.failure

    def _refuse(self, event: Event) -> None:
        self.require_alive()
        steps = event in (Event.NEED, Event.SKIP, Event.STEP, Event.OWN_STEP)
        broken = self.state is State.BACKWARD and steps
        raise OutOfOrderError(
            BROKEN if broken else f"{event.value} while a rank is {self.state.value}"
        )


def _bound(actions: Any, name: str, then: State) -> tuple[str, Callable[[], None], State]:
    act = _do_nothing if name in ("", AGAIN) else getattr(actions, name)
    return name, act, then


def _do_nothing() -> None:
    pass
