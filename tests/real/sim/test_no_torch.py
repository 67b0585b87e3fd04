"""Planning and simulating work without torch."""

import subprocess
import sys
from pathlib import Path

import offbeat.plan

SOURCE = Path(offbeat.plan.__file__).parent.parent


def test_planning_and_simulating_do_not_import_torch():
    rooms = "sim strategies.solvers strategies plan profile core.sim.trace core.verify.check rules"
    imports = ", ".join(f"offbeat.{room}" for room in rooms.split())
    code = f"import sys; sys.path.insert(0, {str(SOURCE)!r}); import {imports}; "
    code += "sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_simulating_needs_no_strategies():
    # Strategies call the simulator, so it must not import them; `offbeat` itself imports both.
    code = (
        "import sys, types; package = types.ModuleType('offbeat'); "
        f"package.__path__ = [{str(SOURCE / 'offbeat')!r}]; sys.modules['offbeat'] = package; "
        "import offbeat.sim; sys.exit('offbeat.strategies' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
