"""torchtitan's own trainer on processors: the losses and weights of a few steps with its losses and with ours."""

# ruff: noqa: E402 - what torchtitan asks for is there before it is imported

import json
import os
import sys

import torch
import torch._utils

torch._utils._get_available_device_type = lambda: "cpu"  # torchtitan takes CUDA where no accelerator is found


class Memory:
    """What torchtitan asks an accelerator for."""

    total_memory = 2**34


torch.cpu.get_device_name = lambda device=None: "CPU"
torch.cpu.get_device_properties = lambda device=None: Memory
torch.cpu.reset_peak_memory_stats = torch.cpu.empty_cache = lambda: None
torch.cpu.memory_stats = lambda device=None: {}
torch.cpu.current_device = lambda: 0
torch.distributed.set_timeout = lambda timeout, group: None  # of a torch newer than 2.13

from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss
from torchtitan.components.validate import Validator
from torchtitan.hf_datasets.text_datasets import HuggingFaceTextDataLoader

from examples.torchtitan_tiny import tiny
from logitless.errors import ConfigError
from logitless.integrations.torchtitan import StreamedLoss
from tests.support.integrations.launching import leave

set_gradient_divide_factor = FSDPModule.set_gradient_divide_factor


def _set_gradient_divide_factor(self, factor):
    """By a sum and a division, since gloo has no scaled sum."""
    set_gradient_divide_factor(self, factor)
    self.set_force_sum_reduction_for_comms(True)


FSDPModule.set_gradient_divide_factor = _set_gradient_divide_factor

STREAMED = "logitless.integrations.torchtitan.streamed"
DENSE, CHUNKED = CrossEntropyLoss.Config(global_vocab_size=2048), ChunkedLossWrapper.Config(num_chunks=5)


def run(loss=None, overrides=(), tied=False, tensor_parallel=1, backend="partial_dtensor"):
    """Losses, gradient norms and validation losses of the steps, and how far the head's weight went."""
    config = tiny()
    config.loss = loss or config.loss
    config.override.imports = list(overrides)
    config.training.disable_cuda_graphs = True
    config.training.global_batch_size = 8  # two passes a step on two ranks
    config.training.steps, config.training.mixed_precision_param = 3, "float32"
    config.debug.seed = 0
    config.model_spec.model.enable_weight_tying = tied
    config.parallelism.tensor_parallel_degree = tensor_parallel
    config.parallelism.spmd_backend = backend
    data = HuggingFaceTextDataLoader.Config(dataset="python")
    config.validator = Validator.Config(enable=True, freq=3, steps=2, dataloader=data)
    trainer = config.build()
    found = {"loss": [], "norm": [], "validation": []}

    def log(step, loss, _, norm, **__):
        found["loss"].append(loss)
        found["norm"].append(float(norm))

    trainer.metrics_processor.log = log
    trainer.metrics_processor.log_validation = lambda loss, step: found["validation"].append(loss)
    trainer.train()
    weight = trainer.model_parts[0].lm_head.weight
    found["weight"] = (weight.full_tensor() if isinstance(weight, DTensor) else weight).double().norm().item()
    found["class"] = type(trainer.loss_fn).__name__
    trainer.close()
    return found


def refusal(**options) -> str:
    try:
        run(**options)
    except ConfigError as error:
        return str(error)
    return ""


def one_rank() -> dict:
    """The backend that torchtitan prefers, whose FSDP2 torch 2.13 lacks where there are two ranks."""
    return {
        "dense, alone": run(DENSE, backend="spmd_types"),
        "streamed, alone": run(backend="spmd_types"),
    }


def two_ranks() -> dict:
    return {
        "dense": run(DENSE),
        "chunked": run(CHUNKED),
        "streamed": run(),
        "small": run(StreamedLoss.Config(memory_budget=2**16)),
        "override": run(CHUNKED, [(STREAMED, {"memory_budget": 2**18})]),
        "dense, tied": run(DENSE, tied=True),
        "streamed, tied": run(tied=True),
        "tensor parallel": refusal(tensor_parallel=2),
    }


def main(place: str) -> None:
    results = one_rank() if os.environ["WORLD_SIZE"] == "1" else two_ranks()
    if torch.distributed.get_rank() == 0:
        with open(place, "w") as file:
            json.dump(results, file)
    leave()


if __name__ == "__main__":
    main(sys.argv[1])
