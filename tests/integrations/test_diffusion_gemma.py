"""DiffusionGemma's denoising without logits against its own, of a tiny model with random weights."""

import copy
from unittest.mock import patch

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from torch import nn
from transformers import DiffusionGemmaConfig, DiffusionGemmaForBlockDiffusion, DiffusionGemmaTextConfig
from transformers.models.diffusion_gemma.generation_diffusion_gemma import StableAndConfidentStoppingCriteria

from logitless.errors import ConfigError
from logitless.integrations import diffusion_gemma as ours
from logitless.relax import Noise
from tests.support.allocations import largest_allocation

V, T = 1500, 12


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    text = DiffusionGemmaTextConfig(
        vocab_size=V, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, global_head_dim=8, sliding_window=8, num_experts=2, top_k_experts=1,
        moe_intermediate_size=16, layer_types=["sliding_attention", "full_attention"],
    )  # fmt: skip
    made = DiffusionGemmaForBlockDiffusion(DiffusionGemmaConfig(text_config=text, canvas_length=T)).eval()
    nn.init.normal_(made.lm_head.weight, std=1.5)  # sure enough that some tokens are accepted
    for name, x in made.model.decoder.self_conditioning.named_parameters():
        if "norm" not in name:
            nn.init.normal_(x, std=0.5)  # so that what is fed back counts
    return made


def keyed(probs, num_samples, **_):
    """`torch.multinomial` with the noise that the adapter takes."""
    noise = Noise.draw((probs.shape[0],), probs.device)
    return (probs.log() + noise.gumbel(slice(0, probs.shape[1]))).argmax(-1, keepdim=True)


def generated(model, **options):
    torch.manual_seed(3)
    prompt = torch.tensor([[5, 9, 11, 4], [8, 2, 77, 31]])
    arguments = {"max_new_tokens": 2 * T, "max_denoising_steps": 4, "do_sample": True, "eos_token_id": None} | options
    return model.generate(prompt, **arguments).sequences


OPTIONS = [
    {},
    {"t_min": 0.4, "t_max": 0.8},
    {"t_min": 0.2, "t_max": 0.3, "stability_threshold": 1, "confidence_threshold": 4.0},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_tokens_are_its_own(model, options):
    with patch.object(torch, "multinomial", keyed):
        expected = generated(model, **options)
    ours.install(model, memory_budget=100_000)
    try:
        found = generated(model, **options)
    finally:
        ours.uninstall(model)
    assert torch.equal(found, expected)
    assert "_denoising_step" not in vars(model)


def test_a_static_cache(model):
    """Twice: transformers keeps the compiled methods of its first sampler, whose mask is not the next one's."""
    own = copy.deepcopy(model)
    with patch.object(torch, "multinomial", keyed):
        expected = generated(own, cache_implementation="static", disable_compile=True)
    ours.install(own)
    with patch.object(torch, "compile", lambda function, **_: function):
        for _ in range(2):
            assert torch.equal(generated(own, cache_implementation="static"), expected)
    assert hasattr(own, "_compiled_renoise_canvas")


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")
def test_adapters_on_the_head_count(model):
    adapted = copy.deepcopy(model)
    inject_adapter_in_model(LoraConfig(r=2, target_modules=["lm_head"], init_lora_weights=False), adapted)
    nn.init.normal_(adapted.lm_head.lora_B["default"].weight)
    with patch.object(torch, "multinomial", keyed):
        expected = generated(adapted)
    ours.install(adapted)
    assert torch.equal(generated(adapted), expected)
    assert not torch.equal(generated(model), expected)


def test_every_part_counts(model):
    """The tokens are others where the mean embedding, the entropy or the temperature is."""
    options, accept, plain = OPTIONS[1], ours.accept, ours.MeanEmbedding.plain
    ours.install(model)
    try:
        right = generated(model, **options)
        wrongs = {
            "MeanEmbedding.plain": lambda self: 0 * plain(self),
            "accept": lambda sampler, canvas, drawn, entropy: accept(sampler, canvas, drawn, -entropy),
            "temperature_of": lambda processors, cur_step: 1.0,
        }
        for name, wrong in wrongs.items():
            with patch(f"{ours.__name__}.{name}", wrong):
                assert not torch.equal(generated(model, **options), right), name
    finally:
        ours.uninstall(model)


@pytest.mark.parametrize(("stability", "done_at"), [(0, range(8)), (1, [1, 3, 4, 5, 6]), (3, [5, 6])])
def test_a_canvas_is_done_where_transformers_has_it_done(stability, done_at):
    """Three sequences, unsure, sure, and unsure of a third of their tokens, that change at some steps."""
    spread = torch.tensor([1.0, 8.0, 8.0])[:, None, None].repeat(1, T, 1)
    spread[2, : T // 3] = 0.0
    canvases = torch.randn(3, 3, T, 31) * spread
    found, theirs = (StableAndConfidentStoppingCriteria(stability, confidence_threshold=2.0) for _ in range(2))
    for step, canvas in enumerate((0, 0, 1, 1, 1, 1, 1, 2)):
        z = canvases[canvas]
        entropy = torch.distributions.Categorical(logits=z).entropy()
        done = ours.stops(found, z.argmax(-1), entropy)
        assert torch.equal(done, theirs(z.argmax(-1), z))
        assert done.tolist() == [False, step in done_at, step in done_at]


def test_nothing_of_the_size_of_logits_is_made(model):
    budget, logits = 40_000, 2 * T * V * 4
    dense = largest_allocation(lambda: generated(model))
    ours.install(model, memory_budget=budget)
    try:
        streamed = largest_allocation(lambda: generated(model))
    finally:
        ours.uninstall(model)
    assert dense >= logits
    assert streamed < logits / 4


class Drafts:
    def __init__(self, takes_logits):
        self._takes_logits, self.seen = takes_logits, []

    def put(self, value):
        self.seen.append(value)

    put_draft, end = put, lambda self: None


def test_a_streamer_of_drafts(model):
    ours.install(model)
    try:
        streamer = Drafts(False)
        generated(model, streamer=streamer)
        assert len(streamer.seen) == 1 + 2 * (4 + 1)
        with pytest.raises(ConfigError, match="streamer: expected one that takes token ids, got one that takes logits"):
            generated(model, streamer=Drafts(True))
    finally:
        ours.uninstall(model)


def test_refusals(model):
    with pytest.raises(ConfigError, match="expected transformers' DiffusionGemmaForBlockDiffusion, got Linear"):
        ours.install(nn.Linear(2, 2))
    ours.install(model)
    try:
        with pytest.raises(ConfigError, match="logits_processor: expected LinearTemperatureSchedule"):
            generated(model, logits_processor=[lambda input_ids, scores, cur_step: scores])
    finally:
        ours.uninstall(model)
    with pytest.raises(ConfigError, match="asks log_softmax of self-conditioning logits"):
        ours.MeanEmbedding.of(torch.zeros(1, 2, 3)).log_softmax(-1)
