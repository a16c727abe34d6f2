"""Replayed sampling: what GRPO and RLOO drew from is what they score, against dense masked rows."""

import math
from functools import partial

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM
from transformers.generation.logits_process import MinPLogitsWarper, TopPLogitsWarper

from logitless.errors import ConfigError, OptionError
from logitless.integrations.trl import replay
from logitless.integrations.trl.trainers import install, uninstall
from logitless.sample import sample_tokens
from logitless.vocab.head.lm_head import LMHead
from tests.support.integrations.trl import runs
from tests.support.sample.dense import vllm_kept

TOP_P = 0.6


@pytest.fixture
def trainer(place):
    trainer = runs.grpo(place, beta=0.0, loss_type="dapo", top_p=TOP_P)
    trainer.current_gradient_accumulation_steps = 1
    return trainer


def rollouts(trainer):
    torch.manual_seed(5)
    trainer.model.train()
    return trainer._prepare_inputs(next(iter(trainer.get_train_dataloader())))


def dense(trainer, batch):
    """Log-softmax of every completion token's row: whole, and over what top-p keeps of it."""
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)
    mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1)
    width = batch["completion_ids"].shape[1]
    z = trainer.model(ids, attention_mask=mask).logits[:, -width - 1 : -1] / trainer.temperature
    kept = TopPLogitsWarper(TOP_P)(None, z.detach().flatten(0, 1)).view_as(z) > -torch.inf
    return z.log_softmax(-1), z.masked_fill(~kept, -torch.inf).log_softmax(-1)


def chosen(rows, batch):
    return rows.gather(-1, batch["completion_ids"][..., None])[..., 0]


def test_on_policy_the_ratio_to_the_sampler_is_one(trainer):
    """Of TRL's own log-probs, over whole rows, it is the mass that was kept."""
    install(trainer, replay=True)
    batch = rollouts(trainer)
    valid = batch["completion_mask"].bool()
    whole, over = (chosen(rows, batch)[valid] for rows in dense(trainer, batch))
    sampled = batch["sampling_per_token_logps"][valid]
    torch.testing.assert_close(sampled, over, rtol=0, atol=2e-6)
    assert (whole - sampled).exp().max() < 0.99
    trainer._compute_loss(trainer.model, batch)
    metrics = trainer._metrics["train"]
    assert abs(metrics["sampling/k1"][-1]) < 1e-6
    assert 0 <= metrics["sampling/k3"][-1] < 1e-6
    (scored,) = trainer._compute_loss.__self__.scored
    torch.testing.assert_close((scored[:, -valid.shape[1] :][valid] - sampled).exp(), torch.ones(int(valid.sum())))


def test_vllms_order_of_sampling(place):
    trainer = runs.grpo(place, beta=0.0, top_p=TOP_P, min_p=0.3)
    install(trainer, replay=True, order="vllm")
    batch = rollouts(trainer)
    valid = batch["completion_mask"].bool()
    z = dense(trainer, batch)[0].detach()
    over = vllm_kept(z.flatten(0, 1).double(), 0, TOP_P, 0.3).log_softmax(-1).view_as(z)
    sampled = batch["sampling_per_token_logps"][valid]
    torch.testing.assert_close(sampled.double(), chosen(over, batch)[valid], rtol=0, atol=2e-6)
    theirs = MinPLogitsWarper(0.3)(None, dense(trainer, batch)[1].flatten(0, 1)).log_softmax(-1).view_as(z)
    assert (chosen(theirs, batch)[valid] - sampled).abs().max() > 1e-3


@pytest.mark.parametrize("frozen", [False, True])
def test_loss_and_gradients_are_those_of_masked_rows(trainer, frozen):
    install(trainer, replay=True)
    batch = rollouts(trainer)
    trainer.model.lm_head.weight.requires_grad_(not frozen)
    parameters = [p for p in trainer.model.parameters() if p.requires_grad]
    loss = trainer._compute_loss(trainer.model, batch)
    found = torch.autograd.grad(loss, parameters)
    logp, mask = chosen(dense(trainer, batch)[1], batch), batch["completion_mask"]
    policy = -(logp - logp.detach()).exp() * batch["advantages"][:, None]
    count = batch["num_items_in_batch"].clamp(min=1) / trainer.args.steps_per_generation
    expected = torch.where(mask.bool(), policy, 0).sum() / count
    torch.testing.assert_close(loss, expected, rtol=1e-4, atol=1e-6)
    exact = torch.autograd.grad(expected, parameters)
    assert max(g.abs().max() for g in exact) > 1e-4
    for a, b in zip(found, exact, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=2e-4 * b.abs().max().item() + 1e-7)


