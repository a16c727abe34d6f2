"""What `test_distributed.py` runs on each of two ranks: every wrapping's gradients beside the single-process ones.

torchrun --nproc-per-node 2 -m tests.support.integrations.ranks RESULTS.json
"""

import copy
import json
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator, DistributedType, FullyShardedDataParallelPlugin
from accelerate.state import AcceleratorState
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard

import logitless
from logitless.integrations.transformers.lm_head import causal_lm, forward_with, through_head
from tests.support.integrations.launching import leave
from tests.support.integrations.tiny import TINY, batch_for, dense_loss

ROWS = 4


def build(adapted: bool = False) -> Any:
    """A Llama in float64; adapted: LoRA on a projection and on the head, its factors far from 0."""
    model = TINY["llama"].build().double().train()
    if not adapted:
        return model
    config = LoraConfig(r=2, target_modules=["q_proj", "lm_head"], init_lora_weights=False, task_type="CAUSAL_LM")
    torch.manual_seed(3)
    return get_peft_model(model, config, autocast_adapter_dtype=False).double()


def half(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    rows = ROWS // dist.get_world_size()
    return {name: x[dist.get_rank() * rows :][:rows] for name, x in batch.items()}


def shard(model: Any, wrapping: str, **options: Any) -> Any:
    mesh, inner = init_device_mesh("cpu", (dist.get_world_size(),)), causal_lm(model)
    for layer in inner.model.layers:
        fully_shard(layer, mesh=mesh, **options)
    if wrapping == "norm and head":
        fully_shard([inner.model.norm, inner.lm_head], mesh=mesh, **options)
    elif wrapping == "head":
        fully_shard(inner.lm_head, mesh=mesh, **options)
    elif wrapping == "factors":
        for part in (x for x in inner.lm_head.modules() if isinstance(x, nn.Linear) and x.weight.requires_grad):
            fully_shard(part, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def whole(x: Tensor) -> Tensor:
    return x.full_tensor() if hasattr(x, "full_tensor") else x


def errors(model: nn.Module, exact: dict[str, Tensor]) -> dict[str, float]:
    """Of each parameter's gradient, the largest difference over the largest entry."""
    grads = {
        name.replace("_fsdp_wrapped_module.", "").removeprefix("module."): whole(p.grad)
        for name, p in model.named_parameters()
        if p.grad is not None
    }
    return {name: float((grads[name] - g).abs().max() / g.abs().max()) for name, g in exact.items()}


def expected(batch: dict[str, Tensor], items: int, adapted: bool = False) -> tuple[float, dict[str, Tensor]]:
    """transformers' own loss and gradients in one process that sees the whole batch."""
    model = build(adapted)
    causal_lm(model).loss_function = dense_loss
    loss = model(**batch, num_items_in_batch=items).loss
    loss.backward()
    return loss.item(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def step(model: Any, batch: dict[str, Tensor], items: int) -> float:
    """The ranks' gradients are averaged: each divides by its share of the items, as Trainer does."""
    for _ in range(2):  # the second step meets what the first one left sharded
        model.zero_grad(set_to_none=True)
        loss = model(**half(batch), num_items_in_batch=items / dist.get_world_size()).loss
        loss.backward()
    total = loss.detach().clone()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def wrapped(how: str, batch: dict[str, Tensor], items: int, adapted: bool = False) -> dict[str, Any]:
    loss, exact = expected(batch, items, adapted)
    model = build(adapted)
    if how == "accelerate fsdp2":
        return by_plugin(model, batch, items, loss, exact)
    if how == "install after":
        model = shard(model, "head")
        logitless.install(model)
    else:
        logitless.install(model)
        wrap = {"ddp": nn.parallel.DistributedDataParallel, "accelerate": Accelerator(cpu=True).prepare}
        model = wrap[how](model) if how in wrap else shard(model, how)
    found = step(model, batch, items)
    return {"loss": [found, loss], "errors": errors(model, exact)}


def by_plugin(
    model: Any, batch: dict[str, Tensor], items: int, loss: float, exact: dict[str, Tensor]
) -> dict[str, Any]:
    """FSDP2 as accelerate sets it up from its configuration."""
    policy = {"auto_wrap_policy": "transformer_based_wrap", "transformer_cls_names_to_wrap": ["LlamaDecoderLayer"]}
    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = Accelerator(cpu=True)
    # accelerate asks for accelerators before it would shard; what it does then is the same here
    accelerator.state.distributed_type = DistributedType.FSDP
    accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, cpu_ram_efficient_loading=False, **policy
    )
    logitless.install(model)
    model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.0))
    assert isinstance(model, FSDPModule)
    return {"loss": [step(model, batch, items), loss], "errors": errors(model, exact)}


