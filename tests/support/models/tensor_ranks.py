"""What `test_tensor_parallel.py` runs on every rank: models whose matrices are split, beside transformers' own."""

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.functional import cross_entropy
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM

from docs.tables.traffic import traffic
from logitless.integrations.transformers.install import install
from logitless.models.catalog import from_config
from logitless.models.instances import with_adapters
from logitless.models.long_context import lightened
from logitless.models.tensor_parallel import split_matrices
from logitless.workbench.plan.setting import Setting
from tests.support.allocations import largest_allocation
from tests.support.vocab.sharding import Case, run

PAD = 32  # the first entry of the third rank of four
SIZES = {
    "vocab_size": 61, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 4,
    "head_dim": 8, "intermediate_size": 24, "max_position_embeddings": 64, "pad_token_id": PAD,
}  # fmt: skip


KINDS = (
    ("qwen3", {"tie_word_embeddings": True}),
    ("qwen2", {}),
    ("llama", {"attention_bias": True, "mlp_bias": True}),
    ("gemma2", {"query_pre_attn_scalar": 8}),
)


def model(kind: str = "qwen3", dtype: torch.dtype = torch.float64, **more: Any) -> Any:
    torch.manual_seed(0)
    made = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **(SIZES | more)), dtype=dtype).train()
    with torch.no_grad():
        for x in made.parameters():  # transformers makes norms ones and biases zeros
            if x.dim() == 1:
                x.normal_(1, 0.2)
    return made


def batch() -> dict[str, torch.Tensor]:
    ids = torch.randint(61, (2, 12), generator=torch.Generator().manual_seed(1))
    ids[0, 3] = ids[1, 7] = PAD
    positions = torch.stack([torch.arange(12), torch.tensor([*range(5), *range(7)])])
    return {"input_ids": ids, "position_ids": positions, "labels": ids.masked_fill(positions == 0, -100)}


def split(group: Any, one: Any, memory_budget: int = 1 << 12) -> Any:
    """The model on the ranks of a group, ready to train."""
    split_matrices(one, DeviceMesh.from_group(group, "cpu", mesh_dim_names=("tp",)))
    install(one, memory_budget=memory_budget)
    return one


def compare(group: Any, whole: Any, parts: Any, rtol: float = 1e-9) -> None:
    """Loss and every gradient of `parts`, split here, against `whole`."""
    everything = batch()
    labels = everything.pop("labels")
    logits = whole(**everything, use_cache=False).logits
    dense = cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    dense.backward()
    wanted = {name: x.grad for name, x in whole.named_parameters()}
    loss = split(group, parts)(**everything, labels=labels, use_cache=False).loss
    torch.testing.assert_close(loss, dense, rtol=rtol, atol=0)
    loss.backward()
    for name, x in parts.named_parameters():
        assert isinstance(x, DTensor), name
        assert x.to_local().numel() <= -(-x.numel() // group.size()) + x[0].numel() or x.dim() == 1 or "lora" in name
        if wanted[name] is not None:
            found, exact = x.grad.full_tensor(), wanted[name]
            torch.testing.assert_close(found, exact, rtol=rtol, atol=rtol * float(exact.abs().max()), msg=name)
    assert {name for name, x in parts.named_parameters() if x.grad is None} == {n for n in wanted if wanted[n] is None}


def kinds(group: Any) -> None:
    """All on two ranks; on four the first."""
    for kind, more in KINDS if group.size() == 2 else KINDS[:1]:
        compare(group, model(kind, **more), model(kind, **more))


def single_precision(group: Any) -> None:
    compare(group, model(dtype=torch.float32), model(dtype=torch.float32), 3e-5)


def beside_other_options(group: Any) -> None:
    """Checkpointed layers, offloaded inputs, tiles and adapters."""
    found = []
    for light in (False, True):
        one = model()
        if light:
            lightened(one, checkpointing=True, offload=True, tiles=3)
        torch.manual_seed(2)
        one = with_adapters(one, 2)
        with torch.no_grad():
            for name, x in one.named_parameters():
                if "lora_B" in name:  # zero at first, and so would be the gradient of the other factor
                    x.normal_(generator=torch.Generator().manual_seed(3))
        found.append(one)
    compare(group, *found)


class Summed(TorchDispatchMode):
    """The numbers that DTensors add up over ranks; the head's own traffic is not theirs."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "c10d_functional.all_reduce" in str(func):
            self.numbers += args[0].numel()
        return func(*args, **(kwargs or {}))


def sums_over_ranks(group: Any) -> None:
    """The planner counts the hidden states that travel, with checkpointed layers and tiles too."""
    shape, tokens = from_config(SIZES | {"model_type": "qwen3"}, "small"), batch()["input_ids"].numel()
    counted = Setting(shape, batch_size=1, response_length=tokens, gpus=2, tensor_parallel=2)
    for checkpointing, tiles in ((False, 1), (True, 1), (False, 3), (True, 3)):
        one = lightened(model(), checkpointing=checkpointing, offload=False, tiles=tiles)
        parts = split(group, one)
        with Summed() as summed:
            parts(**batch(), use_cache=False).loss.backward()
        setting = replace(counted, gradient_checkpointing=checkpointing, mlp_tiles=tiles).check()
        sent = {row.name: row.nbytes for row in traffic(setting)}["hidden states of the layers, all-reduce"]
        assert 2 * summed.numbers == sent, (checkpointing, tiles)  # an all-reduce of two sends its bytes, bf16, once


def memory(group: Any) -> None:
    """No rank makes a tensor of the size of the vocabulary's matrix."""
    vocabulary = 2000
    parts = split(group, model(vocab_size=vocabulary), memory_budget=1 << 15)
    largest = largest_allocation(lambda: parts(**batch(), use_cache=False).loss.backward())
    assert largest <= -(-vocabulary // dist.get_world_size(group)) * SIZES["hidden_size"] * 8, largest


def on_two(case: Case) -> Case:
    """What four ranks do as two do, on two alone: it costs seconds."""
    return lambda group: case(group) if group.size() == 2 else None


CASES: dict[str, Case] = {
    "kinds": kinds,
    "single precision": on_two(single_precision),
    "beside other options": on_two(beside_other_options),
    "sums over ranks": on_two(sums_over_ranks),
    "memory": memory,
}

if __name__ == "__main__":
    run(CASES)
