"""What one step's loss and gradients add to memory, logitless and dense, measured in a process of its own.

A process of its own, because a resident set never shows what an allocator kept from earlier work, and because a
dense loss that does not fit may take its process with it.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from ...errors import is_out_of_memory
from ...units import format_bytes
from ..common.options import from_dict
from .config import TrainConfig

METHODS = ("logitless", "dense")
DENSE_COPIES = 3  # fp32 logits, their log-softmax, and the gradient of either


def measure(config: TrainConfig, tokens: Path) -> dict[str, Any]:
    """{method: {peak_bytes, seconds, loss, curve} or {not_measured: why}} for the first batch's loss and backward."""
    order = json.dumps({"config": config.to_dict(), "tokens": str(tokens)})
    child = [sys.executable, "-m", "logitless.workbench.sft.stepcost"]
    done = subprocess.run(child, input=order, capture_output=True, text=True, check=False)
    found = {}
    for line in done.stdout.splitlines():
        if line.startswith('{"method"'):
            record = json.loads(line)
            found[record.pop("method")] = record
    reason = "killed, most likely for memory" if done.returncode < 0 else _last_line(done.stderr)
    return {method: found.get(method, {"not_measured": reason}) for method in METHODS}


def check_measured(found: dict[str, Any]) -> None:
    """Raises where it is not what `measure` returned."""
    for record in (found[method] for method in METHODS):
        if not isinstance(record.get("not_measured"), str):
            sum((a + b for a, b in record["curve"]), record["loss"] + record["peak_bytes"])


def _last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1] if lines else "the measuring process said nothing"


def main() -> None:
    """Reads an order from standard input and prints one JSON line per method."""
    order = json.loads(sys.stdin.read())
    config = from_dict(order["config"], "order", TrainConfig())
    for method, result in measure_here(config, Path(order["tokens"])):
        print(json.dumps({"method": method, **result}), flush=True)


def measure_here(config: TrainConfig, tokens: Path) -> Any:
    """Yields (method, result) in turn, in this process."""
    import torch

    from ...integrations.transformers.install import install
    from ...resident import free_bytes
    from ..common.device import device_of
    from ..sources.model import build, resolve
    from ..sources.packing import collate
    from .data import load

    device = device_of(config.device)
    rows, _ = load(tokens, config.context_length)
    batch = collate([rows[i] for i in range(min(config.batch_size, len(rows)))])
    batch = {name: tensor.to(device) for name, tensor in batch.items()}
    free = free_bytes(device)
    source = resolve(config.model)
    try:
        model = build(config, source).to(device)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        why = _does_not_fit("the model", _weights(config, source), free)
        yield from ((method, {"not_measured": why}) for method in METHODS)
        return
    model.train()  # what is loaded is in eval mode, which keeps every activation whatever checkpointing says
    inner = model.get_base_model() if config.lora_rank else model
    cast = torch.autocast(device.type, torch.bfloat16, enabled=config.mixed_precision == "bf16")
    for method in METHODS:
        install(model, loss=method, memory_budget=config.memory_budget_bytes)
        needed = sum(p.nbytes for p in model.parameters() if p.requires_grad)  # their gradients
        if method == "dense":
            needed += DENSE_COPIES * 4 * batch["input_ids"].numel() * inner.get_output_embeddings().weight.shape[0]
        yield method, _one(model, batch, device, needed, cast)


def _one(model: Any, batch: dict[str, Any], device: Any, needed: int, cast: Any) -> dict[str, Any]:
    from ...resident import Watch, free_bytes, thin, trim

    free = free_bytes(device)
    does_not_fit = _does_not_fit("a step", needed, free)
    if needed > free:
        return {"not_measured": does_not_fit}
    try:
        few = {name: tensor[:1, :8] for name, tensor in batch.items()}
        _step(model, {**few, "labels": few["input_ids"]}, cast)  # libraries allocate on their first call
        model.zero_grad(set_to_none=True)
        trim()  # what the method before has freed
        start = time.perf_counter()
        with Watch(device) as watch:
            loss = _step(model, batch, cast)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        return {"not_measured": does_not_fit}
    seconds = time.perf_counter() - start
    model.zero_grad(set_to_none=True)
    return {"peak_bytes": watch.peak, "seconds": round(seconds, 3), "loss": loss, "curve": thin(watch.curve)}


def _weights(config: TrainConfig, source: Any) -> int:
    """Bytes of the parameters, by their number."""
    from ...models.catalog import from_config

    known = {"bfloat16": 2, "float32": 4}
    itemsize = known.get(config.dtype) or getattr(getattr(source.config, "dtype", None), "itemsize", 4)
    return itemsize * from_config(source.config.to_dict(), config.model).parameters


def _does_not_fit(what: str, needed: int, free: int) -> str:
    """needed: the least, by arithmetic."""
    return f"does not fit: {what} of {format_bytes(needed)} or more into the {format_bytes(free)} that are free"


def _step(model: Any, batch: dict[str, Any], cast: Any) -> float:
    with cast:
        loss = model(**batch).loss
    loss.backward()
    return loss.item()


if __name__ == "__main__":
    main()
