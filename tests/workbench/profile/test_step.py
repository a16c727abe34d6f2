"""A transformers step on fake tensors against the same step run for real, and what a GPU's kernels change."""

import itertools
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from logitless.algebra.costs import logits_bytes, slices_of
from logitless.errors import ConfigError, OptionError
from logitless.models.instances import configuration
from logitless.workbench.profile import fakes
from logitless.workbench.profile.measure import measure
from logitless.workbench.profile.savings import CHANGES, chosen, savings
from logitless.workbench.profile.step import LOSSES, Step, both, build, run, traced
from logitless.workbench.profile.trace import trace
from tests.support.allocations import AllocationTracker

# Fake tensors hold nothing to poison.
pytestmark = pytest.mark.compiled

SMALL = {
    "vocab_size": 1024,
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
KINDS = {
    "qwen3": {"tie_word_embeddings": True},
    "llama": {"tie_word_embeddings": False},
    "gemma2": {"sliding_window": 32},
    "mistral": {"sliding_window": None},
}
SETTINGS = {
    "plain": {},
    "checkpointing": {"gradient_checkpointing": True},
    "lora": {"lora_rank": 4},
    "lora and checkpointing": {"lora_rank": 4, "gradient_checkpointing": True},
    "tiles and checkpointing": {"mlp_tiles": 3, "gradient_checkpointing": True},
}
GIB = 1 << 30


@pytest.fixture(scope="module")
def model_file(tmp_path_factory):
    place = tmp_path_factory.mktemp("models")

    def write(kind: str, **fields) -> str:
        config = {**SMALL, "model_type": kind, **KINDS.get(kind, {}), **fields}
        path = place / f"{kind}-{len(fields)}.json"
        path.write_text(json.dumps(config))
        return str(path)

    return write


def combinations():
    """Every one, those in the fast suite that differ most."""
    for kind, setting, loss in itertools.product(KINDS, SETTINGS, LOSSES):
        fast = kind == "qwen3" or (setting, loss) in (("plain", "dense"), ("lora and checkpointing", "logitless"))
        yield pytest.param(kind, setting, loss, marks=[] if fast else [pytest.mark.slow], id=f"{kind}-{setting}-{loss}")


@pytest.mark.parametrize(("kind", "setting", "loss"), list(combinations()))
def test_prediction_against_a_real_run(kind, setting, loss, model_file):
    step = Step(model_file(kind), context_length=96, batch_size=2, loss=loss, **SETTINGS[setting])
    found = measure(step, "cpu")
    for predicted, allocated in zip(found.predicted.stages, found.allocated.stages, strict=True):
        assert predicted.name == allocated.name
        assert predicted.nbytes == allocated.nbytes, predicted.name
        assert predicted.peak == allocated.peak, predicted.name
    assert len(found.readings) == len(found.allocated.stages)
    assert found.as_json()["predicted_peak_bytes"] == found.predicted.peak.nbytes


def test_offloaded_inputs_leave_the_gpu_for_the_host(model_file):
    step = Step(model_file("qwen3", num_hidden_layers=6), context_length=1024, gradient_checkpointing=True)
    kept, moved = traced(step), traced(replace(step, offload_activations=True))
    inputs = 6 * 1024 * SMALL["hidden_size"] * 2
    assert moved.host == pytest.approx(inputs, rel=0.01)
    assert kept.host < 0.01 * inputs
    ends = [{s.name: s.nbytes for s in recording.stages}["after full forward"] for recording in (kept, moved)]
    assert ends[0] - ends[1] == pytest.approx(inputs, rel=0.01)
    assert moved.findings == ()


@pytest.mark.parametrize("context_length", [640, pytest.param(4700, marks=pytest.mark.slow)])
def test_sparse_attention_against_a_real_run(context_length, model_file, monkeypatch):
    """A trace runs one chunk of queries and one meeting of a block; no other allocates more. Which blocks are
    selected it cannot know, but the first one always is, and meets all queries."""
    monkeypatch.setattr("logitless.models.nsa.attention.CHUNK_BYTES", 1 << 19)
    name = model_file("qwen3", num_hidden_layers=1, vocab_size=64)
    step = Step(name, context_length=context_length, attention="nsa", gradient_checkpointing=True, optimizer="none")
    found = measure(step, "cpu")
    for predicted, allocated in zip(found.predicted.stages, found.allocated.stages, strict=True):
        assert predicted.nbytes == allocated.nbytes, predicted.name
        assert predicted.peak == allocated.peak, predicted.name


def test_a_trace_of_sparse_attention_does_not_grow_with_the_context(model_file):
    name = model_file("qwen3", num_hidden_layers=1)
    step = Step(name, attention="nsa", gradient_checkpointing=True)
    short, long = (len(traced(replace(step, context_length=n)).curve) for n in (8192, 131_072))
    assert long < 1.3 * short  # the logitless loss has a second chunk


@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_mixture_of_experts(checkpointing, model_file):
    name = model_file("qwen3_moe", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)
    found = measure(Step(name, context_length=96, gradient_checkpointing=checkpointing), "cpu")
    assert found.predicted.peak.nbytes == pytest.approx(found.allocated.peak.nbytes, rel=0.001)


@pytest.mark.parametrize("kind", ["qwen3_moe", "mixtral"])
def test_adapters_of_experts(kind, model_file):
    """PEFT turns autocast off around them, which torch does not know on the device that stands for a GPU."""
    experts = {"num_experts": 4, "moe_intermediate_size": 32} if kind == "qwen3_moe" else {"num_local_experts": 4}
    name = model_file(kind, num_hidden_layers=1, num_experts_per_tok=2, **experts)
    step = Step(name, 96, lora_rank=4, gradient_checkpointing=True)
    found = measure(step, "cpu")
    assert found.predicted.peak.nbytes == pytest.approx(found.allocated.peak.nbytes, rel=0.001)
    assert traced(step).peak.nbytes == pytest.approx(found.allocated.peak.nbytes, rel=0.1)  # other attention


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("optimizer", ["sgd", "none"])
def test_other_dtypes_and_optimizers(dtype, optimizer, model_file):
    step = Step(model_file("qwen3"), context_length=64, optimizer=optimizer, dtype=dtype)
    found = measure(step, "cpu")
    assert found.predicted.peak.nbytes == pytest.approx(found.allocated.peak.nbytes, rel=0.001)
    assert ("optimizer" in {s.name for s in found.allocated.stages}) == (optimizer != "none")


@pytest.mark.parametrize("loss", LOSSES)
def test_the_count_against_an_independent_one(loss, model_file):
    """The same real step under the tests' own tracker, which rounds nothing."""
    step = Step(model_file("qwen3"), context_length=200, loss=loss)
    predicted = traced(step, "cpu")
    model = build(step, "cpu")
    with AllocationTracker() as tracker:
        run(step, model, torch.device("cpu"))
    given = sum(p.nbytes for p in model.parameters()) + sum(b.nbytes for b in model.buffers())
    assert predicted.peak.nbytes == pytest.approx(tracker.peak + given, rel=0.01)


def test_later_chunks_of_the_streamed_loss_allocate_what_the_second_did(model_file, monkeypatch):
    name = model_file("qwen3", num_hidden_layers=1)
    step = Step(name, context_length=2000, memory_budget=1 << 20)  # 256 tokens at a time, or fewer
    short = traced(step, "cpu")
    monkeypatch.setattr(fakes, "CHUNKS", 10**9)
    whole = traced(step, "cpu")
    assert len(whole.curve) > 1.5 * len(short.curve)
    assert [(s.nbytes, s.peak) for s in short.stages] == [(s.nbytes, s.peak) for s in whole.stages]


def test_a_gpu_makes_no_scores_and_no_mask(model_file):
    step = Step(model_file("llama", intermediate_size=64), context_length=4096, optimizer="none")
    recording = traced(step)
    square = [a for a in recording.allocations if a.shape[-2:] == (4096, 4096)]
    assert not square
    assert any(a.shape == (1, 4, 4096) and a.dtype == "float32" for a in recording.allocations)  # its log-sum-exp
    summed = [a for a in recording.allocations if a.shape == (1, 4, 4096, 16) and a.op == "empty_like"]
    assert "float32" in {a.dtype for a in summed}  # dq over blocks of keys
    eager = traced(replace(step, attention="eager"))
    assert any(a.shape == (1, 4, 4096, 4096) for a in eager.allocations)
    assert eager.peak.nbytes > 4 * recording.peak.nbytes


def test_the_gpus_streamed_loss_keeps_to_its_budget(model_file):
    name = model_file("qwen3", vocab_size=50_000, num_hidden_layers=1)
    step = Step(name, context_length=4096, optimizer="none", memory_budget=32 << 20)
    found = both(step)
    logits = logits_bytes(4096, 50_000, 2)
    wide = [a for a in found["logitless"].allocations if a.category == "loss workspace"]
    assert max(a.nbytes for a in found["dense"].allocations) == 2 * logits  # in fp32
    assert max(a.nbytes for a in wide) <= 50_000 * 64 * 4  # the head's gradient in fp32
    assert found["dense"].peak.nbytes - found["logitless"].peak.nbytes > 4 * logits
    slices = slices_of(4095, 50_000, budget=32 << 20, device="gpu", whole=True)
    assert max(a.shape[0] for a in wide if len(a.shape) == 2 and a.shape[1] == 64) <= 50_000
    assert any(a.shape == (slices.tokens * slices.width,) for a in wide)


def test_what_a_gpus_fused_attention_allocates():
    def shapes(heads, kv_heads):
        q = torch.randn(2, heads, 32, 16, requires_grad=True)
        k, v = (torch.randn(2, kv_heads, 32, 16, requires_grad=True) for _ in range(2))
        made = fakes._Attention.apply(q, k, v)
        expected = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        assert made.shape == expected.shape
        return torch.autograd.grad(made, (q, k, v), torch.zeros_like(made)), (q, k, v)

    for heads, kv_heads in ((4, 4), (4, 2), (4, 1)):
        grads, inputs = shapes(heads, kv_heads)
        assert [g.shape for g in grads] == [x.shape for x in inputs]


def test_savings_are_traced_and_ranked(model_file):
    name = model_file("qwen3", vocab_size=8192, num_hidden_layers=1)
    step = Step(name, context_length=512, loss="dense", optimizer="none")
    known = both(step)
    found, refused = savings(step, known["dense"], ["all"], known)
    assert not refused
    assert {r.name for r in found} == set(CHANGES)
    assert [r.saved for r in found] == sorted((r.saved for r in found), reverse=True)
    assert found[0].name in ("logitless-loss", "half-context")
    assert all(r.saved == known["dense"].peak.nbytes - r.recording.peak.nbytes for r in found)
    done = replace(
        step, loss="logitless", gradient_checkpointing=True, lora_rank=2, offload_activations=True, mlp_tiles=2
    )
    assert [r.name for r in savings(done, known["logitless"], ["all"], known)[0]] == ["half-context"]
    assert chosen(["lora", "checkpointing"]) == ["checkpointing", "lora"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"context_length": 0}, "--context-length must be 2 to 2\\^63-1, got 0"),
        ({"batch_size": -1}, "--batch-size must be 1 to 2\\^63-1, got -1"),
        ({"context_length": 2**63}, "--context-length must be 2 to"),
        ({"context_length": 2**62}, "more than 2\\^63-1 bytes"),
        ({"offload_activations": True}, "--offload-activations needs --gradient-checkpointing"),
        ({"mlp_tiles": 0}, "--mlp-tiles must be 1 to"),
        ({"model": "qwen3-5b"}, "unknown model 'qwen3-5b': did you mean"),
    ],
)
def test_steps_that_cannot_be(change, message):
    with pytest.raises((OptionError, ConfigError), match=message) as caught:
        traced(replace(Step("tiny"), **change))
    assert "\n" not in str(caught.value)


