"""Log-probs of continuations against float64 logits of each request alone, whatever is shared."""

from random import Random

import pytest
import torch
from peft import LoraConfig, PrefixTuningConfig, PromptTuningConfig, get_peft_model
from transformers import (
    GitConfig,
    GitForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoConfig,
    GPTNeoForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    XLMConfig,
    XLMWithLMHeadModel,
)

from logitless.errors import DataError
from logitless.integrations.transformers.continuations import continuation_scores, keeps_all, planted
from tests.support.workbench.micro import SHAPE, micro_model

LONGEST = 48


def dense(model: torch.nn.Module, context: list[int], continuation: list[int]) -> tuple[float, bool]:
    ids = torch.tensor([[*context, *continuation][-(LONGEST + 1) :]])
    with torch.no_grad():
        logp = model.double()(ids[:, :-1]).logits[0, -len(continuation) :].log_softmax(-1)
    model.float()
    labels = torch.tensor(continuation)
    return float(logp.gather(-1, labels[:, None]).sum()), bool((logp.argmax(-1) == labels).all())


def best(model: torch.nn.Module, context: list[int], length: int) -> list[int]:
    """What greedy decoding says."""
    ids = list(context)
    for _ in range(length):
        with torch.no_grad():
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(context) :]


def requests_of(model: torch.nn.Module) -> list[tuple[list[int], list[int]]]:
    """Shared contexts, with one token or several to go on with; lone ones; one that is cut; greedy ones; a repeated."""
    draw = Random(0)

    def ids(n: int) -> list[int]:
        return [draw.randrange(3, 259) for _ in range(n)]

    out = []
    for length in (30, 17, 9):
        context = ids(length)
        out += [(context, ids(n)) for n in (4, 1, 6, 2)] + [(context, best(model, context, 3))]
    letters = ids(20)
    out += [(letters, [token]) for token in (5, 6, 7)] + [(letters, best(model, letters, 1))]
    out += [(letters, [9, *best(model, [*letters, 9], 2)])]  # greedy but for its first
    out += [(letters, [*best(model, letters, 1), 9])]  # and but for its last
    out += [(ids(3), ids(9)), (ids(60), ids(5)), (ids(1), ids(LONGEST)), (ids(45), ids(8)), out[2]]
    draw.shuffle(out)
    return out


