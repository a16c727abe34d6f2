"""LLaMA-Factory's v1 fine-tuning of a tiny model on processors: its losses with and without the kernel."""

# ruff: noqa: E402 - the environment is there before it is asked for

import json
import os
import sys
from functools import partial
from pathlib import Path

ALONE = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29587"}
os.environ |= ALONE | dict(os.environ)  # which torchrun has set where it runs this

import torch
from llamafactory.v1.accelerator.interface import DistributedInterface
from llamafactory.v1.trainers.sft_trainer import SFTTrainer, run_sft
from llamafactory.v1.utils.callbacks import LoggingCallback
from omegaconf import OmegaConf
from transformers import Qwen2Tokenizer, Qwen3Config, Qwen3ForCausalLM

from logitless.errors import ConfigError
from logitless.integrations import llamafactory as ours  # which gives the kernel its name
from logitless.resident import AllocationTracker
from tests.support.integrations.launching import ROOT

torch.accelerator.synchronize = lambda: None  # of a processor, which LLaMA-Factory asks for it
ours.token_stats = partial(ours.token_stats, memory_budget=2**18)  # less than all logits of a tiny model
DistributedInterface.destroy = lambda self: None  # several runs in this process

SHAPE = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
LORA = {"name": "lora", "r": 4, "target_modules": ["q_proj", "lm_head"]}


class Other(SFTTrainer.__base__):
    """A trainer that makes logits of its own, as DPO's does."""

    def compute_loss(self, batch):
        raise AssertionError("never called")


def prepare(folder: Path) -> Path:
    """A model with its tokenizer, and a few texts, as LLaMA-Factory reads them."""
    texts = [path.read_text("utf-8")[:800] for path in sorted((ROOT / "docs").glob("*.md"))]
    samples = [json.dumps({"instruction": text[:200], "output": text[200:]}) for text in texts]
    (folder / "data.jsonl").write_text("\n".join(samples))
    path = str(folder / "data.jsonl")
    OmegaConf.save({"texts": {"path": path, "source": "local", "converter": "alpaca"}}, folder / "data.yaml")
    tokenizer = Qwen2Tokenizer().train_new_from_iterator(texts, vocab_size=1000, show_progress=False)
    tokenizer.save_pretrained(folder / "model")
    torch.manual_seed(0)
    Qwen3ForCausalLM(Qwen3Config(vocab_size=len(tokenizer), **SHAPE)).save_pretrained(folder / "model")
    return folder / "model"


def run(model: Path, **changes) -> dict:
    """What LLaMA-Factory logs of its steps, whether its model made logits, and the largest allocation in bytes beside
    the size of a batch's logits."""
    found = {"loss": [], "norm": [], "logits": 0, "largest": 0, "size": 0}

    def log(self, args, state, logs, **_):
        found["loss"].append(logs["loss"])
        found["norm"].append(logs["grad_norm"])

    def fit(self):
        with AllocationTracker() as tracker:
            super(SFTTrainer, self).fit()
        found["largest"] = tracker.largest

    LoggingCallback.on_log, SFTTrainer.fit = log, fit
    own = Qwen3ForCausalLM.forward

    def forward(self, *args, **kwargs):
        outputs = own(self, *args, **kwargs)
        found["size"] = max(found["size"], kwargs["input_ids"].numel() * self.config.vocab_size * 4)
        found["logits"] += outputs.logits.numel() > self.config.vocab_size  # one row is a probe
        return outputs

    Qwen3ForCausalLM.forward = forward
    config = OmegaConf.to_container(OmegaConf.load(ROOT / "examples" / "llamafactory_tiny.yaml"))
    common = {
        "model": str(model),
        "train_dataset": str(model.parent / "data.yaml"),
        "bf16": False,
        "batching_workers": 0,
    }
    try:
        torch.manual_seed(0)
        run_sft(config | common | changes)
    except ConfigError as error:
        return {"error": str(error)}
    finally:
        Qwen3ForCausalLM.forward = own
    return found


def two_ranks(place: Path) -> None:
    """Under DDP, which LLaMA-Factory takes where nothing is said, and under its FSDP2, which shards LoRA's factors."""
    results, sharded = {}, {"dist_config": {"name": "fsdp2"}}
    for name, more in {"ddp": {}, "fsdp2": sharded, "fsdp2 lora": {**sharded, "peft_config": LORA}}.items():
        results[f"{name}, dense"] = run(place / "model", kernel_config=None, **more)
        results[f"{name}, streamed"] = run(place / "model", **more)
    if os.environ["RANK"] == "0":
        (place / "ranks.json").write_text(json.dumps(results))


def main(place: Path) -> None:
    model, dense = prepare(place), {"kernel_config": None}
    results = {
        "full, dense": run(model, **dense),
        "full, streamed": run(model),
        "lora, dense": run(model, peft_config=LORA, **dense),
        "lora, streamed": run(model, peft_config=LORA),
    }
    import llamafactory.v1.trainers.sft_trainer as sft

    sft.SFTTrainer = Other
    results["refused"] = run(model)
    (place / "results.json").write_text(json.dumps(results))


if __name__ == "__main__":
    (main if os.environ["WORLD_SIZE"] == "1" else two_ranks)(Path(sys.argv[1]))
