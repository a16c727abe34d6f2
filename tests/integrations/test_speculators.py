"""speculators' draft models without logits against themselves; `make test-speculators` brings it."""

import importlib
import logging
import runpy
import sys
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader
from transformers import LlamaConfig, Qwen3Config

pytest.importorskip("speculators", reason="speculators is not installed here: make test-speculators")

from speculators.config import SpeculatorsConfig, VerifierConfig
from speculators.losses import eager, resolve_loss_config
from speculators.models.dflash.config import DFlashSpeculatorConfig
from speculators.models.dflash.core import DFlashDraftModel
from speculators.models.eagle3.config import Eagle3SpeculatorConfig
from speculators.models.eagle3.core import Eagle3DraftModel
from speculators.models.peagle.config import PEagleSpeculatorConfig
from speculators.models.peagle.core import PEagleDraftModel
from speculators.proposals.greedy import GreedyTokenProposalConfig
from speculators.train import trainer as training

from logitless.errors import ConfigError
from logitless.integrations import speculators as ours
from tests.support.allocations import trace_allocations
from tests.support.integrations.launching import ROOT

T, H, V = 48, 32, 1500
SHAPE = {
    "vocab_size": V,
    "hidden_size": H,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "attn_implementation": "eager",
}
EAGLE, DFLASH = {"eagle_aux_hidden_state_layer_ids": [0, 1]}, {"aux_hidden_state_layer_ids": [0, 1], "block_size": 4}
KINDS = {
    "eagle3": (Eagle3DraftModel, Eagle3SpeculatorConfig, LlamaConfig, EAGLE),
    "peagle": (PEagleDraftModel, PEagleSpeculatorConfig, LlamaConfig, EAGLE),
    "dflash": (DFlashDraftModel, DFlashSpeculatorConfig, Qwen3Config, DFLASH),
}
CALLS = {"eagle3": {"ttt_steps": 2, "ttt_step_loss_decay": 0.8}, "peagle": {}, "dflash": {"max_anchors": 8}}


def build(kind: str) -> nn.Module:
    model, config, layers, more = KINDS[kind]
    torch.manual_seed(0)
    proposals = {
        "proposal_methods": [GreedyTokenProposalConfig(speculative_tokens=3)],
        "default_proposal_method": "greedy",
    }
    verifier = VerifierConfig(name_or_path=None, architectures=[])
    if kind != "eagle3":
        more = {**more, "mask_token_id": 1}
    made = model(
        config(
            transformer_layer_config=layers(**SHAPE),
            draft_vocab_size=V,
            speculators_config=SpeculatorsConfig(algorithm=kind, verifier=verifier, **proposals),
            **more,
        )
    )
    for name in ("embed_tokens", "lm_head", "verifier_lm_head"):
        nn.init.normal_(getattr(made, name).weight, std=0.5)
    return made


def batch() -> dict:
    torch.manual_seed(1)
    return {
        "hidden_states": torch.randn(1, T, 2 * H),
        "input_ids": torch.randint(V, (1, T)),
        "document_ids": torch.zeros(1, T, dtype=torch.long),
        "loss_mask": torch.ones(1, T, dtype=torch.bool),
        "verifier_last_hidden_states": torch.randn(1, T, H),
    }


def step(kind: str, model: nn.Module, losses: str):
    """(loss, metrics, gradients) of a training step."""
    torch.manual_seed(2)  # anchors are drawn
    config = resolve_loss_config(losses, "eager")
    _, loss, metrics = model(**batch(), loss_config=config, **CALLS[kind])
    model.zero_grad()
    loss.backward()
    return loss, metrics, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


LOSSES = ["kl_div", "rkl", "jsd", "ce", "tv", "nla", "lk_hybrid", '{"ce": 0.3, "kl_div": 0.7}']


@pytest.mark.parametrize("losses", LOSSES)
@pytest.mark.parametrize("kind", KINDS)
def test_losses_metrics_and_gradients_are_its_own(kind, losses):
    model = build(kind)
    loss, metrics, gradients = step(kind, model, losses)
    ours.install(model)
    found, metrics_found, gradients_found = step(kind, model, losses)
    torch.testing.assert_close(found, loss, rtol=1e-4, atol=1e-6)
    assert metrics_found.keys() == metrics.keys()
    for name, value in metrics.items():
        torch.testing.assert_close(metrics_found[name], value, rtol=1e-4, atol=1e-6, msg=name)
    assert gradients
    assert gradients_found.keys() == gradients.keys()
    for name, value in gradients.items():
        torch.testing.assert_close(gradients_found[name], value, rtol=1e-3, atol=1e-6, msg=name)
    ours.uninstall(model)
    assert step(kind, model, losses)[0].item() == loss.item()


def test_memory():
    """Without logits of the draft or the verifier: nothing of the size T · V."""
    model = build("eagle3")
    want = trace_allocations(lambda: step("eagle3", model, "kl_div"))
    ours.install(model, memory_budget=2**14)
    found = trace_allocations(lambda: step("eagle3", model, "kl_div"))
    assert want.largest >= T * V * 4 > 4 * found.largest


class Steps(logging.Handler):
    """What speculators' trainer logs of its steps."""

    def __init__(self):
        super().__init__()
        self.losses = []

    def emit(self, record):
        if isinstance(record.msg, dict) and "train" in record.msg:
            self.losses.append(record.msg["train"]["loss"])