def test_the_reference_is_scored_over_the_same_sets(place):
    trainer = runs.grpo(place, beta=0.3, top_p=TOP_P)
    with torch.no_grad():
        for parameter in trainer.model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    install(trainer, replay=True)
    batch = rollouts(trainer)
    own, trainer.model = trainer.model, trainer.ref_model
    z = dense(trainer, batch)[0]
    trainer.model = own
    over = torch.full_like(z, -torch.inf)
    for b, found in enumerate(batch[replay.SETS]):
        for t, ids in enumerate(found.sets.token_ids.split(found.sets.counts.tolist())):
            over[b, t, ids] = z[b, t, ids]
    valid = batch["completion_mask"].bool()
    expected = chosen(over.log_softmax(-1), batch)[valid]
    torch.testing.assert_close(batch["ref_per_token_logps"][valid], expected, rtol=0, atol=5e-6)


def test_what_was_sampled_by_another_policy_is_weighed(place):
    """Corrected: the ratio of trainer and sampler, within bounds, is a factor of each token's loss."""
    trainer = runs.grpo(place, beta=0.0, top_p=TOP_P, vllm_importance_sampling_mode="token_truncate")
    trainer.current_gradient_accumulation_steps = 1
    install(trainer, replay=True, corrected=True)
    batch = rollouts(trainer)
    valid = batch["completion_mask"].bool()
    ratio = batch["importance_sampling_ratio"]
    assert not ratio.requires_grad
    torch.testing.assert_close(ratio[valid], torch.ones(int(valid.sum())), rtol=0, atol=1e-5)
    assert trainer._metrics["train"]["sampling/importance_sampling_ratio/mean"][-1] == pytest.approx(1, abs=1e-5)
    before = trainer._compute_loss(trainer.model, batch)
    batch["importance_sampling_ratio"] = torch.full_like(ratio, 0.25)
    torch.testing.assert_close(trainer._compute_loss(trainer.model, batch), 0.25 * before)
    assert not trainer.use_vllm


def test_metrics_say_how_far_the_trainer_is_from_the_sampler(trainer):
    install(trainer, replay=True)
    batch = rollouts(trainer)
    batch[replay.SAMPLED] = batch[replay.SAMPLED] - 0.5  # log q/p of each token
    trainer._compute_loss(trainer.model, batch)
    found = trainer._metrics["train"]
    assert found["sampling/k1"][-1] == pytest.approx(-0.5, abs=1e-5)
    assert found["sampling/k3"][-1] == pytest.approx(math.expm1(0.5) - 0.5, abs=1e-5)


def test_the_least_and_the_largest_ratio_are_those_of_all_ranks(place, monkeypatch):
    trainer = runs.grpo(place, beta=0.0, top_p=TOP_P)
    install(trainer, replay=True, corrected=True)
    gather = trainer.accelerator.gather
    # two ranks, with ratios of 1 here and of 3 there
    monkeypatch.setattr(
        trainer.accelerator, "gather", lambda x: torch.cat([gather(x).flatten(), 3 * gather(x).flatten()])
    )
    rollouts(trainer)
    found = {
        name: trainer._metrics["train"][f"sampling/importance_sampling_ratio/{name}"] for name in ("min", "mean", "max")
    }
    assert {name: x[-1] for name, x in found.items()} == pytest.approx({"min": 1, "mean": 2, "max": 3}, abs=1e-4)


