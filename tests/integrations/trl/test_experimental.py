"""CPO, ORPO, GKD and GMPO of trl.experimental: the same training without their logits."""

import os
from functools import partial

import pytest
import torch
from peft import PromptTuningConfig, get_peft_model
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

from logitless.errors import ConfigError, OptionError
from logitless.integrations.trl.pairs import mean_logits
from logitless.integrations.trl.trainers import install, uninstall
from logitless.vocab.head.lm_head import LMHead
from tests.support.allocations import trace_allocations
from tests.support.integrations.tiny import halved
from tests.support.integrations.trl import runs
from tests.support.integrations.trl.runs import assert_same_training

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def quiet(monkeypatch):
    monkeypatch.setitem(os.environ, "TRL_EXPERIMENTAL_SILENCE", "1")


def cpo(place, **changes):
    from trl.experimental.cpo import CPOConfig, CPOTrainer

    args = CPOConfig(**runs.options(place, max_length=32, per_device_train_batch_size=2, **changes))
    return CPOTrainer(runs.micro(place), args=args, **runs.common(place, runs.pairs()))


def orpo(place, **changes):
    from trl.experimental.orpo import ORPOConfig, ORPOTrainer

    args = ORPOConfig(**runs.options(place, max_length=32, per_device_train_batch_size=2, **changes))
    return ORPOTrainer(runs.micro(place), args=args, **runs.common(place, runs.pairs()))


def gkd(place, **changes):
    from trl.experimental.gkd import GKDConfig, GKDTrainer

    talk = [
        {"messages": [{"role": "user", "content": t[:4]}, {"role": "assistant", "content": t[4:]}]} for t in runs.TEXTS
    ]
    args = GKDConfig(**runs.options(place, max_length=32, **{"lmbda": 0.0, "max_new_tokens": 8, **changes}))
    return GKDTrainer(runs.micro(place), teacher_model=runs.teacher(), args=args, **runs.common(place, talk))


def gmpo(place, **changes):
    from trl.experimental.gmpo import GMPOConfig, GMPOTrainer

    sampled = {"num_generations": 4, "max_completion_length": 8, "temperature": 0.8, "beta": 0.1, "epsilon": 0.01}
    args = GMPOConfig(**runs.options(place, **{**sampled, **changes}))
    return GMPOTrainer(str(place), reward_funcs=runs.vowels, args=args, **runs.common(place, runs.prompts()))


def bema(place, **changes):
    """DPO whose reference follows the policy."""
    from trl.experimental.bema_for_ref_model import BEMACallback, DPOTrainer

    trainer = runs.dpo(place, trainer=DPOTrainer, **changes)
    trainer.add_callback(BEMACallback(update_freq=1, update_ref_model=True, ref_model_update_freq=1))
    return trainer


TRAINERS = {
    "cpo": cpo,
    "cpo, simpo": partial(cpo, loss_type="simpo", cpo_alpha=0.5),
    "cpo, no likelihood": partial(cpo, cpo_alpha=0.0),
    "orpo": orpo,
    "gkd": gkd,
    "gkd, forward": partial(gkd, beta=0.0),
    "gkd, on policy": partial(gkd, lmbda=1.0, beta=1.0),
    "gmpo, twice": partial(gmpo, num_iterations=2),
    "bema": bema,
}


@pytest.mark.parametrize("name", ["cpo", "orpo", "gkd", "gmpo, twice"])
def test_the_same_training(place, name):
    assert_same_training(partial(TRAINERS[name], place, max_steps=2))


@pytest.mark.slow
@pytest.mark.parametrize("name", TRAINERS)
def test_the_same_training_with_options(untied, name):
    assert_same_training(partial(TRAINERS[name], untied))


@pytest.mark.parametrize("name", ["cpo", "orpo"])
def test_a_soft_prompt_is_no_token(untied, name, monkeypatch):
    """TRL's own step ends in an error there; the numbers are those of the logits behind the virtual tokens."""

    def soft(place):
        torch.manual_seed(4)
        config = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
        return get_peft_model(AutoModelForCausalLM.from_pretrained(place), config)

    monkeypatch.setattr(runs, "micro", soft)
    trainer = TRAINERS[name](untied)
    install(trainer)
    batch = next(iter(trainer.get_train_dataloader()))
    chosen, rejected, _, _, nll, *_ = trainer.concatenated_forward(trainer.model, batch)
    joined = trainer.concatenated_inputs(batch, padding_value=0, device="cpu")
    ids, labels = joined["concatenated_input_ids"], joined["concatenated_labels"]
    logits = trainer.model(input_ids=ids, attention_mask=joined["concatenated_attention_mask"]).logits[:, 3:-1]
    valid = labels[:, 1:] != -100
    logps = -F.cross_entropy(logits.transpose(1, 2), labels[:, 1:], reduction="none")
    expected = logps.sum(1) / (valid.sum(1) if name == "orpo" else 1)
    torch.testing.assert_close(torch.cat([chosen, rejected]), expected, rtol=1e-5, atol=1e-5)
    nll.backward()
    assert trainer.model.prompt_encoder.default.embedding.weight.grad.any()


@pytest.mark.parametrize("kind", ["CPOTrainer", "ORPOTrainer"])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_the_mean_logit_of_each_half(kind, softcap):
    hidden, head = torch.randn(4, 7, 8, dtype=torch.float64), LMHead(3 * torch.randn(31, 8).double(), softcap=softcap)
    z = hidden @ head.weight.T
    z = z if softcap is None else softcap * torch.tanh(z / softcap)
    z = z[:, :-1] if kind == "ORPOTrainer" else z
    torch.testing.assert_close(mean_logits(kind, head, hidden), z.unflatten(0, (2, 2)).mean((1, 2, 3)))


