"""axolotl's own training entry point on a tiny model, on a processor: the losses of a few steps, dense and with us."""

import json
import os
import sys
from pathlib import Path

os.environ |= {"AXOLOTL_DO_NOT_TRACK": "1", "WANDB_MODE": "disabled", "ACCELERATE_USE_CPU": "true"}

import axolotl.cli.train as command
import axolotl.train
import torch
from axolotl.cli import checks
from axolotl.cli.config import load_cfg
from axolotl.core.trainers.base import AxolotlTrainer
from axolotl.integrations.base import PluginManager
from transformers import Qwen2Tokenizer, Qwen3Config, Qwen3ForCausalLM

from logitless.errors import ConfigError
from logitless.resident import AllocationTracker
from tests.support.integrations.launching import ROOT

checks.check_user_token = lambda: True  # no network


def train(cfg, dataset_meta):
    """axolotl's own, with LoRA drawn alike whether texts had to be tokenised before or not."""
    torch.manual_seed(0)
    return axolotl.train.train(cfg=cfg, dataset_meta=dataset_meta)


command.train = train

SHAPE = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
FULL = {"adapter": None, "lora_target_linear": None}
HEAD = {"lora_target_linear": None, "lora_target_modules": ["q_proj", "lm_head"]}
DENSE = {"logitless_loss": "dense"}
EVALUATED = {"val_set_size": 0.2, "eval_steps": 3, "eval_sample_packing": False}


def prepare(folder: Path) -> Path:
    """A model with its tokenizer, and a few texts, as axolotl reads them."""
    texts = [path.read_text("utf-8")[:2000] for path in sorted((ROOT / "docs").glob("*.md"))]
    (folder / "data.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    tokenizer = Qwen2Tokenizer().train_new_from_iterator(texts, vocab_size=1000, show_progress=False)
    tokenizer.save_pretrained(folder / "model")
    torch.manual_seed(0)
    marks = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id}
    Qwen3ForCausalLM(Qwen3Config(vocab_size=len(tokenizer), **SHAPE, **marks)).save_pretrained(folder / "model")
    return folder / "model"


def run(model: Path, **changes) -> dict:
    """The numbers that axolotl's trainer logs, whether its model made logits, and a step's largest allocation in bytes
    beside the size of its logits."""
    seen = {"log": [], "logits": 0, "largest": 0, "size": 0}

    def log(self, logs, *_):
        seen["log"] += [{k: logs[k] for k in ("loss", "grad_norm", "eval_loss") if k in logs}]

    own_loss, own_step = AxolotlTrainer.compute_loss, AxolotlTrainer.training_step

    def training_step(self, model, inputs, *args, **kwargs):
        seen["size"] = inputs["input_ids"].numel() * model.config.vocab_size * 4
        with AllocationTracker() as tracker:
            loss = own_step(self, model, inputs, *args, **kwargs)
        seen["largest"] = max(seen["largest"], tracker.largest)
        return loss

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss, outputs = own_loss(self, model, inputs, return_outputs=True, num_items_in_batch=num_items_in_batch)
        seen["logits"] += outputs.logits is not None
        return (loss, outputs) if return_outputs else loss

    AxolotlTrainer.log, AxolotlTrainer.compute_loss, AxolotlTrainer.training_step = log, compute_loss, training_step
    kernels = dict.fromkeys(("lora_mlp_kernel", "lora_qkv_kernel", "lora_o_kernel", "lora_embedding_kernel"), False)
    common = {"base_model": str(model), "bf16": False, "seed": 0, "logging_steps": 1, "dataset_num_proc": 1}
    common |= kernels | EVALUATED | {"logitless_memory_budget": 2**18}
    config = load_cfg(str(ROOT / "examples" / "axolotl_tiny.yaml"), **common, **changes)
    try:
        command.do_train(config, None)
    except ConfigError as error:
        return {"error": str(error)}
    finally:
        AxolotlTrainer.compute_loss, AxolotlTrainer.training_step = own_loss, own_step
        PluginManager.get_instance().plugins.clear()
    return seen


def main(place: Path) -> None:
    model = prepare(place)
    results = {
        f"{name}, {loss}": run(model, **changes, **({} if loss == "streamed" else DENSE))
        for name, changes in {"lora": {}, "head": HEAD, "full": FULL}.items()
        for loss in ("streamed", "dense")
    }
    results["refused"] = run(model, chunked_cross_entropy=True)
    (place / "results.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
