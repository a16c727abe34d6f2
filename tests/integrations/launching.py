"""Real processes for tests of several ranks."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def torchrun(module: str, *arguments: str, timeout: int = 150, **environment: str) -> None:
    """`module` on two ranks, one thread each; fails with what they wrote."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", module]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **environment}
    done = subprocess.run(
        [*command, *arguments], cwd=ROOT, env=environment, timeout=timeout, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-4000:]
