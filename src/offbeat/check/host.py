"""Facts of this host: versions, platform, links and limits, for a report of a fault."""

from __future__ import annotations

import os
import platform
import socket
import sys
from collections.abc import Mapping
from importlib import metadata

from offbeat import __version__
from offbeat.core.measuring.processors import processors
from offbeat.core.transport.interfaces import ipv4_of
from offbeat.lab import Cluster, LabError
from offbeat.lab.lab import check_support

PACKAGES = ("torch", "numpy", "accelerate", "transformers", "lightning")
PREFIXES = ("OFFBEAT_", "GLOO_", "NCCL_", "MASTER_")
NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "OMP_NUM_THREADS")
SECRET = "SECRET"  # in the name of a variable whose value is not shown


def host_lines() -> list[str]:
    """Return what a report of a fault needs, without secrets."""
    facts: dict[str, dict[str, object]] = {
        "versions": {
            "python": platform.python_version(),
            "offbeat": __version__,
            **{name: _version(name) for name in PACKAGES},
        },
        "platform": {
            "system": f"{platform.system()} {platform.release()}",
            "machine": platform.machine(),
            "processors": processors(),
            **_torch_facts(),
        },
        # of the network interfaces, which a link can name
        "interfaces": {n: ipv4_of(n) or "no IPv4 address" for _, n in socket.if_nameindex()},
        "limits": {**_limits(), "stdout is a terminal": sys.stdout.isatty()},
        "lab": {"network namespaces": _lab_support()},
        "environment": _environment_of_job(os.environ),
    }
    lines = []
    for title, entries in facts.items():
        lines.append(title)
        lines += [f"  {name:<22} {value}" for name, value in entries.items()] or ["  none"]
    return lines


def _torch_facts() -> dict[str, object]:
    try:
        import torch
    except ImportError:  # it is installed apart, as planning needs none
        return {}
    count = torch.cuda.device_count()
    gpus = sorted({torch.cuda.get_device_name(i) for i in range(count)})
    return {
        "threads of torch": torch.get_num_threads(),
        "accelerators": f"{count} ({', '.join(gpus)})" if gpus else "none",
    }


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def _limits() -> dict[str, object]:
    try:
        import resource
    except ImportError:  # Windows
        return {}
    size = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "open files": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        "bytes of a file": "unlimited" if size == resource.RLIM_INFINITY else size,
        "memory": f"{memory / 2**30:.1f} GiB",
    }


def _lab_support() -> str:
    """Return whether this host can emulate clusters, with the reason if it cannot."""
    try:
        check_support(Cluster.simple(2, "100mbit"))
    except (LabError, OSError, ValueError) as error:
        return f"no: {error}"
    return "yes"


def _environment_of_job(environment: Mapping[str, str]) -> dict[str, object]:
    """Return the variables that a job reads; of secrets only that they are set."""
    return {
        name: "set, not shown" if SECRET in name else value
        for name, value in sorted(environment.items())
        if name.startswith(PREFIXES) or name in NAMES
    }
