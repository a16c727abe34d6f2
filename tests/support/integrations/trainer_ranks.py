"""What `test_distributed.py` runs on each of two ranks: transformers' Trainer on a model that has our loss.

torchrun --nproc-per-node 2 -m tests.support.integrations.trainer_ranks RESULTS.pt
"""

import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import logitless
from tests.integrations.transformers.test_trainer import losses, trainer
from tests.support.integrations.launching import leave
from tests.support.integrations.tiny import TINY

ROWS = 8  # of one optimizer step, over all ranks and both of its forward passes


def trained(place: str, ranks: int, smoothing: float, ours: bool = True):
    """A Trainer after three steps of plain gradient descent, so that parameters tell of gradients."""
    made = trainer(
        place, TINY["qwen3-tied"].build(), per_device_train_batch_size=ROWS // ranks // 2, optim="sgd",
        label_smoothing_factor=smoothing, save_strategy="no",
    )  # fmt: skip
    if ours:
        logitless.install(made)
    made.train()
    return made


def evaluated(made) -> dict[str, torch.Tensor]:
    """What predict says of the tokens of five rows, so that the ranks have unlike numbers of them."""
    found = made.predict(made.eval_dataset[:5])
    return {name: torch.from_numpy(x) for name, x in found.predictions.items()}


def main(place: str) -> None:
    results = {}
    for smoothing in (0.0, 0.2):
        made = trained(place + ".run", 2, smoothing)
        assert isinstance(made.model_wrapped, DistributedDataParallel)
        assert made.args.world_size == 2
        results[smoothing] = losses(made), made.model.state_dict(), made.evaluate(), evaluated(made)
    if dist.get_rank() == 0:
        torch.save(results, place)
    leave()


if __name__ == "__main__":
    main(sys.argv[1])
