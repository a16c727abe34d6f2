"""A small model trained at 131,072 tokens of real text with a vocabulary of 131,072, on a machine without a GPU.

python -m bench.long_context.train [--context-length 131072 --steps 4 --hidden 128 --layers 2 --keep DIR ...]

`logitless train` from scratch on the standard library, native sparse attention, fp32, one sequence a step, layers
checkpointed. One such sequence's logits are 64 GiB in fp32, and a dense cross-entropy keeps three of them. `peak` is
the process's resident set. A run that was killed goes on with --keep: the peak and the seconds then are the last
part's.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from bench.harness import results
from logitless.algebra.costs import logits_bytes

VOCAB = 131_072  # entries of Tekken, and rows of the head


def model(o):
    return {
        "model_type": "qwen3", "vocab_size": VOCAB, "hidden_size": o.hidden, "intermediate_size": 3 * o.hidden,
        "num_hidden_layers": o.layers, "num_attention_heads": o.hidden // 32, "num_key_value_heads": o.hidden // 64,
        "head_dim": 32, "max_position_embeddings": o.context_length, "tie_word_embeddings": True,
    }  # fmt: skip


def train(o, place):
    """The summary of `logitless train`, and its records."""
    run = place / "run"
    config = place / "config.json"
    if (run / "run.json").exists():
        given = ["--resume", str(run)]
    else:
        config.write_text(json.dumps(model(o)), encoding="utf-8")
        given = ["--model", str(config), "--context-length", str(o.context_length), "--batch-size", "1"]
        given += ["--max-steps", str(o.steps), "--attention", "nsa", "--gradient-checkpointing"]
        given += ["--output-dir", str(run)]
    command = [sys.executable, "-m", "logitless.cli", "train", *given]
    subprocess.run(command, check=True, env=os.environ | {"OMP_NUM_THREADS": str(o.threads)})
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return json.loads((run / "summary.json").read_text(encoding="utf-8")), [json.loads(line) for line in lines]


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes = {"context_length": 131_072, "steps": 4, "hidden": 128, "layers": 2, "threads": 2}
    for name, default in sizes.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default)
    parser.add_argument("--out", type=Path, help="write JSON lines here; must not exist")
    parser.add_argument("--keep", type=Path, help="where the run lies and goes on; default: a temporary folder")
    o = parser.parse_args(arguments)
    write = results(o.out, o.threads)
    with tempfile.TemporaryDirectory() as temporary:
        place = o.keep or Path(temporary)
        place.mkdir(parents=True, exist_ok=True)
        begin = time.perf_counter()
        summary, records = train(o, place)
    losses = [(r["step"], round(r["loss"], 4)) for r in records if "loss" in r]
    row = {
        **{name: getattr(o, name) for name in sizes},
        "vocab": VOCAB,
        "dense_logits_bytes": logits_bytes(o.context_length, VOCAB, 4),
        "peak_resident_bytes": resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024,
        "seconds": round(time.perf_counter() - begin),
        "losses": losses,
        "parameters": summary["parameters"],
    }
    print(json.dumps(row, indent=2))
    write(row)


if __name__ == "__main__":
    main()
