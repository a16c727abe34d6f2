"""`generate` against transformers' own: greedy ids, scores, ends, stop strings, streaming, memory."""

import inspect
import math

import peft
import pytest
import tokenizers
import torch
import transformers as t

import logitless as ll
from logitless.errors import ConfigError, NotFiniteError, OptionError, ShapeError
from logitless.integrations.transformers.generation import Recorder, generate
from logitless.integrations.transformers.generation_options import METHODS
from logitless.models.positions import scale
from logitless.sample.record import names
from tests.support.allocations import trace_allocations
from tests.support.integrations.tiny import WIDTH
from tests.support.sample.dense import vllm_kept

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


OTHER_STEPS = {
    "static": {"cache_implementation": "static"},
    "none": {"use_cache": False},
    "states of the whole prompt": {"logits_to_keep": 0},  # what a model without logits_to_keep returns
}


@pytest.mark.parametrize("step", OTHER_STEPS.values(), ids=OTHER_STEPS)
def test_other_caches_and_steps(step):
    """transformers' own, as it prepares them; without a cache all is computed anew at each step."""
    model, usual = tiny("llama"), generate(tiny("llama"), PROMPTS, max_new_tokens=6, do_sample=False)
    ours = generate(model, PROMPTS, max_new_tokens=6, do_sample=False, **step)
    assert torch.equal(ours.ids, model.generate(**PROMPTS, max_new_tokens=6, do_sample=False, **step))
    torch.testing.assert_close(ours.record.logsumexp, usual.record.logsumexp, rtol=1e-4, atol=1e-4)


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
    for step, x in enumerate(scores.view(3, 6, V).unbind(1)):  # each by its sequence's seed and its own position
        noise = ll.sample.Noise(seeds, torch.full_like(seeds, step)).gumbel(slice(0, V))
        assert torch.equal(first.ids[:, 5 + step], (x + noise).argmax(-1))
    assert torch.equal(first.record.n_kept.flatten().long(), (scores > -math.inf).sum(-1))
    vllms = generate(model, PROMPTS, max_new_tokens=1, seeds=seeds, keep=V, order="vllm", **{**rules, "min_p": 0.1})
    kept = vllm_kept(z.view(3, 6, V)[:, 0].double() / 0.7, 20, 0.8, 0.1)
    assert torch.equal(vllms.record.n_kept[:, 0].long(), (kept > -math.inf).sum(-1))
    order = torch.tensor([2, 0, 1])
    again = generate(
        model, {k: x[order] for k, x in PROMPTS.items()}, max_new_tokens=6, seeds=seeds[order], keep=0, **rules
    )
    assert torch.equal(again.ids, first.ids[order])


PROCESSORS = {
    "repetition": {"repetition_penalty": 1.7},
    "several": {
        "no_repeat_ngram_size": 2,
        "bad_words_ids": [[5], [9, 4]],
        "min_new_tokens": 8,
        "repetition_penalty": 0.8,
    },
    "guidance": {"guidance_scale": 3.0},
    "one's own": {"logits_processor": [lambda ids, z: z.roll(1, 1)]},
}


@pytest.mark.parametrize("name", MODELS)
def test_greedy_is_transformers_own_with_processors(name):
    model = tiny(name)
    plain = generate(model, PROMPTS, max_new_tokens=12, do_sample=False).ids
    for options in PROCESSORS.values():
        theirs = model.generate(**PROMPTS, max_new_tokens=12, do_sample=False, **options)
        ours = generate(model, PROMPTS, max_new_tokens=12, do_sample=False, **options)
        assert torch.equal(ours.ids, theirs)
        assert not torch.equal(ours.ids, plain)


