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
    ["sim", "solve", "strategies", "plan", "profile", "trace", "check"],
)
def test_import_does_not_import_torch(module):
    code = f"import sys, offbeat.{module}; sys.exit('torch' in sys.modules)"
    environment = os.environ | {"PYTHONPATH": str(SOURCE)}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True, timeout=60)