def test_models_that_will_not_trace(model_file, monkeypatch):
    with pytest.raises(ConfigError, match="cannot be built: Gemma2ForCausalLM does not support"):
        traced(Step(model_file("gemma2"), attention="sdpa"))
    with monkeypatch.context() as patched:
        patched.setattr("logitless.workbench.profile.step.run", lambda *args: torch.zeros(2, 3).view(5))
        with pytest.raises(ConfigError, match=r"cannot be traced: .*shape"):
            traced(Step(model_file("llama"), context_length=16))
    monkeypatch.setattr("logitless.workbench.profile.measure.free_bytes", lambda device: 5)
    with pytest.raises(OptionError, match=r"--real cpu: the step needs .* are free"):
        measure(Step(model_file("llama"), context_length=16), "cpu")


def test_attention_is_eager_where_a_model_has_no_other(model_file):
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "layer_types": ["full_attention"] * 2}
    kinds = {"gpt_oss": experts, "llama": {}, "gemma2": {}}
    made = {kind: build(Step(model_file(kind, **fields))) for kind, fields in kinds.items()}
    attention = {kind: model.config._attn_implementation for kind, model in made.items()}
    assert attention == {"gpt_oss": "eager", "llama": "sdpa", "gemma2": "eager"}


def test_a_window_that_is_none_is_none():
    assert configuration("mistral-7b").sliding_window is None  # transformers' own default is 4096
    assert configuration("gemma-2-2b").sliding_window == 4096


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("loss", LOSSES)
def test_prediction_against_a_gpu(loss, checkpointing):
    step = Step("qwen3-0.6b", context_length=8192, loss=loss, gradient_checkpointing=checkpointing)
    found = measure(step, "cuda")
    assert found.as_json()["measured_peak_bytes"] == pytest.approx(found.predicted.peak.nbytes, rel=0.05)