@pytest.mark.parametrize("options", [*PROCESSORS.values(), {"typical_p": 0.6}], ids=[*PROCESSORS, "behind the rules"])
@pytest.mark.parametrize("rules", [{}, {"temperature": 0.7, "top_k": 20, "top_p": 0.8}], ids=["all", "rules"])
def test_sampling_with_processors(options, rules):
    """Behaviour log-probs are those of transformers' scores, the rest of the record is raw."""
    model, seen = tiny("llama", eos_token_id=None), []
    given = {"top_k": 0, **rules, **options, "do_sample": True, "max_new_tokens": 6, "min_new_tokens": None}
    ours = generate(model, PROMPTS, seeds=torch.tensor([3, 1, 2]), keep=5, **given)
    forced = iter(ours.ids[:, 5:].unbind(1))

    class Follow(t.LogitsProcessor):
        """Makes transformers' own loop draw what was drawn here."""

        def __call__(self, input_ids, scores):
            seen.append(scores)
            return torch.full_like(scores, -math.inf).scatter_(1, next(forced)[:, None], 0.0)

    processors = model._get_logits_processor
    model._get_logits_processor = lambda **kwargs: t.LogitsProcessorList([*processors(**kwargs), Follow()])
    theirs = model.generate(**PROMPTS, **given, return_dict_in_generate=True, output_logits=True)
    assert torch.equal(theirs.sequences, ours.ids)
    scores, raw = torch.stack(seen, 1), torch.stack(theirs.logits, 1)
    near = {"rtol": 1e-3, "atol": 1e-3}
    drawn = ours.ids[:, 5:, None]
    torch.testing.assert_close(ours.record.behaviour_logprob, scores.log_softmax(-1).gather(-1, drawn)[..., 0], **near)
    torch.testing.assert_close(ours.record.logprob, raw.log_softmax(-1).gather(-1, drawn)[..., 0], **near)
    torch.testing.assert_close(ours.record.topk_logits, raw.topk(5).values, **near)
    assert torch.equal(ours.record.n_kept.long(), (scores > -math.inf).sum(-1))


def test_sampling_masks_of_generated_tokens():
    """Sets are there for every written token, but for rows that a processor changed, which no set replays."""
    options = {"do_sample": True, "max_new_tokens": 6, "top_p": 0.3, "seeds": torch.tensor([3, 1, 2])}
    record = generate(tiny("llama"), PROMPTS, keep=64, **options).record
    mask = record.sampling_mask(cut="empty")
    tokens = record.token.flatten()
    drawn = (tokens >= 0) & ~record.cut.flatten()
    assert drawn.any()
    for token in drawn.nonzero().flatten().tolist():
        assert int(tokens[token]) in mask[token : token + 1].token_ids
    changed = generate(tiny("llama"), PROMPTS, keep=64, repetition_penalty=1.2, **options).record
    with pytest.raises(OptionError, match="no logits processor changed"):
        changed.sampling_mask()


def test_rows_for_processors_are_never_stored():
    model = tiny("llama", vocab_size=20_000, eos_token_id=None)
    one = {"input_ids": PROMPTS["input_ids"][1:2]}
    options = {"max_new_tokens": 16, "do_sample": True, "repetition_penalty": 1.2, "top_p": 0.9}
    got = trace_allocations(lambda: generate(model, one, **options))
    assert got.kept < 200 * 16 + 1000
    assert got.peak < 16 * 20_000 * 4


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


def test_where_all_end_the_record_does():
    out = generate(tiny("llama"), PROMPTS, max_new_tokens=6, do_sample=False, eos_token_id=list(range(V)))
    assert (out.ids.shape, out.record.shape) == ((3, 6), (3, 1))


@pytest.mark.parametrize(
    ("warper", "kept"),
    [(t.TopPLogitsWarper(0.01, min_tokens_to_keep=4), 4), (t.TopKLogitsWarper(3, filter_value=-5.0), V)],
    ids=["at least four", "another number than -inf"],
)
def test_a_warper_that_is_no_rule_is_a_processor(warper, kept):
    options = {"do_sample": True, "top_k": 0, "max_new_tokens": 1, "logits_processor": t.LogitsProcessorList([warper])}
    record = generate(tiny("llama"), PROMPTS, keep=V, **options).record
    assert record.n_kept.tolist() == [[kept]] * 3


