"""verl's engines and fine-tuning with our engine and with its own; `make test-verl` brings it."""

import importlib
import json
import os
import subprocess
import sys
import warnings

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # verl's own, of the engines that are not installed
    pytest.importorskip("verl", reason="verl is not installed here: make test-verl", exc_type=ImportError)
    from verl.workers.engine import FSDPEngineWithLMHead

from logitless.errors import ConfigError
from tests.support.integrations.launching import torchrun

TOKENS, V = 40 + 90 + 3 + 130, 4000  # of the larger micro-batch


def test_another_verl_is_an_error_that_names_versions(monkeypatch):
    monkeypatch.setattr(FSDPEngineWithLMHead, "forward_step", lambda self, micro_batch: None)
    with pytest.raises(ConfigError, match=r"verl 0\.9\.1: .*forward_step takes \(self, micro_batch\), expected"):
        importlib.import_module("logitless.integrations.verl")


LOOKED_UP = """
from verl.workers.engine import EngineRegistry
import logitless.integrations.verl
print(EngineRegistry.get_engine_cls("language_model", "fsdp2").__name__)
"""


@pytest.mark.parametrize("name", ["VERL_ENGINE_DEVICE", "VERL_ENGINE_VENDOR"])
def test_the_engine_is_found_where_verl_is_told_of_other_hardware(name):
    """verl looks it up by these; it would take its own, which it registers for a device alone."""
    environment = {**os.environ, name: "npu"}
    done = subprocess.run([sys.executable, "-c", LOOKED_UP], env=environment, capture_output=True, text=True)
    assert done.stdout.split()[-1:] == ["StreamedEngine"], done.stderr[-2000:]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    place = tmp_path_factory.mktemp("verl")
    torchrun("tests.support.integrations.verl_ranks", str(place), at=place)
    return json.loads((place / "results.json").read_text())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fsdp2", "fsdp", "padded", "lora", "distilled"])
def test_numbers_are_verls_own(results, name):
    """Log-probs, entropies and sums of squared probabilities at a temperature for each sample, the loss and the
    gradient norm of a step, and the numbers after it."""
    got, want = results[f"{name}, StreamedEngine"], results[f"{name}, FSDPEngineWithLMHead"]
    assert got["class"] == "StreamedEngine"
    assert got["numbers"].keys() == want["numbers"].keys()
    assert len(got["numbers"]) >= (7 if name == "distilled" else 8)
    for key, numbers in got["numbers"].items():
        assert numbers == pytest.approx(want["numbers"][key], rel=5e-5, abs=1e-8), key


@pytest.mark.slow
def test_verls_own_precision(results):
    """bf16 under autocast, as verl has it unless told otherwise: as near as its own logits are rounded."""
    got, want = (results[f"bf16, {kind}"]["numbers"] for kind in ("StreamedEngine", "FSDPEngineWithLMHead"))
    for key, off in {"loss": 0.01, "norm": 0.03, "log_probs": 0.1, "entropy": 0.1, "sum_pi_squared": 3e-4}.items():
        assert got[key] == pytest.approx(want[key], abs=off), key


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fsdp2", "fsdp", "padded", "lora", "bf16", "distilled"])
def test_memory(results, name):
    """No tensor of a step is as large as the logits, which verl holds."""
    logits = TOKENS * V * (2 if name == "bf16" else 4)
    assert results[f"{name}, FSDPEngineWithLMHead"]["largest"] >= logits
    assert results[f"{name}, StreamedEngine"]["largest"] < logits / 2


@pytest.mark.slow
def test_fine_tuning_is_verls_own(results):
    """The command of the example, with a validation: losses and gradient norms of three steps; no logits."""
    got, want = results["streamed run"], results["dense run"]
    assert got.pop("logits") == 0 < want.pop("logits")
    assert [len(numbers) for numbers in got.values()] == [3, 3, 1]
    for key, numbers in got.items():
        assert numbers == pytest.approx(want[key], rel=1e-4), key


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "kind"), [("forward", "forward"), ("reverse", "reverse"), ("jsd", "jsd"), ("fine-tuning", "forward")]
)
def test_divergences_from_a_teacher_over_the_whole_vocabulary(results, name, kind):
    """Of each token at its sample's temperature, their mean, which is the loss, and its gradient, against float64."""
    got, want = results[f"{name}, taught"]["numbers"], results[f"{kind}, float64"]
    assert got["distillation_losses"] == pytest.approx(want["distillation_losses"], rel=2e-5)
    assert sum(got["loss"]) == pytest.approx(want["loss"], rel=2e-5)
    assert got["norm"] == pytest.approx([want["norm"]], rel=2e-5)


@pytest.mark.slow
def test_a_share_of_a_teacher_in_the_policys_loss(results):
    got, own = (results[name]["numbers"] for name in ("half, taught", "fsdp2, FSDPEngineWithLMHead"))
    want = 0.25 * results["forward, float64"]["loss"] + 0.75 * sum(own["loss"])
    assert sum(got["loss"]) == pytest.approx(want, rel=5e-5)
    assert got["log_probs"] == pytest.approx(own["log_probs"], rel=5e-5)


@pytest.mark.slow
def test_a_teacher_in_verls_own_precision(results):
    got, want = results["in bf16, taught"]["numbers"], results["reverse, float64"]
    assert sum(got["loss"]) == pytest.approx(want["loss"], rel=0.01)
    assert got["norm"] == pytest.approx([want["norm"]], rel=0.03)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["forward", "reverse", "jsd", "fine-tuning", "half", "in bf16"])
def test_memory_with_a_teacher(results, name):
    """No tensor of a step is as large as the logits of either model."""
    assert results[f"{name}, taught"]["largest"] < TOKENS * V * (2 if name == "in bf16" else 4) / 2


@pytest.mark.slow
def test_fine_tuning_with_a_teacher(results):
    """The command, whose teacher is the student as it begins: at the first step only the text's share is left."""
    got, want = results["taught run"], results["dense run"]
    assert got["logits"] == 0
    assert [len(got[name]) for name in ("loss", "norm", "validation")] == [3, 3, 1]
    for name in ("loss", "norm"):
        assert got[name][0] == pytest.approx(0.75 * want[name][0], rel=1e-4)


@pytest.mark.slow
def test_a_micro_batch_is_brought_to_the_device(results):
    assert results["from elsewhere"] == 40 + 90 + 3 + 130


@pytest.mark.slow
def test_refusals(results):
    assert "distill_loss: expected one of forward, reverse, jsd, got backward" in results["distill_loss"]
    assert "distill_weight: expected above 0, at most 1, got 2" in results["distill_weight"]
    assert "Qwen3ForCausalLM changes its logits otherwise than by scale 1" in results["scaled"]
    assert "expected a teacher with the student's tokenizer" in results["teacher"]
    assert "expected a vocabulary of at least the student's 4000 entries, got 3904" in results["narrow"]
    assert "distill_weight, impl_backend, got distil_loss" in results["misspelt"]
    assert "expected no distillation.enabled" in results["both"]
    assert "expected use_fused_kernels=False" in results["fused"]
    assert "expected strategy fsdp or fsdp2" in results["megatron"]
    assert "leave distillation_loss.use_chunked_topk out" in results["chunked"]