LONG = """
import json, time
from dataclasses import replace
import torch
from logitless.resident import peak_bytes
from logitless.workbench.profile.step import Step, both, traced
step = Step("4b", context_length=131072, gradient_checkpointing=True)
start, runs = time.process_time(), both(step)
seconds, used = time.process_time() - start, peak_bytes(torch.device("cpu"))
runs["bare"] = traced(replace(step, optimizer="none"))
runs["kept"] = traced(replace(step, gradient_checkpointing=False))
runs["bare and kept"] = traced(replace(step, gradient_checkpointing=False, optimizer="none"))
found = {name: {s.name: [s.nbytes, s.peak] for s in run.stages} for name, run in runs.items()}
print(json.dumps({"seconds": seconds, "bytes": used, "runs": found}))
"""
ENDS, PEAKS = 0, 1
DOCS = Path(__file__).parents[3] / "docs"
FIGURES = [  # page, text, its run, stage and column
    ("where-reports-go-wrong.md", "8.81 GiB", "bare", "after first layer", ENDS),
    ("where-reports-go-wrong.md", "16.56 GiB", "bare", "after first layer", PEAKS),
    ("where-reports-go-wrong.md", "29.59 GiB", "bare and kept", "after first layer", ENDS),
    ("where-reports-go-wrong.md", "34.89 GiB", "bare", "loss", PEAKS),
    ("where-reports-go-wrong.md", "32.56 GiB", "bare", "after full forward", ENDS),
    ("where-reports-go-wrong.md", "56.99 GiB", "bare", "backward", PEAKS),
    ("where-reports-go-wrong.md", "71.98 GiB", "logitless", "backward", PEAKS),
    ("where-reports-go-wrong.md", "270.10 GiB", "dense", "backward", PEAKS),
    ("how-to/profile.md", "779.07 GiB", "kept", "backward", PEAKS),
]


