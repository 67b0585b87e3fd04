"""Scripts in a rehearsal: state of the process that each replica sees as its own."""

from __future__ import annotations

import importlib.util
import os
import sys
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, TextIO

from offbeat.experiments.script import MODULE
from offbeat.rehearsal.replica import RandomStreams

OWN = __name__.partition(".")[0]
# Classes of accelerate whose objects share one dictionary per process, which holds its rank.
SHARING_MODULE = "accelerate.state"
SHARING_CLASSES = ("PartialState", "AcceleratorState", "GradientState")


class ScriptState:
    """State of one replica that runs a script: random streams, environment, output and modules.

    A replica imports the modules of the script's folder itself, because their code may read the
    rank. Modules of installed packages are common to all replicas, except the state of accelerate.

    Args:
        seed: seed of the random streams at the start.
        environ: variables of this replica.
        script: script with its arguments, or -m with a module and its arguments.
        output: file of the replica's output.
    """

    def __init__(
        self, seed: int, environ: Mapping[str, str], script: Sequence[str], output: TextIO
    ) -> None:
        self._streams = RandomStreams(seed)
        self._environ, self._output = environ, output
        self._argv = list(script[1:] if script[0] == MODULE else script)
        folder = Path.cwd() if script[0] == MODULE else Path(script[0]).absolute().parent
        self._roots = tuple({str(folder), str(Path.cwd())})
        self._path = [str(folder), *sys.path[1:]]
        self.main = ModuleType("__main__")
        self._modules: dict[str, ModuleType] = {"__main__": self.main}
        self._others: dict[str, ModuleType | None] = {}  # what the modules have replaced
        self._count = -1  # modules of the process after the last search
        self._shared: dict[str, dict[str, Any]] = {}  # state of accelerate, by class

    def enter(self) -> None:
        """Install the state of the replica."""
        os.environ.update(self._environ)
        sys.argv, sys.path = self._argv, self._path
        sys.stdout = sys.stderr = self._output
        self._others = {name: sys.modules.get(name) for name in self._modules}
        sys.modules.update(self._modules)
        for name, sharing in _sharing_classes():
            sharing._shared_state = self._shared.setdefault(name, {})
        self._streams.enter()

    def leave(self) -> None:
        """Store the state of the replica."""
        self._streams.leave()
        self._output.flush()
        self._find_modules()
        self._shared = {name: sharing._shared_state for name, sharing in _sharing_classes()}
        for name in self._modules:
            before = self._others.get(name)
            if before is None:
                del sys.modules[name]
            else:
                sys.modules[name] = before

    def _find_modules(self) -> None:
        """Add the modules of the script's folder that the replica has imported."""
        if len(sys.modules) == self._count:
            return
        for name, module in list(sys.modules.items()):
            if name not in self._modules and self._is_own(name, module):
                self._modules[name] = module
        self._count = len(sys.modules)

    def _is_own(self, name: str, module: ModuleType) -> bool:
        path = getattr(module, "__file__", None)
        if path is None or name.partition(".")[0] == OWN:
            return False
        return path.startswith(self._roots) and not path.startswith(_package_folders())


def _sharing_classes() -> Iterator[tuple[str, Any]]:
    """Yield name and class of the state of accelerate, if a script has imported it."""
    module = sys.modules.get(SHARING_MODULE)
    for name in SHARING_CLASSES:
        if hasattr(module, name):
            yield name, getattr(module, name)


@cache  # `sysconfig` builds all its variables anew for each path
def _package_folders() -> tuple[str, ...]:
    """Return the folders of Python's own modules and of installed packages."""
    names = ("stdlib", "platstdlib", "purelib", "platlib")
    return tuple({sysconfig.get_path(name) for name in names})


def code_of(script: Sequence[str]) -> tuple[CodeType, dict[str, object]]:
    """Return the code of a script or module, and the attributes of its `__main__`."""
    if script[0] != MODULE:
        text = Path(script[0]).read_bytes()
        return compile(text, script[0], "exec"), {"__file__": script[0]}
    name = script[1]
    with suppress(ModuleNotFoundError):
        package = importlib.util.find_spec(f"{name}.__main__")
        name = name if package is None else package.name
    spec = importlib.util.find_spec(name)
    code = None if spec is None or spec.loader is None else spec.loader.get_code(name)  # type: ignore[attr-defined]
    if spec is None or code is None:
        raise ValueError(f"module ({script[1]!r}) must have Python code")
    return code, {"__file__": spec.origin, "__spec__": spec, "__package__": spec.parent}


def run_script(code: CodeType, attributes: Mapping[str, object], main: ModuleType) -> None:
    """Run a script as `__main__` in a module.

    Raises:
        RuntimeError: the script has called `sys.exit` with an error.
    """
    main.__dict__.update(attributes, __builtins__=__builtins__)
    try:
        exec(code, main.__dict__)
    except SystemExit as end:
        if end.code not in (None, 0):
            raise RuntimeError(f"the script has ended with sys.exit({end.code!r})") from end
