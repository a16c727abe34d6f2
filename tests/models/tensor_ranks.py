"""What `test_tensor_parallel.py` runs on every rank: models whose matrices are split, beside transformers' own."""

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn.functional import cross_entropy
from transformers import AutoConfig, AutoModelForCausalLM

from logitless.integrations.transformers import install
from logitless.models.instances import with_adapters
from logitless.models.long_context import lightened
from logitless.models.tensor_parallel import split_matrices
from tests.support import largest_allocation
from tests.vocab.sharding import Case, run

PAD = 40
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


def sums_over_ranks(group: Any) -> None:
    """Hidden states travel twice a layer and pass, once for the embedding; the head's own traffic is not DTensor's."""
    parts = split(group, model())
    forward, backward = CommDebugMode(), CommDebugMode()
    with forward:
        loss = parts(**batch(), use_cache=False).loss
    with backward:
        loss.backward()
    functional = [_functional(mode) for mode in (forward, backward)]
    assert functional == [2 * SIZES["num_hidden_layers"] + 1, 2 * SIZES["num_hidden_layers"]], functional


def _functional(mode: CommDebugMode) -> int:
    return sum(n for op, n in mode.get_comm_counts().items() if "c10d_functional" in str(op))


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
