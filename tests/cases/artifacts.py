"""Write the files of the current version for `tests/real/test_old_artifacts.py`:

PYTHONPATH=tests python -m cases.artifacts      writes tests/artifacts/VERSION.tar.xz
"""

from __future__ import annotations

import json
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from harness.ranks import run_ranks

import offbeat
from cases.checkpoint_jobs import job
from offbeat.strategies import find, strategy_names

ROOT = Path(__file__).parents[2]
ITERATIONS = 4
STRATEGIES = {
    "a2cid2": offbeat.A2CiD2(),
    "ddp": offbeat.DDP(),
    "deft": offbeat.DeFT(),
    "diloco": offbeat.DiLoCo(period=3),
    "dreamddp-int4": offbeat.DreamDDP(period=3, wire="int4"),
    "selsync": offbeat.SelSync(),
    "wfbp": offbeat.WFBP(),
}
COMPARISON = (
    "compare --lab none --hosts 2 --strategies ddp,dreamddp:period=2 --repeat 1 --out {out} "
    "{root}/examples/gpt.py --steps 12 --layers 1 --width 32 --heads 2"
)


def save_checkpoints(folder: str) -> dict[str, str]:
    """Train and save under each strategy on this rank; return the digests of the saved bits."""
    digests = {}
    for name, strategy in STRATEGIES.items():
        with job(strategy) as saved:
            saved.train(range(ITERATIONS))
            saved.save(f"{folder}/{name}")
        with job(strategy) as loaded:  # workers of gossip change after they have saved
            loaded.load(f"{folder}/{name}")
            digests[name] = loaded.digest()
    return digests


def write_artifacts(folder: Path) -> None:
    """Write checkpoints of two ranks, plans, a profile, and the record of a comparison."""
    digests = run_ranks(2, save_checkpoints, str(folder / "checkpoints"), timeout_s=90)
    (folder / "checkpoints.json").write_text(json.dumps(digests))
    argv = COMPARISON.format(out=folder / "record", root=ROOT).split()
    subprocess.run([sys.executable, "-m", "offbeat", *argv], check=True, timeout=300)
    profile = offbeat.Profile.load(folder / "record" / "profile.json")
    profile.save(folder / "profile.json")
    plans = {
        name: cls().plan(profile)
        for name, cls in ((name, find(name)) for name in strategy_names())
        if not (cls.needs.servers or cls.needs.allows_joining)
    }
    saved = {name: {"digest": plan.digest, "plan": plan.to_dict()} for name, plan in plans.items()}
    (folder / "plans.json").write_text(json.dumps(saved))
    (folder / "record" / "report.html").unlink()


def main() -> None:
    """Write the archive of the current version."""
    target = ROOT / "tests" / "artifacts" / f"{offbeat.__version__}.tar.xz"
    with tempfile.TemporaryDirectory() as folder:
        write_artifacts(Path(folder))
        with tarfile.open(target, "w:xz") as archive:
            archive.add(folder, arcname=".")


if __name__ == "__main__":
    main()