def test_adapters_on_the_head():
    lora = peft.LoraConfig(target_modules=["lm_head", "q_proj"], r=2, init_lora_weights=False, task_type="CAUSAL_LM")
    model = peft.get_peft_model(tiny("llama"), lora).eval()
    out = generate(model, PROMPTS, max_new_tokens=6, do_sample=False)
    assert torch.equal(out.ids, model.generate(**PROMPTS, max_new_tokens=6, do_sample=False))
    with model.disable_adapter():
        assert not torch.equal(out.ids, generate(model, PROMPTS, max_new_tokens=6, do_sample=False).ids)


def letters() -> t.PreTrainedTokenizerFast:
    """A tokenizer of one character per id."""
    one = tokenizers.Tokenizer(tokenizers.models.WordLevel({chr(33 + i): i for i in range(V)}, unk_token="!"))
    one.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    one.decoder = tokenizers.decoders.Fuse()
    return t.PreTrainedTokenizerFast(tokenizer_object=one)


def test_stop_strings_beside_another_criterion():
    model = tiny("llama", eos_token_id=None, pad_token_id=0)
    criteria = t.StoppingCriteriaList([t.MaxLengthCriteria(7)])
    options = {"stop_strings": ["!!!!!!"], "tokenizer": letters(), "stopping_criteria": criteria}
    assert generate(model, PROMPTS, max_new_tokens=6, do_sample=False, **options).ids.shape == (3, 7)


@pytest.mark.parametrize("ends", [False, True], ids=["no end of text", "with one"])
def test_stop_strings(ends):
    """One sequence of three ends before the others; ids are transformers' own, the record says where each ended."""
    model = tiny("llama", eos_token_id=None, pad_token_id=0)
    every = generate(model, PROMPTS, max_new_tokens=8, do_sample=False).ids
    model.generation_config.eos_token_id = min(set(range(1, V)) - set(every.flatten().tolist())) if ends else None
    free = every[1].tolist()
    stop = {"stop_strings": [chr(33 + free[6]) + chr(33 + free[7])], "tokenizer": letters()}
    out = generate(model, PROMPTS, max_new_tokens=8, do_sample=False, **stop)
    assert torch.equal(out.ids, model.generate(**PROMPTS, max_new_tokens=8, do_sample=False, **stop))
    assert out.ids.shape[1] == 13
    assert out.record.token[1].tolist() == [*free[5:8], *[-1] * 5]
    assert bool((out.ids[1, 8:] == 0).all()) == ends


@pytest.mark.parametrize("where", ["of the call", "of the model"])
def test_stop_strings_of_a_generation_config(where):
    model = tiny("llama", eos_token_id=None, pad_token_id=0)
    options = {"max_new_tokens": 8, "do_sample": False}
    free = generate(model, PROMPTS, **options).ids
    stop = ["".join(chr(33 + i) for i in free[1, 6:8].tolist())]
    if where == "of the call":
        options = {"generation_config": t.GenerationConfig(**options, stop_strings=stop, pad_token_id=0)}
    else:
        model.generation_config.stop_strings = stop
    with pytest.raises(OptionError, match="stop_strings: expected a tokenizer"):
        generate(model, PROMPTS, **options)
    out = generate(model, PROMPTS, **options, tokenizer=letters())
    assert torch.equal(out.ids, model.generate(**PROMPTS, **options, tokenizer=letters()))
    assert out.record.token[1].tolist() == [*free[1, 5:8].tolist(), *[-1] * 5]
    without = generate(model, PROMPTS, **options, stop_strings=None)
    assert torch.equal(without.ids, free)


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