def test_tokens_of_which_nothing_is_known_are_refused(trainer):
    install(trainer, replay=True)
    batch = rollouts(trainer)
    batch[replay.SETS] = batch[replay.SETS][1:]
    with pytest.raises(ConfigError, match="use no tools and no rollout of your own"):
        trainer._compute_loss(trainer.model, batch)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("use_vllm", True, "got another engine"),
        ("use_transformers_continuous_batching", True, "got another engine"),
        ("tools", [len], "got tools"),
        ("rollout_func", len, "got rollout_func"),
    ],
)
def test_completions_of_others_are_refused(trainer, name, value, message):
    setattr(trainer, name, value)
    with pytest.raises(ConfigError, match=message):
        install(trainer, replay=True)


@pytest.mark.parametrize("mode", ["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"])
@pytest.mark.parametrize(("low", "high"), [(None, 2.0), (0.5, None), (0.5, 2.0), (1.0, 1.0), (None, None)])
def test_importance_ratio(mode, low, high):
    log_ratio = torch.tensor([[0.1, -1.2, 0.9], [0.05, 0.0, -0.1]])
    found = replay.importance_ratio(log_ratio, mode, low, high)
    ratio = (log_ratio.sum(1, keepdim=True) if mode.startswith("sequence") else log_ratio).exp()
    least, most = low or 0.0, high or float("inf")
    expected = ratio.clamp(least, most) if "truncate" in mode else ratio * ((ratio >= least) & (ratio <= most))
    torch.testing.assert_close(found, expected)


def adapted(place, **options):
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(place), LoraConfig(target_modules=["q_proj"]))
    return runs.grpo(place, model, **options)


@pytest.mark.parametrize(
    "made",
    [
        pytest.param(partial(runs.grpo, num_iterations=2, steps_per_generation=2, beta=0.1), id="grpo, off policy"),
        pytest.param(partial(runs.rloo, beta=0.1), id="rloo"),
        pytest.param(partial(adapted, beta=0.1), id="adapters"),
    ],
)
def test_whole_runs(place, made):
    trainer = made(place, top_p=0.8, top_k=20)
    install(trainer, replay=True)
    trainer.train()
    logged = [record for record in trainer.state.log_history if "sampling/k3" in record]
    assert len(logged) == trainer.args.max_steps
    assert logged[0]["sampling/k3"] < 1e-6
    assert all(record["grad_norm"] < 1e3 for record in logged)
    assert any(record["grad_norm"] > 0 for record in logged)


@pytest.mark.parametrize("ends", [range(100), [2]], ids=["some", "all"])
def test_completions_that_were_cut_short_count_for_nothing(place, ends):
    """TRL masks them out of the rollouts, where it is known all the same what they were sampled from."""
    options = {"max_completion_length": 2, "vllm_importance_sampling_mode": "token_truncate", "loss_type": "dapo"}
    trainer = runs.grpo(place, beta=0.0, top_p=TOP_P, mask_truncated_completions=True, **options)
    trainer.current_gradient_accumulation_steps = 1
    install(trainer, replay=True, corrected=True)
    trainer.eos_token_ids = list(ends)
    batch = rollouts(trainer)
    valid = batch["completion_mask"].bool()
    assert valid.any() == (len(ends) > 1)
    assert not valid.any(1).all()
    loss = trainer._compute_loss(trainer.model, batch)
    logp = chosen(dense(trainer, batch)[1], batch)[valid]
    policy = -(logp - logp.detach()).exp() * batch["advantages"][:, None].expand_as(valid)[valid]
    expected = policy.sum() / batch["num_items_in_batch"].clamp(min=1)
    torch.testing.assert_close(loss, expected, rtol=1e-4, atol=1e-6)
    parameters = list(trainer.model.parameters())
    exact = torch.autograd.grad(expected, parameters)
    for a, b in zip(torch.autograd.grad(loss, parameters), exact, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=2e-4 * b.abs().max().item() + 1e-7)
    metrics = trainer._metrics["train"]
    assert abs(metrics["sampling/k1"][-1]) < 1e-6
    assert 0 <= metrics["sampling/k3"][-1] < 1e-6
    assert metrics["sampling/importance_sampling_ratio/mean"][-1] == pytest.approx(float(valid.any()), abs=1e-5)


