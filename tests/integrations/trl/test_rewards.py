"""Self-certainty as a reward: dense float64 on the exact ids, each token scored by the position before it."""

import copy
import math
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from logitless.errors import ConfigError, LabelError, NotFiniteError, OptionError, ShapeError
from logitless.integrations.trl.rewards import SelfCertaintyReward
from logitless.models.positions import scale
from tests.support.allocations import trace_allocations
from tests.support.integrations.certainty import dense
from tests.support.workbench.micro import SHAPE, micro_model

PROMPTS = [[5, 9, 17], [3], [44, 2, 8, 100, 31, 7], [12, 13]]
COMPLETIONS = [[7, 7, 90, 2], [11, 250, 6, 5, 99, 41, 2], [2], [30, 31, 32]]  # 2 is the end of text


@pytest.fixture
def model():
    """A policy that is far from uniform, so that positions differ."""
    found = micro_model()
    with torch.no_grad():
        found.get_output_embeddings().weight.mul_(30)
    return found


def score(reward, **options):
    return reward(prompt_token_ids=PROMPTS, completion_ids=COMPLETIONS, **options)


@pytest.mark.parametrize("micro_batch", [None, 1, 3])
@pytest.mark.parametrize("temperature", [None, 0.7])
def test_equals_the_dense_formula_row_by_row(model, temperature, micro_batch):
    """Rows of different lengths in one batch: padding changes nothing, and the end of text is a token like others."""
    reward = SelfCertaintyReward(temperature=temperature, micro_batch=micro_batch).bind(model)
    wanted = [dense(model, *row, temperature or 1.0) for row in zip(PROMPTS, COMPLETIONS, strict=True)]
    assert score(reward) == pytest.approx(wanted, rel=2e-6)


def test_a_shift_by_one_would_be_seen(model):
    """Scored by their own positions instead of those before, the numbers are others by far more than rounding."""
    got = score(SelfCertaintyReward().bind(model))
    for value, *row in zip(got, PROMPTS, COMPLETIONS, strict=True):
        assert value == pytest.approx(dense(model, *row), rel=2e-6)
        assert abs(value - dense(model, *row, shift=0)) > 1e-3


def test_the_trainers_left_padding_is_the_same_policy(model):
    """TRL pads prompts on the left; with the positions that generation gives, that is the same number."""
    width = max(map(len, PROMPTS))
    exact = copy.deepcopy(model).double().eval()
    for got, prompt, completion in zip(score(SelfCertaintyReward().bind(model)), PROMPTS, COMPLETIONS, strict=True):
        row = [0] * (width - len(prompt)) + prompt + completion
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * (len(prompt) + len(completion))])
        positions = (mask.cumsum(-1) - 1).clamp_min(0)
        with torch.no_grad():
            z = exact(torch.tensor([row]), attention_mask=mask, position_ids=positions).logits[0, width - 1 : -1]
        certainty = z.logsumexp(-1) - z.mean(-1) - math.log(z.shape[-1])
        assert got == pytest.approx(float(certainty.mean()), rel=2e-6)


def test_masked_tokens_are_read_but_not_counted(model):
    masks = [[1, 0, 1, 1], [0, 0, 0, 0, 0, 0, 1], [1], [True, True, False]]
    got = score(SelfCertaintyReward().bind(model), completion_mask=masks)
    rows = zip(PROMPTS, COMPLETIONS, masks, strict=True)
    assert got == pytest.approx([dense(model, p, c, mask=m) for p, c, m in rows], rel=2e-6)


def test_columns_of_any_name_are_passed_over(model):
    """TRL passes all of a table's, and one may be called self."""
    reward = SelfCertaintyReward().bind(model)
    assert score(reward, self="x", _="y") == score(reward)


