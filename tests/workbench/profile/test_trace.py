"""`trace` on models of one's own: storages counted once, stages, labels, real and fake alike."""

import json
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import (
    ModernBertDecoderConfig,
    ModernBertDecoderForCausalLM,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
)

import logitless as ll
from logitless.errors import ConfigError, OptionError
from logitless.memory import trace
from logitless.workbench.profile.labels import short
from logitless.workbench.profile.recording import CATEGORIES, FEW, POINTS
from logitless.workbench.profile.storages import BLOCK, Tracker, tensors_of
from logitless.workbench.profile.trace import landmarks
from tests.support.allocations import peak_new_bytes
from tests.support.workbench.micro import SHAPE, micro_model

# Fake tensors hold nothing to poison.
pytestmark = pytest.mark.compiled

WIDTH, LAYERS, TOKENS = 64, 3, 256  # every tensor of the model is a multiple of 512 bytes


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


class Model(nn.Module):
    def __init__(self, checkpointing: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(128, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.checkpointing = checkpointing

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.checkpointing else layer(x)
        return x


def meta(kind=Model, **options):
    with torch.device("meta"):
        return kind(**options)


def one_step(model, device, optimizer=True):
    made = torch.optim.AdamW(model.parameters(), fused=True) if optimizer else None
    loss = model(torch.zeros(TOKENS, dtype=torch.long, device=device)).square().sum()
    loss.backward()
    if made:
        made.step()


def traced(model, **options):
    with trace(model, **options) as t:
        one_step(model, t.device)
    return t


STAGES = ["parameters", "after embedding", "after first layer", "after full forward", "loss", "backward", "optimizer"]


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("device", ["gpu", "cpu"])
def test_fake_and_real_agree_to_the_byte(checkpointing, device):
    real = traced(Model(checkpointing)).recording
    fake = traced(meta(checkpointing=checkpointing), device=device).recording
    assert [s.name for s in real.stages] == [s.name for s in fake.stages] == STAGES
    assert [(s.nbytes, s.peak) for s in fake.stages] == [(s.nbytes, s.peak) for s in real.stages]
    assert fake.categories(fake.peak.event) == real.categories(real.peak.event)


def test_a_peak_against_an_independent_count():
    model = Model()
    ids = torch.zeros(TOKENS, dtype=torch.long)

    def work():
        model(ids).square().sum().backward()

    expected = peak_new_bytes(work)
    model.zero_grad(set_to_none=True)
    with trace(model) as t:
        work()
    before = sum(p.nbytes for p in model.parameters()) + ids.nbytes
    assert abs(t.peak.nbytes - before - expected) <= 4 * BLOCK  # scalars are counted as a block


@pytest.mark.parametrize("around", ["", "base_model.model.", "module.", "_orig_mod.", "module._orig_mod."])
@pytest.mark.parametrize("outside", ["", "_orig_mod.module."])
def test_names_are_without_what_is_around_the_model(outside, around):
    """A DDP of a compiled model, or a compiled DDP, as of PEFT's."""
    assert short(f"{outside}{around}model.layers.0") == "model.layers.0"
    assert short(f"{outside}{around}".removesuffix(".")) == ""
    assert short("base_model") == ""


def test_what_is_counted_by_hand():
    t = traced(Model(), device="cpu")
    parameters = 128 * WIDTH * 4 + LAYERS * 8 * WIDTH * WIDTH * 4
    row = TOKENS * WIDTH * 4
    by_name = {s.name: s for s in t.recording.stages}
    assert by_name["parameters"].nbytes == parameters
    assert by_name["after embedding"].nbytes == parameters + TOKENS * 8 + row
    # a layer keeps its input, which is counted already, the relu's output, and its own output
    assert by_name["after first layer"].nbytes - by_name["after embedding"].nbytes == 4 * row + row
    assert by_name["optimizer"].nbytes >= 4 * parameters
    assert t.recording.categories(by_name["optimizer"].end)["gradients"] == parameters
    state = t.recording.categories(by_name["optimizer"].end)["optimizer state"]
    assert state == 2 * parameters + len(list(t.model.parameters())) * BLOCK


def test_checkpointing_saves_what_layers_keep():
    plain, recomputed = (traced(meta(checkpointing=c)) for c in (False, True))
    row = TOKENS * WIDTH * 4
    kept = {
        t: next(s.nbytes for s in t.recording.stages if s.name == "after full forward") for t in (plain, recomputed)
    }
    assert kept[plain] - kept[recomputed] == LAYERS * 4 * row
    assert recomputed.peak.nbytes < plain.peak.nbytes


@pytest.mark.parametrize("checkpointing", [False, True])
def test_memory_is_labelled_by_module_forward_and_backward(checkpointing):
    found = traced(meta(checkpointing=checkpointing)).recording.allocations
    wide = [a for a in found if a.shape == (TOKENS, 4 * WIDTH)]
    modules = {(a.module, a.category) for a in wide}
    for i in range(LAYERS):
        assert (f"layers.{i}.up", "activations") in modules
        assert (f"layers.{i}.down", "activation gradients") in modules
    assert {a.category for a in found} <= set(CATEGORIES)
    assert any(a.category == "gradients" and a.module == "layers.1.up.weight" for a in found)
    assert {a.module for a in found if a.category.startswith("optimizer")} == {"optimizer"}
    again = [a for a in wide if a.module == "layers.0.up" and a.category == "activations"]
    assert len(again) == (2 if checkpointing else 1)  # computed twice


def test_the_peak_names_operator_and_module():
    class Bump(Model):
        def forward(self, ids):
            x = super().forward(ids)
            return x + torch.cat([x] * 64).sum()

    t = traced(meta(Bump))
    assert (t.peak.op, t.peak.module) == ("cat", "model")
    assert t.recording.alive(t.peak.event)[0].shape == (64 * TOKENS, WIDTH)
    assert sum(t.recording.categories(t.peak.event).values()) == t.peak.nbytes == max(t.recording.curve)


@pytest.mark.parametrize("layers", [1, LAYERS])
def test_a_layers_experts_are_no_layers(layers):
    class Experts(Layer):
        def __init__(self) -> None:
            super().__init__()
            self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS + 1))

        def forward(self, x):
            return super().forward(x) + sum(expert(x) for expert in self.experts)

    class Mixture(Model):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Experts() for _ in range(layers))

    model = meta(Mixture)
    assert landmarks(model) == ("embed", "layers.0", "")
    assert [s.name for s in traced(model).recording.stages] == STAGES


