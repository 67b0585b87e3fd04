"""The public names, and what importing them costs."""

from __future__ import annotations

import subprocess
import sys

import pytest
from cases.promised import MODULES, gaps, promised

import offbeat

DOCUMENTED = [
    "ADPSGD",
    "ASCWFBP",
    "BSP",
    "DDP",
    "P3",
    "PSBSP",
    "SSP",
    "WFBP",
    "A2CiD2",
    "ByteScheduler",
    "Checkpoint",
    "Cyclic",
    "DeAR",
    "DeFT",
    "DiLoCo",
    "DreamDDP",
    "FedAvg",
    "LocalSGD",
    "Members",
    "OuterSGD",
    "PartialSync",
    "Plan",
    "Planned",
    "Profile",
    "RehearsedCurve",
    "Saving",
    "SelSync",
    "Strategy",
    "Trace",
    "USByte",
    "iteration",
    "join",
    "load",
    "prepare",
    "rehearse",
    "report_metric",
    "save",
]


def test_public_names() -> None:
    assert offbeat.__all__ == DOCUMENTED
    for name in DOCUMENTED:
        assert getattr(offbeat, name).__name__ == name


def test_unknown_attribute() -> None:
    with pytest.raises(AttributeError, match="module 'offbeat' has no attribute 'prepair'"):
        _ = offbeat.prepair


def test_import_does_not_need_torch() -> None:
    """Planning and simulating work where torch is not installed."""
    code = (
        "import sys; sys.modules['torch'] = None; "
        "import offbeat, offbeat.sim, offbeat.strategies.solvers"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_commands_that_launch_ranks_do_not_import_torch() -> None:
    """It takes more than a second of processor time, and only the ranks need it."""
    code = (
        "import sys; sys.modules['torch'] = None; import offbeat.cli, offbeat.experiments.compare"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_prepare_is_the_runtimes() -> None:
    from harness.parts import prepare

    assert offbeat.prepare is prepare


@pytest.mark.parametrize("module", MODULES)
def test_docstrings_of_promised_names(module: str) -> None:
    """Each explains all parameters or fields, and so do the public methods of classes."""
    assert [gap for where, name in promised() if where == module for gap in gaps(where, name)] == []
