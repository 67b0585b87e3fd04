"""Forward hooks that complete the buckets whose parameters a module is about to use."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from offbeat.core.buckets.attached import UncopiedHook
from offbeat.core.buckets.flat import Flat
from offbeat.core.runtime.hooks import calling_code


class ForwardHooks:
    """Hooks that call `complete_bucket(b)` before a module that uses parameters of bucket `b` runs.

    A parameter is not always used by the module that owns it. For example, attention reads the
    weight of its output projection and never calls that module. Therefore the first forward is
    recorded, and all buckets are completed when it begins. The record shows in which module each
    parameter was first read. From then on, the hook of that module completes the parameter's
    bucket. The hook of the owner completes the bucket of a parameter without a recorded read. If a
    later forward reads a parameter before that module runs, the read itself completes the bucket
    (`WatchedParameters`).

    FSDP gathers parameters on a stream of its own, which waits for compute only when the model
    begins. So all buckets of a sharded model are completed when its forward begins.

    Attributes:
        at_start: bucket that is needed when the whole model begins, together with all buckets
            nearer the input; None if no bucket is needed then.
    """

    def __init__(
        self,
        model: nn.Module,
        flat: Flat,
        complete_bucket: Callable[[int], None],
        before_read: Callable[[int], None],
    ):
        self._model, self._complete, self._before_read = model, complete_bucket, before_read
        self._bucket_of = {
            id(p): b for b, bucket in enumerate(flat.buckets) for p in bucket.parameters
        }
        self.at_start: int | None = 0
        self._learnt = False
        self._called: set[str] = set()
        self._running: list[str] = []
        self._first_read: dict[int, str] = {}
        self._handles: list[RemovableHandle] = []
        self._readers: list[nn.Module] = []  # modules whose parameters are watched
        modules = [] if flat.is_sharded else list(model.named_modules(remove_duplicate=False))
        watched = _outside_compiled(modules)
        self._compiled = len(watched) < len(modules)
        for name, module in watched:
            self._handles += self._watch(name, module)

    def record_reads(self) -> AbstractContextManager[Any]:
        """Return the context of a forward of the whole model. It records reads of parameters in the
        first forward."""
        if not self._learnt and _has_compiled_caller():
            # torch.compile has traced the caller without these hooks, so the start of the forward
            # completes all buckets.
            self.remove()
        if not self._handles or self.at_start != 0 or self._compiled or self._first_read:
            return nullcontext()
        return _ReadRecorder(self._on_read)

    def on_forward_end(self) -> None:
        """Handle the end of a training forward. After the first one, register the hooks of the
        modules that have read parameters."""
        if not self._called:
            return
        self.remove()
        self._learnt = True
        first: dict[str, int] = {}
        for name, module in self._model.named_modules(remove_duplicate=False):
            for p in module._parameters.values():
                if id(p) in self._bucket_of:
                    home, bucket = self._responsible_module(name, id(p)), self._bucket_of[id(p)]
                    first[home] = min(bucket, first.get(home, bucket))
        self.at_start = first.get("")
        for name, bucket in first.items():
            module, hook = self._model.get_submodule(name), partial(self._complete, bucket)
            handle = module.register_forward_pre_hook(UncopiedHook(hook), prepend=True)
            self._handles.append(handle)
        self._called = set()
        self._watch_reads()

    def remove(self) -> None:
        """Remove all hooks and restore the parameter dictionaries of the modules."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        for module in self._readers:
            module.__dict__["_parameters"] = dict(module._parameters)
        self._readers = []

    def _watch_reads(self) -> None:
        """Complete a bucket when a module attribute that is one of its parameters is read."""
        for _, module in _outside_compiled(self._model.named_modules()):
            if any(id(p) in self._bucket_of for p in module._parameters.values()):
                watched = WatchedParameters(module._parameters, self._bucket_of, self._before_read)
                module.__dict__["_parameters"] = watched
                self._readers.append(module)

    def _responsible_module(self, owner: str, parameter: int) -> str:
        """Return the name of the module whose hook completes the bucket of a parameter of module
        `owner`."""
        reader = self._first_read.get(parameter, owner)
        inside = reader == owner or reader.startswith(f"{owner}.") or not owner
        name = owner if inside else reader
        while name and name not in self._called:
            name = name.rpartition(".")[0]
        return name

    def _watch(self, name: str, module: nn.Module) -> list[RemovableHandle]:
        return [
            module.register_forward_pre_hook(
                UncopiedHook(partial(self._enter, name)), prepend=True
            ),
            module.register_forward_hook(UncopiedHook(self._leave), always_call=True),
        ]

    def _enter(self, name: str) -> None:
        self._called.add(name)
        self._running.append(name)
        self._complete(0)

    def _leave(self) -> None:
        if self._running:
            self._running.pop()

    def _on_read(self, parameter: int) -> None:
        if parameter in self._bucket_of and parameter not in self._first_read:
            self._first_read[parameter] = self._running[-1] if self._running else ""


class WatchedParameters(dict[str, nn.Parameter | None]):
    """Parameters of a module. Calls `before_read(b)` before it returns a parameter of bucket `b`.

    `nn.Module` reads its attributes there. Copies and pickles are plain dictionaries.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter | None],
        bucket_of: Mapping[int, int],
        before_read: Callable[[int], None],
    ):
        super().__init__(parameters)
        self._bucket_of, self._before_read = bucket_of, before_read

    def __getitem__(self, name: str) -> nn.Parameter | None:
        parameter = super().__getitem__(name)
        bucket = self._bucket_of.get(id(parameter))
        if bucket is not None:
            self._before_read(bucket)
        return parameter

    def __reduce_ex__(self, protocol: Any) -> Any:
        return dict, (dict(self),)


class _ReadRecorder(TorchFunctionMode):
    """Function mode that reports the id of every argument of a torch function."""

    def __init__(self, report: Callable[[int], None]):
        super().__init__()
        self._report = report

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        for value in (*args, *kwargs.values()):
            for item in value if isinstance(value, (list, tuple)) else (value,):
                self._report(id(item))
        return func(*args, **kwargs)


def _has_compiled_caller() -> bool:
    """Return whether the caller of the model was compiled, and the model with it."""
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    return dynamo is not None and any(c.co_filename == dynamo.__file__ for c in calling_code())


def _outside_compiled(modules: Iterable[tuple[str, nn.Module]]) -> list[tuple[str, nn.Module]]:
    """Return the modules whose hooks run as Python.

    The graph of a compiled module leaves out hooks that were registered after its compilation.
    """
    outside: list[tuple[str, nn.Module]] = []
    compiled: list[str] = []
    for name, module in modules:
        if any(name.startswith(prefix) for prefix in compiled):
            continue
        in_place = getattr(module, "_compiled_call_impl", None) is not None
        if in_place or hasattr(module, "_orig_mod"):
            compiled.append(f"{name}." if name else "")
        if not in_place:  # the hooks of a module compiled in place are part of its graph
            outside.append((name, module))
    return outside
