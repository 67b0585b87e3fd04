"""The two objects that `prepare` returns: the user's model and optimizer, seen through."""

from __future__ import annotations

import copy
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import wraps
from types import MethodType
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import torch
from torch import nn

from offbeat.core.buckets.coupling import delegates
from offbeat.core.runtime.joint_optimizer import JointOptimizer
from offbeat.core.runtime.outputs import tensors_of
from offbeat.core.transport.cluster import Cluster

if TYPE_CHECKING:
    from offbeat.core.runtime.iteration import Iteration


class Saver(Protocol):
    """Whoever saves in the background."""

    def finish(self) -> None:
        """Wait for what is being saved, and leave the other ranks."""


@dataclass(frozen=True)
class Position:
    """Where a session stands between two iterations.

    `alike`: every rank has the same weights, and nothing else is needed to go on from them, so that
    a job of any size can. `state` is what only this strategy can go on from.
    """

    iteration: int
    alike: bool
    state: dict[str, Any] = field(default_factory=dict)


class Session(ABC):
    """What a prepared model and optimizer hand their calls to."""

    _cluster: Cluster
    strategy: str = ""
    """Name and settings of what was asked for."""
    elsewhere: ClassVar[str | None] = None
    """Why it cannot be saved, and what else to do."""
    alone: ClassVar[bool] = False
    """Whether ranks do not wait for each other, so that each saves and loads for itself."""
    saver: Saver | None = None
    """Who saves this session's checkpoints, once one was asked for."""

    @abstractmethod
    def forward(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The model's forward pass: a call of the module, or of one of its methods."""

    def drive(
        self, call: Callable[..., Any], closure: Any = None, /, *args: Any, **kwargs: Any
    ) -> Any:
        """Call a method of the user's optimizer, which may step in it, or evaluate the `closure`
        several times. Return its result, and whether it has stepped."""
        if closure is not None:
            raise ValueError(
                f"{self.strategy} steps the optimizer without a closure; use a strategy that steps "
                "at once, such as WFBP()"
            )
        self.flush()
        return call(*args, **kwargs), False

    @property
    def awaits_step(self) -> bool:
        """Whether a backward is over, and the step that ends its iteration has not come."""
        return False

    def note_forward(self, output: object) -> None:  # noqa: B027 - nothing to do by default
        """A call that was not announced as a forward has returned tensors of a graph: backward
        may begin there."""

    def before_call(self) -> None:
        """Complete every update of the weights that a method of the model is about to read."""
        self.flush()

    @abstractmethod
    def step(self, skip_update: bool) -> None:
        """`optimizer.step()`: ends one iteration, with or without an update."""

    @abstractmethod
    def zero_grad(self, set_to_none: bool) -> None:
        """`optimizer.zero_grad()`."""

    @abstractmethod
    def no_sync(self) -> AbstractContextManager[None]:
        """Accumulate gradients locally."""

    @abstractmethod
    def consolidate(self, repairing: bool) -> None:
        """Make all replicas bit-identical; as `Model.consolidate` has it."""

    @abstractmethod
    def close(self) -> None:
        """Leave the other ranks: write the record, stop the links, drop their groups."""

    @property
    @abstractmethod
    def iteration(self) -> int:
        """Iterations that are over, those before a resume included."""

    @abstractmethod
    def capture_position(self) -> Position:
        """Where it stands between two iterations: what is not in the model and the optimizer.

        Nothing that is computed later depends on whether this was called. ValueError if it cannot
        be said, RuntimeError within an iteration."""

    @abstractmethod
    def resume(self, iteration: int, state: Mapping[str, Any] | None) -> None:
        """Go on from there; the model's and the optimizer's state are there already. Without the
        state of a position the plan begins anew. Every rank must call it."""

    @property
    def observing(self) -> bool:
        """Whether there is no plan yet."""
        return False

    @property
    def worker(self) -> int:
        """Which of the job's workers this is."""
        return self._cluster.control.rank

    @property
    def cluster(self) -> Cluster:
        """What this process is connected to."""
        return self._cluster

    scaler_remedy: str | None = None
    """Why GradScaler cannot unscale this session's gradients, and what else to do."""

    @abstractmethod
    def traffic(self) -> dict[str, int]:
        """Bytes sent so far, by link."""

    def listen(self, listener: Callable[[Iteration], None]) -> None:  # noqa: B027
        """Tell somebody of every iteration that is complete; by default nobody knows its times."""

    def on_scaler_step(self) -> None:  # noqa: B027 - nothing to do by default
        """A gradient scaler is about to step."""

    def skip_step(self) -> None:
        """Ends one iteration without an update; as `Model.skip_step` has it."""
        self.step(skip_update=True)

    def flush(self) -> None:  # noqa: B027 - nothing to do by default
        """Do every update that `step` has asked for."""

    def optimizer_reloaded(self) -> None:  # noqa: B027 - nothing to do by default
        """The optimizer's state and groups were replaced."""


OF_DDP = {
    "join": "let all ranks have as many batches, or call model.skip_step() where one has none left",
    "register_comm_hook": "choose a strategy and its wire format, as in 'wfbp:wire=fp16'",
}


class Watcher(Protocol):
    """Whoever is told of every step."""

    def on_step_end(self) -> None: ...
    def close(self) -> None: ...


class Model(nn.Module):
    """The user's module, trained together with its replicas on the other ranks.

    Attributes, `state_dict` and `load_state_dict` are the module's own, so checkpoints look as
    if nothing had happened.
    """

    _is_accelerate_prepared = True  # Accelerator.prepare leaves it alone: no DDP around it

    def __init__(self, module: nn.Module, session: Session, meter: Watcher | None = None):
        super().__init__()
        self.module = module
        object.__setattr__(self, "_session", session)
        object.__setattr__(self, "_meter", meter)
        object.__setattr__(self, "_forwards", set())  # names of methods that train
        object.__setattr__(self, "_no_sync", None)  # the no_sync() that the script has switched on

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        around = getattr(nn.parallel.DistributedDataParallel, "_active_ddp_module", None)
        if around is not None and around.module is self:
            raise RuntimeError(
                "DistributedDataParallel is around a prepared model, whose strategy averages "
                "already; leave it out"
            )
        return self._session.forward(self._modules["module"], *args, **kwargs)  # type: ignore[arg-type]

    def no_sync(self) -> AbstractContextManager[None]:
        """Within it, backward only accumulates: `with model.no_sync(): loss.backward()`."""
        return self._session.no_sync()

    def skip_step(self) -> None:
        """End this iteration without an update: in place of `optimizer.step()`, or of backward
        and the step, where a loss is not worth a backward. Messages go as usual, so nobody waits.

        Where parameters are averaged, this worker's update alone is left out. Where gradients are
        averaged, all ranks must skip the same iterations, as replicas would differ otherwise (an
        error at their next comparison): decide by what all know, such as the norm of the averaged
        gradients. Where they are applied iterations later (DeFT) this iteration's count as zero.
        ValueError where backward has applied or handed on the gradients already.
        """
        self._session.skip_step()

    def consolidate(self, repair: bool = False) -> None:
        """Average what differs between replicas; they are bit-identical when it returns.

        Every rank must call it, between iterations. RuntimeError if replicas still differ, and,
        naming rank and tensor, if parameters differ under a strategy that averages only gradients:
        it keeps them equal, so something went wrong. `repair` averages even those, and the
        optimizer's state.
        """
        self._session.consolidate(repair)

    def flush(self) -> None:
        """Finish updates that wait for their bucket's next forward.

        Only for code that passes parameters that it keeps to functions, such as `torch.lerp`:
        parameters, state, copies and evaluations of this object and of the bare module are up to
        date anyway, and so are `p.data` and `p.detach()`.
        """
        self._session.flush()

    def close(self) -> None:
        """Leave the other ranks. Called at exit; earlier only to prepare another model after."""
        if self._session.saver is not None:
            self._session.saver.finish()
        self._session.close()
        if self._meter is not None:
            self._meter.close()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop or zero the gradients, as `optimizer.zero_grad()` does."""
        self._session.zero_grad(set_to_none)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Return the module's own named parameters, with the names of `state_dict`."""
        self._session.flush()
        return self.module.named_parameters(*args, **kwargs)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, torch.Tensor]]:
        """Return the module's own named buffers, with the names of `state_dict`."""
        return self.module.named_buffers(*args, **kwargs)

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        if assign:
            raise ValueError(
                "assign (True) would put tensors in the place of those that are synchronized; "
                "leave it out, or load before offbeat.prepare"
            )
        return self.module.load_state_dict(state_dict, strict)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Model:
        """`to`, `double`, `cuda`: nothing may move out of its bucket."""
        if any(_would_move(t, fn) for t in self.parameters()):
            raise ValueError("move or convert the model before offbeat.prepare, not after it")
        if any(_would_move(t, fn) for t in self.buffers()):
            return super()._apply(fn, recurse)
        return self  # to where everything is already

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        """A copy is a plain module: for weight averages (`AveragedModel`) and evaluation."""
        self._session.flush()
        return copy.deepcopy(self.module, memo)

    def __getattr__(self, name: str) -> Any:
        if name == "module":
            self._session.flush()  # who reads the bare module finds it up to date
        try:
            return super().__getattr__(name)
        except AttributeError:
            module = super().__getattr__("module")
            if name in OF_DDP and not hasattr(module, name):
                raise AttributeError(
                    f"{name} is DistributedDataParallel's; {OF_DDP[name]}"
                ) from None
            value = getattr(module, name)
        if inspect.ismethod(value) and value.__self__ is module:
            return self._track_calls(name, value)
        if isinstance(value, (torch.Tensor, nn.Module)) or callable(value):
            self._session.flush()  # what it reads must be up to date
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute of the module, unless this object or its class has one of that name.

        Names with an underscore, which wrappers of models use for themselves, stay here, unless
        the value is a tensor or a module.
        """
        own = "_session" not in self.__dict__ or name in self.__dict__ or hasattr(type(self), name)
        private = name.startswith("_") and not isinstance(value, (torch.Tensor, nn.Module))
        if own or private or name == "module":
            super().__setattr__(name, value)
        else:
            self._session.flush()
            setattr(self._modules["module"], name, value)

    def __delattr__(self, name: str) -> None:
        if name in self.__dict__ or name == "module":
            super().__delattr__(name)
        else:
            delattr(self._modules["module"], name)

    def __getitem__(self, key: Any) -> Any:
        self._session.flush()
        return self._modules["module"][key]  # type: ignore[index]

    def __len__(self) -> int:
        return len(self._modules["module"])  # type: ignore[arg-type]

    def __bool__(self) -> bool:
        return True

    @property
    def require_backward_grad_sync(self) -> bool:
        """False: backward only accumulates, as within `no_sync()`."""
        return self._no_sync is None

    @require_backward_grad_sync.setter
    def require_backward_grad_sync(self, value: bool) -> None:
        if value and self._no_sync is not None:
            self._no_sync.__exit__(None, None, None)
            object.__setattr__(self, "_no_sync", None)
        elif not value and self._no_sync is None:
            quiet = self.no_sync()
            quiet.__enter__()
            object.__setattr__(self, "_no_sync", quiet)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            "a prepared model holds connections to other ranks and cannot be pickled; pickle "
            "model.module, copy.deepcopy(model) or model.state_dict()"
        )

    def _track_calls(self, name: str, method: MethodType) -> MethodType:
        """The method, whose calls count as forward passes if they train."""

        @wraps(method.__func__)
        def call(_: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return self._call(name, method, *args, **kwargs)

        return MethodType(call, method.__self__)

    def _call(self, name: str, method: MethodType, *args: Any, **kwargs: Any) -> Any:
        """Call a method. Whether it trains is seen in what it returns at first: tensors of a graph.
        From then on it is announced as a forward, so that messages may pass beneath it."""
        if name in self._forwards and torch.is_grad_enabled():
            return self._session.forward(method, *args, **kwargs)
        self._session.before_call()
        output = method(*args, **kwargs)
        if isinstance(output, Generator):
            return self._wrap_generator(output)
        if torch.is_grad_enabled() and any(t.grad_fn is not None for t in tensors_of(output)):
            self._forwards.add(name)
            self._session.note_forward(output)
        return output

    def _wrap_generator(self, generator: Generator[Any, Any, Any]) -> Generator[Any, Any, Any]:
        """The same; its body may run in other iterations than the call."""
        while True:
            self._session.before_call()
            try:
                value = next(generator)
            except StopIteration as end:
                return end.value
            yield value


def _would_move(tensor: torch.Tensor, fn: Callable[[torch.Tensor], torch.Tensor]) -> bool:
    """Whether it would be somewhere else or of another kind. A copy is not: `cpu:0`, as accelerate
    calls it, is where `cpu` is, though torch copies."""
    moved = fn(tensor.detach())
    if moved.data_ptr() == tensor.data_ptr():
        return False
    kinds = [(t.dtype, t.device.type, t.stride()) for t in (moved, tensor)]
    elsewhere = tensor.device.type != "cpu" and moved.device != tensor.device
    return kinds[0] != kinds[1] or elsewhere


class Optimizer(torch.optim.Optimizer):
    """The user's optimizer; `step` also communicates. Groups and state are the user's own
    objects, so LR schedulers and checkpoints see no difference."""

    def __init__(
        self, inner: torch.optim.Optimizer, session: Session, meter: Watcher | None = None
    ):
        self._sealed = False
        super().__init__(inner.param_groups, inner.defaults)
        self.inner = inner
        self._session, self._meter = session, meter
        self._after_step: Callable[[], None] | None = None
        self._parts: list[Part] = []
        self._alias()
        self._sealed = True

    def _alias(self) -> None:
        self.param_groups = self.inner.param_groups
        self.defaults = self.inner.defaults

    @property
    def state(self) -> Any:
        """The user's own, up to date: who changes it changes what the next update begins from."""
        if self._sealed:
            self._session.flush()
        return self.inner.state

    @state.setter
    def state(self, state: Any) -> None:  # type: ignore[override]
        if self._sealed:
            self._session.flush()
            self.inner.state = state
            self._session.optimizer_reloaded()

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        if closure is not None and not _evaluates_once(self.inner):
            loss, _ = self._session.drive(self.inner.step, closure)
            self._end_iteration(skip_update=True)
            return loss
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._end_iteration(skip_update=self._unscale_gradients())
        return loss

    def _end_iteration(self, *, skip_update: bool) -> None:
        self._session.step(skip_update=skip_update)
        if self._meter is not None:
            self._meter.on_step_end()
        if self._after_step is not None:
            self._after_step()

    def __getattr__(self, name: str) -> Any:
        """The user's optimizer has it. A method in which it steps ends an iteration."""
        if name in ("inner", "_session", "_sealed"):
            raise AttributeError(name)
        value = getattr(self.inner, name)
        if not (inspect.ismethod(value) and value.__self__ is self.inner):
            return value

        @wraps(value)
        def call(*args: Any, **kwargs: Any) -> Any:
            result, stepped = self._session.drive(value, None, *args, **kwargs)
            if stepped:
                self._end_iteration(skip_update=True)
            return result

        return call

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self.__dict__ or hasattr(type(self), name) or not self.__dict__.get("_sealed"):
            super().__setattr__(name, value)
        elif not name.startswith("_") and hasattr(self.inner, name):
            setattr(self.inner, name, value)
        else:
            super().__setattr__(name, value)

    @property
    def __class__(self) -> type:  # type: ignore[override]
        """That of the user's optimizer for `isinstance`; `type()` is this class."""
        return type(self.inner) if self.__dict__.get("_sealed") else type(self)

    def after_step(self, act: Callable[[], None]) -> None:
        """Call this whenever an iteration is over."""
        self._after_step = act

    def _unscale_gradients(self) -> bool:
        """Do what GradScaler.step asks for through two attributes: unscale, unless the user has
        done so, and report a gradient that is not finite. The iteration ends either way, so a
        rank that skips its update stays in step with the others."""
        found_inf = getattr(self, "found_inf", None)
        if found_inf is None:
            return False
        self._session.on_scaler_step()
        scale: torch.Tensor | None = getattr(self, "grad_scale", None)
        if scale is not None:
            gradients = [
                p.grad for g in self.param_groups for p in g["params"] if p.grad is not None
            ]
            for gradient in gradients:
                gradient.mul_(scale.double().reciprocal().to(gradient.dtype))
        return bool(found_inf)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients, or zero them where they are; those that are sent have their place,
        and are always zeroed there."""
        self._session.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        self._session.flush()
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._session.flush()
        self.inner.load_state_dict(state_dict)
        self._alias()
        for part in self._parts:
            part._alias()
        self._session.optimizer_reloaded()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if self._sealed:
            raise ValueError("param groups must be added before offbeat.prepare")
        super().add_param_group(param_group)

    def parts(self) -> list[Part]:
        """One optimizer for each of several that were prepared together."""
        assert isinstance(self.inner, JointOptimizer)
        stepped: set[int] = set()
        self._parts = [Part(part, self._session, self, stepped) for part in self.inner.parts]
        return list(self._parts)

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Asked by GradScaler.step alone."""
        if self._session.scaler_remedy is not None:
            raise ValueError(
                "GradScaler cannot unscale this strategy's gradients: "
                f"{self._session.scaler_remedy}, or bf16 autocast without a scaler"
            )
        return True


