"""Former names of public modules: they warn until version 0.3 and return the new module."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

REMOVED_IN = "0.3"
MODULES = {
    "offbeat.advice": "offbeat.experiments.advice",
    "offbeat.numerics": "offbeat.core.rules",
    "offbeat.plan.check": "offbeat.core.verify.check",
    "offbeat.report": "offbeat.experiments.report",
    "offbeat.runtime": "offbeat.core.runtime.prepare",
    "offbeat.solve": "offbeat.strategies.solvers",
    "offbeat.strategies.base": "offbeat.core.strategy.interface",
    "offbeat.strategies.texts": "offbeat.core.strategy.parsing",
    "offbeat.trace": "offbeat.core.sim.trace",
}
PUBLIC = {  # where the public names of a former module are
    "offbeat.numerics": "offbeat.rules",
    "offbeat.plan.check": "offbeat.plan",
    "offbeat.runtime": "offbeat",
    "offbeat.strategies.base": "offbeat.strategies",
    "offbeat.trace": "offbeat",
}


class FormerNames(MetaPathFinder, Loader):
    """Finder of the modules of `MODULES` under their former names."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return ModuleSpec(name, self) if name in MODULES else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        new = PUBLIC.get(spec.name, MODULES[spec.name])
        warnings.warn(
            f"module {spec.name} is now {new}; the former name will be removed in {REMOVED_IN}",
            FutureWarning,
            stacklevel=2,
        )
        module = import_module(MODULES[spec.name])
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Restore the specification of the new name. The module has already been executed."""
        if module.__spec__ is not None:
            module.__spec__ = module.__spec__.loader_state


def install() -> None:
    """Add the finder behind all other finders."""
    if not any(isinstance(finder, FormerNames) for finder in sys.meta_path):
        sys.meta_path.append(FormerNames())
