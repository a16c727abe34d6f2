"""Install, install again, uninstall; what is refused leaves the trainer as it was."""

import copy
import importlib
import inspect
import os
import re
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
import trl
from transformers import AutoModelForCausalLM, Trainer

import logitless as ll
from logitless.errors import ConfigError, OptionError
from logitless.integrations.trl import contract, install, uninstall
from logitless.integrations.trl.forward import TokenOutput
from tests.support.allocations import trace_allocations
from tests.support.integrations.trl import runs


def state_of(trainer):
    reference = getattr(trainer, "ref_model", None)
    return [dict(vars(x)) for x in (trainer, trainer.model, reference) if x is not None]


def fused(trainer):
    ids = torch.arange(3, 15)[None]
    return trainer.model(input_ids=ids, labels=ids, fused_lm_head=True)


@pytest.fixture
def trainer(place):
    return runs.sft(place)


@pytest.mark.parametrize("make", [runs.sft, runs.dpo, runs.distillation])
def test_uninstall_gives_everything_back(place, make):
    trainer = make(place)
    before = state_of(trainer)
    install(trainer)
    assert state_of(trainer) != before
    uninstall(trainer)
    assert state_of(trainer) == before
    uninstall(trainer)


def test_installing_again_changes_the_options(trainer):
    install(trainer)
    assert fused(trainer).top_k_ids is None
    install(trainer, top_k=2, statistics=("self_certainty",))
    out = fused(trainer)
    assert out.top_k_ids.shape == (1, 11, 2)
    assert out.self_certainty.shape == (1, 11)
    with pytest.raises(OptionError):
        install(trainer, top_k=10**6)
    assert fused(trainer).top_k_ids is not None
    install(trainer, statistics="logsumexp")
    assert fused(trainer).logsumexp is not None
    uninstall(trainer)
    assert not isinstance(fused(trainer), TokenOutput)


def test_a_copy_computes_with_its_own_weights(trainer):
    install(trainer)
    copied, ids = copy.deepcopy(trainer.model), torch.arange(3, 15)[None]
    with torch.no_grad():
        copied.model.layers[0].mlp.up_proj.weight.mul_(3)
    own = type(copied).forward(copied, input_ids=ids, labels=ids)
    loss = copied(input_ids=ids, labels=ids, fused_lm_head=True).loss
    torch.testing.assert_close(loss, own.loss)
    torch.testing.assert_close(copied(input_ids=ids).logits, own.logits)
    assert abs(loss - fused(trainer).loss) > 1e-3


def test_what_wraps_the_forward_later_stays(trainer):
    """accelerate's autocast comes around whatever forward it finds."""
    install(trainer)
    ours = trainer.model.forward
    trainer.model.forward = wrapped = lambda *args, **kwargs: ours(*args, **kwargs)
    uninstall(trainer)
    assert trainer.model.forward is wrapped
    assert not isinstance(fused(trainer), TokenOutput)


def test_a_refused_second_install_leaves_what_wraps_the_forward(trainer):
    install(trainer)
    ours = trainer.model.forward
    trainer.model.forward = wrapped = lambda *args, **kwargs: ours(*args, **kwargs)
    with pytest.raises(OptionError):
        install(trainer, top_k=10**6)
    assert trainer.model.forward is wrapped
    assert isinstance(fused(trainer), TokenOutput)


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"statistics": ("kl",)}, OptionError, "logsumexp, self_certainty"),
        ({"top_k": -1}, OptionError, "top_k"),
        ({"top_k": 10**6}, OptionError, "vocabulary"),
        ({"memory_budget": 0}, OptionError, "memory_budget"),
        ({"exact_kl": True}, OptionError, "GRPO"),
    ],
)
def test_refused_options_change_nothing(trainer, options, error, says):
    before = state_of(trainer)
    with pytest.raises(error, match=says) as caught:
        install(trainer, **options)
    assert "\n" not in str(caught.value)
    assert state_of(trainer) == before


@pytest.mark.parametrize(
    ("make", "options", "only_logprob", "equal_weights"),
    [
        (runs.sft, {}, True, True),
        (runs.sft, {"loss_type": "dft"}, True, False),
        (runs.dpo, {}, True, False),
        (runs.grpo, {}, True, False),
        (runs.grpo, {"entropy_coef": 0.1}, False, False),
    ],
)
def test_each_trainer_gets_the_lowest_price_that_its_loss_allows(place, make, options, only_logprob, equal_weights):
    trainer = make(place, **options)
    install(trainer, memory_budget=1 << 20)
    wanted = [change.fused.wanted for change in vars(trainer)["_logitless"].changes if change.fused]
    assert (wanted[0].only_logprob, wanted[0].equal_weights) == (only_logprob, equal_weights)
    assert all(x.memory_budget == 1 << 20 for x in wanted)
    assert [x.statistics for x in wanted[1:]] == [("logprob",)] * len(wanted[1:])