def test_modes_and_gradients_are_left_as_they_were():
    model = micro_model(attention_dropout=0.9).train()
    model.model.norm.eval()
    before = [module.training for module in model.modules()]
    reward = SelfCertaintyReward().bind(model)
    assert score(reward) == score(reward)  # no dropout
    assert [module.training for module in model.modules()] == before
    assert all(p.grad is None for p in model.parameters())
    assert "forward" not in model.__dict__


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # PEFT 0.21 asks for the older name
def test_adapters_are_part_of_the_policy(model):
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(1)
    adapted = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj", "down_proj"], init_lora_weights=False))
    got = score(SelfCertaintyReward().bind(adapted))
    merged = adapted.merge_and_unload()
    assert got == pytest.approx([dense(merged, *row) for row in zip(PROMPTS, COMPLETIONS, strict=True)], rel=1e-5)


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
def test_a_soft_prompt_moves_no_token(model):
    """PEFT puts virtual tokens before the ids: positions count from behind them."""
    from peft import PromptTuningConfig, get_peft_model

    config = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    tuned = get_peft_model(model, config).eval()
    got = score(SelfCertaintyReward().bind(tuned))
    for value, prompt, completion in zip(got, PROMPTS, COMPLETIONS, strict=True):
        with torch.no_grad():
            z = tuned(torch.tensor([prompt + completion])).logits[0, -len(completion) - 1 : -1].double()
        certainty = z.logsumexp(-1) - z.mean(-1) - math.log(z.shape[-1])
        assert value == pytest.approx(float(certainty.mean()), rel=1e-5)


def test_memory_holds_no_logits():
    vocab = 40_000
    reward = SelfCertaintyReward(memory_budget=2**20).bind(micro_model(vocab_size=vocab))
    seen = trace_allocations(lambda: score(reward))
    assert seen.largest < 4 * max(map(len, COMPLETIONS)) * vocab / 2
    assert seen.peak < 4 * sum(map(len, COMPLETIONS)) * vocab / 2


def test_text_becomes_ids_as_the_tokenizer_makes_them(model, micro):
    tokenizer = AutoTokenizer.from_pretrained(micro.model.parent)
    prompts = ["def f(x):\n", "a"]
    got = SelfCertaintyReward().bind(model, tokenizer)(prompts=prompts, completion_ids=COMPLETIONS[:2])
    ids = tokenizer(prompts)["input_ids"]
    assert got == pytest.approx([dense(model, *row) for row in zip(ids, COMPLETIONS[:2], strict=True)], rel=2e-6)


def test_conversations_become_ids_by_the_chat_template(model, micro):
    tokenizer = AutoTokenizer.from_pretrained(micro.model.parent)
    tokenizer.chat_template = "{{ messages[0].content }}{% if add_generation_prompt %}>{% endif %}"
    talks = [[{"role": "user", "content": text}] for text in ("one", "two more")]
    got = SelfCertaintyReward().bind(model, tokenizer)(prompts=talks, completion_ids=COMPLETIONS[:2])
    ids = tokenizer(["one>", "two more>"], add_special_tokens=False)["input_ids"]
    assert got == SelfCertaintyReward().bind(model)(prompt_token_ids=ids, completion_ids=COMPLETIONS[:2])


def bound(model):
    return SelfCertaintyReward().bind(model)


def broken(model):
    with torch.no_grad():
        model.model.norm.weight[3] = math.nan
    return bound(model)


LONG = [[1] * (SHAPE["max_position_embeddings"] - 2)]
BAD = {
    "unbound": (lambda m: SelfCertaintyReward(), {}, ConfigError, r"call reward.bind\(trainer\)"),
    "no ids": (bound, {"completion_ids": None}, ConfigError, "pass completion_ids"),
    "no tokenizer": (bound, {"prompt_token_ids": None, "prompts": ["a"]}, ConfigError, r"bind\(model, tokenizer\)"),
    "no completion": (bound, {"completion_ids": [], "prompt_token_ids": []}, ShapeError, "got none"),
    "empty completion": (bound, {"completion_ids": [[]]}, ShapeError, "completion 0 is empty"),
    "empty prompt": (bound, {"prompt_token_ids": [[]]}, ShapeError, "prompt 0 is empty"),
    "other counts": (bound, {"prompt_token_ids": [[1], [2]]}, ShapeError, "1 completions and 2 prompts"),
    "other masks": (bound, {"completion_mask": [[1], [1]]}, ShapeError, "1 completions and 2 masks"),
    "short mask": (bound, {"completion_mask": [[1]]}, ShapeError, "has 3 tokens, its mask 1"),
    "all masked": (bound, {"completion_mask": [[0, 0, 0]]}, ShapeError, "leaves none of 3 tokens"),
    "too long": (bound, {"prompt_token_ids": LONG}, ShapeError, "62 prompt and 3 completion tokens exceed .* of 64"),
    "unknown id": (bound, {"completion_ids": [[5, 259]]}, LabelError, r"in \[0, 259\), got 259"),
    "padding id": (bound, {"completion_ids": [[5, -100]]}, LabelError, "got -100"),
    "NaN": (broken, {}, NotFiniteError, "completion 0 is nan: the policy's hidden states are not finite"),
}


