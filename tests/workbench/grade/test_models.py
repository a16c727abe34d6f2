"""transformers models as readers of soft tokens: cached steps against whole prefixes, wrapped by PEFT or not."""

import pytest
import torch
from torch import Tensor
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Qwen3Config,
    Qwen3ForSequenceClassification,
)

from logitless.errors import ConfigError, NotFiniteError, OptionError
from logitless.models.instances import with_adapters
from logitless.relax import Sampling, SoftTokens, generate
from logitless.workbench.grade.models import SoftReward, TokenReward, finite_norm, reader_of, shared_vocabulary
from tests.support.integrations.tiny import TINY, WIDTH, halved, randomised

VOCAB, T = 97, 4


def prompts() -> tuple[Tensor, Tensor, Tensor]:
    ids = torch.randint(8, VOCAB, (2, 5), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[0, :2] = 0
    return ids, mask, torch.tensor([3, 4])


def gradients(model, carry: str) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad()
    sampling = Sampling(T, 1.5, k=VOCAB, hard=True, carry=carry, tolerance=0.0)
    rollout = generate(reader_of(model, VOCAB), *prompts(), sampling)
    values = torch.randn(VOCAB, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    rollout.backward((rollout.soft.weights * values[rollout.soft.ids]).sum())
    return rollout.soft.token, {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", ["qwen3-tied", "granite-scaling", "gemma3-softcap", "gpt2-tied", "phi-bias"])
def test_every_carry_gives_one_gradient(name):
    model = TINY[name].build(VOCAB).double().eval()
    token, exact = gradients(model, "recompute")
    for carry in ("cached", "sweeps"):
        found_token, found = gradients(model, carry)
        assert found_token.equal(token)
        assert found.keys() == exact.keys()
        largest = max(float(x.norm()) for x in exact.values())
        for key, x in exact.items():
            assert float((found[key] - x).norm()) < 1e-5 * (float(x.norm()) + 1e-3 * largest), (
                key
            )  # norms are fp32 inside


def test_the_policy_without_its_adapters_is_the_reference():
    model = with_adapters(TINY["qwen3-tied"].build(VOCAB), 4).eval()
    policy, reference = reader_of(model, VOCAB), reader_of(model, VOCAB, without_adapters=True)
    first = generate(policy, *prompts(), Sampling(T, k=9), reference=reference)
    assert not first.kl.detach().any()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.3)
    later = generate(policy, *prompts(), Sampling(T, k=9), reference=reference)
    assert bool((later.kl > 0).all())
    later.backward(later.kl.sum())
    assert all(p.grad is None for n, p in model.named_parameters() if "lora" not in n)
    assert any(bool(p.grad.any()) for n, p in model.named_parameters() if "lora_A" in n)


def test_a_model_that_changes_its_logits_in_a_way_of_its_own_is_refused():
    with pytest.raises(ConfigError, match="Qwen3ForCausalLM changes its logits otherwise than by scale 1"):
        generate(reader_of(halved(TINY["qwen3-tied"].build(VOCAB)), VOCAB), *prompts(), Sampling(T, k=9))


def hard_tokens(ids: Tensor) -> SoftTokens:
    ones = torch.ones(*ids.shape, 1)
    return SoftTokens(ids[..., None], ones, ids, torch.zeros(ids.shape), VOCAB, VOCAB)


@pytest.mark.parametrize("kind", ["decoder", "encoder"])
@pytest.mark.parametrize(("labels", "label"), [(2, 0), (2, 1), (2, None), (1, 0), (1, None)])
def test_the_reward_of_one_hot_tokens_is_the_classifiers_own(kind, labels, label):
    """Its label's probability: without a label the second's, or that of the only one."""
    torch.manual_seed(0)
    if kind == "decoder":
        model = Qwen3ForSequenceClassification(Qwen3Config(vocab_size=VOCAB, num_labels=labels, **WIDTH))
    else:
        model = BertForSequenceClassification(
            BertConfig(
                vocab_size=VOCAB,
                num_labels=labels,
                **{k: v for k, v in WIDTH.items() if k not in ("num_key_value_heads", "head_dim")},
            )
        )
    reward = SoftReward.of(randomised(model), VOCAB, label)
    ids = torch.randint(8, VOCAB, (3, 6))
    lengths = torch.tensor([6, 4, 1])
    alive = torch.arange(6) < lengths[:, None]
    found = reward(hard_tokens(ids), alive)
    for i, length in enumerate(lengths.tolist()):
        logits = model(input_ids=ids[i : i + 1, :length]).logits[0]
        exact = logits[0].sigmoid() if labels == 1 else logits.softmax(-1)[1 if label is None else label]
        torch.testing.assert_close(found[i], exact, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(reward.of_ids(ids, alive), found)
    assert not any(p.requires_grad for p in model.parameters())


class Letters:
    """A tokenizer whose entries are single characters."""

    def decode(self, ids: list[int]) -> str:
        return "".join(chr(97 + i % 26) for i in ids)


def test_a_rules_reward_is_its_mean_over_soft_tokens_up_to_the_end():
    torch.manual_seed(0)
    reward = TokenReward.of(lambda text: float(text in "aeiou"), "rules:vowels", Letters(), VOCAB, "cpu")
    values = torch.tensor([float(chr(97 + i % 26) in "aeiou") for i in range(VOCAB)])
    weights = torch.rand(3, 6, VOCAB).softmax(-1).requires_grad_()
    alive = torch.arange(6) < torch.tensor([6, 4, 1])[:, None]
    found = reward.of_rows(weights @ reward.table, alive)
    exact = torch.stack([(weights[i, :n] @ values).mean() for i, n in enumerate((6, 4, 1))])
    torch.testing.assert_close(found, exact)
    got, expected = (torch.autograd.grad(x.square().sum(), weights, retain_graph=True)[0] for x in (found, exact))
    torch.testing.assert_close(got, expected)
    ids = torch.randint(VOCAB, (3, 6))
    torch.testing.assert_close(reward.of_ids(ids, alive), reward(hard_tokens(ids), alive))


@pytest.mark.parametrize(
    ("value", "error"),
    [(None, OptionError), ("yes", OptionError), (float("nan"), NotFiniteError), (1e300, NotFiniteError)],
)
def test_a_rule_that_gives_no_number_is_named_with_its_token(value, error):
    with pytest.raises(error, match=r"rules:bad: expected a finite number in float32 for every token, got .* for 'a'"):
        TokenReward.of(lambda text: value, "rules:bad", Letters(), VOCAB, "cpu")


def test_a_rule_whose_sums_are_beyond_float32_is_refused():
    reward = TokenReward.of(lambda text: 3e38, "rules:large", Letters(), VOCAB, "cpu")
    with pytest.raises(NotFiniteError, match="the token reward's sums are not finite in float32: have it give smaller"):
        reward.of_ids(torch.ones(1, 2, dtype=torch.long), torch.ones(1, 2, dtype=torch.bool))


def test_models_that_do_not_fit_are_refused():
    torch.manual_seed(0)
    policy = TINY["qwen2"].build(VOCAB)
    reward = Qwen3ForSequenceClassification(Qwen3Config(vocab_size=90, num_labels=2, **WIDTH))

    class Words:
        def __init__(self, count: int) -> None:
            self.count = count

        def get_vocab(self) -> dict[str, int]:
            return {f"w{i}": i for i in range(self.count)}

    assert shared_vocabulary(policy, reward, Words(80), Words(80)) == 90
    with pytest.raises(ConfigError, match="tokenizer differs from the policy's"):
        shared_vocabulary(policy, reward, Words(80), Words(81))
    with pytest.raises(ConfigError, match="96 rows or more, got policy and reward model of"):
        shared_vocabulary(policy, reward, Words(96), Words(96))
    with pytest.raises(ConfigError, match=r"has labels 0\.\.1"):
        SoftReward.of(reward, 90, 2)
    with torch.no_grad():
        reward.score.weight.fill_(float("nan"))
    with pytest.raises(NotFiniteError, match="reward model returned NaN"):
        SoftReward.of(reward, 90, 1).of_ids(torch.zeros(1, 2, dtype=torch.long), torch.ones(1, 2, dtype=torch.bool))
    with pytest.raises(NotFiniteError, match="gradient is NaN or infinite: lower --learning-rate"):
        finite_norm(float("inf"))
    assert finite_norm(2.0) == 2.0


def test_keys_and_values_of_different_shapes_are_refused():
    """Gemma 3n's shared layers, latent attention and state-space layers; here keys wider than values."""
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    ranks = {"q_lora_rank": None, "kv_lora_rank": 8, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4, "v_head_dim": 6}
    config = DeepseekV3Config(vocab_size=VOCAB, num_key_value_heads=2, first_k_dense_replace=2, **sizes, **ranks)
    policy = reader_of(DeepseekV3ForCausalLM(config).eval(), VOCAB)
    with pytest.raises(ConfigError, match=r"DeepseekV3ForCausalLM: methods on soft tokens need 2 layers .* 1x4, 1x8"):
        generate(policy, *prompts(), Sampling(T, k=9))
    model = TINY["qwen3-tied"].build(VOCAB).eval()
    model.config.num_hidden_layers = 3  # as where a layer reads another's
    with pytest.raises(ConfigError, match=r"need 3 layers .* got 2 with"):
        generate(reader_of(model, VOCAB), *prompts(), Sampling(T, k=9))