def statistics(batch: dict[str, Tensor]) -> dict[str, Any]:
    """hidden_states and numbers of one's own through a sharded model, without and with gradients."""
    own = build().eval()
    labels = batch["labels"]
    hidden = logitless.hidden_states(own, batch)
    logprob = logitless.token_stats(hidden, logitless.LMHead.of(own), labels).logprob
    logprob.sum().backward()
    exact = {name: p.grad for name, p in own.named_parameters()}
    model = shard(build().eval(), "head")
    mine = half(batch)

    def end(inner: Any, hidden: Tensor) -> Tensor:
        return through_head(inner, lambda head, h, y: logitless.token_stats(h, head, y).logprob, hidden, mine["labels"])

    with torch.no_grad():
        difference = (logitless.hidden_states(model, mine) - half({"h": hidden})["h"]).abs().max()
    found = forward_with(model, mine, end)
    (dist.get_world_size() * found.sum()).backward()
    return {
        "hidden": float(difference),
        "logprob": float((found - half({"x": logprob})["x"]).abs().max()),
        "errors": errors(model, exact),
    }


def first_fsdp(batch: dict[str, Tensor], items: int, after: bool) -> dict[str, Any]:
    """FullyShardedDataParallel, with the head a unit of its own; after: is what `install` meets."""
    loss, exact = expected(batch, items)
    model = build()
    if not after:
        logitless.install(model)
    options = {"use_orig_params": True, "device_id": torch.device("cpu")}
    model.lm_head = FullyShardedDataParallel(model.lm_head, **options)
    model = FullyShardedDataParallel(model, **options)
    if after:
        logitless.install(model)
    found = step(model, batch, items)
    with FullyShardedDataParallel.summon_full_params(model, with_grads=True):
        return {"loss": [found, loss], "errors": errors(model, exact)}


def mixed_precision(batch: dict[str, Tensor], items: int) -> dict[str, Any]:
    """bfloat16 operands, float32 loss: the head's inputs and nothing else are rounded."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = shard(build().float(), "head", mp_policy=policy)
    logitless.install(model)
    mine = half(batch)
    loss = model(**mine, num_items_in_batch=items).loss
    loss.backward()
    return {
        "loss_dtype": str(loss.dtype),
        "grad_dtype": str(model.lm_head.weight.grad.dtype),
        "finite": all(bool(whole(p.grad).isfinite().all()) for p in model.parameters()),
    }


def generated(batch: dict[str, Tensor]) -> list[bool]:
    """Whether each rank's sharded model generates what a whole one does; rank 0's completions end first."""
    prompts = {name: half(batch)[name] for name in ("input_ids", "attention_mask")}
    length = prompts["input_ids"].shape[1] + 2 + 3 * dist.get_rank()
    options: dict[str, Any] = {
        "max_new_tokens": 8,
        "do_sample": False,
        "repetition_penalty": 1.3,
        "stopping_criteria": [lambda ids, scores, **_: torch.full((len(ids),), ids.shape[1] >= length)],
    }
    expected = build().eval().generate(**prompts, **options)
    out = logitless.generate(shard(build().eval(), "head"), prompts, **options)
    equal = torch.equal(out.ids, expected) and torch.equal(out.ids[:, -out.record.shape[1] :], out.record.token.long())
    found = [False] * dist.get_world_size()
    dist.all_gather_object(found, equal and expected.shape[1] == length)
    return found


def main(place: str) -> None:
    dist.init_process_group("gloo", timeout=timedelta(minutes=2))
    torch.set_num_threads(1)
    batch = batch_for("", rows=ROWS)
    batch["labels"][0] = -100  # ranks with unlike numbers of tokens that count
    items = int((batch["labels"][:, 1:] != -100).sum())
    results: dict[str, Any] = {
        how: wrapped(how, copy.deepcopy(batch), items)
        for how in ("ddp", "accelerate", "root", "norm and head", "head", "install after", "accelerate fsdp2")
    }
    for how in ("ddp", "root", "norm and head", "head", "factors"):
        results[f"{how}, adapted"] = wrapped(how, copy.deepcopy(batch), items, adapted=True)
    results["first fsdp"] = first_fsdp(batch, items, after=False)
    results["first fsdp, install after"] = first_fsdp(batch, items, after=True)
    results["statistics"] = statistics(batch)
    results["mixed precision"] = mixed_precision(batch, items)
    results["generated"] = generated(batch)
    if dist.get_rank() == 0:
        Path(place).write_text(json.dumps(results))
    leave()


if __name__ == "__main__":
    main(sys.argv[1])