def test_another_trainer(place, tmp_path):
    from transformers import TrainingArguments

    args = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to=[])
    other = Trainer(AutoModelForCausalLM.from_pretrained(place), args)
    with pytest.raises(ConfigError, match=r"SFTTrainer.*got Trainer"):
        install(other)
    for wrong in (other.model, None):
        with pytest.raises(ConfigError, match=f"got {type(wrong).__name__}"):
            install(wrong)


def every_trainer():
    """All of TRL's trainers, by name."""
    files = Path(trl.__file__).parent.rglob("*_trainer.py")
    places = (".".join(("trl", *file.relative_to(Path(trl.__file__).parent).with_suffix("").parts)) for file in files)
    found = (x for place in places for x in vars(importlib.import_module(place)).items())
    public = ((name, x) for name, x in found if name.endswith("Trainer") and not name.startswith("_"))
    return {name: x for name, x in public if x.__module__.startswith("trl.")}


def test_each_of_trls_trainers_is_taken_or_refused_and_the_page_says_which(monkeypatch):
    """GOLD's and server distillation's derive from trainers of which nothing else would be left to replace."""
    monkeypatch.setitem(os.environ, "TRL_EXPERIMENTAL_SILENCE", "1")
    kinds, refused = {}, {}
    for name, trainer in every_trainer().items():
        try:
            kinds[name] = contract.kind_of(object.__new__(trainer))
        except ConfigError as error:
            refused[name] = str(error)
    assert kinds == {name: name for name in contract.LOSS} | {"GMPOTrainer": "GRPOTrainer"}
    assert all(said.endswith(f", got {name}") for name, said in refused.items())
    page = (Path(__file__).parents[3] / "docs/how-to/trl.md").read_text(encoding="utf-8")
    assert {*refused} == {*re.findall(r"`(\w+Trainer)`", page.split("are taken but for these:")[1])}


@pytest.mark.parametrize("name", ["_compute_loss", "compute_loss"])
def test_a_loss_of_ones_own_is_seen_in_the_class_and_in_the_trainer(name):
    from trl import GRPOTrainer

    trainer, own = (object.__new__(c) for c in (GRPOTrainer, type("Own", (GRPOTrainer,), {name: lambda self: None})))
    assert contract.only_own_loss(trainer, "GRPOTrainer")
    assert not contract.only_own_loss(own, "GRPOTrainer")
    setattr(trainer, name, lambda: None)
    assert not contract.only_own_loss(trainer, "GRPOTrainer")


def test_a_step_whose_first_parameters_are_others_is_refused(monkeypatch):
    monkeypatch.setitem(contract.FIRST, "_generate_single_turn", ("self", "ids"))
    said = r"GRPOTrainer._generate_single_turn begins with \(self, prompt_ids\), expected \(self, ids\); install 'trl"
    with pytest.raises(ConfigError, match=said):
        contract.require("GRPOTrainer", replay=True)


def test_rollouts_that_begin_with_other_parameters_are_refused(monkeypatch):
    monkeypatch.setitem(contract.FIRST, "_generate_and_score_completions", ("self", "prompts"))
    contract.require("GRPOTrainer")
    with pytest.raises(ConfigError, match=r"_completions begins with \(self, inputs\), expected \(self, prompts\)"):
        contract.require("GRPOTrainer", exact_kl=True)


def test_a_model_without_an_output_head(trainer):
    before = state_of(trainer)
    trainer.model.get_output_embeddings = lambda: None
    with pytest.raises(ConfigError, match="no output head"):
        install(trainer)
    del trainer.model.get_output_embeddings
    assert state_of(trainer) == before


def test_completions_longer_than_the_context(place):
    with pytest.raises(ConfigError, match="context of 64 tokens, got 65"):
        install(runs.grpo(place, max_completion_length=65))


def test_labels_and_hidden_states_of_different_lengths(trainer):
    from logitless.errors import ShapeError

    install(trainer)
    ids = torch.arange(3, 15)[None]
    with pytest.raises(ShapeError, match="labels"):
        trainer.model(input_ids=ids, labels=ids[:, :-2], fused_lm_head=True)


