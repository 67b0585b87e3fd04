"""Registry of strategies: by name, and by `module:Class` for strategies of other packages."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from importlib.resources import files
from inspect import signature
from pkgutil import iter_modules
from typing import Any

from offbeat.core.parts import load_object
from offbeat.core.plan import Plan
from offbeat.core.strategy.interface import Strategy, require_choice

ENTRY_POINTS = "offbeat.strategies"  # entry point group of strategies in other packages

BASELINE = "ddp"  # strategy with which all others are compared
# Synchronous strategies come first. Paths are text, so that listing the names imports nothing.
BUILT_IN = {
    "ddp": "offbeat.strategies.ddp:DDP",
    "wfbp": "offbeat.strategies.wfbp:WFBP",
    "asc-wfbp": "offbeat.strategies.asc_wfbp:ASCWFBP",
    "bsp": "offbeat.strategies.bsp:BSP",
    "bytescheduler": "offbeat.strategies.priorities:ByteScheduler",
    "dear": "offbeat.strategies.dear:DeAR",
    "p3": "offbeat.strategies.priorities:P3",
    "us-byte": "offbeat.strategies.priorities:USByte",
    "cyclic": "offbeat.strategies.cyclic:Cyclic",
    "deft": "offbeat.strategies.deft:DeFT",
    "diloco": "offbeat.strategies.diloco:DiLoCo",
    "dreamddp": "offbeat.strategies.dreamddp:DreamDDP",
    "fedavg": "offbeat.strategies.fedavg:FedAvg",
    "local-sgd": "offbeat.strategies.local_sgd:LocalSGD",
    "partial-sync": "offbeat.strategies.partial_sync:PartialSync",
    "selsync": "offbeat.strategies.selsync:SelSync",
    "ps-bsp": "offbeat.server.strategies:PSBSP",
    "ssp": "offbeat.server.strategies:SSP",
    "a2cid2": "offbeat.gossip.strategies:A2CiD2",
    "ad-psgd": "offbeat.gossip.strategies:ADPSGD",
}


# Package in which each module holds one strategy, with the name of the module (`-` for `_`).
PACKAGE = "offbeat.strategies.methods"


def strategy_names() -> list[str]:
    """Return the names of all strategies: built-in strategies, then strategies of installed
    packages."""
    own = [*BUILT_IN, *module_names()]
    return [*own, *sorted(set(_entry_points()) - set(own))]


@cache
def module_names() -> dict[str, str]:
    """Return by name the modules of the strategies in `PACKAGE`. No module is imported."""
    root, *rooms = PACKAGE.split(".")
    return {
        module.name.replace("_", "-"): f"{PACKAGE}.{module.name}"
        for module in iter_modules([str(files(root).joinpath(*rooms))])
    }


def read_plan(data: Mapping[str, Any]) -> Plan:
    """Return the plan of JSON types, as `Plan.from_dict` does, with the rules of its strategy.

    Args:
        data: result of `Plan.to_dict`.

    Raises:
        ValueError: as `Plan.from_dict`, or the module of the strategy cannot be imported.
    """
    plan = Plan.from_dict(data)
    if plan.strategy in module_names():
        import_module(module_names()[plan.strategy])  # registers the rules
    elif not _is_own(plan.strategy) and len(_entry_points().get(plan.strategy, ())) == 1:
        find(plan.strategy)
    return plan


def find(name: str) -> type[Strategy]:
    """Return the strategy class of a name.

    Args:
        name: a built-in name, a name that an installed package declares in the entry point group
            `offbeat.strategies`, or `module:Class`.

    Raises:
        ValueError: no strategy has this name, or two packages declare it, or the class cannot be
            imported or is not a strategy.
    """
    if ":" in name:
        return _import(name, name)
    if _is_own(name):
        if name in _entry_points():
            raise ValueError(
                _ambiguity_message(name, ["offbeat", *map(_package, _entry_points()[name])])
            )
        return _import(name, BUILT_IN.get(name) or _path_in_module(name))
    points = _entry_points().get(name, [])
    if len(points) > 1:
        raise ValueError(_ambiguity_message(name, [_package(point) for point in points]))
    require_choice("strategy", name, strategy_names())
    return _import(name, points[0].value)


def is_registered(strategy: Strategy) -> bool:
    """Return whether the registry returns the strategy's class for its name."""
    name = getattr(strategy, "name", "")
    return (_is_own(name) or name in _entry_points()) and find(name) is type(strategy)


def _is_own(name: str) -> bool:
    return name in BUILT_IN or name in module_names()


def _path_in_module(name: str) -> str:
    """Return `module:Class` of a strategy in `PACKAGE`."""
    path = module_names()[name]
    classes = [
        member
        for member in vars(import_module(path)).values()
        if isinstance(member, type) and issubclass(member, Strategy)
    ]
    [cls] = [c for c in classes if c.__module__ == path and getattr(c, "name", None) == name]
    return f"{path}:{cls.__name__}"


def reference_of(strategy: Strategy) -> str:
    """Return the name under which another process finds the strategy's class.

    Args:
        strategy: a strategy.

    Returns:
        The registered name, or `module:Class`.

    Raises:
        ValueError: the class is defined in the script, which other processes cannot import.
    """
    cls = type(strategy)
    if is_registered(strategy):
        return strategy.name
    if cls.__module__ == "__main__" or "<locals>" in cls.__qualname__:
        raise ValueError(
            f"strategy ({cls.__qualname__}) must be in a module of its own, not in the script, as "
            "the launcher imports it; name it as module:Class, or start the script with torchrun"
        )
    return f"{cls.__module__}:{cls.__qualname__}"


def create(name: str, settings: Mapping[str, Any] | None = None) -> Strategy:
    """Return the strategy of a name with these settings.

    Args:
        name: name as for `find`.
        settings: settings by name; all others have their defaults.

    Raises:
        ValueError: there is no such strategy or setting. The error suggests the nearest name.
    """
    make, settings = find(name), settings or {}
    known = setting_names(name)
    if "outer" in settings and "outer" not in known:
        raise ValueError(
            f"outer must be left out with {name}: outer optimizers step on averages of parameters, "
            "which this strategy does not make"
        )
    for key in settings:
        require_choice(f"setting of {name}", key, known)
    return make(**settings)


def setting_names(name: str) -> list[str]:
    """Return the names of a strategy's settings.

    Args:
        name: name as for `find`.

    Raises:
        ValueError: there is no such strategy.
    """
    return list(signature(find(name)).parameters)


@cache
def _entry_points() -> dict[str, list[EntryPoint]]:
    points: dict[str, list[EntryPoint]] = {}
    for point in entry_points(group=ENTRY_POINTS):
        points.setdefault(point.name, []).append(point)
    return points


def _import(name: str, path: str) -> type[Strategy]:
    try:
        cls = load_object(path)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(
            f"strategy ({name}) must be a class that can be imported as {path}: {error}"
        ) from error
    if not (isinstance(cls, type) and issubclass(cls, Strategy)):
        raise ValueError(f"strategy ({name}) must be a subclass of offbeat.Strategy, not {cls!r}")
    return cls


def _ambiguity_message(name: str, packages: list[str]) -> str:
    return (
        f"strategy ({name}) is declared by {' and '.join(packages)}; name the class as module:Class"
    )


def _package(point: EntryPoint) -> str:
    return point.dist.name if point.dist is not None else point.value
