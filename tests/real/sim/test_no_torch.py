"""Planning and simulating work without torch."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import offbeat.plan

SOURCE = Path(offbeat.plan.__file__).parent.parent


@pytest.mark.parametrize(
    "module",
    [
        "sim",
        "strategies.solvers",
        "strategies",
        "strategies.levels",
        "plan",
        "profile",
        "core.sim.trace",
        "core.verify.check",
        "rules",
    ],
)
def test_import_does_not_import_torch(module):
    code = f"import sys, offbeat.{module}; sys.exit('torch' in sys.modules)"
    environment = os.environ | {"PYTHONPATH": str(SOURCE)}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True, timeout=60)


def test_simulating_needs_no_strategies():
    # Strategies call the simulator, so it must not import them; `offbeat` itself imports both.
    code = (
        "import sys, types; package = types.ModuleType('offbeat'); "
        f"package.__path__ = [{str(SOURCE / 'offbeat')!r}]; sys.modules['offbeat'] = package; "
        "import offbeat.sim; sys.exit('offbeat.strategies' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
