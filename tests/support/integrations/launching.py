"""Real processes for tests of several ranks."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

import torch.distributed as dist

ROOT = Path(__file__).parents[3]
LIMIT = 280  # seconds, of the 300 of a test: on a busy machine two ranks take minutes to import what they need


def torchrun(module: str, *arguments: str, ranks: int = 2, at: Path = ROOT, **environment: str) -> None:
    """`module` on some ranks, one thread each, in a folder; fails with what they wrote, and leaves none behind."""
    launcher = "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)
    command = [sys.executable, "-m", *launcher, "-m", module]
    given = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    path = os.pathsep.join([str(ROOT), *map(os.path.abspath, given)])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, **environment}
    ranks = subprocess.Popen(
        [*command, *arguments], cwd=at, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    try:
        written, _ = ranks.communicate(timeout=LIMIT)
    except BaseException as error:  # the end of the test's own time, too
        ranks.send_signal(signal.SIGTERM)  # torchrun ends its ranks
        written, _ = ranks.communicate(timeout=40)
        if not isinstance(error, subprocess.TimeoutExpired):
            raise
        raise AssertionError(f"no end within {LIMIT} s\n{written[-4000:]}") from None
    assert ranks.returncode == 0, written[-4000:]


def leave() -> NoReturn:
    """Ends a rank at once: a thread of gloo that frees a tensor while Python shuts down aborts it (pytorch#179291)."""
    dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
