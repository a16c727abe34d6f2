"""What `test_context_parallel.py` runs on every rank: models that share sequences, beside transformers' own."""

from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from transformers import AutoConfig, AutoModelForCausalLM

from logitless.integrations.transformers.install import install
from logitless.models import packed
from logitless.models.context_parallel import Part, attach
from logitless.models.instances import with_adapters
from logitless.models.long_context import lightened
from logitless.models.nsa import layers as nsa_layers
from logitless.models.nsa.options import NSAOptions
from logitless.vocab.ranks.collectives import count_tokens
from tests.support.allocations import largest_allocation
from tests.support.vocab.sharding import Case, run

SIZES = {
    "vocab_size": 61, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 8, "intermediate_size": 24, "max_position_embeddings": 2048,
}  # fmt: skip
# Longer than a part or two, starting where a part does, of one token, shorter than any part.
DOCUMENTS = [[5, 30, 13], [12, 12, 1, 23], [48], [3, 3, 4, 1, 1, 24, 12]]
SPARSE = NSAOptions(block=4, stride=2, selected_block=4, selected=4, window=5)


def model(kind: str = "qwen3", dtype: torch.dtype = torch.float64, **more: Any) -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **(SIZES | more)), dtype=dtype).train()


def batch(documents: list[list[int]]) -> dict[str, torch.Tensor]:
    """Packed rows as a run packs them; the last part of the last row has few labels that count."""
    positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in documents])
    ids = torch.randint(61, positions.shape, generator=torch.Generator().manual_seed(1))
    labels = ids.masked_fill(positions == 0, -100)
    labels[-1, -10:] = -100
    return {"input_ids": ids, "position_ids": positions, "labels": labels}


def compare(group: Any, whole: Any, shared: Any, rtol: float = 1e-9) -> None:
    """Logits, loss and every gradient of `shared` on all ranks, summed, against `whole` on one."""
    everything = batch(DOCUMENTS)
    labels = everything["labels"][:, 1:]
    count = int((labels != -100).sum())
    logits = whole(everything["input_ids"], position_ids=everything["position_ids"], use_cache=False).logits
    wanted = cross_entropy(logits[:, :-1].flatten(0, 1), labels.flatten(), reduction="sum") / count
    wanted.backward()
    part = Part.of(group)
    mine = part.cut(everything)
    with torch.no_grad():
        found = attach(shared, group)(mine["input_ids"], position_ids=mine["position_ids"], use_cache=False).logits
    torch.testing.assert_close(found, logits.detach().chunk(part.ranks, 1)[part.rank], rtol=rtol, atol=rtol)
    install(shared, memory_budget=1 << 12)
    items = count_tokens(mine["labels"], group)
    assert int(items) == count
    loss = shared(**mine, num_items_in_batch=items).loss
    loss.backward()
    dist.all_reduce(total := loss.detach(), group=group)
    torch.testing.assert_close(total, wanted.detach(), rtol=rtol, atol=0)
    exact = {name: p.grad for name, p in whole.named_parameters() if p.requires_grad}
    largest = max(float(gradient.abs().max()) for gradient in exact.values())
    assert any(gradient.abs().max() > 1e-3 * largest for name, gradient in exact.items() if "k_proj" in name)
    for name, p in shared.named_parameters():
        if name in exact:
            dist.all_reduce(p.grad, group=group)
            torch.testing.assert_close(p.grad, exact[name], rtol=rtol, atol=rtol * largest)


def full_attention(group: Any) -> None:
    sliding = {"use_sliding_window": True, "sliding_window": 7, "layer_types": ["full_attention", "sliding_attention"]}
    for kind, more in (("llama", {}), ("llama", {"num_key_value_heads": 4}), ("qwen3", sliding)):
        with patch.object(packed, "MASK_BYTES", 2000):  # several blocks
            compare(group, model(kind, **more), model(kind, **more))
    compare(group, model(dtype=torch.float32), model(dtype=torch.float32), 3e-5)


def windows_that_layers_do_not_pass(group: Any) -> None:
    """Those that transformers' mask alone has: of some layers, with and without an attribute that says so; of all."""
    everything, part = batch(DOCUMENTS), Part.of(group)
    mine = part.cut(everything)
    some = {"use_sliding_window": True, "layer_types": ["sliding_attention", "full_attention"]}
    for kind, more in (("qwen2_moe", some), ("phimoe", {})):
        more |= {"sliding_window": 5, "num_local_experts": 2, "num_experts": 4, "moe_intermediate_size": 8}
        whole, shared = (model(kind, **more).eval() for _ in range(2))
        for one in (whole, shared):
            one.set_experts_implementation("eager")  # the only one in float64
        attach(shared, group)
        with torch.no_grad():
            wanted, found = (
                one(given["input_ids"], position_ids=given["position_ids"], use_cache=False).logits
                for one, given in ((whole, everything), (shared, mine))
            )
        torch.testing.assert_close(found, wanted.chunk(part.ranks, 1)[part.rank], rtol=1e-9, atol=1e-9)


def sparse_attention(group: Any) -> None:
    compare(group, nsa_layers.attach(model(), SPARSE), nsa_layers.attach(model(), SPARSE))


def all_that_makes_a_context_longer(group: Any) -> None:
    """Checkpointed layers, offloaded inputs, tiles, adapters; with sparse attention in tests/train."""
    found = []
    for one in (model(), lightened(model(), checkpointing=True, offload=True, tiles=3)):
        torch.manual_seed(2)
        found.append(with_adapters(one, 2))
        with torch.no_grad():
            for name, p in found[-1].named_parameters():
                if "lora_B" in name:  # zero at first, and so would be the gradient of the other factor
                    p.normal_(generator=torch.Generator().manual_seed(3))
    compare(group, *found)


def memory(group: Any) -> None:
    """No rank makes anything of the context's length squared, in forward or in backward; one alone does."""
    length = 1024
    long = batch([[300, 500, 224]])
    mine = Part.of(group).cut(long)
    shared = attach(model(), group)
    with patch.object(packed, "MASK_BYTES", 1 << 18):
        largest = largest_allocation(lambda: shared(**mine, use_cache=False, num_items_in_batch=9).loss.backward())
    assert largest < length**2 // 2, largest
    assert largest_allocation(lambda: model()(**long, use_cache=False)) >= length**2


def what_travels(group: Any) -> None:
    """Each layer's keys and values of a part, once forward and again where it is recomputed; gradients once."""
    mine = Part.of(group).cut(batch(DOCUMENTS))
    part_bytes = 2 * mine["input_ids"].numel() * SIZES["num_key_value_heads"] * SIZES["head_dim"] * 8
    for checkpointed, gathers in ((False, 1), (True, 2)):
        shared = attach(lightened(model(), checkpointed, offload=False, tiles=1), group)
        with (
            patch.object(dist, "all_gather", side_effect=dist.all_gather) as gather,
            patch.object(dist, "reduce_scatter", side_effect=dist.reduce_scatter) as scatter,
        ):
            shared(**mine, use_cache=False, num_items_in_batch=9).loss.backward()
        sent = [call.args[1].nbytes for call in gather.call_args_list]
        assert sent == [part_bytes] * gathers * SIZES["num_hidden_layers"]
        assert scatter.call_count == SIZES["num_hidden_layers"]


CASES: dict[str, Case] = {
    case.__name__: case
    for case in (
        full_attention,
        windows_that_layers_do_not_pass,
        sparse_attention,
        all_that_makes_a_context_longer,
        what_travels,
        memory,
    )
}

if __name__ == "__main__":
    run(CASES)