def test_rollouts_from_before_are_made_again(place):
    """A second run may begin in the middle of what the first one sampled, where nothing was recorded."""
    trainer = runs.grpo(place, beta=0.0, top_p=TOP_P, steps_per_generation=2, max_steps=1)
    trainer.train()
    assert trainer._buffered_inputs is not None
    install(trainer, replay=True)
    trainer.train()
    assert trainer.state.log_history[0]["sampling/k3"] < 1e-6


def test_rollouts_are_made_again_once_taken_back(place):
    """Old log-probs over sets are not those that TRL compares with."""
    trainer = runs.grpo(place, beta=0.0, top_p=TOP_P, num_iterations=2, steps_per_generation=1, learning_rate=1e-9)
    trainer.current_gradient_accumulation_steps = 1
    install(trainer, replay=True)
    rollouts(trainer)
    trainer._step += 1
    uninstall(trainer)
    batch = rollouts(trainer)
    assert replay.SETS not in batch
    whole, _ = dense(trainer, batch)
    old, valid = batch["old_per_token_logps"], batch["completion_mask"].bool()
    torch.testing.assert_close(old[valid], chosen(whole, batch)[valid], rtol=0, atol=2e-6)


def test_taken_back(trainer):
    before = {name: vars(trainer).get(name) for name in ("_compute_loss", "_generate_single_turn")}
    install(trainer, replay=True)
    uninstall(trainer)
    assert {name: vars(trainer).get(name) for name in before} == before
    assert replay.SETS not in rollouts(trainer)


def gmpo(place):
    """Whose loss reads no ratio."""
    from trl.experimental.gmpo import GMPOConfig, GMPOTrainer

    args = GMPOConfig(**runs.options(place, num_generations=4, max_completion_length=8))
    return GMPOTrainer(str(place), reward_funcs=runs.vowels, args=args, **runs.common(place, runs.prompts()))


def doubled(place):
    """Whose loss is twice that of the class above."""
    from trl import GRPOTrainer

    class Doubled(GRPOTrainer):
        def _compute_loss(self, model, inputs):
            return 2 * super()._compute_loss(model, inputs)

    return runs.grpo(place, trainer=Doubled)


# options of generation that draw otherwise than by temperature, top_k, top_p and min_p
UNLIKE = {
    "do_sample": False,
    "min_new_tokens": 2,
    "bad_words_ids": [[7]],
    "no_repeat_ngram_size": 2,
    "sequence_bias": [[[7], -1.0]],
    "typical_p": 0.9,
    "num_beams": 2,
    "forced_eos_token_id": 0,
    "forced_bos_token_id": 7,
}


@pytest.mark.filterwarnings("ignore::trl.import_utils.TRLExperimentalWarning")
@pytest.mark.parametrize(
    ("made", "options", "message"),
    [
        (runs.dpo, {}, "replay: expected a trainer that samples, GRPOTrainer or RLOOTrainer, got DPOTrainer"),
        (runs.grpo, {"exact_kl": True}, "replay: exact_kl is of the whole row"),
        (runs.grpo, {"top_k": 3}, "replay: top_k is of the whole row"),
        (runs.grpo, {"order": "vlm"}, "order: expected .*, got 'vlm'"),
        (partial(runs.grpo, repetition_penalty=1.2), {}, "got repetition_penalty=1.2; leave one of the two out"),
        (
            partial(runs.grpo, generation_kwargs={"repetition_penalty": 1.2}),
            {},
            "got repetition_penalty=1.2; leave one of the two out",
        ),
        (
            partial(runs.rloo, generation_kwargs={"suppress_tokens": [7]}),
            {},
            "got suppress_tokens, as TRL sets them for a model with images; leave replay out",
        ),
        (
            partial(runs.grpo, vllm_importance_sampling_correction=False),
            {"corrected": True},
            "corrected: expected GRPO's importance ratio in the loss, got vllm_importance_sampling_correction=False",
        ),
        (runs.rloo, {"corrected": True}, "corrected: expected GRPO's importance ratio in the loss, got RLOOTrainer"),
        (
            gmpo,
            {"corrected": True},
            "corrected: expected GRPO's importance ratio in the loss, got GMPOTrainer, whose loss is "
            r"another; leave corrected out, or call super\(\)._compute_loss in a GRPOTrainer of your own",
        ),
        (
            partial(runs.grpo, temperature=1.0, generation_kwargs={"temperature": 0.7}),
            {},
            "replay: expected completions sampled at the temperature of 1.0 that scores them, got 0.7",
        ),
        *(
            (partial(runs.grpo, generation_kwargs={name: value}), {}, f"replay: expected .*, got {name}=")
            for name, value in UNLIKE.items()
        ),
    ],
)
def test_what_cannot_be_replayed_is_refused(place, made, options, message):
    with pytest.raises((OptionError, ConfigError), match=message):
        install(made(place), replay=True, **options)
    with pytest.raises(OptionError, match="corrected: expected replay"):
        install(runs.grpo(place), corrected=True)
    with pytest.raises(OptionError, match="order: expected replay, which does the sampling, with 'vllm'"):
        install(runs.grpo(place), order="vllm")