@pytest.mark.parametrize("name", ["cpo", "orpo", "gkd"])
def test_no_logits(tmp_path, name):
    place = runs.saved_model(tmp_path, vocab_size=4096)
    largest = {}
    for ours in (True, False):
        trainer = TRAINERS[name](place) if name != "gkd" else gkd_of(place)
        if ours:
            install(trainer, memory_budget=1 << 16)
        batch = next(iter(trainer.get_train_dataloader()))

        def step(trainer=trainer, batch=batch):
            loss = trainer.compute_loss(trainer.model, batch)
            loss.backward()

        traced = trace_allocations(step)
        largest[ours] = traced.largest
        if ours:
            assert traced.peak <= 4 * 4096 * 32 * 4  # the default budget's slices are more
    dense = 4096 * 4 * 4 * 8  # a few positions' logits; the head's gradient is 4096 x 32 in fp32
    assert largest[True] <= 4096 * 32 * 4
    assert largest[False] > dense


def test_a_teacher_that_changes_its_logits_in_a_way_of_its_own_is_refused(place):
    trainer = gkd(place)
    halved(trainer.teacher_model)
    install(trainer)
    with pytest.raises(ConfigError, match="Qwen3ForCausalLM changes its logits otherwise than by scale 1"):
        trainer.train()


def gkd_of(place):
    from trl.experimental.gkd import GKDConfig, GKDTrainer

    talk = [
        {"messages": [{"role": "user", "content": t[:4]}, {"role": "assistant", "content": t[4:]}]} for t in runs.TEXTS
    ]
    args = GKDConfig(**runs.options(place, max_length=32, lmbda=0.0))
    return GKDTrainer(runs.micro(place), teacher_model=runs.micro(place), args=args, **runs.common(place, talk))


@pytest.mark.parametrize("name", ["cpo", "orpo"])
def test_ligers_own_forward_is_refused(place, name):
    with pytest.raises(ConfigError, match=r"set liger_kernel_config=\{'fused_linear_cross_entropy': False\}"):
        install(TRAINERS[name](place, use_liger_kernel=True))
    install(TRAINERS[name](place, use_liger_kernel=True, liger_kernel_config={"fused_linear_cross_entropy": False}))
    install(gkd(place, use_liger_kernel=True))  # which leaves it out by itself


class Logits(TorchDispatchMode):
    """Whether both operands of each product that makes logits are numbers of bf16, however they are multiplied."""

    def __init__(self, entries: int) -> None:
        super().__init__()
        self.entries, self.rounded = entries, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket.__name__ == "mm" and args[1].shape[1] == self.entries:
            self.rounded.append(all(torch.equal(x, x.bfloat16().to(x.dtype)) for x in args))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", ["cpo", "orpo", "gkd"])
@pytest.mark.parametrize("prepared", [True, False])
def test_heads_are_multiplied_in_the_trainers_precision(place, name, prepared):
    """Also where accelerate has prepared the model before us."""
    trainer = TRAINERS[name](place, bf16=True, max_steps=1)
    if prepared:
        trainer.train()
    install(trainer)
    if not prepared:
        trainer.train()
    batch = next(iter(trainer.get_train_dataloader()))
    with Logits(trainer.model.config.vocab_size) as made:
        trainer.compute_loss(trainer.model, batch)
    assert len(made.rounded) > 1
    assert all(made.rounded)


def test_uninstall(place):
    trainer = orpo(place)
    before = dict(vars(trainer)), dict(vars(trainer.model))
    install(trainer)
    assert "concatenated_forward" in vars(trainer)
    uninstall(trainer)
    assert (dict(vars(trainer)), dict(vars(trainer.model))) == before


@pytest.mark.parametrize("asked", [{"top_k": 3}, {"statistics": ("logsumexp",)}], ids=str)
def test_there_is_no_output_to_add_to(place, asked):
    with pytest.raises(OptionError, match="ORPOTrainer has no fused output to add them to"):
        install(orpo(place), **asked)


def test_gkd_divides_by_the_items_that_it_is_given(place):
    trainer = gkd(place)
    install(trainer)
    batch = next(iter(trainer.get_train_dataloader()))
    mean, sixteenth = (trainer.compute_loss(trainer.model, batch, num_items_in_batch=n) for n in (None, 16))
    torch.testing.assert_close(sixteenth * 16, mean * (batch["labels"][:, 1:] != -100).sum())


def test_gkds_teacher_drops_nothing_out_and_keeps_no_graph(place):
    trainer = gkd(place)
    install(trainer)
    trainer.teacher_model.train()
    graphs = []
    trainer.teacher_model.register_forward_pre_hook(lambda *_: graphs.append(torch.is_grad_enabled()))
    trainer.compute_loss(trainer.model, next(iter(trainer.get_train_dataloader())))
    assert not trainer.teacher_model.training
    assert graphs == [False]


def test_asked_for_outputs_gkd_builds_them(place):
    trainer = gkd(place)
    install(trainer)
    batch = next(iter(trainer.get_train_dataloader()))
    loss, outputs = trainer.compute_loss(trainer.model, batch, return_outputs=True)
    torch.testing.assert_close(loss, trainer.compute_loss(trainer.model, batch), rtol=1e-4, atol=1e-6)
    assert outputs.logits is not None


def test_what_changes_grpos_loss_is_refused_where_gmpos_is_another(place):
    with pytest.raises(ConfigError, match=r"GMPOTrainer has a loss of its own .* replace; leave exact_kl out"):
        install(gmpo(place), exact_kl=True)
    with pytest.raises(OptionError, match="got GMPOTrainer, whose loss is another; leave corrected out"):
        install(gmpo(place), replay=True, corrected=True)
