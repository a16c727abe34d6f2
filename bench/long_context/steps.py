"""From a dense loss to the smallest peak on one GPU, a step at a time, each traced on fake tensors.

python -m bench.long_context.steps [--model 4b --context-length 131072 --out FILE]

bf16 weights and AdamW states in bf16, one sequence, fused attention. Each row adds one thing to the row before it;
`host` is what lies in the host's memory meanwhile.
"""

import argparse
from dataclasses import replace
from pathlib import Path

from bench.harness import results
from logitless.workbench.profile.step import Step, traced

CHANGES = (
    ("transformers' loss, layers checkpointed", {}),
    ("+ logitless loss", {"loss": "logitless"}),
    ("+ LoRA, rank 16, the rest frozen", {"lora_rank": 16}),
    ("+ layers' inputs on the host", {"offload_activations": True}),
    ("+ MLP in 8 tiles", {"mlp_tiles": 8}),
)


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="4b")
    parser.add_argument("--context-length", type=int, default=131_072)
    parser.add_argument("--out", type=Path, help="write JSON lines here; must not exist")
    o = parser.parse_args(arguments)
    write = results(o.out, model=o.model, context_length=o.context_length)
    step = Step(o.model, o.context_length, loss="dense", attention="sdpa", gradient_checkpointing=True)
    for name, change in CHANGES:
        step = replace(step, **change)
        found = traced(step)
        peak = found.peak
        write({"step": name, "peak_bytes": peak.nbytes, "stage": peak.stage, "host_bytes": found.host})
        print(
            f"{name:<42} {peak.nbytes / 2**30:7.2f} GiB in {peak.stage}, host {found.host / 2**30:6.2f} GiB", flush=True
        )


if __name__ == "__main__":
    main()
