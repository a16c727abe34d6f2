"""What GPUs send: each sharding by hand, and what does not depend on how it is cut."""

from dataclasses import replace

import pytest

from docs.tables.traffic import traffic
from logitless.models.catalog import from_config
from logitless.workbench.plan.setting import Setting
from tests.support.workbench.rank_bytes import CONFIG

SHAPE = from_config(CONFIG, "tiny")
BASE = Setting(SHAPE, batch_size=8, response_length=32, micro_batch=2, gpus=4)
WEIGHTS, HEAD = 2 * SHAPE.parameters, 2 * SHAPE.head


def sent(setting: Setting) -> dict[str, int]:
    return {row.name.split(",")[0]: row.nbytes for row in traffic(setting.check())}


def test_one_gpu_sends_nothing():
    assert sent(replace(BASE, gpus=1)) == {}


def test_ddp_sends_its_gradients_once_a_step():
    assert sent(BASE) == {"gradients": 2 * (WEIGHTS * 3 // 4)}
    assert sent(replace(BASE, micro_batch=1)) == sent(BASE)
    adapters = 4 * SHAPE.lora(8)
    assert sent(replace(BASE, lora_rank=8)) == {"gradients": 2 * (adapters * 3 // 4)}


def test_fsdp2_gathers_weights_for_every_pass_and_the_head_once():
    found = sent(replace(BASE, sharding="fsdp2"))
    assert found == {
        "gradients": WEIGHTS * 3 // 4,
        "weights of the layers": 2 * ((WEIGHTS - HEAD) * 3 // 4),
        "weights of the head": HEAD * 3 // 4,
    }
    assert sent(replace(BASE, sharding="fsdp2", micro_batch=1)) == {name: 2 * size for name, size in found.items()}


def test_a_split_model_sends_hidden_states():
    split = replace(BASE, tensor_parallel=2)
    tokens, wide = 4 * 32, SHAPE.hidden  # four rows on each pair of GPUs
    found = sent(split)
    assert found["hidden states of the layers"] == (1 + 4 * SHAPE.layers) * 2 * (2 * tokens * wide // 2)
    assert found["the split head"] >= tokens * wide * 4  # its gradient, fp32, once
    assert sent(replace(split, micro_batch=1))["hidden states of the layers"] == found["hidden states of the layers"]


def test_context_parallel_sends_keys_and_values():
    found = sent(replace(BASE, context_parallel=2))["keys and values"]
    assert found == 2 * 2 * 2 * SHAPE.layers * SHAPE.key * (4 * 32 // 2)  # once forward, once their gradients


@pytest.mark.parametrize("ranks", [2, 64, 1024])
def test_dividing_the_optimizer_costs_no_more_than_ddp(ranks):
    """Reduce-scatter and all-gather are what an all-reduce is made of."""
    whole = replace(BASE, gpus=ranks, batch_size=4096, micro_batch=0)
    ddp, zero1 = (sum(sent(replace(whole, sharding=name)).values()) for name in ("ddp", "zero2"))
    assert ddp == pytest.approx(zero1, rel=1e-6)
