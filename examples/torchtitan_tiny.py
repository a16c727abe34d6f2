"""A tiny Llama on the modules of Python's own library, trained by torchtitan without logits.

    torchrun --nproc-per-node 2 -m torchtitan.train --module examples.torchtitan_tiny --config tiny \
        --training.disable_cuda_graphs

What differs from any other configuration of torchtitan is `loss=`. Any of its own takes the same loss by
`--override.imports logitless.integrations.torchtitan.streamed`.
"""

import json
import sysconfig
from pathlib import Path

from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.optimizer import default_adamw
from torchtitan.config import ParallelismConfig, TrainingConfig
from torchtitan.hf_datasets import DatasetConfig
from torchtitan.hf_datasets.text_datasets import DATASETS, HuggingFaceTextDataLoader
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.llama3 import model_registry
from torchtitan.trainer import Trainer

from logitless.integrations.torchtitan import StreamedLoss


def _python_library(path: str) -> Dataset:
    return Dataset.from_dict(
        {"text": [p.read_text("utf-8", errors="replace") for p in sorted(Path(path).glob("*.py"))]}
    )


def _byte_tokenizer(folder: Path) -> Path:
    """The 256 bytes, and marks for a document's beginning and end, as torchtitan reads tokenizers."""
    folder.mkdir(parents=True, exist_ok=True)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.add_special_tokens(["<bos>", "<eos>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    marks = {"bos_token": "<bos>", "eos_token": "<eos>", "add_bos_token": True, "add_eos_token": True}
    (folder / "tokenizer_config.json").write_text(json.dumps(marks))
    return folder


DATASETS["python"] = DatasetConfig(sysconfig.get_path("stdlib"), _python_library, lambda sample: sample["text"])


def tiny() -> Trainer.Config:
    spec = model_registry("debugmodel")
    del spec.model.layers[2:]
    for layer in spec.model.layers:  # FlexAttention, torchtitan's own choice, has no backward on a CPU
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    return Trainer.Config(
        loss=StreamedLoss.Config(),
        hf_assets_path=str(_byte_tokenizer(Path("outputs/tokenizer"))),
        model_spec=spec,
        optimizer=default_adamw(lr=8e-4),
        training=TrainingConfig(local_batch_size=2, seq_len=250, steps=4),
        dataloader=HuggingFaceTextDataLoader.Config(dataset="python"),
        metrics=MetricsProcessor.Config(log_freq=1),
        parallelism=ParallelismConfig(),
        checkpoint=CheckpointManager.Config(enable=False),
    )