@pytest.mark.parametrize("asked", [None, False, True])
def test_ranks_are_in_step_where_it_is_asked(asked, monkeypatch):
    """False: for a rank that generates alone from parameters that it has gathered."""
    model, seen = tiny("llama"), set()

    def unfinished(this_peer_finished, synced_gpus, device):
        seen.add(synced_gpus)
        return not this_peer_finished

    monkeypatch.setattr(model, "_has_unfinished_sequences", unfinished)
    generate(model, PROMPTS, max_new_tokens=2, do_sample=False, synced_gpus=asked)
    assert seen == {bool(asked)}


def test_a_text_streamer_of_transformers(capsys):
    model, one = tiny("llama", eos_token_id=None), {"input_ids": PROMPTS["input_ids"][1:2]}
    out = generate(model, one, max_new_tokens=4, do_sample=False, streamer=t.TextStreamer(letters()))
    assert capsys.readouterr().out == letters().decode(out.ids[0]) + "\n"
    for several, more in ((PROMPTS, {}), (one, {"num_return_sequences": 3, "do_sample": True})):
        with pytest.raises(OptionError, match="a TextStreamer takes one sequence, got 3; use on_step"):
            generate(model, several, max_new_tokens=4, streamer=t.TextStreamer(letters()), **more)


def test_who_is_told_of_a_step_is_a_function():
    with pytest.raises(OptionError, match="on_step: expected a function of a step's record, got bool"):
        generate(tiny("llama"), PROMPTS, max_new_tokens=2, on_step=True)


def test_each_step_is_told_of():
    """The record (B,) of each step, with the sequences that have ended blank."""
    model = tiny("llama", eos_token_id=None)
    end = int(generate(model, PROMPTS, max_new_tokens=6, do_sample=False).ids[0, 6])
    seen = []
    options = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": end, "pad_token_id": 0}
    out = generate(model, PROMPTS, keep=3, on_step=lambda step: seen.append(step.map(torch.clone)), **options)
    assert [step.shape for step in seen] == [(3,)] * out.record.shape[1]
    assert out.record.token[0].tolist()[1:] == [end, *[-1] * (len(seen) - 2)]
    for name in names():
        assert torch.equal(torch.stack([getattr(step, name) for step in seen], 1), getattr(out.record, name)), name


def test_a_model_that_changes_its_logits_in_a_way_of_its_own():
    class Halved(t.LlamaForCausalLM):
        def forward(self, *args, **kwargs):
            output = super().forward(*args, **kwargs)
            output.logits = 0.5 * output.logits
            return output

    model = Halved(t.LlamaConfig(**SMALL)).eval()
    with pytest.raises(ConfigError, match="Halved changes its logits otherwise than by scale 1"):
        generate(model, PROMPTS, max_new_tokens=3)
    assert model.generate(**PROMPTS, max_new_tokens=3, do_sample=False).shape == (3, 8)


def test_memory_holds_no_row_per_step():
    model = tiny("llama", vocab_size=20_000, eos_token_id=None)
    one = {"input_ids": PROMPTS["input_ids"][1:2]}
    got = trace_allocations(lambda: generate(model, one, max_new_tokens=16, do_sample=False))
    assert got.kept < 200 * 16 + 1000
    assert got.peak < 16 * 20_000 * 4


