"""`logitless.score` against the model's own logits in float64."""

import copy

import pytest
import torch
import transformers as t
from peft import PromptTuningConfig, get_peft_model
from torch import Tensor

import logitless
from logitless.errors import ConfigError, LabelError, OptionError, ShapeError
from tests.support.allocations import trace_allocations
from tests.support.integrations.masked import MASKED, WIDTH
from tests.support.integrations.tiny import TINY

KEEP = 4
ONES = ("llama", "qwen3-tied", "gemma2-softcap", "gpt2-tied", "phi-bias", "granite-scaling", "qwen3-moe")


def texts(side: str = "right", vocab: int = 97) -> dict[str, Tensor]:
    """Three texts of 9, 6 and 1 tokens."""
    ids = torch.randint(8, vocab, (3, 9))
    mask = torch.tensor([[1] * 9, [1] * 6 + [0] * 3, [1] + [0] * 8])
    if side == "left":
        mask = mask.flip(1)
    return {"input_ids": ids.masked_fill(mask == 0, 0), "attention_mask": mask}


def dense(model, ids: Tensor) -> Tensor:
    """The logits that score tokens 1, 2, ... of one unpadded text, (n - 1, V)."""
    with torch.no_grad():
        return model(input_ids=ids[None]).logits[0, :-1].double()


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("name", ONES)
def test_each_token_is_scored_by_the_position_before_it(name, side):
    model, batch = TINY[name].build().double().eval(), texts(side)
    record = logitless.score(model, batch, keep=KEEP)
    mask = batch["attention_mask"].bool()
    assert record.shape == (3, 9)
    assert record.vocab_size == 97
    for row, ids, real in zip(range(3), batch["input_ids"], mask, strict=True):
        first = int(real.nonzero()[0])
        written = record.token[row] >= 0
        assert written.tolist() == [bool(r) and t > first for t, r in enumerate(real)]
        mine, labels, z = record[row][written], ids[real][1:], dense(model, ids[real])
        logp = z.log_softmax(-1)
        label = z.gather(-1, labels[:, None])
        assert mine.token.tolist() == labels.tolist()
        expected = {
            "logprob": logp.gather(-1, labels[:, None])[:, 0],
            "behaviour_logprob": logp.gather(-1, labels[:, None])[:, 0],
            "entropy": -(logp.exp() * logp).sum(-1),
            "self_certainty": -logp.mean(-1) - torch.tensor(97.0).log().double(),
            "logsumexp": z.logsumexp(-1),
            "topk_logits": z.topk(KEEP).values,
        }
        for what, value in expected.items():
            torch.testing.assert_close(
                getattr(mine, what), value, rtol=1e-6, atol=1e-6, msg=lambda m, w=what: f"{w}: {m}"
            )
        assert mine.n_kept.tolist() == [97] * len(labels)  # drawn from all, as it were
        assert mine.rank.tolist() == (1 + (z > label).sum(-1)).tolist()


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
@pytest.mark.parametrize("side", ["right", "left"])
def test_a_soft_prompt_moves_no_token(side):
    """PEFT puts virtual tokens before the ids: each token is still scored by the position before it."""
    config = PromptTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM")
    model, batch = get_peft_model(TINY["llama"].build(), config).eval(), texts(side)
    record = logitless.score(model, batch, keep=0)
    for row, ids, real in zip(range(2), batch["input_ids"], batch["attention_mask"].bool(), strict=False):
        with torch.no_grad():
            logp = model(input_ids=ids[real][None]).logits[0, 3:-1].log_softmax(-1)
        expected = logp.gather(-1, ids[real][1:, None])[:, 0]
        torch.testing.assert_close(record[row].logprob[record.token[row] >= 0], expected, rtol=1e-4, atol=1e-4)
    assert logitless.hidden_states(model, batch).shape == (3, 9, 16)


def test_without_a_mask_every_token_is_text_and_a_model_in_training_stays_so():
    model = TINY["llama"].build().train()
    ids = texts()["input_ids"][:1]
    record = logitless.score(model, {"input_ids": ids}, keep=0)
    assert model.training
    assert (record.token >= 0).sum() == 8
    assert record.topk_ids.shape == (1, 9, 0)
    assert record.topk_ids.dtype == torch.int32
    assert record.perplexity.isfinite().all()


def test_a_token_by_itself_has_no_score():
    record = logitless.score(TINY["llama"].build(), {"input_ids": torch.tensor([[5]])})
    assert record.token.tolist() == [[-1]]
    assert record.perplexity.tolist() == [1.0]


def test_a_token_behind_padding_has_no_score():
    """Nothing comes before it but what is no text, also in the middle of a row."""
    batch = {"input_ids": torch.tensor([[5, 6, 0, 7, 8]]), "attention_mask": torch.tensor([[1, 1, 0, 1, 1]])}
    record = logitless.score(TINY["llama"].build(), batch, keep=0)
    assert record.token.tolist() == [[-1, 6, -1, -1, 8]]


def test_memory_has_no_logits():
    model = TINY["llama"].build(vocab=8192).eval()
    batch = {"input_ids": torch.randint(8192, (4, 60))}
    logits = 4 * 60 * 8192 * 4
    found = trace_allocations(lambda: logitless.score(model, batch, keep=KEEP, memory_budget=1 << 19))
    assert found.largest < logits / 8
    assert found.peak < logits / 4
    wrong = trace_allocations(lambda: model(**batch).logits)
    assert wrong.largest >= logits