def test_subclass_with_a_loss_of_its_own_gets_every_gradient(place):
    from trl import SFTTrainer

    class Entropic(SFTTrainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            return -model(**inputs, fused_lm_head=True).entropy.sum()

    args = runs.sft(place).args
    losses = []
    for ours in (True, False):
        rows = runs.common(place, [{"text": text} for text in runs.TEXTS])
        trainer = Entropic(str(place), args, **rows)
        if ours:
            install(trainer)
        batch = next(iter(trainer.get_train_dataloader()))
        trainer.compute_loss(trainer.model, batch).backward()
        losses.append({name: p.grad for name, p in trainer.model.named_parameters()})
    for name, exact in losses[1].items():
        torch.testing.assert_close(losses[0][name], exact, rtol=1e-3, atol=1e-5 * exact.abs().max().item())


def test_a_subclass_that_adds_to_the_loss_gets_every_gradient(untied):
    """Of a frozen head too, where TRL's own loss needs that of the log-probs alone."""
    from trl import DPOTrainer

    class Entropic(DPOTrainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            given = {name: inputs[name] for name in ("input_ids", "attention_mask")}
            labels = inputs["input_ids"].masked_fill(inputs["completion_mask"] == 0, -100)
            bonus = model(**given, labels=labels, fused_lm_head=True).entropy.mean()
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch) - bonus

    args, found = runs.dpo(untied).args, []
    for ours in (True, False):
        trainer = Entropic(str(untied), args=args, **runs.common(untied, runs.pairs()))
        trainer.model.lm_head.requires_grad_(False)
        if ours:
            install(trainer)
        batch = next(iter(trainer.get_train_dataloader()))
        trainer.compute_loss(trainer.model, batch).backward()
        found.append({name: p.grad for name, p in trainer.model.named_parameters() if p.grad is not None})
    assert found[0].keys() == found[1].keys() != set()
    for name, exact in found[1].items():
        torch.testing.assert_close(found[0][name], exact, rtol=1e-3, atol=2e-4 * exact.abs().max().item())


# --- the contract -------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", contract.PARAMETERS)
def test_trl_has_what_is_relied_on(name):
    assert contract.moved(name) == ""


def test_trl_says_what_is_relied_on():
    assert contract.moved_fields() == ""
    assert contract.moved_k3() == ""
    assert version("trl").startswith("1.16.")


@pytest.mark.parametrize("kind", contract.FUSED_TRAINERS)
def test_what_has_moved_is_named(kind, monkeypatch):
    monkeypatch.setitem(contract.PARAMETERS, contract.FUSED, ("model", "tau"))
    monkeypatch.setattr(contract, "FIELDS", (*contract.FIELDS, "perplexity"))
    monkeypatch.setattr(contract, "USE_ADAPTER", "trl.trainer.utils:no_such_name")
    with pytest.raises(ConfigError) as caught:
        contract.require(kind, exact_kl=True)
    text = str(caught.value)
    assert "add_fused_lm_head takes (model, temperature, cast_lm_head_to_fp32, outputs), expected (model, tau)" in text
    assert "FusedCausalLMOutput has" in text
    assert "trl.trainer.utils:no_such_name is gone" in text
    assert text.startswith(f"trl {version('trl')}: ")
    assert "\n" not in text


def test_a_sampled_kl_of_another_form_is_named(monkeypatch):
    monkeypatch.setattr(contract, "K3", ("(ref_per_token_logps - per_token_logps) ** 2 / 2",))
    assert "_compute_loss no longer says '(ref" in contract.moved_k3()
    contract.require("GRPOTrainer")
    with pytest.raises(ConfigError, match="no longer says"):
        contract.require("GRPOTrainer", exact_kl=True)


@pytest.mark.parametrize(
    ("name", "moved", "options"),
    [
        ("OUTPUT", "trl.trainer.utils:no_such_name", {}),
        ("K3", ("gone",), {"exact_kl": True}),
        ("FIRST", dict.fromkeys(contract.FIRST, ("self",) * 9), {"replay": True}),
    ],
)
def test_install_refuses_what_has_moved(place, monkeypatch, name, moved, options):
    trainer = runs.grpo(place)
    monkeypatch.setattr(contract, name, moved)
    with pytest.raises(ConfigError, match=f"^trl {version('trl')}: .*; install 'trl>="):
        install(trainer, **options)


def test_a_distillation_of_ones_own_is_not_replaced(place):
    trainer = runs.distillation(place)
    trainer._compute_loss = lambda *_: None
    with pytest.raises(ConfigError, match="DistillationTrainer has a loss of its own"):
        install(trainer)


def test_a_forward_that_is_not_trls(trainer):
    del trainer.model.forward
    before = state_of(trainer)
    with pytest.raises(ConfigError, match="add_fused_lm_head"):
        install(trainer)
    assert state_of(trainer) == before


def test_a_forward_under_the_other_install(trainer):
    ll.install(trainer.model)
    before = state_of(trainer)
    with pytest.raises(ConfigError, match=r"call logitless.uninstall\(trainer.model\) before this install$"):
        install(trainer)
    assert state_of(trainer) == before
    ll.uninstall(trainer.model)
    install(trainer)


def test_the_signature_stays(trainer):
    before = inspect.signature(trainer.model.forward)
    install(trainer)
    assert inspect.signature(trainer.model.forward) == before


# --- memory -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sft", "dpo", "kto", "grpo", "rloo", "distillation"])
def test_a_step_needs_no_more_memory_than_trls(tmp_path, name):
    place = runs.saved_model(tmp_path / "wide", vocab_size=8192)
    peaks = {}
    for ours in (True, False):
        trainer = wide(place) if name == "distillation" else getattr(runs, name)(place, max_steps=1)
        if ours:
            install(trainer, memory_budget=1 << 20)
        peaks[ours] = trace_allocations(trainer.train).peak
    assert peaks[True] <= peaks[False]


def wide(place):
    from trl import DistillationConfig, DistillationTrainer

    args = DistillationConfig(**runs.options(place, max_completion_length=8, max_steps=1))
    teacher = AutoModelForCausalLM.from_pretrained(place)
    rows = runs.common(place, runs.prompts())
    return DistillationTrainer(str(place), teacher_model=teacher, args=args, **rows)