@pytest.mark.parametrize(
    ("options", "error", "fragment"),
    [
        ({"num_beams": 2}, OptionError, "got beam_search; use model.generate"),
        (
            {"penalty_alpha": 0.6, "top_k": 4},
            OptionError,
            "greedy_search or sample of a decoder-only model, got contra",
        ),
        ({"dola_layers": "low"}, OptionError, "got dola_generation"),
        ({"prompt_lookup_num_tokens": 2}, OptionError, "got assisted_generation"),
        ({"stop_strings": ["x"]}, OptionError, "tokenizer"),
        ({"token_healing": True, "tokenizer": object()}, OptionError, "expected no token_healing"),
        ({"output_scores": True}, OptionError, "no output_scores, which is not kept: the record has"),
        ({"output_hidden_states": True, "return_dict_in_generate": True}, OptionError, "no output_hidden_states"),
        (
            {"generation_config": t.GenerationConfig(output_logits=True, return_dict_in_generate=True)},
            OptionError,
            "no output_logits",
        ),
        ({"max_new_tokens": 2.0}, OptionError, "expected a whole number of new tokens by max_new_tokens or max"),
        ({"seeds": torch.arange(2)}, ShapeError, "(3,)"),
        ({"keep": V + 1}, OptionError, "0..97"),
        ({"top_p": 0.0, "do_sample": True}, OptionError, "0 < p ≤ 1"),
        ({"top_p": 1.5, "do_sample": True}, OptionError, "0 < p ≤ 1"),
        ({"generation_config": t.GenerationConfig(min_p=2.0)}, OptionError, "min_p"),
        ({"order": "first"}, OptionError, "order: expected 'transformers' or 'vllm'"),
        (
            {"do_sample": True, "top_p": 0.9, "min_p": 0.1, "typical_p": 0.6, "order": "vllm"},
            OptionError,
            "got TypicalLogitsWarper last",
        ),
        ({"temperature": 0.0, "do_sample": True}, OptionError, "do_sample=False is greedy"),
        ({"temperature": "1", "do_sample": True}, OptionError, "expected a number in 1e-24..1e+26, got '1'"),
        ({"temperature": 1e27, "do_sample": True}, OptionError, "got 1e+27; do_sample=False is greedy"),
        ({"logits_processor": [lambda ids, z: z * math.nan]}, NotFiniteError, "logits processors"),
        ({"logits_processor": [lambda ids, z: z[:, 1:]]}, ShapeError, "(3, 97)"),
    ],
)
def test_bad_options(options, error, fragment):
    with pytest.raises(error) as caught:
        generate(tiny("llama"), PROMPTS, **{"max_new_tokens": 2, "do_sample": False, **options})
    assert fragment in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("dtype", "length"), [(torch.int8, 130), (torch.uint8, 4), (torch.uint64, 4)], ids=str)
def test_seeds_of_every_integer_dtype_are_those_of_int64(dtype, length):
    """Positions past 127, which int8 cannot hold, are counted, too."""
    model = tiny("llama", eos_token_id=None, max_position_embeddings=512, num_hidden_layers=1)
    seeds = torch.tensor([3, 1, 127])
    options = {"do_sample": True, "max_new_tokens": length, "keep": 0}
    wide = generate(model, PROMPTS, seeds=seeds, **options).ids
    assert torch.equal(generate(model, PROMPTS, seeds=seeds.to(dtype), **options).ids, wide)


def test_bad_prompts():
    empty = {**PROMPTS, "attention_mask": PROMPTS["attention_mask"] * torch.tensor([[1], [1], [0]])}
    with pytest.raises(ShapeError, match="at least one token"):
        generate(tiny("llama"), empty)
    with pytest.raises(ShapeError, match="less than 64 tokens, the context of LlamaForCausalLM, got 65"):
        generate(tiny("llama"), {"input_ids": torch.ones(1, 65, dtype=torch.long)}, max_new_tokens=1)
    with pytest.raises(ShapeError, match="at least one token"):
        generate(tiny("llama"), {"input_ids": torch.zeros(1, 0, dtype=torch.long)})
    with pytest.raises(ShapeError, match=r"expected input_ids \(B, P\), got shape \(3,\); pass input_ids\[None\]"):
        generate(tiny("llama"), {"input_ids": torch.ones(3, dtype=torch.long)})