def test_stretched_positions_are_a_longer_context(model):
    """Past max_position_embeddings, as far as scaled rotary embeddings reach."""
    config = copy.deepcopy(model.config)
    scale(config, "linear:2")
    long = bound(type(model)(config))
    assert len(long(prompt_token_ids=LONG, completion_ids=[[1, 2, 3]])) == 1
    assert len(long(prompt_token_ids=[LONG[0] + [1] * 64], completion_ids=[[1, 2]])) == 1  # all 128
    with pytest.raises(ShapeError, match=r"126 prompt and 3 completion tokens exceed .* of 128"):
        long(prompt_token_ids=[LONG[0] + [1] * 64], completion_ids=[[1, 2, 3]])


def test_a_model_without_positions_has_no_longest_context():
    config = AutoConfig.for_model("mamba", vocab_size=259, hidden_size=16, state_size=4, num_hidden_layers=1)
    assert len(bound(AutoModelForCausalLM.from_config(config))(prompt_token_ids=LONG, completion_ids=[[1, 2, 3]])) == 1


@pytest.mark.parametrize("what", BAD)
def test_bad_input_is_one_line(model, what):
    make, changes, error, message = BAD[what]
    given = {"prompt_token_ids": [[4, 5]], "completion_ids": [[1, 2, 3]], **changes}
    with pytest.raises(error, match=message) as caught:
        make(model)(**given)
    assert "\n" not in str(caught.value)
    assert not [m for m in model.modules() if not m.training]  # as it was


@pytest.mark.parametrize("options", [{"temperature": 0.0}, {"temperature": 1e27}, {"micro_batch": 0}])
def test_options_without_a_meaning(options):
    with pytest.raises(OptionError, match=r"expected a number in 1e-24|micro_batch must be"):
        SelfCertaintyReward(**options)


def test_what_cannot_be_a_policy():
    reward = SelfCertaintyReward()
    with pytest.raises(ConfigError, match="expected a transformers model, got Linear"):
        reward.bind(torch.nn.Linear(2, 2))
    with pytest.raises(ConfigError, match="has no _tokenize_prompts: expected a GRPOTrainer or RLOOTrainer"):
        reward.bind(SimpleNamespace(accelerator=None))
    tools = SimpleNamespace(accelerator=None, _tokenize_prompts=None, temperature=1.0, tools=[print])
    with pytest.raises(ConfigError, match="leave tools out"):
        reward.bind(tools)


class Rollouts:
    """A stand-in for TRL's trainer around prompts that are more than text, or ids of their own."""

    accelerator, temperature, tools = None, 1.0, None

    def __init__(self, model, fields=None, rollout_func=None):
        self.model, self.fields, self.rollout_func = model, fields or {}, rollout_func

    def _tokenize_prompts(self, prompts):
        return [[1]] * len(prompts), None, self.fields


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fields": {"pixel_values": []}}, "have pixel_values too"),
        ({"rollout_func": print}, "as 'prompt_token_ids' too"),
    ],
)
def test_prompts_that_are_more_than_text_are_refused(model, options, message):
    reward = SelfCertaintyReward().bind(Rollouts(model, **options))
    with pytest.raises(ConfigError, match=message):
        reward(prompts=["a"], completion_ids=[[1]])
