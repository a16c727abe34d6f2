"""What every model of the installed transformers does to its logits: read by `LMHead.of`, or refused."""

import inspect
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import logitless as ll
from logitless.errors import ConfigError
from logitless.vocab.head.from_model import (
    APPLIES_TEXT,
    DIVIDES,
    LEAVES_OUT,
    MULTIPLIES,
    REFUSED,
    SOFTCAPS,
    TRIMS,
)
from tests.support.vocab.heads import assert_same, refused

transformers = pytest.importorskip("transformers")
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES  # noqa: E402
from transformers.models.auto.modeling_auto import (  # noqa: E402
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

KINDS = {
    model_type: kind if isinstance(kind, str) else kind[0]
    for names in (MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    for model_type, kind in names.items()
}
KNOWN = {*MULTIPLIES, *DIVIDES, *SOFTCAPS}
NOT_OF_THE_HEAD = re.compile(r"init_value|^max_|^attn_|^attention_|^conf_|router|hidden_output|capab|mup_width")
LOOKS_LIKE_A_TRANSFORM = re.compile(r"^    (\w*(?:logit|lm_head|output)\w*_?(?:scal|mult|cap|mup)\w*)\s*[:=]", re.M)
SOURCES = Path(inspect.getfile(transformers)).parent / "models"
# Models whose default configuration does not build or run without what is not here (timm, a vision tower's sizes).
NOT_RUN = """
    aya_vision bart bigbird_pegasus blenderbot blenderbot-small blip-2 chameleon cohere_compass
    cohere_compass_text dbrx deepseek_ocr2 diffusion_gemma dots1 dots3_note emu3 fast_vlm gemma3n
    gemma4_assistant gemma4_unified_assistant granite4_vision hunyuan_v1_dense hunyuan_v1_moe hunyuan_vl
    instructblip instructblipvideo kosmos-2 kosmos-2.5 lfm2_moe llama4 llama4_text marian mbart ministral mllama
    musicgen musicgen_melody mvp nemotron pegasus perception_lm plbart prophetnet qwen3_5 qwen3_5_moe qwen4_exp
    reformer
"""
WITH_TRANSFORMS = """
    beam cohere cohere2 cohere2_moe cohere2_vision falcon_h1 gemma2 gemma3 gemma3_text gemma3n_text gemma4
    gemma4_text gemma4_unified gemma4_unified_text granite granite_docling granite_swa granitemoe granitemoe_swa
    granitemoehybrid granitemoeshared hyperclovax hyperclovax_vision_v2 inkling2 inkling2_loop inkling2_loop_text
    inkling2_text inkling_mm_model inkling_text minicpm3 mistral_large4 mpt muse_glimmer muse_spark nanochat paligemma
    recurrent_gemma vaultgemma xlstm
"""


def test_every_option_that_looks_like_a_transform_is_known():
    """A new one in a new transformers fails here, with its name."""
    found = {
        name
        for path in SOURCES.glob("*/configuration_*.py")
        for name in LOOKS_LIKE_A_TRANSFORM.findall(path.read_text())
        if not NOT_OF_THE_HEAD.search(name)
    }
    assert found - KNOWN == set()
    assert len(found & KNOWN) >= 7


def texts_of(config):
    """A configuration and all within it."""
    inner = (getattr(config, name) for name in getattr(config, "sub_configs", {}))
    return [config, *(x for y in inner if y is not None for x in texts_of(y))]


def configured(name: str, few_layers: bool):
    """The default configuration with every transform that it has away from neutral."""
    config = getattr(transformers, name)()
    for part in texts_of(config):
        for option in ("num_hidden_layers", "n_layer", "n_layers", "num_layers"):
            if few_layers and isinstance(getattr(part, option, None), int):
                setattr(part, option, 2)
        for option in KNOWN:
            if hasattr(part, option) and not isinstance(getattr(type(part), option, None), property):
                setattr(part, option, 2.5)
        if hasattr(part, TRIMS):
            setattr(part, TRIMS, 1000)
    return config


class Output(SimpleNamespace):
    """A body's output that has whatever a model looks for."""

    def __getattr__(self, name):
        return None

    def __getitem__(self, index):
        return self.last_hidden_state if index == 0 else ()

    def __len__(self):
        return 1


class Probe(nn.Module):
    """Stands in for a head: whatever the hidden states, the same raw logits."""

    def __init__(self, raw: torch.Tensor, weight: torch.Tensor) -> None:
        super().__init__()
        self.raw, self.weight = raw, weight  # some models ask for its dtype

    def forward(self, hidden):
        return self.raw.clone()


def done_to_logits(model: nn.Module, raw: torch.Tensor) -> torch.Tensor:
    """What the model's own forward makes of its head's output; its body does not run, and nothing is real."""
    linear = model.get_output_embeddings()
    width = getattr(model.config.get_text_config(), "hidden_size", linear.in_features)
    hidden = torch.empty(1, 3, width, device="meta")
    model.base_model.forward = lambda *args, **kwargs: Output(last_hidden_state=hidden)
    owner, name = next((m, n) for m in model.modules() for n, child in m.named_children() if child is linear)
    setattr(owner, name, Probe(raw, linear.weight))
    return model(input_ids=torch.zeros(1, 3, dtype=torch.long, device="meta")).logits


def built(kind: str, config: str) -> nn.Module:
    with torch.device("meta"):
        try:
            return getattr(transformers, kind)(configured(config, few_layers=True)).eval()
        except (IndexError, KeyError, TypeError, ValueError):  # a list with an entry for every layer
            return getattr(transformers, kind)(configured(config, few_layers=False)).eval()


def check(model: nn.Module) -> None:
    head = ll.LMHead.of(model)
    raw = torch.randn(1, 3, head.weight.shape[0]) * 3
    z = head.scale * raw[..., : head.vocab_size].double()
    z = z if head.softcap is None else head.softcap * torch.tanh(z / head.softcap)
    with torch.no_grad():
        assert_same(done_to_logits(model, raw).double(), z, 1e-5)


@pytest.mark.parametrize("model_type", WITH_TRANSFORMS.split())
def test_transforms_are_the_models_own(model_type):
    check(built(KINDS[model_type], CONFIG_MAPPING_NAMES[model_type]))


@pytest.mark.parametrize(
    "model_type", ["cohere", "cohere2_moe", "falcon_h1", "gemma2", "granite", "inkling2", "mistral_large4"]
)
def test_numbers_that_have_changed_since_the_model_was_made(model_type):
    """Some models read them from their configuration in each forward, others have kept what it said."""
    model = built(KINDS[model_type], CONFIG_MAPPING_NAMES[model_type])
    for part in texts_of(model.config):
        for option in KNOWN & vars(part).keys():
            setattr(part, option, 1.7)
    check(model)


def test_a_scale_that_is_set_on_the_model():
    model = built("CohereForCausalLM", "CohereConfig")
    model.logit_scale = 0.3
    assert ll.LMHead.of(model).scale == 0.3
    check(model)


@pytest.mark.slow
@pytest.mark.parametrize("model_type", sorted({*KINDS} - {*WITH_TRANSFORMS.split(), *NOT_RUN.split()}))
def test_every_other_model_leaves_its_logits_alone_or_is_refused(model_type):
    try:
        check(built(KINDS[model_type], CONFIG_MAPPING_NAMES[model_type]))
    except ConfigError as error:
        assert str(error).startswith("LMHead.of: ")  # noqa: PT017


@pytest.mark.parametrize("kind", sorted(REFUSED))
def test_models_that_do_more_are_refused(kind):
    config = SimpleNamespace(model_type=kind)
    model = nn.Module()
    model.config, model.get_output_embeddings = config, lambda: nn.Linear(4, 9)
    refused(model, "LMHead.of: Module", REFUSED[kind])


def test_what_a_model_does_is_said_before_what_its_layer_is():
    """Dory's head is a layer of its own, with a scale for each entry."""
    refused(built("DoryForCausalLM", "DoryConfig"), "LMHead.of: DoryForCausalLM scales each entry's logit")


@pytest.mark.parametrize("kind", ["Deberta", "DebertaV2"])
def test_a_head_that_is_no_layer(kind):
    """What DeBERTa calls its output embeddings then comes before the product with the vocabulary."""
    config = getattr(transformers, f"{kind}Config")(num_hidden_layers=1, legacy=False)
    with torch.device("meta"):
        model = getattr(transformers, f"{kind}ForMaskedLM")(config)
    refused(model, f"{kind}ForMaskedLM multiplies with its word embedding", "pass LMHead(word_embeddings.weight, bias)")


def test_a_composite_model_of_unknown_habits_is_refused():
    """Around a text model that scales: what the outer forward does is anybody's guess."""
    text = SimpleNamespace(model_type="cohere", logit_scale=0.3)
    model = nn.Module()
    model.config = SimpleNamespace(model_type="own", get_text_config=lambda: text)
    model.get_output_embeddings = lambda: nn.Linear(4, 9)
    refused(model, "text model with scale 0.3", "not known", "pass LMHead(weight, bias, scale")
    text.logit_scale = 1.0
    assert ll.LMHead.of(model).scale == 1.0


def test_the_tables_name_models_that_exist():
    assert {*LEAVES_OUT, *APPLIES_TEXT, *REFUSED} <= set(CONFIG_MAPPING_NAMES)
