"""Gemma 3 270M trained in full at 8,192 tokens a step, with its vocabulary of 262,144, on a machine without a GPU.

make test-gemma3 # installs the weights, under Gemma's own terms, into build/gemma3
PYTHONPATH=build/gemma3 python -m bench.real.gemma [--steps 20 --limit-gib 20 --keep DIR --out FILE]

`logitless train` on the text of this Python's own library, fp32, layers checkpointed, in sequences of 2,048 tokens: 20
steps on streamed logits, then one step each on dense logits of more and more tokens, until they do not fit into the
limit. One step's logits are 8 GiB, and a dense cross-entropy holds three such tensors. Each run is a process of its
own: `peak` is its resident set, `cpu_seconds` what it computed, of which others that use the machine take nothing. A
run that was killed goes on with --keep and a new --out: `cpu_seconds` then are the last part's, the steps' own times
are of all.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path

from bench.harness import results
from logitless.algebra.costs import logits_bytes

MODEL, VOCAB, LONG = "gemma3-270m", 262_144, 8_192
LENGTH = 2_048  # of a sequence
DENSE = (1_024, 2_048, 4_096, LONG)


def train(place, loss, tokens, steps, o):
    """The row of one `logitless train`: its losses, seconds and peak, or the last line of what ended it."""
    command = [sys.executable, "-m", "logitless.cli", "train"]
    if (place / "run.json").exists():
        command += ["--resume", str(place)]
    else:
        length = min(tokens, LENGTH)
        command += ["--model", MODEL, "--loss", loss, "--context-length", str(length)]
        command += ["--batch-size", str(tokens // length)]
        command += ["--max-steps", str(steps), "--gradient-checkpointing", "--output-dir", str(place)]
    limit = o.limit_gib * 2**30
    begin = time.perf_counter()
    with tempfile.TemporaryFile("w+") as written:
        process = subprocess.Popen(
            command,
            env=os.environ | {"OMP_NUM_THREADS": str(o.threads)},
            stderr=written,
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_DATA, (limit, limit)),
        )
        _, status, used = os.wait4(process.pid, 0)
        written.seek(0)
        lines = [line.strip() for line in written if line.strip()]
    row = {"kind": "training", "loss": loss, "tokens": tokens, "steps": steps, "limit_gib": o.limit_gib}
    row["logits_bytes"] = logits_bytes(tokens, VOCAB, 4)
    row["seconds"], row["cpu_seconds"] = round(time.perf_counter() - begin), round(used.ru_utime + used.ru_stime)
    row["peak_resident_bytes"] = used.ru_maxrss * 1024
    if status:
        return row | {"failed": lines[-1] if lines else f"ended by signal {status & 127}"}
    records = [json.loads(line) for line in (place / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    taken = [r for r in records if "loss" in r]
    ends = [0.0, *(r["seconds"] for r in taken)]
    return row | {
        "losses": [(r["step"], round(r["loss"], 4)) for r in taken],
        "step_seconds": [round(end - begin) for begin, end in pairwise(ends)],
        "summary": json.loads((place / "summary.json").read_text(encoding="utf-8")),
    }


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--limit-gib", type=int, default=20, help="of memory for each run")
    parser.add_argument("--runs", choices=["streamed", "dense", "both"], default="both")
    parser.add_argument("--keep", type=Path, help="where the runs lie and go on; default: a temporary folder")
    parser.add_argument("--out", type=Path, help="write JSON lines here; must not exist")
    o = parser.parse_args(arguments)
    streamed = [("logitless", LONG, o.steps)] if o.runs != "dense" else []
    dense = [("dense", tokens, 1) for tokens in DENSE] if o.runs != "streamed" else []
    write = results(o.out, o.threads)
    with tempfile.TemporaryDirectory() as temporary:
        for loss, tokens, steps in streamed + dense:
            row = train((o.keep or Path(temporary)) / f"{loss}-{tokens}", loss, tokens, steps, o)
            print(json.dumps(row), flush=True)
            write(row)


if __name__ == "__main__":
    main()
