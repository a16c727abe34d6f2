"""The arithmetic of a plan: shares of each GPU, phases, what an algorithm keeps, both ways to make a loss."""

from dataclasses import replace

import pytest
import torch

import logitless as ll
from logitless.algebra.costs import dense_loss_bytes, dense_parts, logits_bytes, slices_of, weight_gradient_bytes
from logitless.errors import OptionError
from logitless.models.catalog import shape_of
from logitless.vocab.head.gguf import FORMATS
from logitless.workbench.plan.algorithms import ALGORITHMS, PHASES
from logitless.workbench.plan.commands import flags
from logitless.workbench.plan.plan import at_length, both, plan, sweep
from logitless.workbench.plan.setting import GIB, HEAD_FORMATS, Setting
from tests.support.allocations import trace_allocations

SHAPE = shape_of("qwen2.5-0.5b")
P = SHAPE.parameters
RL = Setting(SHAPE, "grpo", batch_size=16, responses_per_prompt=8, prompt_length=512, response_length=1024, gpus=8)


def sizes(setting: Setting, way: str = "logitless") -> dict[str, int]:
    return {c.name: c.nbytes for c in plan(setting, way).components}


def test_a_peak_is_the_sum_of_what_is_alive():
    made = plan(RL, "dense")
    for phase in PHASES:
        assert made.peaks[phase] == sum(c.nbytes for c in made.components if phase in c.phases)
    assert made.peak == max(made.peaks.values()) == made.peaks[made.peak_phase]
    assert made.margin == 80 * GIB - 2 * GIB - made.peak
    assert made.largest.largest == max(c.largest for c in made.components)
    assert all(0 < c.largest <= c.nbytes for c in made.components)


