"""Forward hooks: which bucket's parameters a module is about to use."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from offbeat.core.buckets.flat import Flat
from offbeat.core.runtime.attached import UncopiedHook


class ForwardHooks:
    """Calls `needed(b)` before a module runs that uses parameters of bucket b.

    A parameter is not always used by the module that owns it. Attention, for example, reads the
    weight of its output projection and never calls that module. So the first forward is watched,
    and every bucket is needed as soon as it begins. It shows which module was running when a
    parameter was first read. From then on that module asks for the parameter's bucket. A
    parameter that nobody was seen to read is asked for by its owner. A later forward may read a
    parameter before that module runs; then the read itself completes the parameter's bucket
    (`WatchedParameters`).

    `at_start` is the bucket that the model as a whole needs when it begins. Buckets nearer the
    input are needed with it.
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
        modules = list(model.named_modules(remove_duplicate=False))
        watched = _outside_compiled(modules)
        self._compiled = len(watched) < len(modules)
        for name, module in watched:
            self._handles += self._watch(name, module)

    def record_reads(self) -> AbstractContextManager[Any]:
        """For one forward of the whole model: sees parameters read, in the first one."""
        if not self._learnt and _has_compiled_caller():
            self.remove()  # they would be left out of the graph: everything is needed at the start
        if not self._handles or self.at_start != 0 or self._compiled or self._first_read:
            return nullcontext()
        return _ReadRecorder(self._on_read)

    def on_forward_end(self) -> None:
        """A training forward of the whole model is over: from the first one learn who is called."""
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
        for handle in self._handles:
            handle.remove()
        self._handles = []
        for module in self._readers:
            module.__dict__["_parameters"] = dict(module._parameters)
        self._readers = []

    def _watch_reads(self) -> None:
        """Complete a bucket when an attribute of a module is read that is one of its parameters."""
        for _, module in _outside_compiled(self._model.named_modules()):
            if any(id(p) in self._bucket_of for p in module._parameters.values()):
                watched = WatchedParameters(module._parameters, self._bucket_of, self._before_read)
                module.__dict__["_parameters"] = watched
                self._readers.append(module)

    def _responsible_module(self, owner: str, parameter: int) -> str:
        """Who answers for a parameter of this module."""
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
    """Parameters of a module. Calls `before_read(b)` before it returns a parameter of bucket b.

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
    """Reports the id of whatever torch functions are given."""

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
    """Whether whoever calls the model was compiled, and the model with it."""
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    frame = sys._getframe() if dynamo is not None else None
    while frame is not None:
        if frame.f_code.co_filename == dynamo.__file__:  # type: ignore[union-attr]
            return True
        frame = frame.f_back
    return False


def _outside_compiled(modules: Iterable[tuple[str, nn.Module]]) -> list[tuple[str, nn.Module]]:
    """Modules whose hooks run as Python: the graph of a compiled module leaves out hooks that
    were registered after it was compiled."""
    found: list[tuple[str, nn.Module]] = []
    compiled: list[str] = []
    for name, module in modules:
        if any(name.startswith(prefix) for prefix in compiled):
            continue
        in_place = getattr(module, "_compiled_call_impl", None) is not None
        if in_place or hasattr(module, "_orig_mod"):
            compiled.append(f"{name}." if name else "")
        if not in_place:  # else its own hooks are part of the graph
            found.append((name, module))
    return found
