"""What rewards soft tokens: classifiers against their own forward, rules against means, and what is refused."""

import pytest
import torch
from torch import Tensor
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2ForSequenceClassification,
    Qwen3Config,
    Qwen3ForSequenceClassification,
)

from logitless.errors import ConfigError, NotFiniteError, OptionError
from logitless.relax import SoftTokens
from logitless.workbench.grade.models import SoftReward, TokenReward, finite_norm, shared_vocabulary
from tests.support.integrations.tiny import TINY, WIDTH, randomised

VOCAB = 97


def hard_tokens(ids: Tensor) -> SoftTokens:
    ones = torch.ones(*ids.shape, 1)
    return SoftTokens(ids[..., None], ones, ids, torch.zeros(ids.shape), VOCAB, VOCAB)


@pytest.mark.parametrize("kind", ["decoder", "of absolute positions", "encoder"])
@pytest.mark.parametrize(("labels", "label"), [(2, 0), (2, 1), (3, None), (1, 0), (1, None)])
def test_the_reward_of_one_hot_tokens_is_the_classifiers_own(kind, labels, label):
    """Its label's probability: without a label the second's, or that of the only one."""
    torch.manual_seed(0)
    if kind == "decoder":
        model = Qwen3ForSequenceClassification(Qwen3Config(vocab_size=VOCAB, num_labels=labels, **WIDTH))
    elif kind == "of absolute positions":
        config = GPT2Config(vocab_size=VOCAB, n_positions=6, n_embd=32, n_layer=1, n_head=2, num_labels=labels)
        model = GPT2ForSequenceClassification(config)
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
        def __init__(self, count: int, first: str = "w") -> None:
            self.count, self.first = count, first

        def get_vocab(self) -> dict[str, int]:
            return {f"{self.first}{i}": i for i in range(self.count)}

    assert shared_vocabulary(policy, reward, Words(80), Words(80)) == 80  # what lies behind is padding
    for theirs in (Words(81), Words(80, "v")):
        got = rf"tokenizer differs from the policy's \({theirs.count} entries against 80\)"
        with pytest.raises(ConfigError, match=got):
            shared_vocabulary(policy, reward, Words(80), theirs)
    with pytest.raises(ConfigError, match="91 rows or more, got policy and reward model of"):
        shared_vocabulary(policy, reward, Words(91), Words(91))
    with pytest.raises(ConfigError, match="96 rows or more, got policy and reward model of"):
        shared_vocabulary(policy, reward, Words(96), Words(96))
    for label in (2, -1):
        with pytest.raises(ConfigError, match=rf"--reward-label {label}: the reward model has labels 0\.\.1"):
            SoftReward.of(reward, 90, label)
    with torch.no_grad():
        reward.score.weight.fill_(float("nan"))
    with pytest.raises(NotFiniteError, match="reward model returned NaN"):
        SoftReward.of(reward, 90, 1).of_ids(torch.zeros(1, 2, dtype=torch.long), torch.ones(1, 2, dtype=torch.bool))
    with pytest.raises(NotFiniteError, match="gradient is NaN or infinite: lower --learning-rate"):
        finite_norm(float("inf"))
    assert finite_norm(2.0) == 2.0
