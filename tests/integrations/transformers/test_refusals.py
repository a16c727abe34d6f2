"""What `install` refuses, in one line, leaving the model as it was."""

import accelerate
import peft
import pytest
import torch
import transformers
from torch import nn

import logitless
from logitless.errors import ConfigError, OptionError
from logitless.integrations.transformers.lm_head import forward_with, through_head
from logitless.integrations.transformers.scoring import head_inputs
from tests.support.allocations import trace_allocations
from tests.support.integrations.tiny import TINY, batch_for, halved

CHANGES = "changes its logits otherwise than by scale 1"


def tiny():
    return TINY["qwen3-tied"].build()


def logprobs(model, batch):
    def end(inner, hidden):
        return through_head(
            inner, lambda head, h, y: logitless.token_stats(h, head, y).logprob, hidden, batch["labels"]
        )

    return forward_with(model, batch, end)


def refused(kind, config, **changes):
    shape = {"vocab_size": 97, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, **changes}
    return kind(config(**shape, num_attention_heads=2, num_key_value_heads=1, pad_token_id=0))


def xlm():
    return transformers.XLMWithLMHeadModel(transformers.XLMConfig(vocab_size=97, emb_dim=16, n_layers=1, n_heads=2))


def t5():
    return transformers.T5ForConditionalGeneration(
        transformers.T5Config(vocab_size=97, d_model=16, d_kv=8, d_ff=24, num_layers=1, num_heads=2, pad_token_id=0)
    )


def bamba():
    mamba = {"mamba_n_heads": 2, "mamba_d_state": 8, "mamba_chunk_size": 8, "attn_layer_indices": [0]}
    return refused(transformers.BambaForCausalLM, transformers.BambaConfig, z_loss_coefficient=1e-4, **mamba)


def instruct_blip():
    """Whose text model is an encoder-decoder, where its own configuration says nothing of it."""
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.InstructBlipConfig(
        vision_config={**sizes, "image_size": 28, "patch_size": 14},
        qformer_config={**sizes, "vocab_size": 97},
        text_config=t5().config,
    )
    return transformers.InstructBlipForConditionalGeneration(config)


def with_other_loss():
    model = tiny()
    model.loss_function = nn.functional.cross_entropy
    return model


def with_a_hook():
    model = tiny()
    model.lm_head.register_forward_hook(lambda module, args, logits: 2 * logits)
    return model


class OwnLoss(transformers.Qwen3ForCausalLM):
    def forward(self, input_ids, labels=None):
        return self.lm_head(self.model(input_ids).last_hidden_state).logsumexp(-1).mean()


def with_own_loss():
    return OwnLoss(tiny().config)


def with_a_prompt_that_weighs_its_loss():
    config = peft.CPTConfig(cpt_token_ids=[9, 10], cpt_mask=[1, 1], cpt_tokens_type_mask=[1, 4], task_type="CAUSAL_LM")
    return peft.get_peft_model(tiny(), config)