MODELS = {
    "rotary positions": lambda: micro_model(initializer_range=0.2),
    "learned positions": lambda: GPT2LMHeadModel(
        GPT2Config(vocab_size=259, n_embd=32, n_layer=2, n_head=2, n_positions=64, initializer_range=0.2)
    ),
    "windows in a layer": lambda: micro_model(
        initializer_range=0.2,
        layer_types=["full_attention", "sliding_attention"],
        sliding_window=8,
        use_sliding_window=True,
    ),
    "windows that count padding": lambda: GPTNeoForCausalLM(
        GPTNeoConfig(
            vocab_size=259,
            hidden_size=32,
            num_layers=2,
            num_heads=2,
            attention_types=[[["global", "local"], 1]],
            window_size=8,
            max_position_embeddings=64,
            initializer_range=0.3,
        )
    ),
    "an image before the text": lambda: GitForCausalLM(
        GitConfig(
            vocab_size=259,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=64,
            max_position_embeddings=64,
            initializer_range=0.3,
            vision_config={"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 32},
        )
    ),
    "windows": lambda: MistralForCausalLM(
        MistralConfig(**{n: x for n, x in SHAPE.items() if n != "tie_word_embeddings"}, sliding_window=8)
    ),
}


@pytest.mark.parametrize("batch_size", [1, 3, 64])
@pytest.mark.parametrize("kind", MODELS)
def test_answers_are_those_of_each_request_alone(kind, batch_size):
    torch.manual_seed(1)
    model = MODELS[kind]().eval()
    requests, heard, tokens = requests_of(model), {}, {}

    def answered(number, answer, each):
        heard[number], tokens[number] = answer, each

    found = continuation_scores(model, requests, longest=LONGEST, batch_size=batch_size, answered=answered)
    assert [heard[i] for i in range(len(requests))] == found
    assert sum(greedy for _, greedy in found) >= 4
    for number, (request, (total, greedy)) in enumerate(zip(requests, found, strict=True)):
        assert sum(tokens[number]["logprob"]) == pytest.approx(total)
        assert len(tokens[number]["rank"]) == len(request[1])
        expected, best_of_all = dense(model, *request)
        assert total == pytest.approx(expected, abs=1e-4)
        assert greedy == best_of_all


def fed(model: torch.nn.Module, requests: list, **more: object) -> int:
    """Tokens that go through the body."""
    count = 0

    def seen(module, inputs) -> None:
        nonlocal count
        count += inputs[0].numel()

    with model.get_input_embeddings().register_forward_pre_hook(seen):
        continuation_scores(model, requests, longest=LONGEST, batch_size=64, **more)
    return count


def test_a_shared_context_is_computed_once():
    model = micro_model().eval()
    context = list(range(3, 33))
    choices = [(context, [40 + i, 41, 42]) for i in range(4)]
    assert fed(model, choices) == 30 + 4 * 2
    assert fed(model, choices, share=False) == 4 * 32
    letters = [(context, [40 + i]) for i in range(4)]
    assert fed(model, letters) == fed(model, letters, share=False) == 30


def test_what_cannot_be_shared():
    assert not keeps_all(MODELS["windows in a layer"]())
    assert keeps_all(MODELS["rotary positions"]())
    assert not keeps_all(MODELS["windows"]())
    assert not keeps_all(MODELS["windows that count padding"]())
    own = XLMConfig(vocab_size=259, emb_dim=32, n_layers=1, n_heads=2, max_position_embeddings=64)
    assert not keeps_all(XLMWithLMHeadModel(own))  # keys and values of a kind of its own, and called `cache`
    short = [([3], [5, 6, 7]), ([3], [6, 6, 7])]  # a second pass would cost more than it saves
    assert [len(tree.branches) for tree in planted(short, LONGEST, True)] == [0, 0]
    assert [(tree.rows, len(tree.stem.fed)) for tree in planted([([3], [4]), ([3] * 9, [4])], LONGEST, True)] == [
        (1, 9),
        (1, 1),
    ]  # the longest first
    cut = [([3] * LONGEST, [5, 6]), ([3] * LONGEST, [6, 6])]  # the model sees less of a context before a longer ending
    assert [len(tree.branches) for tree in planted(cut, LONGEST, True)] == [0, 0]
    whole = [([3] * (LONGEST - 1), [5, 6]), ([3] * (LONGEST - 1), [6, 6])]  # which it sees all of
    assert [len(tree.branches) for tree in planted(whole, LONGEST, True)] == [2]
    alike = [([3, 4], [5, 6]), ([3, 4], [6, 6])]  # as long as what goes on from it
    assert [len(tree.branches) for tree in planted(alike, LONGEST, True)] == [0, 0]


def test_a_pass_has_as_many_rows_as_it_is_told():
    model, rows = micro_model().eval(), []
    with model.get_input_embeddings().register_forward_pre_hook(lambda module, given: rows.append(len(given[0]))):
        continuation_scores(model, [([3, 4 + i], [5]) for i in range(5)], longest=LONGEST, batch_size=2)
    assert rows == [2, 2, 1]


def test_a_short_continuation_beside_a_long_one_needs_no_further_position():
    """Of a model that has positions for each request alone: what pads the shorter one is at none behind them."""
    config = GPT2Config(vocab_size=259, n_embd=32, n_layer=1, n_head=2, n_positions=LONGEST, initializer_range=0.2)
    model = GPT2LMHeadModel(config).eval()
    long, short = list(range(3, 43)), list(range(3, 23))
    requests = [(long, [first, 5, 6]) for first in (4, 5)] + [(short, [first, *range(50, 64)]) for first in (4, 5)]
    for request, (total, _) in zip(
        requests, continuation_scores(model, requests, longest=LONGEST, batch_size=8), strict=True
    ):
        assert total == pytest.approx(dense(model, *request)[0], abs=1e-4)


def test_how_certain_each_token_was():
    model, context, ending, heard = micro_model(initializer_range=0.2).eval(), list(range(3, 23)), [40, 41], []
    hear = {"certainty": True, "answered": lambda request, answer, tokens: heard.append(tokens)}
    continuation_scores(model, [(context, ending)], longest=LONGEST, batch_size=1, **hear)
    with torch.no_grad():
        p = model(torch.tensor([context + ending])).logits[0, -3:-1].double().softmax(-1)
    assert heard[0]["confidence"] == pytest.approx(p.amax(-1).tolist(), rel=1e-4)
    assert heard[0]["entropy"] == pytest.approx(torch.special.entr(p).sum(-1).tolist(), rel=1e-4)


CAUSAL = {"task_type": "CAUSAL_LM"}
FROM_THE_BEGINNING = {
    "prompt": PromptTuningConfig(num_virtual_tokens=3, **CAUSAL),
    "prefix": PrefixTuningConfig(num_virtual_tokens=3, **CAUSAL),
    "activated LoRA": LoraConfig(
        alora_invocation_tokens=[7, 8], target_modules=["q_proj"], init_lora_weights=False, **CAUSAL
    ),
}


@pytest.mark.filterwarnings(
    "ignore:.*is_gradient_checkpointing:FutureWarning",
    "ignore:`past_key_values` is deprecated:FutureWarning",  # PEFT 0.21's own calls of transformers 5.24
)
@pytest.mark.parametrize("kind", FROM_THE_BEGINNING)
def test_adapters_that_read_the_beginning_of_a_text(kind):
    """Virtual tokens, and what follows an invocation: every continuation is computed with its whole context."""
    model = get_peft_model(micro_model(initializer_range=0.2), FROM_THE_BEGINNING[kind]).eval()
    with torch.no_grad():
        for x in model.parameters():
            if x.requires_grad:
                x.normal_(std=0.5)
    context = [5, 7, 8, *range(20, 40)]
    requests = [(context, [40 + i, 41, 42]) for i in range(3)]
    found = continuation_scores(model, requests, longest=LONGEST, batch_size=4)
    for (total, _), (_, ending) in zip(found, requests, strict=True):
        with torch.no_grad():
            logp = model(torch.tensor([context + ending])).logits[0, -1 - len(ending) : -1].log_softmax(-1)
        expected = logp.gather(-1, torch.tensor(ending)[:, None]).sum()
        assert total == pytest.approx(float(expected), rel=1e-4)


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (([], [3]), "request 2 of 2: its context has no token"),
        (([3], []), "request 2 of 2: its continuation has no token"),
        (([3], [3] * 49), "request 2 of 2: its continuation has 49 tokens, expected at most the 48"),
    ],
)
def test_requests_without_a_meaning(request_, message):
    with pytest.raises(DataError, match=message):
        continuation_scores(micro_model(), [([3], [4]), request_], longest=LONGEST, batch_size=2)
