"""What `test_rank_peaks.py` runs on each rank: the most bytes alive in runs of `logitless train`, and what they are.

torchrun --nproc-per-node 2 -m tests.support.workbench.rank_peaks CASES.json RESULTS.json

A case is a name and the options of a `TrainConfig`.
"""

import json
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch.distributed as dist
from accelerate.state import AcceleratorState
from rich.console import Console
from transformers import Trainer

from logitless.workbench.profile.recording import Recording
from logitless.workbench.profile.trace import trace
from logitless.workbench.sft import run as sft
from logitless.workbench.sft.config import TrainConfig
from tests.support.integrations.launching import leave

TENSORS = 40
UNMEASURED = {method: {"not_measured": "test"} for method in ("logitless", "dense")}


def recorded(config: TrainConfig) -> Recording:
    """What `Trainer.train` allocates; what is saved after it is not looked at."""
    found: list[Recording] = []
    train = Trainer.train

    def traced(self: Any, *args: Any, **kwargs: Any) -> Any:
        with trace(self.model) as t:
            done = train(self, *args, **kwargs)
        found.append(t.recording)
        return done

    with patch.object(Trainer, "train", traced), patch.object(sft, "measure", lambda *_: UNMEASURED):
        sft.run(config, Console(quiet=True))
    return found[0]


def measured(options: dict[str, Any]) -> dict[str, Any]:
    AcceleratorState._reset_state()  # of the case before
    place = Path(options["output_dir"])
    fixed = {"device": "cpu", "loss": "logitless", "output_dir": place}
    config = TrainConfig(**{"dtype": "bfloat16", **options, **fixed})
    recording = recorded(config)
    peak = recording.peak
    return {
        "peak": peak.nbytes,
        "stage": peak.stage,
        "module": peak.module,
        "categories": recording.categories(peak.event),
        "tensors": [
            [a.nbytes, list(a.shape), a.dtype, a.op, a.module, a.category]
            for a in recording.alive(peak.event)[:TENSORS]
        ],
        "stages": [[s.name, s.nbytes, s.peak] for s in recording.stages],
    }


def main(cases: str, results: str) -> None:
    found = {name: measured(options) for name, options in json.loads(Path(cases).read_text()).items()}
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, found)
    if dist.get_rank() == 0:
        Path(results).write_text(json.dumps(every))
    leave()


if __name__ == "__main__":
    main(*sys.argv[1:])
