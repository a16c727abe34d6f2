"""Ways to carry a policy's gradient through T generated tokens: time, memory, and how exact each is.

python -m bench.grade.carry [--steps 64 --vocab 32768 --hidden 128 --layers 4 --threads 1 --out FILE]

A random Qwen3 with LoRA of rank 16, one sequence, k 256, straight-through, the KL in the loss. `peak` counts what the
step's operators allocate beside the weights. The error is of the whole gradient, against cached steps.
"""

import argparse
import gc
import time
from pathlib import Path

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from bench.harness import results
from logitless.integrations.transformers.soft_tokens import reader_of
from logitless.models.instances import with_adapters
from logitless.relax import Sampling, generate
from tests.support.allocations import AllocationTracker

WAYS = {
    "cached, checkpointed": {"carry": "cached"},
    "cached": {"carry": "cached", "checkpoint": False},
    "recompute, checkpointed": {"carry": "recompute"},
    "recompute": {"carry": "recompute", "checkpoint": False},
    **{f"sweeps, {n} at most": {"carry": "sweeps", "most_sweeps": n} for n in (0, 1, 2, 4, 8)},
    "sweeps to 1e-3": {"carry": "sweeps", "tolerance": 1e-3},
    "sweeps to 1e-6": {"carry": "sweeps"},
}
EXACT = {"cached", "recompute, checkpointed", "recompute", "sweeps to 1e-6"}


def policy(o):
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=o.vocab, hidden_size=o.hidden, intermediate_size=3 * o.hidden, num_hidden_layers=o.layers,
        num_attention_heads=o.hidden // 32, num_key_value_heads=o.hidden // 64, head_dim=32, tie_word_embeddings=True,
    )  # fmt: skip
    return adapted(config)


def adapted(config):
    """A random model with LoRA of rank 16, the adapters off their start, so that no gradient is zero."""
    model = with_adapters(Qwen3ForCausalLM(config), 16).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.02)
            if "embed" in name:
                parameter.mul_(5)
    return model


def step(model, o, options):
    """One step: (seconds, gradient, sweeps)."""
    prompts = torch.arange(o.prompt)[None] + 5
    values = torch.randn(o.vocab, generator=torch.Generator().manual_seed(2))
    readers = reader_of(model, o.vocab), reader_of(model, o.vocab, without_adapters=True)
    model.zero_grad()
    gc.collect()
    begin = time.perf_counter()
    sampling = Sampling(o.steps, 1.0, min(256, o.vocab), **options)
    rollout = generate(readers[0], prompts, torch.ones_like(prompts), torch.tensor([1]), sampling, reference=readers[1])
    rollout.backward((rollout.soft.weights * values[rollout.soft.ids]).sum() + 0.1 * rollout.kl.sum())
    seconds = time.perf_counter() - begin
    gradient = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    return seconds, gradient, rollout.carried.sweeps if rollout.carried else None


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes = {"steps": 64, "vocab": 32768, "hidden": 128, "layers": 4, "prompt": 16, "threads": 1, "repeats": 3}
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--out", type=Path, help="write JSON lines here; must not exist")
    o = parser.parse_args(arguments)
    torch.set_num_threads(o.threads)
    write, model = results(o.out), policy(o)
    exact, rows = None, []
    for name, options in WAYS.items():
        with AllocationTracker() as tracker:
            _, gradient, sweeps = step(model, o, options)
        exact = gradient if exact is None else exact
        error = float((gradient - exact).norm() / exact.norm())
        if name in EXACT and error > 1e-4:
            raise SystemExit(f"{name}: the gradient is off by {error:.1e}")
        seconds = min(step(model, o, options)[0] for _ in range(o.repeats))
        rows.append({"way": name, "seconds": seconds, "peak_bytes": tracker.peak, "error": error, "sweeps": sweeps})
        print(
            f"{name:24s} {seconds:7.2f} s {tracker.peak / 2**20:8.1f} MiB  error {error:.1e}  {sweeps or ''}",
            flush=True,
        )
    sizes = {name: value for name, value in vars(o).items() if name != "out"}
    write({"kind": "carry", "sizes": sizes, "rows": rows})


if __name__ == "__main__":
    main()
