"""A tiny SPLADE model on Python's own library, trained by sentence-transformers without logits.

    python examples/sentence_transformers_tiny.py runs/splade

A query is the first line of a function's docstring, its document what comes after. What differs from any other script
for sentence-transformers is one line, `install(model)`.
"""

import importlib
import inspect
import re
import sys
from collections import Counter
from pathlib import Path

import torch
from datasets import Dataset
from sentence_transformers import SparseEncoder, SparseEncoderTrainer, SparseEncoderTrainingArguments
from sentence_transformers.base.modules import Transformer
from sentence_transformers.sparse_encoder.losses import SparseMultipleNegativesRankingLoss, SpladeLoss
from sentence_transformers.sparse_encoder.modules import SpladePooling
from sentence_transformers.util import cos_sim
from transformers import BertConfig, BertForMaskedLM, BertTokenizerFast

from logitless.integrations.sentence_transformers import install

MODULES = (
    "argparse ast asyncio collections csv decimal email fractions http inspect io json logging os pathlib random re "
)
MODULES += "shutil socket statistics string subprocess tarfile textwrap threading unittest urllib uuid xml zipfile"


def pairs() -> Dataset:
    """(query, document) of every function and class that says something about itself."""
    modules = [importlib.import_module(name) for name in MODULES.split()]
    things = {id(x): x for m in modules for x in vars(m).values() if inspect.isfunction(x) or inspect.isclass(x)}
    texts = sorted({text for x in things.values() if (text := inspect.getdoc(x)) and text.count("\n\n")})
    return Dataset.from_list([dict(zip(("query", "document"), text.split("\n\n", 1), strict=True)) for text in texts])


def untrained(folder: Path, texts: list[str]) -> SparseEncoder:
    """A small BERT over the words of the texts; `SparseEncoder("naver/splade-v3")` in its place would be trained on."""
    words = Counter(re.findall(r"\w+|[^\w\s]", " ".join(texts).lower()))
    kept = [word for word, count in words.items() if count > 1]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *kept]))
    BertTokenizerFast(str(folder / "vocab.txt"), model_max_length=64).save_pretrained(folder)
    config = BertConfig(
        vocab_size=len(kept) + 5,
        initializer_range=0.05,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
    )
    BertForMaskedLM(config).save_pretrained(folder)
    return SparseEncoder(
        modules=[Transformer(str(folder), transformer_task="fill-mask"), SpladePooling()], device="cpu"
    )


def main(out: str, steps: int = 100) -> None:
    torch.manual_seed(0)
    data = pairs()
    model = untrained(Path(out) / "untrained", [*data["query"], *data["document"]])
    install(model)
    loss = SpladeLoss(model, SparseMultipleNegativesRankingLoss(model, scale=20, similarity_fct=cos_sim), 1e-2, 1e-2)
    arguments = SparseEncoderTrainingArguments(
        out, max_steps=steps, per_device_train_batch_size=32, learning_rate=3e-3, logging_steps=10, report_to="none",
        save_strategy="no", disable_tqdm=True, use_cpu=not torch.cuda.is_available(),
    )  # fmt: skip
    SparseEncoderTrainer(model, arguments, train_dataset=data, loss=loss).train()
    model.save_pretrained(f"{out}/trained")

    queries, documents = (model.encode(data[name][:64]) for name in ("query", "document"))
    best = cos_sim(queries, documents).argmax(1)
    found = int((best == torch.arange(64)).sum())
    entries = model.sparsity(documents)["active_dims"]
    print(f"{found} of 64 queries find their own document first; a document has {entries:.0f} entries")


if __name__ == "__main__":
    main(*sys.argv[1:2], *map(int, sys.argv[2:3]))
