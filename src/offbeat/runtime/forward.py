"""Forward hooks: which bucket's parameters a module is about to use."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn
from torch.utils.hooks import RemovableHandle

from offbeat.runtime.flat import Flat


class ForwardHooks:
    """Calls `needed(b)` before a module runs that uses parameters of bucket b.

    Not every module is called: attention reads the weight of its output projection, whose own
    hooks then never run. So the first forward is watched, and a module that was not called in it
    answers for its parameters through the nearest one around it that was. In that first forward
    everything is needed at once. `at_start` is what the model as a whole needs when it begins:
    a bucket, and with it all that come before it in the forward.
    """

    def __init__(self, model: nn.Module, flat: Flat, needed: Callable[[int], None]):
        self._model, self._needed = model, needed
        bucket_of = {id(p): b for b, bucket in enumerate(flat.buckets) for p in bucket.parameters}
        self._uses = {
            name: min(buckets)
            for name, module in model.named_modules(remove_duplicate=False)
            if (
                buckets := [
                    bucket_of[id(p)] for p in module._parameters.values() if id(p) in bucket_of
                ]
            )
        }
        self.at_start: int | None = 0
        self._called: set[str] = set()
        self._handles: list[RemovableHandle] = []
        for name, module in _outside_compiled(model):
            self._watch(name, module)

    def forward_ended(self) -> None:
        """A training forward of the whole model is over: from the first one learn who is called."""
        if not self._called:
            return
        self.remove()
        first: dict[str, int] = {}
        for name, bucket in self._uses.items():
            home = self._answering(name)
            first[home] = min(bucket, first.get(home, bucket))
        self.at_start = first.get("")
        for name, bucket in first.items():
            self._attach(self._model.get_submodule(name), bucket)
        self._called = set()

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _answering(self, name: str) -> str:
        while name and name not in self._called:
            name = name.rpartition(".")[0]
        return name

    def _watch(self, name: str, module: nn.Module) -> None:
        def called(_module: nn.Module, _inputs: object) -> None:
            self._called.add(name)
            self._needed(0)

        self._handles.append(module.register_forward_pre_hook(called, prepend=True))

    def _attach(self, module: nn.Module, bucket: int) -> None:
        def about_to_run(_module: nn.Module, _inputs: object) -> None:
            self._needed(bucket)

        self._handles.append(module.register_forward_pre_hook(about_to_run, prepend=True))


def _outside_compiled(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Modules whose hooks run as Python: the graph of a compiled module leaves out hooks that
    were registered after it was compiled."""
    found: list[tuple[str, nn.Module]] = []
    compiled: list[str] = []
    for name, module in model.named_modules(remove_duplicate=False):
        if any(name.startswith(prefix) for prefix in compiled):
            continue
        in_place = getattr(module, "_compiled_call_impl", None) is not None
        if in_place or hasattr(module, "_orig_mod"):
            compiled.append(f"{name}." if name else "")
        if not in_place:  # else its own hooks are part of the graph
            found.append((name, module))
    return found
