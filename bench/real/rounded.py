"""A pretrained model whose matrices are rounded to 8 bits, to be evaluated against the model itself.

python -m bench.real.rounded FOLDER [--model smollm2]
logitless eval --model smollm2 --against FOLDER --data docstrings.jsonl

Each row of each matrix, the embedding's and so a tied head's included, is a whole number from -127 to 127 times the
row's own scale, its largest entry over 127. The weights in the folder are the float32 numbers that these stand for.
"""

import argparse
from pathlib import Path

import torch
from torch import Tensor

from logitless.workbench.sources.model import load_model, load_tokenizer, resolve


def rounded(matrix: Tensor) -> Tensor:
    """(rows, columns), each row in 255 equal steps between minus and plus its largest entry."""
    scale = matrix.abs().amax(1, keepdim=True).clamp_min(torch.finfo(matrix.dtype).tiny) / 127
    return (matrix / scale).round() * scale


@torch.no_grad()
def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where the rounded model is saved, with its tokenizer")
    parser.add_argument("--model", default="smollm2")
    o = parser.parse_args(arguments)
    source = resolve(o.model)
    model = load_model(source, dtype="float32")
    for weight in model.parameters():
        if weight.dim() == 2:
            weight.copy_(rounded(weight))
    model.save_pretrained(o.folder)
    load_tokenizer(source).saved.save_pretrained(o.folder)


if __name__ == "__main__":
    main()
