"""Prepared model and optimizer, which pass each call to their session."""

from __future__ import annotations

import copy
import inspect
import os
from collections import defaultdict
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch._C import _current_graph_task_id as current_graph_task_id

from offbeat.core.buckets.coupling import is_wrapper
from offbeat.core.guards.step_hooks import has_hooks
from offbeat.core.measuring.loss import accumulation
from offbeat.core.runtime.hooks import tensors_of
from offbeat.core.runtime.joint_optimizer import JointOptimizer
from offbeat.core.runtime.session import Position as Position
from offbeat.core.runtime.session import Session

if TYPE_CHECKING:
    from offbeat.elastic.samples import MemberSamples, Stream
    from offbeat.jobs.meter import Meter

OF_DDP = {
    "join": "let all ranks have as many batches, or call model.skip_step() where one has none left",
    "register_comm_hook": "choose a strategy and its wire format, as in 'wfbp:wire=fp16'",
}


class Model(nn.Module):
    """The user's module, trained together with its replicas on the other ranks.

    Attributes, `state_dict` and `load_state_dict` are the module's own, so checkpoints have the
    module's own format.
    """

    _is_accelerate_prepared = True  # prevents Accelerator.prepare from wrapping it in DDP

    def __init__(self, module: nn.Module, session: Session, meter: Meter | None = None):
        super().__init__()
        self.module = module
        object.__setattr__(self, "_session", session)
        object.__setattr__(self, "_meter", meter)
        object.__setattr__(self, "_process_id", os.getpid())
        object.__setattr__(self, "_forwards", set())  # names of methods that train
        object.__setattr__(self, "_no_sync", None)  # no_sync() of `require_backward_grad_sync`

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        around = getattr(nn.parallel.DistributedDataParallel, "_active_ddp_module", None)
        if around is not None and around.module is self:
            raise RuntimeError(
                "DistributedDataParallel is around a prepared model, whose strategy averages "
                "already; leave it out"
            )
        return self._session.forward(self._modules["module"], *args, **kwargs)  # type: ignore[arg-type]

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Return a context in which backward only accumulates: `with model.no_sync():
        loss.backward()`."""
        with self._session.no_sync(), accumulation():
            yield

    def skip_step(self) -> None:
        """End this iteration without an update, in place of `optimizer.step()`, or in place of
        backward and step. Messages are sent as usual, so no other rank waits.

        Under strategies that average parameters, the call leaves out only this worker's update.
        Under strategies that average gradients, all ranks must skip the same iterations, otherwise
        replicas differ and their next comparison raises. Base the decision on values that all ranks
        have, such as the norm of the averaged gradients. Under strategies that apply gradients
        several iterations later (DeFT), the gradients of this iteration count as zero.

        Raises:
            ValueError: backward has already sent or applied the gradients.
        """
        _require_backward_ended("skip_step()")
        self._session.skip_step()
        self._session.finish_iteration()

    def consolidate(self, repair: bool = False) -> None:
        """Average the differences between replicas, so that all replicas are bit-identical. Every
        rank must call this method, between iterations.

        Args:
            repair: average parameters and optimizer state even if the strategy keeps replicas
                equal.

        Raises:
            RuntimeError: replicas still differ, or, without `repair`, parameters differ under a
                strategy that averages only gradients. The error names rank and tensor.
        """
        _require_backward_ended("consolidate()")
        self._session.consolidate(repair)

    def request_leave(self, reason: str = "requested") -> None:
        """Request that this process leaves the job at the next end of a period of the plan. The
        process trains until then. Any thread may call this method.

        Args:
            reason: reason for the record of the job.

        Raises:
            ValueError: the members of the job do not change (see `members` of `offbeat.prepare`).
        """
        self._session.request_leave(reason)

    def read_samples(self, stream: Stream) -> MemberSamples:
        """Return the batches of this member from a stream that all members read together.
        `offbeat.data.MemberSampler` calls it. Every member must call it once, before it trains.

        Args:
            stream: samples of the job, the same on all members.

        Raises:
            ValueError: streams differ between members, or the members of the job do not change.
        """
        return self._session.read_samples(stream)

    @property
    def has_left(self) -> bool:
        """Whether this process has left the job after `request_leave`. It must not train on."""
        return self._session.has_left

    @property
    def replica(self) -> int:
        """Index of the replica that this rank trains. All ranks of a node train the same one."""
        return self._session.replica

    @property
    def member(self) -> int:
        """Index of this rank within its node; 0 if every rank has a replica of its own."""
        return self._session.cluster.member

    def flush(self) -> None:
        """Complete updates that would otherwise run at the next forward of their bucket.

        Call this method only before code passes stored references to parameters to functions such
        as `torch.lerp`. Parameters, state, copies and evaluations of this object and of the bare
        module are always up to date, and so are `p.data` and `p.detach()`.
        """
        self._session.flush()

    def close(self) -> None:
        """Leave the job. The process calls this method at exit; call it earlier only to prepare
        another model. In a fork of the process, such as a worker of a DataLoader, the call has no
        effect."""
        if os.getpid() != self._process_id:
            return
        _require_backward_ended("close()")
        if self._session.saver is not None:
            self._session.saver.finish()
        self._session.close()
        if self._meter is not None:
            self._meter.close()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop or zero the gradients, as `optimizer.zero_grad()` does.

        Args:
            set_to_none: drop the gradients instead of zeroing them.
        """
        _require_backward_ended("zero_grad()")
        self._session.zero_grad(set_to_none)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Return the module's own named parameters, with the names of `state_dict`."""
        self._session.flush()
        return self.module.named_parameters(*args, **kwargs)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, torch.Tensor]]:
        """Return the module's own named buffers, with the names of `state_dict`."""
        return self.module.named_buffers(*args, **kwargs)

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        self._session.note_reading("state_dict()")
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
        """Implement `to`, `double` and `cuda`. Raise ValueError if a parameter would move out of
        its bucket."""
        if any(_would_move(t, fn) for t in self.parameters()):
            raise ValueError("move or convert the model before offbeat.prepare, not after it")
        if any(_would_move(t, fn) for t in self.buffers()):
            return super()._apply(fn, recurse)
        return self  # nothing would move

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        """Return a copy of the bare module, for averages of weights (`AveragedModel`) and for
        evaluation."""
        self._session.flush()
        return copy.deepcopy(self.module, memo)

    def __getattr__(self, name: str) -> Any:
        if name == "module":
            self._session.flush()  # the bare module must be up to date
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
            self._session.flush()  # the weights that the value reads must be up to date
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute of the module, unless this object or its class has an attribute of that
        name.

        Names with a leading underscore are set on this object unless the value is a tensor or a
        module, because wrappers of models use such names for themselves.
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
        """Return the method with calls that count as forward passes if they return tensors with a
        graph."""

        @wraps(method.__func__)
        def call(_: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return self._call(name, method, *args, **kwargs)

        return MethodType(call, method.__self__)

    def _call(self, name: str, method: MethodType, *args: Any, **kwargs: Any) -> Any:
        """Call a method of the module.

        The first call that returns tensors with a graph shows that the method trains. Later calls
        are announced as forwards, so that messages can overlap them.
        """
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
        """Yield the values of a generator. Its body may run in other iterations than the call."""
        while True:
            self._session.before_call()
            try:
                value = next(generator)
            except StopIteration as end:
                return end.value
            yield value


def _would_move(tensor: torch.Tensor, fn: Callable[[torch.Tensor], torch.Tensor]) -> bool:
    """Return whether `fn` would change the dtype, device or strides of a tensor.

    A copy on the same device is no move: torch copies a tensor on `cpu` if the target is `cpu:0`,
    the name that accelerate uses.
    """
    moved = fn(tensor.detach())
    if moved.data_ptr() == tensor.data_ptr():
        return False
    kinds = [(t.dtype, t.device.type, t.stride()) for t in (moved, tensor)]
    elsewhere = tensor.device.type != "cpu" and moved.device != tensor.device
    return kinds[0] != kinds[1] or elsewhere


def _add_step_hooks(step: Callable[..., Any]) -> Callable[..., Any]:
    """Return a `step` with the hooks of the script.

    torch would wrap every `step` in a record for its profiler. The user's optimizer has that record
    already, within this step.
    """
    with_hooks = torch.optim.Optimizer.profile_hook_step(step)

    @wraps(step)
    def run(self: Optimizer, *args: Any, **kwargs: Any) -> Any:
        return (with_hooks if has_hooks(self) else step)(self, *args, **kwargs)

    run.hooked = True  # type: ignore[attr-defined] # torch leaves it as it is
    return run


class Optimizer(torch.optim.Optimizer):
    """The user's optimizer, whose `step` also communicates.

    Groups and state are the user's own objects, so learning-rate schedulers and checkpoints work
    unchanged.
    """

    def __init__(self, inner: torch.optim.Optimizer, session: Session):
        self._sealed = False
        super().__init__(inner.param_groups, inner.defaults)
        self.inner = inner
        self._session = session
        self._parts: list[OptimizerPart] = []
        self._alias()
        self._sealed = True

    def _alias(self) -> None:
        self.param_groups = self.inner.param_groups
        self.defaults = self.inner.defaults

    @property
    def state(self) -> Any:
        """State of the user's optimizer, after all requested updates. Changes affect the next
        update."""
        if self._sealed:
            self._session.flush()
        return self.inner.state

    @state.setter
    def state(self, state: Any) -> None:  # type: ignore[override]
        if self._sealed:
            self._session.flush()
            self.inner.state = state
            self._session.optimizer_reloaded()

    @_add_step_hooks
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        _require_backward_ended("step()")
        if closure is not None and not _evaluates_once(self.inner):
            loss, _ = self._session.drive(self.inner.step, closure)
            self._end_iteration(skip_update=True)
            return loss
        loss = _evaluate(closure)
        self._session.step(skip_update=self._unscale_gradients())
        self._session.finish_iteration()
        return loss

    def _end_iteration(self, *, skip_update: bool) -> None:
        self._session.step(skip_update=skip_update)
        self._session.finish_iteration()

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the user's optimizer. A call of a method that steps the optimizer
        ends an iteration."""
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
        """Class of the user's optimizer, for `isinstance`; `type()` returns this class."""
        return type(self.inner) if self.__dict__.get("_sealed") else type(self)

    def _unscale_gradients(self) -> bool:
        """Return whether GradScaler has found a gradient that is not finite, after unscaling the
        gradients unless the script has done so.

        GradScaler.step passes both through the attributes `found_inf` and `grad_scale`. The
        iteration ends in either case, so a rank that skips its update stays in step with the other
        ranks.
        """
        # Without `__getattr__`, whose errors take time in every step.
        found_inf = vars(self).get("found_inf")
        if found_inf is None:
            found_inf = getattr(self.inner, "found_inf", None)
        if found_inf is None:
            return False
        found = bool(found_inf)
        self._session.on_scaler_step(steps=not found)
        scale: torch.Tensor | None = getattr(self, "grad_scale", None)
        if scale is not None:
            inverse, by_dtype = scale.double().reciprocal().reshape(()), defaultdict(list)
            for p in (p for group in self.param_groups for p in group["params"]):
                if p.grad is not None:
                    by_dtype[p.grad.dtype].append(p.grad)
            for dtype, gradients in by_dtype.items():
                torch._foreach_mul_(gradients, inverse.to(dtype))
        return found

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop or zero the gradients.

        Args:
            set_to_none: drop the gradients instead of zeroing them. Gradients whose update is
                still to come are kept in the flat storage, and dropped from `p.grad`.
        """
        _require_backward_ended("zero_grad()")
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

    def parts(self) -> list[OptimizerPart]:
        """Return one prepared optimizer for each optimizer of the list that was prepared."""
        assert isinstance(self.inner, JointOptimizer)
        stepped = dict[int, int]()
        self._parts = [
            OptimizerPart(part, self._session, self, stepped) for part in self.inner.parts
        ]
        return list(self._parts)

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Whether the optimizer handles gradient scales itself. Only GradScaler.step reads this
        attribute."""
        if self._session.scaler_remedy is not None:
            raise ValueError(
                "GradScaler cannot unscale this strategy's gradients: "
                f"{self._session.scaler_remedy}, or bf16 autocast without a scaler"
            )
        return True


class OptimizerPart(Optimizer):
    """One of several optimizers of a model.

    The iteration ends when all of them have stepped, or with the next backward.
    """

    def __init__(
        self,
        inner: torch.optim.Optimizer,
        session: Session,
        whole: Optimizer,
        stepped: dict[int, int],
    ):
        super().__init__(inner, session)
        self._whole, self._stepped = whole, stepped  # iteration of the last step, by id of the part

    @_add_step_hooks
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        _require_backward_ended("step()")
        loss = _evaluate(closure)
        iteration = self._session.iteration
        if not self._session.awaits_step or self._stepped.get(id(self)) == iteration:
            self._stepped.clear()
        if not self._unscale_gradients():
            self._session.drive(self.inner.step)
        self._stepped[id(self)] = iteration
        if all(self._stepped.get(id(part)) == iteration for part in self._whole._parts):
            self._stepped.clear()
            self._whole._end_iteration(skip_update=True)
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        assert isinstance(self._whole.inner, JointOptimizer)
        self._whole.inner.gather()
        self._whole._alias()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop or zero gradients.

        Between a backward and the last step of its iteration, only this optimizer's gradients are
        affected, otherwise the gradients of all parameters.
        """
        _require_backward_ended("zero_grad()")
        if self._session.awaits_step or self._session.iteration in self._stepped.values():
            self.inner.zero_grad(set_to_none)
        else:
            self._session.zero_grad(set_to_none)


def _require_backward_ended(call: str) -> None:
    """Raise ValueError within a backward, as in a hook of a gradient."""
    if current_graph_task_id() >= 0:
        raise ValueError(
            f"{call} was called within backward (in a hook of a gradient), where gradients are "
            "not averaged yet; call it after backward"
        )


def _evaluate(closure: Callable[[], Any] | None) -> Any:
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


def _evaluates_once(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether `step(closure)` is `closure()` followed by `step()`, as in torch's own
    optimizers."""
    step = next(cls for cls in type(optimizer).__mro__ if "step" in vars(cls))
    return step.__module__.startswith("torch.optim.") and not is_wrapper(optimizer)