@pytest.mark.filterwarnings("ignore::tqdm.TqdmExperimentalWarning")
@pytest.mark.filterwarnings("ignore:In CPU autocast:UserWarning")  # which fp32 turns off
@pytest.mark.parametrize(("dtype", "near"), [(torch.float32, 1e-4), (torch.bfloat16, 1e-2)], ids=["fp32", "bf16"])
@pytest.mark.parametrize("kind", KINDS)
def test_its_trainer(kind, dtype, near, monkeypatch, tmp_path):
    """Three steps on a processor, which speculators' trainer does not know: its questions are answered for it."""
    cpu = {False: torch.device("cpu"), True: None}  # what the optimizer asks is answered as it is
    monkeypatch.setattr(training, "get_local_rank", lambda: cpu[False])
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: cpu[check_available])
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: None)
    monkeypatch.setattr(torch.accelerator, "memory_allocated", lambda: 0)
    logger, seen = logging.getLogger("speculators.metrics"), []
    for install in (lambda model: None, ours.install):
        model, steps = build(kind), Steps()
        install(model)
        logger.addHandler(steps)
        logger.setLevel(logging.INFO)
        options = {**CALLS[kind], "loss_config": resolve_loss_config("kl_div", "eager")}
        config = training.TrainerConfig(
            1e-2, 1, str(tmp_path / str(len(seen))), train_call_kwargs=options, hidden_states_dtype=dtype
        )
        data = DataLoader([{**batch(), "error_records": 0} for _ in range(3)], batch_size=None)
        trainer = training.Trainer(model, config, data)
        torch.manual_seed(3)
        trainer.train_epoch(0)
        logger.removeHandler(steps)
        seen.append(steps.losses)
    assert len(seen[0]) == 3
    assert seen[0][2] < seen[0][0]
    assert seen[1] == pytest.approx(seen[0], rel=near)


def test_the_example(monkeypatch):
    """With its losses and with ours the same ones come of it."""
    found = []
    for options in ([], ["--dense"]):
        monkeypatch.setattr(sys, "argv", ["speculators_tiny.py", *options])
        found.append(runpy.run_path(str(ROOT / "examples" / "speculators_tiny.py"), run_name="__main__")["losses"])
    assert found[0][-1] < found[0][0]
    assert found[0] == pytest.approx(found[1], rel=1e-3)


def test_refusals():
    model = build("eagle3")
    ours.install(model)
    with pytest.raises(ConfigError, match="loss_config: expected kl_div, rkl, jsd, ce, tv, nla, lk_hybrid, got mse"):
        model(**batch(), loss_config={"mse": (nn.functional.mse_loss, 1.0)}, **CALLS["eagle3"])
    sharper = partial(eager.lk_hybrid_loss, eta=1.0)
    with pytest.raises(ConfigError, match="loss_config: lk_hybrid: expected speculators' own function, got functools"):
        model(**batch(), loss_config={"lk_hybrid": (sharper, 1.0)}, **CALLS["eagle3"])
    fused = resolve_loss_config("lk_hybrid", "fused")
    assert model(**batch(), loss_config=fused, **CALLS["eagle3"])[1].isfinite()
    with pytest.raises(ConfigError, match=r"expected speculators' Eagle3DraftModel.*got Linear"):
        ours.install(nn.Linear(2, 2))


def test_what_would_be_of_hidden_states_is_refused():
    model = build("eagle3")
    ours.install(model)
    x = model.lm_head(torch.randn(1, 3, H))
    assert x.shape == (1, 3, V)
    every = torch.ones(1, 3, dtype=torch.bool)
    assert x[:, 1:].shape == torch.roll(x, 1, dims=1)[:, :2].shape == x[:, torch.tensor([2, 0]), :].shape == (1, 2, V)
    assert x[0].shape == x[every].shape == x[every, :].shape == (3, V)
    square = model.lm_head(torch.randn(1, H, H))
    for name, call in (
        ("softmax", lambda: x.softmax(-1)),
        ("argmax", lambda: torch.argmax(x, dim=-1, keepdim=True)),
        ("argmax", lambda: x.argmax()),
        ("__getitem__", lambda: x[..., :3]),
        ("__getitem__", lambda: x[..., : H + 1]),
        ("__getitem__", lambda: x[:, :, -H - 1 :]),
        ("__getitem__", lambda: x[every, : H + 1]),
        ("__getitem__", lambda: square[:, :, 0]),
        ("roll", lambda: torch.roll(x, 1, dims=-1)),
        ("roll", lambda: torch.roll(x[0], 1, dims=1)),
        ("roll", lambda: torch.roll(x, 1)),
    ):
        with pytest.raises(ConfigError, match=rf"its model asks {name} of logits, expected tokens'"):
            call()


def test_another_speculators_is_an_error_that_names_versions(monkeypatch):
    core = importlib.import_module("speculators.models.eagle3.metrics")
    monkeypatch.setattr(core, "compute_metrics", lambda logits, targets: None)
    with pytest.raises(ConfigError, match=r"speculators 0\.9\S*: compute_metrics takes \(logits, targets\), expected"):
        ours.install(build("eagle3"))