def test_a_prompt_that_could_grow_past_the_context():
    """Positions count from a prompt's first token: padding takes none."""
    model, ids = tiny("gpt2", eos_token_id=None), torch.ones(2, 70, dtype=torch.long)
    mask = torch.ones_like(ids)
    mask[0, :30], mask[1, :8] = 0, 0  # 40 and 62 tokens
    prompts = {"input_ids": ids, "attention_mask": mask}
    assert generate(model, prompts, max_new_tokens=2, do_sample=False).record.shape == (2, 2)
    expected = "62 prompt tokens and 3 new ones go past the context of GPT2LMHeadModel, 64 tokens; .* at most 2"
    with pytest.raises(ShapeError, match=expected):
        generate(model, prompts, max_new_tokens=3, do_sample=False)
    with pytest.raises(ShapeError, match=expected):
        model.generate(**prompts, max_new_tokens=3, do_sample=False, custom_generate=Recorder())
    with pytest.raises(ShapeError, match="and 17 new ones"):
        generate(model, {"input_ids": ids[:, :60]}, max_length=77, do_sample=False)
    with pytest.warns(UserWarning, match="default `max_length`"):  # 20 more, but for its end
        assert generate(model, {"input_ids": ids[:, :60]}, do_sample=False).ids.shape[1] == 64


@pytest.mark.parametrize("kind", ["linear", "dynamic", "yarn"])
def test_stretched_positions_are_a_longer_context(kind):
    """Scaled rotary embeddings reach past max_position_embeddings: as far as `reach` says, and as transformers goes."""
    config = t.LlamaConfig(**{**SMALL, "eos_token_id": None})
    scale(config, f"{kind}:4")
    config.max_position_embeddings = 64  # yarn as older checkpoints write it
    torch.manual_seed(0)
    model = t.AutoModelForCausalLM.from_config(config).eval()
    prompt = {"input_ids": torch.arange(1, 6)[None]}
    made = generate(model, prompt, max_new_tokens=100, do_sample=False)
    assert made.record.shape == (1, 100)
    assert torch.equal(made.ids, model.generate(**prompt, max_new_tokens=100, do_sample=False))
    expected = "^generate: 5 prompt tokens and 252 new ones .* 256 tokens; .* at most 251, .*$"
    with pytest.raises(ShapeError, match=expected):
        generate(model, prompt, max_new_tokens=252, do_sample=False)


def test_a_model_without_hidden_states():
    class Opaque(t.LlamaForCausalLM):
        """One that multiplies by its head's weight, past the head."""

        def forward(self, input_ids=None, attention_mask=None, **kwargs):
            hidden = self.model(input_ids, attention_mask, **kwargs)[0]
            return t.modeling_outputs.CausalLMOutputWithPast(logits=hidden @ self.lm_head.weight.T)

    model = Opaque(t.LlamaConfig(**SMALL)).eval()
    with pytest.raises(ConfigError, match="calls its output head 'lm_head' in forward, it never did"):
        generate(model, PROMPTS, max_new_tokens=2, do_sample=False)
    with pytest.raises(ConfigError, match="transformers model, got Linear"):
        generate(torch.nn.Linear(2, 2), PROMPTS)


def test_what_moved_in_transformers_is_named(monkeypatch):
    model = tiny("llama")
    monkeypatch.setattr(type(model), "_prefill", lambda self, ids, config: None)
    monkeypatch.setattr(t.GenerationMixin, "_update_model_kwargs_for_generation", None)
    with pytest.raises(ConfigError) as caught:
        generate(model, PROMPTS, max_new_tokens=2, do_sample=False)
    assert "GenerationMixin._prefill takes (ids, config), expected (input_ids, " in str(caught.value)
    assert "_update_model_kwargs_for_generation is gone; install 'transformers>=5.6,<6' or a " in str(caught.value)


@pytest.mark.parametrize("name", METHODS)
def test_transformers_own_methods_are_as_they_were(name):
    """Fails with a release that changes what the loop is made of, before users do."""
    more = {  # as of transformers 5.24
        "_prefill": ("is_first_iteration",),
        "_update_model_kwargs_for_generation": ("is_encoder_decoder", "num_new_tokens"),
    }
    parameters = list(inspect.signature(getattr(t.GenerationMixin, name)).parameters)
    assert tuple(parameters) == ("self", *METHODS[name], *more.get(name, ()))


def test_public_name():
    assert ll.generate is generate