class Part(Optimizer):
    """One of several optimizers of a model. The iteration ends when all of them have stepped, or
    with the next backward."""

    def __init__(
        self,
        inner: torch.optim.Optimizer,
        session: Session,
        whole: Optimizer,
        stepped: set[int],
    ):
        super().__init__(inner, session)
        self._whole, self._stepped = whole, stepped  # ids of those that have, in this iteration

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if not self._session.awaits_step or id(self) in self._stepped:
            self._stepped.clear()
        if not self._unscale_gradients():
            self._session.drive(self.inner.step)
        self._stepped.add(id(self))
        assert isinstance(self._whole.inner, JointOptimizer)
        if len(self._stepped) == len(self._whole.inner.parts):
            self._stepped.clear()
            self._whole._end_iteration(skip_update=True)
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        assert isinstance(self._whole.inner, JointOptimizer)
        self._whole.inner.gather()
        self._whole._alias()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop or zero the gradients of this optimizer's parameters between a backward and the
        steps of all optimizers, and otherwise those of all."""
        if self._session.awaits_step or self._stepped:
            self.inner.zero_grad(set_to_none)
        else:
            self._session.zero_grad(set_to_none)


def _evaluates_once(optimizer: torch.optim.Optimizer) -> bool:
    """Whether `step(closure)` is `closure()` and then `step()`, as in torch's own optimizers."""
    step = next(cls for cls in type(optimizer).__mro__ if "step" in vars(cls))
    return step.__module__.startswith("torch.optim.") and not delegates(optimizer)