def test_a_loss_that_adds_to_trls_is_corrected(place):
    trainer, plain = doubled(place), runs.grpo(place)
    for made in (trainer, plain):
        made.current_gradient_accumulation_steps = 1
        install(made, replay=True, corrected=True)
    batch = rollouts(plain)
    batch[replay.RATIO] = 3 * batch[replay.RATIO]
    with torch.no_grad():
        found, once = (made._compute_loss(made.model, batch) for made in (trainer, plain))
    assert once != 0
    torch.testing.assert_close(found, 2 * once)


@pytest.mark.parametrize("asked", [{"penalty_alpha": 0.6}, {"temperature": None}, {"min_length": 0}], ids=str)
def test_options_of_generation_that_change_nothing_are_taken(place, asked):
    trainer = runs.grpo(place, temperature=1.0, generation_kwargs=asked)
    trainer.current_gradient_accumulation_steps = 1
    install(trainer, replay=True)
    trainer._compute_loss(trainer.model, rollouts(trainer))
    assert trainer._metrics["train"]["sampling/k3"] == pytest.approx([0], abs=1e-6)


@pytest.mark.parametrize(("name", "value"), [("temperature", 0.6), ("typical_p", 0.9)])
def test_what_the_models_own_configuration_asks_for_counts_where_the_trainers_is_none(place, name, value):
    trainer = runs.grpo(place, temperature=1.0, generation_kwargs={name: None})
    setattr(trainer.model.generation_config, name, value)
    with pytest.raises(ConfigError, match=f"replay: expected .*{value}"):
        install(trainer, replay=True)


def test_a_set_that_is_too_large_is_the_whole_row_less_what_was_kept(place, monkeypatch):
    monkeypatch.setattr(replay, "KEPT", 83)
    trainer = runs.grpo(place, top_p=TOP_P, beta=0.0, loss_type="dapo")
    trainer.current_gradient_accumulation_steps = 1
    install(trainer, replay=True)
    batch = rollouts(trainer)
    valid = batch["completion_mask"].bool()
    cut = torch.zeros(valid.shape, dtype=torch.bool)
    cut[valid] = torch.cat([found.whole for found in batch[replay.SETS]])
    assert 0.1 < cut[valid].double().mean() < 0.9
    parameters = list(trainer.model.parameters())
    found = torch.autograd.grad(trainer._compute_loss(trainer.model, batch), parameters)
    assert trainer._metrics["train"]["sampling/k3"][-1] < 1e-6
    whole, over = (chosen(rows, batch) for rows in dense(trainer, batch))
    logp = torch.where(cut, whole, over)
    policy = -(logp - logp.detach()).exp() * batch["advantages"][:, None]
    count = batch["num_items_in_batch"].clamp(min=1) / trainer.args.steps_per_generation
    exact = torch.autograd.grad(torch.where(valid, policy, 0).sum() / count, parameters)
    for a, b in zip(found, exact, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=2e-4 * b.abs().max().item() + 1e-7)


def test_the_first_entry_of_the_vocabulary_is_sampled_as_any():
    record = sample_tokens(torch.randn(64, 4), LMHead(0.1 * torch.randn(3, 4)), keep=1)
    found = replay.SampledFrom.of(record)
    assert (record.token == 0).any()
    assert found.whole.all()
    torch.testing.assert_close(found.log_kept, record.log_kept_mass)
