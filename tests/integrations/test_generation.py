"""`generate` against transformers' own: greedy ids, scores, ends, stop strings, streaming, memory."""

import math

import peft
import pytest
import tokenizers
import torch
import transformers as t

import logitless as ll
from logitless.errors import DtypeError, OptionError, ShapeError
from logitless.integrations.generation import Recorder, generate
from tests.integrations.tiny import WIDTH
from tests.support import trace_allocations

V = 97
SMALL = {**WIDTH, "vocab_size": V, "initializer_range": 0.5}
MODELS = {
    "qwen3, tied": ("Qwen3Config", {"tie_word_embeddings": True}),
    "llama": ("LlamaConfig", {}),
    "gemma2, softcap": ("Gemma2Config", {"final_logit_softcapping": 2.0, "sliding_window": 4}),
    "cohere, scale": ("CohereConfig", {"logit_scale": 0.3}),
    "phi, bias": ("PhiConfig", {}),
    "gpt2": ("GPT2Config", {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 64}),
}
PROMPTS = {
    "input_ids": torch.tensor([[0, 0, 5, 9, 4], [7, 8, 3, 11, 50], [0, 6, 7, 3, 20]]),
    "attention_mask": torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1], [0, 1, 1, 1, 1]]),
}


def tiny(name: str, **changes):
    config, extra = MODELS[name]
    torch.manual_seed(0)
    return t.AutoModelForCausalLM.from_config(getattr(t, config)(**{**SMALL, **extra, **changes})).eval()


@pytest.mark.parametrize("name", MODELS)
def test_greedy_is_transformers_own(name):
    model = tiny(name)
    dense = {"return_dict_in_generate": True, "output_logits": True}
    theirs = model.generate(**PROMPTS, max_new_tokens=12, do_sample=False, **dense)
    ours = generate(model, PROMPTS, max_new_tokens=12, do_sample=False, keep=3)
    assert torch.equal(ours.ids, theirs.sequences)
    z = torch.stack(theirs.logits, 1)
    new = theirs.sequences[:, 5:]
    ended = (new == 2).cumsum(1) - (new == 2).int() > 0
    assert torch.equal(ours.record.token.long(), new.masked_fill(ended, -1))
    near = {"rtol": 1e-4, "atol": 1e-4}
    torch.testing.assert_close(ours.record.logsumexp[~ended], z.logsumexp(-1)[~ended], **near)
    torch.testing.assert_close(ours.record.topk_logits[~ended], z.topk(3).values[~ended], **near)
    assert (ours.record.rank[~ended] == 1).all()


def test_sampling_follows_the_generation_config():
    model = tiny("llama", eos_token_id=None)
    seeds = torch.tensor([3, 1, 2])
    rules = {"do_sample": True, "temperature": 0.7, "top_k": 20, "top_p": 0.8, "min_p": 0.01}
    first = generate(model, PROMPTS, max_new_tokens=6, seeds=seeds, keep=V, **rules)
    theirs = model(first.ids, attention_mask=torch.cat([PROMPTS["attention_mask"], torch.ones(3, 6).long()], 1))
    z = theirs.logits[:, 4:-1].flatten(0, 1)
    scores = z / 0.7
    for warp in (t.TopKLogitsWarper(20), t.TopPLogitsWarper(0.8), t.MinPLogitsWarper(0.01)):
        scores = warp(None, scores)
    logp = scores.log_softmax(-1).view(3, 6, V).gather(-1, first.ids[:, 5:, None])[..., 0]
    torch.testing.assert_close(first.record.behaviour_logprob, logp, rtol=1e-3, atol=1e-3)
    assert torch.equal(first.record.n_kept.flatten().long(), (scores > -math.inf).sum(-1))
    order = torch.tensor([2, 0, 1])
    again = generate(
        model, {k: x[order] for k, x in PROMPTS.items()}, max_new_tokens=6, seeds=seeds[order], keep=0, **rules
    )
    assert torch.equal(again.ids, first.ids[order])


def test_several_completions_of_a_prompt_differ():
    out = generate(
        tiny("llama"),
        {"input_ids": PROMPTS["input_ids"][1:2]},
        do_sample=True,
        num_return_sequences=4,
        max_new_tokens=5,
    )
    assert out.record.shape[0] == 4
    assert len(set(map(tuple, out.ids.tolist()))) > 1


