"""What `test_distributed.py` runs on each of two ranks: TRL's trainers as they are and on the pass.

torchrun --nproc-per-node 2 -m tests.support.integrations.trl.trainer_ranks PLACE
"""

import sys
import warnings
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from tests.support.integrations.launching import leave
from tests.support.integrations.trl import runs

MAKE = {"sft": partial(runs.sft, per_device_train_batch_size=3), "dpo": runs.dpo, "grpo": runs.grpo, "rloo": runs.rloo}


def main(place: Path) -> None:
    warnings.simplefilter("ignore")  # names that transformers gives up, TRL's to change
    for name, make in MAKE.items():
        make = partial(make, place / "model", max_steps=2, output_dir=str(place / name))
        ours = runs.run(make, ours=True)
        runs.assert_same(ours, runs.run(make, ours=False))
        if dist.get_rank() == 0:
            torch.save((ours.logs, ours.parameters), place / f"{name}.pt")
    leave()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