@pytest.mark.parametrize(
    ("inputs", "error", "message"),
    [
        ({}, ShapeError, "expected integer ids"),
        ({"input_ids": torch.ones(3, dtype=torch.long)}, ShapeError, "expected integer ids of shape"),
        ({"input_ids": torch.ones(1, 3)}, ShapeError, "got torch.float32 of shape"),
        ({"input_ids": torch.ones(1, 3, dtype=torch.bool)}, ShapeError, "got torch.bool of shape"),
        ({"input_ids": torch.ones(0, 3, dtype=torch.long)}, ShapeError, "at least one token"),
        (
            {"input_ids": torch.ones(1, 3).long(), "attention_mask": torch.ones(1, 2)},
            ShapeError,
            r"attention_mask: expected input_ids' shape \(1, 3\), got \(1, 2\)",
        ),
        (
            {"input_ids": torch.ones(1, 3).long(), "attention_mask": {"full_attention": torch.ones(1, 1, 3, 3)}},
            ShapeError,
            "attention_mask: expected input_ids' shape .*, got dict",
        ),
    ],
)
def test_bad_input_is_named(inputs, error, message):
    with pytest.raises(error, match=message):
        logitless.score(TINY["llama"].build(), inputs)


class Elsewhere(Tensor):
    """On another device, as it were: `to` brings it to the others."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function is not Tensor.to and any(type(x) is Tensor for x in args):
            raise RuntimeError("Expected all tensors to be on the same device")
        with torch._C.DisableTorchFunctionSubclass():
            found = function(*args, **(kwargs or {}))
        return found.as_subclass(Tensor) if function is Tensor.to else found


def test_logits_that_hooks_move_to_where_the_input_was():
    """As accelerate's do of a model that is split over devices, after its forward."""
    model = TINY["llama"].build()
    moved, batch = copy.deepcopy(model), texts()
    forward = moved.forward

    def hooked(*args, **kwargs):
        output = forward(*args, **kwargs)
        output.logits = output.logits.as_subclass(Elsewhere)
        return output

    moved.forward = hooked
    expected, got = (logitless.score(x, batch).logprob for x in (model, moved))
    torch.testing.assert_close(got, expected, equal_nan=True)


XLM = {"vocab_size": 97, "emb_dim": 16, "n_layers": 1, "n_heads": 2}
XLNET = {"vocab_size": 97, "d_model": 16, "n_layer": 1, "n_head": 2, "d_inner": 24}
GEMMA = {"vocab_size": 97, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "head_dim": 8}
BART = {"vocab_size": 97, "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "is_decoder": True}
SEE_AHEAD = {
    "ModernBertForMaskedLM": MASKED["modernbert"].build,
    "BertLMHeadModel": lambda: t.BertLMHeadModel(t.BertConfig(vocab_size=97, **WIDTH)),
    "XLMWithLMHeadModel": lambda: t.XLMWithLMHeadModel(t.XLMConfig(**XLM)),
    "XLNetLMHeadModel": lambda: t.XLNetLMHeadModel(t.XLNetConfig(**XLNET)),
    "CpmAntForCausalLM": lambda: t.CpmAntForCausalLM(
        t.CpmAntConfig(vocab_size=97, hidden_size=16, num_attention_heads=2, dim_head=8, dim_ff=24, num_hidden_layers=1)
    ),
    "Gemma3ForCausalLM": lambda: t.Gemma3ForCausalLM(t.Gemma3TextConfig(**GEMMA, use_bidirectional_attention=True)),
    "BartForConditionalGeneration": lambda: t.BartForConditionalGeneration(t.BartConfig(**BART)),
    "LlamaForCausalLM": lambda: TINY["llama"].build(is_causal=False),
}


@pytest.mark.parametrize("name", SEE_AHEAD)
def test_a_model_that_sees_what_it_is_to_predict(name):
    with pytest.raises(ConfigError, match=f"expected a causal language model, got {name}, which sees what follows"):
        logitless.score(SEE_AHEAD[name](), texts())


def test_models_that_see_ahead_unless_they_are_told_not_to():
    ids = texts()["input_ids"][:1]
    causal = t.BertLMHeadModel(t.BertConfig(vocab_size=97, **WIDTH, is_decoder=True))
    for model in (causal, t.XLMWithLMHeadModel(t.XLMConfig(**XLM, causal=True)), TINY["gpt-neox"].build()):
        whole, cut = (logitless.score(model, {"input_ids": ids[:, :n]}, keep=0) for n in (9, 6))
        torch.testing.assert_close(whole.logprob[0, 1:6], cut.logprob[0, 1:])


def test_more_entries_than_there_are():
    with pytest.raises(OptionError, match=r"keep: expected a whole number in 0..97 \(the vocabulary\), got 98"):
        logitless.score(TINY["llama"].build(), texts(), keep=98)


def test_an_id_without_a_row_in_the_head():
    model = TINY["llama"].build(vocab_size=97)
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight[:50].detach())
    model.lm_head.out_features = 50
    with pytest.raises(LabelError, match="labels"):
        logitless.score(model, {"input_ids": torch.tensor([[1, 60]])})