@pytest.mark.slow
def test_a_4b_model_at_131072_tokens():
    """Within its limits of time and memory, and what the pages say of it."""
    done = subprocess.run([sys.executable, "-c", LONG], capture_output=True, text=True, timeout=290, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["bytes"] <= 2 * GIB
    assert found["seconds"] <= 30  # of processor time, both losses together
    runs = found["runs"]
    assert runs["logitless"]["after embedding"][ENDS] - runs["logitless"]["optimizer state"][ENDS] >= 640 * 2**20
    assert f"{runs['bare']['after embedding'][ENDS] / 1e9:.2f} GB" == "8.72 GB"
    for page, text, which, stage, column in FIGURES:
        assert text == f"{runs[which][stage][column] / GIB:.2f} GiB"
        assert text in (DOCS / page).read_text(encoding="utf-8")
    rows = (DOCS / "how-to/profile.md").read_text(encoding="utf-8").replace("*", "")
    for stage in runs["dense"]:
        cells = (f"{n / GIB:.2f}" for which in ("dense", "logitless") for n in runs[which][stage])
        assert f"| {stage} | {' | '.join(cells)} |" in rows


def test_the_trace_runs_real_code_of_the_streamed_loss(model_file):
    """Fake tensors end in the same gradients' shapes and dtypes as real ones."""
    step = Step(model_file("llama"), context_length=32)
    model = build(step)
    with trace(model, batch=(1, 32)) as t:
        run(step, model, t.device)
        made = {name: (p.grad.shape, p.grad.dtype) for name, p in model.named_parameters() if p.grad is not None}
    assert made == {name: (p.shape, p.dtype) for name, p in model.named_parameters()}