def test_a_sequence_that_ends():
    model = tiny("llama", eos_token_id=None)
    free = generate(model, PROMPTS, max_new_tokens=6, do_sample=False)
    end = int(free.ids[0, 6])
    out = generate(model, PROMPTS, max_new_tokens=6, do_sample=False, eos_token_id=end, pad_token_id=0)
    assert out.record.token[0, 1:].tolist() == [end] + [-1] * (out.record.shape[1] - 2)
    assert torch.equal(
        out.ids, model.generate(**PROMPTS, max_new_tokens=6, do_sample=False, eos_token_id=end, pad_token_id=0)
    )


def test_adapters_on_the_head():
    lora = peft.LoraConfig(target_modules=["lm_head", "q_proj"], r=2, init_lora_weights=False, task_type="CAUSAL_LM")
    model = peft.get_peft_model(tiny("llama"), lora).eval()
    out = generate(model, PROMPTS, max_new_tokens=6, do_sample=False)
    assert torch.equal(out.ids, model.generate(**PROMPTS, max_new_tokens=6, do_sample=False))
    with model.disable_adapter():
        assert not torch.equal(out.ids, generate(model, PROMPTS, max_new_tokens=6, do_sample=False).ids)


def test_stop_strings():
    letters = tokenizers.Tokenizer(tokenizers.models.WordLevel({chr(33 + i): i for i in range(V)}, unk_token="!"))
    letters.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    letters.decoder = tokenizers.decoders.Fuse()
    tokenizer = t.PreTrainedTokenizerFast(tokenizer_object=letters)
    model, one = tiny("llama", eos_token_id=None), {"input_ids": PROMPTS["input_ids"][1:2]}
    free = generate(model, one, max_new_tokens=8, do_sample=False).ids[0].tolist()
    stop = {"stop_strings": [chr(33 + free[6]) + chr(33 + free[7])], "tokenizer": tokenizer}
    out = generate(model, one, max_new_tokens=8, do_sample=False, **stop)
    assert torch.equal(out.ids, model.generate(**one, max_new_tokens=8, do_sample=False, **stop))
    assert out.ids[0].tolist() == free[:8]


def test_streaming_and_a_loop_of_transformers():
    class Streamer(t.generation.BaseStreamer):
        def __init__(self):
            self.seen, self.ended = [], False

        def put(self, value):
            self.seen += value.flatten().tolist()

        def end(self):
            self.ended = True

    model, one = tiny("llama", eos_token_id=None), {"input_ids": PROMPTS["input_ids"][1:2]}
    streamer = Streamer()
    out = generate(model, one, max_new_tokens=4, do_sample=False, streamer=streamer)
    assert streamer.ended
    assert streamer.seen == out.ids[0].tolist()
    recorder = Recorder(keep=2)
    ids = model.generate(**one, max_new_tokens=4, do_sample=False, custom_generate=recorder)
    assert torch.equal(ids, out.ids)
    assert recorder.record.topk_ids.shape == (1, 4, 2)
    assert "forward" not in vars(model)


def test_memory_holds_no_row_per_step():
    model = tiny("llama", vocab_size=20_000, eos_token_id=None)
    one = {"input_ids": PROMPTS["input_ids"][1:2]}
    got = trace_allocations(lambda: generate(model, one, max_new_tokens=16, do_sample=False))
    assert got.kept < 200 * 16 + 1000
    assert got.peak < 16 * 20_000 * 4


@pytest.mark.parametrize(
    ("options", "error", "fragment"),
    [
        ({"repetition_penalty": 1.5}, OptionError, "RepetitionPenalty"),
        ({"num_beams": 2}, OptionError, "beam"),
        ({"stop_strings": ["x"]}, OptionError, "tokenizer"),
        ({"seeds": torch.arange(2)}, ShapeError, "(3,)"),
        ({"keep": V + 1}, OptionError, "0..97"),
    ],
)
def test_bad_options(options, error, fragment):
    with pytest.raises(error) as caught:
        generate(tiny("llama"), PROMPTS, max_new_tokens=2, **{"do_sample": False, **options})
    assert fragment in str(caught.value)
    assert "\n" not in str(caught.value)


def test_bad_prompts():
    with pytest.raises(ShapeError, match="at least one token"):
        generate(tiny("llama"), {"input_ids": torch.zeros(1, 0, dtype=torch.long)})
    with pytest.raises(DtypeError, match="by name"):
        generate(tiny("llama"), PROMPTS["input_ids"])


def test_public_name():
    assert ll.generate is generate
