"""Facts of this host: versions, platform, links and limits, for a report of a fault."""

from __future__ import annotations

import os
import platform
import socket
import sys
from collections.abc import Mapping
from importlib import metadata
from typing import Any

from offbeat import __version__
from offbeat.core.measuring.processors import processors
from offbeat.core.transport.interfaces import ipv4_of

PACKAGES = ("torch", "numpy", "accelerate", "transformers", "lightning")
PREFIXES = ("OFFBEAT_", "GLOO_", "NCCL_", "MASTER_")
NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "OMP_NUM_THREADS")
SECRET = "SECRET"  # in the name of a variable whose value is not shown


def host_lines() -> list[str]:
    """Return what a report of a fault needs, without secrets."""
    facts = {
        "versions": package_versions(),
        "platform": platform_facts(),
        "interfaces": interface_addresses(),
        "limits": process_limits(),
        "lab": lab_support(),
        "environment": environment_of_job(os.environ),
    }
    lines = []
    for title, entries in facts.items():
        lines.append(title)
        lines += [f"  {name:<22} {value}" for name, value in entries.items()] or ["  none"]
    return lines


def package_versions() -> dict[str, str]:
    """Return the versions of offbeat and the packages that it works with, as far as installed."""
    found = {"python": platform.python_version(), "offbeat": __version__}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def platform_facts() -> dict[str, Any]:
    """Return the operating system, and the accelerators that torch sees."""
    found: dict[str, Any] = {
        "system": f"{platform.system()} {platform.release()}",
        "machine": platform.machine(),
        "processors": processors(),
    }
    try:
        import torch
    except ImportError:
        return found | {"accelerators": "unknown, as torch is not installed"}
    count = torch.cuda.device_count()
    names = {torch.cuda.get_device_name(i) for i in range(count)}
    return found | {
        "threads of torch": torch.get_num_threads(),
        "accelerators": f"{count} ({', '.join(sorted(names))})" if count else "none",
    }


def interface_addresses() -> dict[str, str]:
    """Return the IPv4 address of each network interface, which a link can name."""
    return {name: str(ipv4_of(name) or "no IPv4 address") for _, name in socket.if_nameindex()}


def process_limits() -> dict[str, Any]:
    """Return the limits of this process that distributed training may exceed."""
    found = {"stdout is a terminal": sys.stdout.isatty()}
    try:
        import resource
    except ImportError:  # Windows
        return found
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    size = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    unlimited = size == resource.RLIM_INFINITY
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "open files": files,
        "bytes of a file": "unlimited" if unlimited else size,
        "memory": f"{memory / 2**30:.1f} GiB",
    } | found


def lab_support() -> dict[str, str]:
    """Return whether this host can emulate clusters, with the reason if it cannot."""
    from offbeat.lab import Cluster, LabError
    from offbeat.lab.lab import check_support

    try:
        check_support(Cluster.simple(2, "100mbit"))
    except (LabError, OSError, ValueError) as error:
        return {"network namespaces": f"no: {error}"}
    return {"network namespaces": "yes"}


def environment_of_job(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that a job reads; of secrets only that they are set."""
    return {
        name: "set, not shown" if SECRET in name else value
        for name, value in sorted(environment.items())
        if name.startswith(PREFIXES) or name in NAMES
    }