def test_dense_tensors_are_those_of_a_real_cross_entropy():
    n, v = 96, 512
    parts = dense_parts(n, v, 2)
    first = ("logits", "logits in fp32", "log-softmax")
    assert sum(parts[name] for name in first) == dense_loss_bytes(n, v, 2)
    hidden = torch.randn(n, 8, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(v, 8, dtype=torch.bfloat16)
    labels = torch.randint(v, (n,))

    def forward():
        logits = hidden @ weight.T
        return torch.nn.functional.cross_entropy(logits.float(), labels), logits

    traced = trace_allocations(forward)
    assert traced.peak == pytest.approx(dense_loss_bytes(n, v, 2), rel=0.01)
    saved = trace_allocations(lambda: forward()[0])
    assert saved.kept == pytest.approx(parts["log-softmax"], rel=0.01)
    backward = trace_allocations(traced.result[0].backward)
    assert backward.peak == pytest.approx(
        parts["gradient of the log-softmax"] + parts["gradient of the logits"], rel=0.02
    )


def test_a_quantised_head():
    """It takes its blocks' bytes in the place of bf16's, whole on each GPU; slices have room to dequantise."""
    shape = replace(SHAPE, tied=False)
    base = Setting(shape, "sft", lora_rank=8, gpus=2)
    stored = replace(base, head_format="q8_0")
    before, after = sizes(base), sizes(stored)
    assert after["quantised head"] == shape.embedding * 34 // 32
    assert before["parameters"] - after["parameters"] == 2 * shape.embedding
    assert sizes(replace(stored, sharding="fsdp2"))["quantised head"] == after["quantised head"]
    assert sizes(replace(stored, tensor_parallel=2))["quantised head"] == after["quantised head"] // 2
    assert after["slices of the logits"] <= stored.memory_budget
    assert flags(stored) == {}
    replace(stored, reward_shape=SHAPE, critic_shape=SHAPE).check()  # whose heads are none
    for wrong in ({"lora_rank": 0}, {"model": SHAPE, "reward_shape": shape}, {"algorithm": "grade"}):
        with pytest.raises(OptionError, match="needs a frozen head of its own"):
            replace(stored, **wrong).check()
    assert {name: HEAD_FORMATS[name.lower()] for name in ("Q8_0", "Q6_K", "Q4_K")} == {
        name: (FORMATS[name].nbytes, FORMATS[name].numbers) for name in ("Q8_0", "Q6_K", "Q4_K")
    }


def test_the_softcap_keeps_its_tanh():
    capped = shape_of("gemma-2-2b")
    setting = Setting(capped, batch_size=1, response_length=4096)
    assert sizes(setting, "dense")["softcap's tanh"] == logits_bytes(4096, 256_000, 2)
    assert "softcap's tanh" not in sizes(replace(setting, model=shape_of("gemma-3-1b")), "dense")


def test_logitless_takes_what_a_real_pass_takes():
    n, hidden, vocab, budget = 1024, 128, 8192, 1 << 20
    h = torch.randn(n, hidden, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.nn.Parameter(torch.randn(vocab, hidden, dtype=torch.bfloat16))
    labels = torch.randint(vocab, (n,))

    def step():
        ll.linear_cross_entropy(h, ll.LMHead(weight), labels, memory_budget=budget).backward()

    step()
    measured = trace_allocations(step).peak
    wide, narrow = weight_gradient_bytes(vocab, hidden, 2)
    planned = slices_of(n, vocab, budget=budget, device="cpu", whole=True).nbytes + wide + narrow + n * hidden * 2
    assert planned * 0.7 < measured < planned * 1.15


def test_slices_are_the_runtimes():
    row = next(c for c in plan(RL).components if c.name == "slices of the logits")
    n = RL.response_tokens
    assert row.nbytes == slices_of(n, SHAPE.vocab, budget=256 << 20, device="gpu", whole=True).nbytes
    smaller = sizes(replace(RL, memory_budget=64 << 20))["slices of the logits"]
    assert smaller <= 64 << 20 < row.nbytes <= 256 << 20


@pytest.mark.parametrize(
    ("sharding", "parameters", "gradients", "optimizer"),
    [("ddp", 1, 1, 1), ("zero1", 1, 1, 8), ("zero2", 1, 8, 8), ("zero3", 8, 8, 8), ("fsdp2", 8, 8, 8)],
)
def test_what_is_divided(sharding, parameters, gradients, optimizer):
    found = sizes(replace(RL, sharding=sharding))
    assert found["parameters"] == found["reference model"] == P // parameters * 2
    assert found["gradients"] == P // gradients * 2
    assert found["optimizer state"] == P // optimizer * 8
    assert found["master weights"] == P // optimizer * 4
    assert ("DDP's gradient buckets" in found) == (sharding == "ddp")
    assert any("gathered layer" in name for name in found) == (parameters == 8)


E, L, UNTIED = 2 * SHAPE.embedding, 2 * SHAPE.largest_layer, replace(SHAPE, tied=False)
A = 4 * (SHAPE.lora(16) // SHAPE.layers)  # a layer's adapters
HALF = 2 * (SHAPE.layer_vectors + (SHAPE.largest_layer - SHAPE.layer_vectors) // 2)
EXTRA = ("DDP's", "gathered", "a layer's gradients", "a layer's reduce-scatter", "head's share", "the last reduce")


def placed(setting: Setting, way: str = "logitless") -> dict[str, tuple[int, str]]:
    """Bytes of each component, and the places of its phases in PHASES."""
    made = plan(setting, way).components
    return {c.name: (c.nbytes, "".join(str(PHASES.index(p)) for p in c.phases)) for c in made}


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"sharding": "ddp"}, {"DDP's gradient buckets": (2 * P, "012345678")}),
        ({"sharding": "ddp", "lora_rank": 16}, {"DDP's gradient buckets": (4 * SHAPE.lora(16), "012345678")}),
        ({"sharding": "ddp", "gpus": 1}, {}),
        ({"sharding": "zero1"}, {}),
        ({"sharding": "zero2"}, {"a layer's gradients": (L, "56")}),
        ({"sharding": "zero2", "lora_rank": 16}, {}),
        ({"sharding": "zero2", "tensor_parallel": 2}, {"a layer's gradients": (HALF, "56")}),
        (
            {"sharding": "zero3", "model": UNTIED},
            {
                "a layer's gradients": (L, "56"),
                "gathered layers": (2 * L, "0123456"),
                "gathered embedding and head": (2 * E, "123456"),
                "gathered model": (2 * P + E - 2 * L, "0"),
            },
        ),
        (
            {"sharding": "fsdp2"},
            {
                "gathered layer": (L, "01256"),
                "gathered layer, its buffer": (L, "0123456"),
                "gathered head": (E, "01234567"),
                "a layer's reduce-scatter": (L, "6"),
                "the last reduce-scatter": (L, "7"),
            },
        ),
        (
            {"sharding": "fsdp2", "model": UNTIED},
            {
                "gathered layer": (L, "01256"),
                "gathered layer, its buffer": (L, "01245"),
                "gathered head": (E, "0134"),
                "gathered head, its buffer": (E, "13"),
                "gathered embedding": (E, "67"),
                "a layer's reduce-scatter": (L, "6"),
                "head's share of its gradient": (E // 8, "5"),
                "the last reduce-scatter": (E // 8, "7"),
            },
        ),
        (
            {"sharding": "fsdp2", "model": UNTIED, "micro_batch": 4, "tensor_parallel": 2},
            {
                "gathered layer": (HALF, "01256"),
                "gathered layer, its buffer": (HALF, "01245"),
                "gathered head": (E // 2, "0134"),
                "gathered head, its buffer": (E // 2, "13"),
                "gathered embedding": (E // 2, "67"),
                "a layer's reduce-scatter": (HALF, "6"),
                "the last reduce-scatter": (E // 8, "7"),
            },
        ),
        (
            {"sharding": "fsdp2", "model": UNTIED, "lora_rank": 16},
            {
                "gathered layer": (L + A, "01256"),
                "gathered layer, its buffer": (L + A, "01245"),
                "gathered head": (E, "0134"),
                "gathered head, its buffer": (E, "13"),
                "a layer's reduce-scatter": (A, "6"),
                "the last reduce-scatter": (A, "7"),
            },
        ),
    ],
    ids=lambda x: "-".join(map(str, x.values())) if "sharding" in x else "",
)
def test_what_dividing_costs(change, expected):
    """Bytes, and the places in PHASES; of FSDP2 and DDP as the slow tests find them on real ranks."""
    found = placed(replace(RL, **change))
    assert {name: x for name, x in found.items() if name.startswith(EXTRA)} == expected
    if "gathered head" in expected:  # a gradient of the input of checkpointed layers wants the embedding
        light = sizes(replace(RL, **change, gradient_checkpointing=True))
        assert ("gathered embedding" in light) == (not replace(RL, **change).model.tied)


def test_the_largest_tensor_of_what_training_adds():
    """The embedding's own: its gradient, one of two moments, its copy in fp32; of DDP a bucket."""
    small = shape_of("qwen3-0.6b")
    found = {c.name: c.largest for c in plan(replace(RL, algorithm="ppo", critic_shape=small)).components}
    e = SHAPE.embedding
    assert found["parameters"] == found["reference model"] == found["gradients"] == 2 * e
    assert found["optimizer state"] == found["master weights"] == 4 * e
    assert found["critic"] == 2 * small.embedding
    assert found["critic's optimizer state"] == found["critic's master weights"] == 4 * small.embedding
    assert found["DDP's gradient buckets"] == 25 << 20
    divided = plan(replace(RL, sharding="zero3", gpus=64, batch_size=64)).components
    assert all(c.largest <= c.nbytes for c in divided)
    few = {c.name: c for c in plan(replace(RL, lora_rank=1)).components}
    for name in ("adapters", "gradients", "DDP's gradient buckets"):
        assert few[name].largest == few[name].nbytes < 25 << 20
    assert few["adapters"].shape.endswith(" fp32")
    assert few["parameters"].shape.endswith(" bf16")


def test_a_critic_is_trained_whole_beside_adapters():
    adapted = sizes(replace(RL, algorithm="ppo", lora_rank=16))
    critic = SHAPE.embedding + SHAPE.body + SHAPE.hidden
    assert (adapted["critic's optimizer state"], adapted["critic's master weights"]) == (8 * critic, 4 * critic)
    assert "master weights" not in adapted


@pytest.mark.parametrize(
    ("optimizer", "each"), [("adamw-fp32", 8), ("adamw-bf16", 4), ("adamw-8bit", 65 / 32), ("sgd", 0), ("none", 0)]
)
def test_optimizers(optimizer, each):
    found = sizes(replace(RL, optimizer=optimizer))
    assert found.get("optimizer state", 0) == int(P * each)
    assert ("master weights" in found) == (optimizer != "none")
    assert "master weights" not in sizes(replace(RL, master_weights=False))


def test_tensor_parallelism_divides_matrices_and_the_vocabulary():
    one, two = RL, replace(RL, tensor_parallel=2)
    assert sizes(two)["parameters"] == (SHAPE.vectors + (P - SHAPE.vectors) // 2) * 2
    before, after = sizes(one, "dense"), sizes(two, "dense")
    # twice the rows on each pair of GPUs, half of the vocabulary on each
    assert after["logits"] == before["logits"]
    assert after["key-value cache"] == before["key-value cache"]
    assert after["head's gradient"] * 2 == before["head's gradient"]
    few = Setting(shape_of("qwen3-0.6b"), "reinforce", 1, gpus=16, tensor_parallel=16)
    assert sizes(few)["key-value cache"] == 2 * 2 * 128 * 28 * 2048  # each of 8 heads of keys lies on two GPUs


def test_context_parallelism_divides_tokens():
    long = Setting(SHAPE, batch_size=1, response_length=65_536, gpus=4, context_parallel=4)
    assert long.tokens == 16_384
    assert sizes(long, "dense")["logits"] == logits_bytes(16_384, SHAPE.vocab, 2)
    assert sizes(long)["parameters"] == 2 * P
    assert sizes(replace(long, sharding="fsdp2"))["parameters"] == 2 * (P // 4)  # which weights, and rollouts, are by
    assert replace(RL, context_parallel=2).rollout_sequences == RL.rollout_sequences


def test_adapters():
    found = sizes(replace(RL, lora_rank=16))
    adapters = SHAPE.lora(16)
    assert found["adapters"] == found["gradients"] == 4 * adapters
    assert found["optimizer state"] == 8 * adapters
    assert not {"master weights", "reference model", "head's gradient", "head's gradient, summed"} & set(found)
    assert "reference model" in sizes(replace(RL, lora_rank=16, reference="yes"))
    preference = replace(RL, algorithm="dpo", lora_rank=16)  # not separable, head frozen: the basis folds
    assert "basis p · W" in sizes(preference)


@pytest.mark.parametrize(
    ("algorithm", "models"),
    [
        ("sft", set()),
        ("dpo", {"reference model"}),
        ("ppo", {"reference model", "critic", "reward model"}),
        ("grpo", {"reference model"}),
        ("intuitor", {"reference model"}),
        ("reinforce", set()),
        ("grade", {"reference model", "reward model"}),
    ],
)
def test_what_each_algorithm_keeps(algorithm, models):
    found = sizes(replace(RL, algorithm=algorithm))
    assert {"reference model", "critic", "reward model"} & set(found) == models
    rollout = "rollout" in ALGORITHMS[algorithm].phases
    assert ("key-value cache" in found) == rollout == (algorithm not in ("sft", "dpo", "grade"))
    if "critic" in models:
        assert found["critic's optimizer state"] == (SHAPE.embedding + SHAPE.body + SHAPE.hidden) * 8
    more = sizes(replace(RL, algorithm=algorithm, reference="no", critic="no", reward_model="no"))
    assert not {"reference model", "critic", "reward model"} & set(more)


def test_critic_and_reward_model_of_other_shapes():
    small = shape_of("qwen3-0.6b")
    asked = replace(RL, algorithm="ppo", critic_shape=small, reward_shape=shape_of("4b"))
    found, same = sizes(asked), sizes(replace(RL, algorithm="ppo"))
    assert found["critic"] == 2 * (small.embedding + small.body + small.hidden)
    assert found["critic's optimizer state"] == 4 * found["critic"]
    assert found["critic's master weights"] == 2 * found["critic"]
    assert found["reward model"] == 2 * (shape_of("4b").parameters + 2560)
    changed = {name for name in found if found[name] != same[name]}
    assert changed == {"critic", "critic's optimizer state", "critic's master weights", "reward model"}
    soft = replace(asked, algorithm="grade", prompt_length=32, response_length=64)
    assert (
        sizes(soft)["reward model's activations"]
        > sizes(replace(soft, reward_shape=None))["reward model's activations"]
    )
    with pytest.raises(OptionError, match="--tensor-parallel must be a divisor of 14 heads"):
        plan(replace(RL, model=small, critic_shape=SHAPE, tensor_parallel=4))


def test_a_preference_is_two_sequences_and_recomputes():
    pair = Setting(SHAPE, "dpo", batch_size=4, prompt_length=100, response_length=400)
    assert (pair.micro_sequences, pair.tokens, pair.response_tokens) == (8, 4000, 3200)
    assert pair.tokens_per_step == 4000
    row = next(c for c in plan(pair).components if c.name == "slices of the logits")
    assert row.phases == ("loss", "loss backward")


def test_the_loss_holds_logits_only_where_they_are_made():
    dense, ours = both(RL)
    assert dense.peaks["scoring"] > ours.peaks["scoring"]
    assert dense.peaks["loss"] > ours.peaks["loss"]
    assert all(dense.peaks[p] == ours.peaks[p] for p in PHASES if "loss" not in p and p != "scoring")


def test_prompts_have_logits_in_the_dense_way_only():
    assert sizes(RL, "dense")["logits"] == logits_bytes(RL.tokens, SHAPE.vocab, 2)
    asked = sizes(replace(RL, dense_logits="response"), "dense")["logits"]
    assert asked == logits_bytes(RL.response_tokens, SHAPE.vocab, 2)


def test_gradients_live_on_while_they_accumulate():
    once = next(c for c in plan(RL).components if c.name == "gradients")
    often = next(c for c in plan(replace(RL, micro_batch=4)).components if c.name == "gradients")
    assert once.phases == ("optimizer",)
    assert often.phases == PHASES[2:]


def test_batches_and_passes():
    assert (RL.rows, RL.micro_rows, RL.accumulation, RL.tokens_per_step) == (16, 16, 1, 16 * 8 * 1536)
    assert replace(RL, micro_batch=3).accumulation == 6
    assert replace(RL, micro_batch=99).micro_rows == 16
    assert replace(RL, batch_size=1, responses_per_prompt=1).rows == 1
    assert replace(RL, rollout_batch=4).rollout_sequences == 4


def test_the_cache_is_as_long_as_validation():
    longer = replace(RL, validation_length=4096)
    per_token = 2 * 2 * SHAPE.key * SHAPE.layers
    assert sizes(RL)["key-value cache"] == per_token * 16 * 1536
    assert sizes(longer)["key-value cache"] == per_token * 16 * 4608
    windowed = replace(RL, model=shape_of("gemma-2-2b"), validation_length=8192)
    shape = windowed.model
    assert sizes(windowed)["key-value cache"] == 2 * 2 * shape.key * 16 * shape.kv_tokens(8704)


def test_eager_attention_makes_scores():
    flash, eager = RL, replace(RL, attention="eager")
    more = sizes(eager)["activations of the layers"] - sizes(flash)["activations of the layers"]
    scores = RL.tokens * RL.length * SHAPE.heads * SHAPE.layers * 6
    assert more == pytest.approx(scores, rel=0.05)


def test_soft_tokens():
    setting = Setting(SHAPE, "grade", batch_size=1, prompt_length=32, response_length=64, lora_rank=16)
    dense, ours = both(setting)
    whole = {c.name: c.nbytes for c in dense.components}
    few = {c.name: c.nbytes for c in ours.components}
    assert whole["soft tokens"] == 64 * SHAPE.vocab * 4
    assert few["soft tokens"] == 64 * 256 * 4
    assert few["soft tokens' ids"] == 64 * 256 * 8
    full = {c.name: c.nbytes for c in both(replace(setting, top_k=0).check())[1].components}
    for name in ("soft rows of all tables", "gradient of the soft rows of all tables"):
        assert full[name] == 64 * 2 * SHAPE.hidden * 4
    assert not any("soft tokens" in name for name in full)
    # without a cache each step passes all before it again: 64·32 + 64·65/2 tokens
    ratio = whole["activations of the layers"] / few["activations of the layers"]
    assert ratio == pytest.approx((64 * 32 + 64 * 65 / 2) / 96)
    twice = sizes(replace(setting, batch_size=2, top_k=10**6), "dense")
    assert twice["activations of the layers"] == 2 * whole["activations of the layers"]
    assert sizes(replace(setting, top_k=10**6))["soft tokens"] == whole["soft tokens"]


HIDDEN = "gradient of the hidden states"


@pytest.mark.parametrize(
    ("change", "gradient", "formed"),
    [
        ({}, "4567", "34"),  # autograd adds the embedding's to a tied head's
        ({"model": UNTIED}, "45", "34"),
        ({"model": UNTIED, "micro_batch": 4}, "4", "34"),  # the sum of several passes takes it in at once
        ({"model": UNTIED, "micro_batch": 4, "sharding": "fsdp2"}, "45", "34"),
        ({"algorithm": "dpo"}, "4567", "4"),  # recomputed in backward
        ({"lora_rank": 16}, None, "34"),
        ({"lora_rank": 16, "algorithm": "dpo"}, None, "4"),
    ],
)
def test_when_the_vocabularys_share_lives(change, gradient, formed):
    setting = replace(RL, **change)
    found, n = placed(setting), setting.response_tokens
    assert found[HIDDEN] == (2 * setting.tokens * SHAPE.hidden, formed)
    assert found["per-token numbers"] == (n * 8 * 4, "134")
    again = not setting.lora_rank and not setting.kind.separable
    assert found["slices of the logits"][1] == ("34" if again else "3")
    alone = slices_of(n, SHAPE.vocab, budget=256 << 20, device="gpu").nbytes
    assert found["slices of the logits, scoring"] == (alone, "1")
    wide, narrow = (None, None) if gradient is None else ((2 * E, formed), (E, gradient))
    assert (found.get("head's gradient, summed"), found.get("head's gradient")) == (wide, narrow)
    basis = (n * SHAPE.hidden * 4, "34") if gradient is None and not setting.kind.separable else None
    assert found.get("basis p · W") == basis
    dense = placed(setting, "dense")
    assert dense[HIDDEN] == (found[HIDDEN][0], "4")
    assert "head's gradient, summed" not in dense
    assert dense.get("head's gradient") == narrow


def test_when_soft_tokens_live():
    setting = Setting(SHAPE, "grade", batch_size=1, prompt_length=32, response_length=64)
    found, dense = placed(setting), placed(setting, "dense")
    assert found["soft tokens"] == (64 * 256 * 4, "2345")
    assert found["gradient of the soft tokens"] == (64 * 256 * 4, "45")
    assert dense["gradient of the soft tokens"] == (64 * SHAPE.vocab * 4, "45")
    assert found["soft tokens' ids"] == (64 * 256 * 8, "2345")
    assert found["soft embeddings"] == dense["soft embeddings"] == (64 * SHAPE.hidden * 2, "2345")
    both_heads = slices_of(64, SHAPE.vocab, budget=256 << 20, device="gpu", heads=2).nbytes
    assert found["slices of both heads' logits"] == (both_heads, "24")
    assert (found["head's gradient, summed"], found["head's gradient"]) == ((2 * E, "4"), (E, "4567"))
    assert dense["head's gradient"] == found["head's gradient"]
    for name in ("policy's probabilities", "policy's log-softmax", "reference's log-softmax"):
        assert dense[name] == dense["soft tokens"] == (64 * SHAPE.vocab * 4, "2345")
    every = replace(setting, top_k=0, lora_rank=8)
    rows = "soft rows of all tables"
    assert placed(replace(every, reward_model="no"))[rows][0] == 64 * SHAPE.hidden * 4
    read = replace(every, reward_shape=shape_of("4b"))
    assert placed(read)[rows][0] == 64 * (SHAPE.hidden + 2560) * 4
    assert "soft tokens' ids" not in placed(read)
    assert found["reward model's activations"][1] == "34"


def test_the_largest_tensor_of_the_vocabularys_share():
    found = {c.name: c for c in plan(RL).components}
    whole, parts = (
        slices_of(RL.response_tokens, SHAPE.vocab, budget=256 << 20, device="gpu", whole=w) for w in (True, False)
    )
    assert found["slices of the logits"].largest == whole.tokens * SHAPE.vocab * 4
    assert found["slices of the logits, scoring"].largest == parts.tokens * parts.width * 4
    assert found["per-token numbers"].largest == RL.response_tokens * 4
    kinds = {c.name: c.shape.rpartition(" ")[2] for c in plan(RL, "dense").components}
    assert (kinds["logits"], kinds["logits in fp32"], kinds["log-softmax"]) == ("bf16", "fp32", "fp32")


def test_a_sweep_keeps_the_prompts_share():
    rows = sweep(replace(RL, dense_logits="all"), [3072, 1536])
    assert [length for length, *_ in rows] == [3072, 1536]
    assert rows[0][1].setting.prompt_length == 1024
    assert rows[1][1].peak == plan(RL, "dense").peak
    assert at_length(Setting(SHAPE), 100).prompt_length == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"algorithm": "gpro"}, "--algorithm must be one of sft, dpo"),
        ({"batch_size": 0}, "--batch-size must be 1 to 2"),
        ({"response_length": -1}, "--response-length must be 1 to 2"),
        ({"prompt_length": -1}, "--prompt-length must be 0 to 2"),
        ({"micro_batch": 2**63}, "--micro-batch must be 0 to 2"),
        ({"response_length": 2**62}, "more than 2\\^63-1: give smaller sizes"),
        ({"gpus": 6, "tensor_parallel": 4}, "--gpus must be a multiple of tensor × context parallelism \\(4\\), got 6"),
        ({"gpus": 4, "tensor_parallel": 4}, "--tensor-parallel must be a divisor of 14 heads"),
        ({"reserve": 80 * GIB}, "--reserve 80.00 GiB leaves nothing of a GPU's 80.00 GiB"),
        ({"gpus": 2, "context_parallel": 2, "attention": "eager"}, "--context-parallel 2 knows no --attention eager"),
    ],
)
def test_bad_settings(change, message):
    with pytest.raises(OptionError, match=message) as caught:
        both(replace(RL, **change))
    assert "\n" not in str(caught.value)


def test_a_way_that_does_not_exist():
    with pytest.raises(OptionError, match="dense or logitless"):
        plan(RL, "magic")


def test_sweeps_need_a_length():
    with pytest.raises(OptionError, match="lengths must be 1 or more, got 0"):
        sweep(RL, [0])


def test_sparse_attention_adds_parameters_and_no_scores():
    setting = Setting(shape_of("qwen3-0.6b"), batch_size=1, response_length=4096)
    sparse = plan(replace(setting, attention="nsa"))
    assert sparse.setting.model == replace(setting.model, sparse=True)
    more = sum(a * b + b for a, b in sparse.setting.model.sparse_linears) * setting.model.layers
    assert sizes(replace(setting, attention="nsa"))["parameters"] == sizes(setting)["parameters"] + 2 * more
    back = plan(replace(sparse.setting, attention="flash"))
    assert back == plan(setting)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": shape_of("gemma-2-2b")}, "--attention nsa needs layers like Qwen3's: those of gemma-2-2b have"),
        ({"gpus": 2, "tensor_parallel": 2}, "--tensor-parallel 2 cannot split --attention nsa; use --sharding fsdp2"),
    ],
)
def test_what_sparse_attention_cannot_do(change, message):
    with pytest.raises(OptionError, match=message):
        plan(replace(Setting(SHAPE, attention="nsa"), **change))