def test_layers_are_those_of_the_decoder():
    """Of which this model has fewer than blocks of its eyes."""
    text = {**SHAPE, "rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3]}}
    eyes = {"depth": 3, "embed_dim": 32, "hidden_size": 32, "num_heads": 2}
    with torch.device("meta"):
        model = Qwen2VLForConditionalGeneration(Qwen2VLConfig(text_config=text, vision_config=eyes))
    within = "model.language_model"
    assert landmarks(model) == (f"{within}.embed_tokens", f"{within}.layers.0", within)
    assert landmarks(micro_model()) == ("model.embed_tokens", "model.layers.0", "model")


def test_layers_are_found_where_the_decoder_is_none_of_them():
    """It is what transformers finds by the name `decoder`: of ModernBERT's the head."""
    sizes = {**SHAPE, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2}
    with torch.device("meta"):
        model = ModernBertDecoderForCausalLM(ModernBertDecoderConfig(**sizes))
    assert isinstance(model.get_decoder(), nn.Linear)
    assert landmarks(model) == ("model.embeddings.tok_embeddings", "model.layers.0", "model")

    class Without(Model):
        def get_decoder(self):
            return None

    assert landmarks(meta(Without)) == ("embed", "layers.0", "")


@pytest.mark.parametrize("embeds", [True, False])
def test_a_list_of_the_body_is_no_list_of_layers(embeds):
    class Tower(Model):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(WIDTH)
            if not embeds:
                del self.embed

    class Towers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.towers = nn.ModuleList([Tower()])
            self.head = nn.Linear(WIDTH, 128)

    assert landmarks(meta(Towers)) == ("towers.0.embed" if embeds else None, "towers.0.layers.0", "towers.0")


def test_several_steps_repeat_their_stages():
    model = Model()
    with trace(model) as t:
        for _ in range(2):
            one_step(model, t.device, optimizer=False)
            model.zero_grad(set_to_none=True)
    names = [s.name for s in t.recording.stages]
    assert names == [STAGES[0], *STAGES[1:6], *STAGES[1:6]]
    assert t.recording.stages[-1].nbytes >= t.recording.stages[0].nbytes


def test_accumulated_gradients_end_their_stages():
    model = Model()
    with trace(model) as t:
        for _ in range(2):
            one_step(model, t.device, optimizer=False)
    assert [s.name for s in t.recording.stages] == [STAGES[0], *STAGES[1:6], *STAGES[1:6]]


def test_a_gradient_inside_the_loss_is_no_stage():
    model = meta()
    with trace(model) as t:
        x = model(torch.zeros(TOKENS, dtype=torch.long, device=t.device))
        (inner,) = torch.autograd.grad(x.square().sum(), x, retain_graph=True)
        (x * inner.detach()).sum().backward()
    assert [s.name for s in t.recording.stages] == STAGES[:6]


def test_a_meter_is_read_at_the_end_of_each_stage():
    """Of a gradient inside the loss, too, which is none."""
    numbers = iter(range(100))
    model = Model()
    with trace(model, meter=SimpleNamespace(read=lambda: (next(numbers), 0))) as t:
        x = model(torch.zeros(TOKENS, dtype=torch.long))
        torch.autograd.grad(x.square().sum(), x, retain_graph=True)
        x.sum().backward()
    assert [now for now, _ in t.readings] == [0, 1, 2, 3, 5, 6]  # not where that one began
    assert len(t.readings) == len(t.recording.stages)


def test_what_comes_after_the_last_stage_is_one_of_its_own():
    model = meta()
    with trace(model) as t:
        one_step(model, t.device)
        late = torch.zeros(17, 3, device=t.device)
    assert [s.name for s in t.recording.stages] == [*STAGES, "end"]
    assert late.shape in [a.shape for a in t.recording.alive(t.recording.stages[-1].end)]


def test_the_streamed_token_loss_on_a_meta_model():
    model = meta()
    with torch.device("meta"):
        model.head = nn.Linear(WIDTH, 4096, bias=False)
    with trace(model, batch=(2, TOKENS // 2)) as t:
        ids = torch.zeros(2, TOKENS // 2, dtype=torch.long, device=t.device)
        head = ll.LMHead(model.head.weight)
        loss = ll.token_loss(lambda stats: -stats.logprob.exp(), model(ids), head, ids, want=("logprob",))
        loss.backward()
    assert [s.name for s in t.recording.stages] == STAGES[:6]
    assert not any(a.shape == (TOKENS, 4096) for a in t.recording.allocations)


def test_an_installed_meta_model_is_traced_again():
    """Nothing of the first trace's loss, which is no number, is looked at in the second."""
    with torch.device("meta"):
        model = micro_model()
    ll.install(model)
    peaks = []
    for _ in range(2):
        with trace(model, batch=(2, 64)) as t:
            for _ in range(2):
                ids = torch.zeros(2, 64, dtype=torch.long, device=t.device)
                model(input_ids=ids, labels=ids).loss.backward()
            model.zero_grad()
        peaks.append(t.peak.nbytes)
    assert peaks[0] == peaks[1]


def test_without_backward():
    model = meta()
    with trace(model) as t, torch.no_grad():
        model(torch.zeros(TOKENS, dtype=torch.long, device=t.device)).sum()
    assert [s.name for s in t.recording.stages] == STAGES[:5]


@pytest.mark.parametrize("net", [nn.Linear(2, 2), nn.ReLU()], ids=["parameters", "nothing"])
def test_nothing_at_all(net, tmp_path):
    with trace(net) as t:
        pass
    assert [s.name for s in t.recording.stages] == ["parameters"]
    assert "parameters" in t.table()
    with pytest.raises(OptionError, match="expected a step within its block to plot, got none"):
        t.plot(tmp_path / "nothing.png")


def test_a_model_gets_its_own_parameters_back():
    model = meta()
    own = dict(model.named_parameters())
    traced(model)
    with pytest.raises(ZeroDivisionError), trace(model):
        _ = 1 / 0
    assert all(p is own[name] and p.grad is None for name, p in model.named_parameters())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_tied_parameters_are_counted_once():
    class Tied(Model):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(WIDTH, 128, bias=False)
            self.head.weight = self.embed.weight

    assert traced(meta(Tied)).recording.stages[0] == traced(meta(Model)).recording.stages[0]


def test_tensors_of_one_storage_are_counted_once():
    class Views(Model):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(WIDTH, 128, bias=False)
            self.head.weight.data = self.embed.weight.data
            self.register_buffer("mask", torch.ones(WIDTH, WIDTH))
            self.register_buffer("part", self.mask[8:16])

    stages = [traced(model).recording.stages for model in (meta(Views), Views())]
    assert [(s.nbytes, s.peak) for s in stages[0]] == [(s.nbytes, s.peak) for s in stages[1]]


def test_results_as_text_picture_and_json(tmp_path):
    t = traced(meta())
    text = t.table()
    for word in (*STAGES, "gradients", "peaks at", "layers.*.up", "256 × 64"):
        assert word in text
    t.plot(tmp_path / "step.png")
    assert (tmp_path / "step.png").read_bytes().startswith(b"\x89PNG")
    found = json.loads(json.dumps(t.as_json()))
    assert found["schema"] == 1
    assert [s["name"] for s in found["stages"]] == STAGES
    assert found["peak"]["bytes"] == t.peak.nbytes == max(nbytes for _, nbytes in found["timeline"])
    assert len(found["timeline"]) <= POINTS + FEW * len(found["stages"])
    assert sum(found["peak"]["categories"].values()) == found["peak"]["bytes"]
    assert set(found["peak"]["tensors"][0]) == {"bytes", "shape", "dtype", "op", "module", "category"}


def test_questions_about_data_that_does_not_exist():
    class Asks(Model):
        def forward(self, ids):
            x = super().forward(ids)
            return x * 2 if bool((ids == 0).all()) and ids.max().item() == 1 else x

    assert traced(meta(Asks)).recording.stages

    class Routes(Model):
        def forward(self, ids):
            return self.embed(ids)[ids.nonzero()[:, 0]]

    with pytest.raises(ConfigError, match="chooses its work by its data"):
        traced(meta(Routes))


@pytest.mark.parametrize("device", ["gpu", "cpu"])
def test_nothing_is_nan_or_infinite(device):
    class Checks(Model):
        def forward(self, ids):
            x = super().forward(ids)
            assert not torch.isnan(x).any()
            found = torch.isnan(x) | x.isinf()
            assert not found.any(dim=-1).sum()
            assert not found.any()  # as often as one asks
            assert found.float().mean().item() == found.sum().item() == 0
            assert torch.isfinite(x).all()
            assert (found | (x > 0)).any()
            del found
            assert all((x > 0).any() for _ in range(9))  # in memory that was of what is false
            return x

    assert traced(meta(Checks), device=device).recording.stages


@pytest.mark.parametrize("device", ["gpu", "cpu"])
def test_what_is_false_holds_under_more_operators(device):
    class Checks(Model):
        def forward(self, ids):
            x = super().forward(ids)
            found = x.isnan()
            for false in (found.all(), found.amax(), found.max(), found.any(-1).clone().max(0).values):
                assert not false
            assert (found.sum() + x.isinf().sum()).item() == 0
            assert not torch.logical_or(found, x.isinf()).any()
            assert not (found | False).any()
            found |= x.isinf()
            found.logical_or_(x.isinf())
            count = found.sum()
            count += x.isinf().sum()
            assert not found.any()
            assert count.item() == 0
            return x

    assert traced(meta(Checks), device=device).recording.stages


@pytest.mark.parametrize("device", ["gpu", "cpu"])
def test_what_was_false_is_so_no_longer(device):
    """Where something else is written to it, or it meets what is true."""

    class Checks(Model):
        def forward(self, ids):
            x = super().forward(ids)
            found = x.isnan().any()
            found |= (x > 0).any()
            count = x.isnan().sum()
            count += 5
            filled = x.isnan()
            filled[0] = True
            for true in (found, filled.any(), (x.isnan() | True).any(), x.isnan().sum() + 5):
                assert true
            assert count.item() == 1
            return x

    assert traced(meta(Checks), device=device).recording.stages


def test_mistakes():
    with pytest.raises(OptionError, match="expected 'gpu' or 'cpu', got 'tpu'"):
        trace(Model(), device="tpu")
    with pytest.raises(OptionError, match="its block to have ended"), trace(Model()) as t:
        _ = t.peak
    with pytest.raises(OptionError, match="parameters or buffers, got Tanh without"), trace(nn.Tanh()) as t:
        _ = t.device


def test_the_tracker_forgets_what_is_freed_and_rounds_up():
    with Tracker(lambda: ("", "activations")) as tracker:
        kept = torch.zeros(1)
        torch.zeros(1000).view(10, 100).t()
        inside = tracker.live
        del kept
        assert inside == BLOCK
        assert tracker.live == 0
    assert max(tracker.curve) == BLOCK + 4096


def test_what_lies_elsewhere_is_counted_apart():
    """The most of it at once."""
    with Tracker(lambda: ("", "activations"), device="meta") as tracker:
        for _ in range(3):
            away, here = torch.zeros(1000), torch.zeros(1000, device="meta")
            del away, here
    assert (tracker.elsewhere, tracker.most_elsewhere) == (0, 4096)
    assert (tracker.live, max(tracker.curve)) == (0, 4096)


@pytest.mark.parametrize("category", ["activations", "activation gradients", "loss workspace", "inputs"])
def test_logits_are_as_wide_as_the_vocabulary(category):
    """Of which the head's gradient, either way round, and an adapter's rows are none."""
    shapes = (3, 128), (2, 3, 128), (128, 64), (64, 128), (128, 3), (128,)
    with Tracker(lambda: ("", category), head=(128, 64)) as tracker:
        found = [tracker.category(x) for x in [torch.zeros(shape) for shape in shapes]]
    logits = category if category == "inputs" else "logits"
    gradient = "gradients" if category == "activation gradients" else category
    assert found == [logits, logits, gradient, gradient, category, category]


def test_tensors_are_found_in_any_nesting():
    a, b, c = torch.zeros(3).unbind()
    found = tensors_of(({"x": [a, (b, None)]}, 3, c, "text"))
    assert {id(x) for x in found} == {id(a), id(b), id(c)}