REFUSED = {
    "no model": (lambda: "qwen", "expected a transformers model, got str"),
    "no transformers": (lambda: nn.Linear(3, 4), "got Linear without get_output_embeddings"),
    "no head": (lambda: transformers.Qwen3Model(tiny().config), "Qwen3Model has no output head"),
    "classification": (
        lambda: refused(transformers.LlamaForSequenceClassification, transformers.LlamaConfig, num_labels=3),
        "LlamaForSequenceClassification has no output head",
    ),
    "a loss in its head": (xlm, "XLMWithLMHeadModel"),
    "encoder-decoder": (t5, "T5ForConditionalGeneration is an encoder-decoder"),
    "an encoder-decoder within": (instruct_blip, "InstructBlipForConditionalGeneration is an encoder-decoder"),
    "a loss of its logits beside": (bamba, "BambaForCausalLM adds a z-loss of its logits"),
    "another loss": (with_other_loss, "loss is cross_entropy, expected transformers' ForCausalLMLoss"),
    "a hook that doubles the logits": (with_a_hook, "the output head has a forward hook of tests"),
    "a loss of PEFT's": (with_a_prompt_that_weighs_its_loss, "PEFT's CPT weighs a loss of its own from the logits"),
    "a loss of its own": (with_own_loss, "OwnLoss computes its loss by itself"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_and_left_as_it_was(name):
    make, message = REFUSED[name]
    model = make()
    before = dict(getattr(model, "__dict__", {}))
    with pytest.raises(ConfigError, match=message) as caught:
        logitless.install(model)
    assert "\n" not in str(caught.value)
    assert getattr(model, "__dict__", {}) == before


@pytest.mark.parametrize(
    "options",
    [{"loss": "streamed"}, {"memory_budget": 0}, {"label_smoothing": 2}, {"loss": "dense", "label_smoothing": 0.1}],
)
def test_bad_options(options):
    model = tiny()
    with pytest.raises(OptionError, match=next(reversed(options))):
        logitless.install(model, **options)
    assert "forward" not in model.__dict__


def test_a_transform_that_nobody_told_us_of():
    """Found at the first call, before a step is trained on the wrong loss."""

    class Shifted(transformers.Qwen3ForCausalLM):
        def forward(self, input_ids, labels=None, **kwargs):
            hidden = self.model(input_ids).last_hidden_state
            logits = 0.5 * self.lm_head(hidden)
            loss = None if labels is None else self.loss_function(logits, labels, self.vocab_size)
            return transformers.modeling_outputs.CausalLMOutputWithPast(loss=loss, logits=logits)

    model, batch = Shifted(tiny().config), batch_for("")
    logitless.install(model)
    with pytest.raises(ConfigError, match=f"Shifted {CHANGES}"):
        model(batch["input_ids"], labels=batch["labels"])

    for _ in range(2):
        with pytest.raises(ConfigError, match=f"Shifted {CHANGES}"):
            logprobs(model, batch)
    assert logitless.hidden_states(model, batch).shape == (2, 12, 16)  # for a head of one's own


def test_a_model_to_compare_with_is_looked_at_too():
    batch, at = batch_for(""), (torch.tensor([0, 1]), torch.tensor([3, 4]))
    with pytest.raises(ConfigError, match=f"Qwen3ForCausalLM {CHANGES}"):
        head_inputs(halved(tiny()), batch, at)
    assert head_inputs(tiny(), batch, at)[0].shape == (2, 16)


@pytest.mark.parametrize("name", ["qwen3-tied", "qwen3-moe"])  # with a loss of its experts before its logits
def test_a_call_for_a_tuple_is_looked_at_too(name):
    batch = batch_for(name) | {"return_dict": False}
    with pytest.raises(ConfigError, match=CHANGES):
        logprobs(halved(TINY[name].build()), batch)
    expected = logprobs(TINY[name].build(), batch_for(name))
    torch.testing.assert_close(logprobs(TINY[name].build(), batch), expected)


def test_a_configuration_for_tuples_is_looked_at_too():
    model, batch = halved(TINY["gemma3-vision"].build()), batch_for("gemma3-vision")
    model.config.return_dict = False
    with pytest.raises(ConfigError, match=CHANGES):
        logprobs(model, batch)


def test_a_transform_that_only_the_configuration_has_changed():
    """What was found once holds for the head as it was."""

    class Kept(transformers.Qwen3ForCausalLM):
        def forward(self, *args, **kwargs):
            output = super().forward(*args, **kwargs)
            output.logits = 0.5 * output.logits
            return output

    batch, config = batch_for(""), tiny().config
    config.logits_scaling = 2.0
    model = Kept(config)
    assert logprobs(model, batch).shape == (2, 12)
    model.config.logits_scaling = 1.0
    with pytest.raises(ConfigError, match=f"Kept {CHANGES}"):
        logprobs(model, batch)


def test_hidden_states_for_a_head_of_ones_own_make_no_logits():
    model, batch = halved(TINY["llama"].build(vocab=100_000)), {"input_ids": torch.ones(1, 2, dtype=torch.long)}
    with torch.no_grad():
        assert trace_allocations(lambda: logitless.hidden_states(model, batch)).largest < 4 * 100_000


def test_a_loss_function_that_is_not_called():
    """The sum of logits that are not there is 0: a loss without a word."""

    class Summed(transformers.Qwen3ForCausalLM):
        def forward(self, input_ids, labels=None, **kwargs):
            logits = self.lm_head(self.model(input_ids).last_hidden_state)
            loss = self.loss_function(logits, labels, self.vocab_size) if self.training else logits.sum()
            return transformers.modeling_outputs.CausalLMOutputWithPast(loss=loss, logits=logits)

    model, batch = Summed(tiny().config).train(), batch_for("")
    logitless.install(model)
    assert model(batch["input_ids"], labels=batch["labels"]).loss > 0
    with pytest.raises(ConfigError, match="Summed returned a loss without a call of its loss function"):
        model.eval()(batch["input_ids"], labels=batch["labels"])


def test_a_hook_that_comes_after_install():
    model, batch = tiny(), batch_for("")
    logitless.install(model)
    handle = model.lm_head.register_forward_pre_hook(lambda module, args: (2 * args[0],))
    with pytest.raises(ConfigError, match="the output head has a forward pre-hook of tests"):
        model(**batch)
    handle.remove()
    assert model(**batch).logits is None


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("first", ["install", "offload"])
def test_an_offloaded_head(first):
    """accelerate brings its weight for the head's own product only."""
    model, batch = tiny(), batch_for("")
    steps = {
        "install": lambda: logitless.install(model),
        "offload": lambda: accelerate.cpu_offload(model, execution_device=torch.device("cpu")),
    }
    for name in (first, *(steps.keys() - {first})):
        steps[name]()
    with pytest.raises(ConfigError, match=r"weight is offloaded \(on meta\), expected it on cpu; leave the head out"):
        model(**batch)
