"""SPLADE models against their own embeddings, losses and trainer; `make test-sentence-transformers` brings these."""

import copy
import json
import pickle
import subprocess
import sys

import pytest
import torch
import transformers

pytest.importorskip(
    "sentence_transformers",
    reason="sentence-transformers is not installed here: make test-sentence-transformers",
    exc_type=ImportError,
)

from datasets import Dataset
from peft import LoraConfig
from sentence_transformers import SparseEncoder, SparseEncoderTrainer, SparseEncoderTrainingArguments
from sentence_transformers.base.modules import Router, Transformer
from sentence_transformers.sentence_transformer.modules import Pooling
from sentence_transformers.sparse_encoder import losses
from sentence_transformers.sparse_encoder.modules import SparseStaticEmbedding, SpladePooling

from logitless.errors import ConfigError, OptionError
from logitless.integrations import seam
from logitless.integrations import sentence_transformers as ours
from tests.support.allocations import trace_allocations
from tests.support.integrations.launching import ROOT
from tests.support.integrations.masked import MASKED
from tests.support.integrations.tiny import assert_same_gradients

WORDS = [f"w{i}" for i in range(400)]
V = len(WORDS) + 5
TEXTS = [" ".join(WORDS[(7 * i * j + j) % 400] for j in range(1, 3 + 4 * i)) for i in range(6)]


@pytest.fixture(scope="module", params=["bert", "modernbert", "xlm-roberta"])
def folder(request, tmp_path_factory):
    """A tiny masked language model with a tokenizer of its own, as `from_pretrained` reads it."""
    path = tmp_path_factory.mktemp(request.param)
    MASKED[request.param].build(V).save_pretrained(path)
    (path / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]))
    transformers.BertTokenizerFast(str(path / "vocab.txt"), model_max_length=64).save_pretrained(path)
    return str(path)


def encoder(folder: str, **pooling) -> SparseEncoder:
    return SparseEncoder(
        modules=[Transformer(folder, transformer_task="fill-mask"), SpladePooling(**pooling)], device="cpu"
    )


def both(folder: str, **pooling) -> tuple[SparseEncoder, SparseEncoder]:
    own, streamed = encoder(folder, **pooling).eval(), encoder(folder, **pooling).eval()
    ours.install(streamed, memory_budget=1 << 16)
    return own, streamed


def triplets() -> Dataset:
    columns = {"query": TEXTS, "positive": TEXTS[::-1], "negative": TEXTS[2:] + TEXTS[:2]}
    return Dataset.from_dict(columns)


@pytest.mark.parametrize("activation", ["relu", "log1p_relu"])
def test_embeddings(folder, activation):
    own, streamed = both(folder, activation_function=activation)
    for method in ("encode", "encode_query", "encode_document"):
        expected, found = (
            getattr(m, method)(TEXTS, convert_to_sparse_tensor=False, batch_size=4) for m in (own, streamed)
        )
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
        assert (found > 0).float().mean() > 0.1
    sparse = streamed.encode(TEXTS, max_active_dims=8)
    assert sparse.is_sparse
    assert sparse.to_dense().count_nonzero(1).tolist() == [8] * 6
    assert streamed.decode(sparse[0]) == own.decode(own.encode(TEXTS, max_active_dims=8)[0])
    assert streamed.get_embedding_dimension() == own.get_embedding_dimension() == V


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_embeddings_have_the_dtype_of_the_models(folder, dtype):
    own, streamed = both(folder)
    expected, found = (
        m.to(dtype).encode(TEXTS, convert_to_sparse_tensor=False, convert_to_tensor=True) for m in (own, streamed)
    )
    assert found.dtype == expected.dtype == dtype
    torch.testing.assert_close(found, expected, rtol=0.05, atol=0.05)


def test_documents_end_to_end(folder):
    """As flash attention takes them; here one attends to the other, in both models alike."""
    own, streamed = both(folder)
    ids = torch.randint(5, V, (1, 17))
    flat = {"input_ids": ids, "cu_seq_lens_q": torch.tensor([0, 3, 4, 17], dtype=torch.int32)}
    expected, found = (m(dict(flat))["sentence_embedding"] for m in (own, streamed))
    assert found.shape == (3, V)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def features_of(model: SparseEncoder) -> list[dict[str, torch.Tensor]]:
    return [model.preprocess(column) for column in (TEXTS[:3], TEXTS[3:], TEXTS[1:4])]


def margins(model: SparseEncoder):
    return losses.SparseMarginMSELoss(model), torch.tensor([1.0, -2.0, 3.0])


LOSSES = {
    "splade": lambda m: (losses.SpladeLoss(m, losses.SparseMultipleNegativesRankingLoss(m), 3e-2, 5e-2), None),
    "splade, margins": lambda m: (losses.SpladeLoss(m, margins(m)[0], 3e-2, 5e-2), margins(m)[1]),
    "splade, L0 masking": lambda m: (
        losses.SpladeLoss(
            m,
            losses.SparseTripletLoss(m),
            3e-2,
            5e-2,
            document_regularizer_threshold=80,
            query_regularizer_threshold=80,
        ),
        None,
    ),
    "splade, distilled": lambda m: (
        losses.SpladeLoss(m, losses.SparseDistillKLDivLoss(m), 3e-2, 5e-2),
        torch.tensor([[1.0, 0.0], [0.5, 2.0], [0.0, 0.0]]),
    ),
    "cached": lambda m: (
        losses.CachedSpladeLoss(m, losses.SparseMultipleNegativesRankingLoss(m), 3e-2, 5e-2, mini_batch_size=2),
        None,
    ),
}


def gradients(model: SparseEncoder, name: str):
    loss, labels = LOSSES[name](model.train())  # in eval mode the host's pooling overwrites what backward needs
    model.zero_grad(set_to_none=True)
    total = sum(loss(features_of(model), labels).values())
    total.backward()
    return total.item(), {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("name", LOSSES)
def test_losses_and_gradients_of_every_parameter(folder, name):
    own, streamed = (m.double() for m in both(folder))
    (expected, exact), (found, got) = gradients(own, name), gradients(streamed, name)
    assert found == pytest.approx(expected, rel=1e-6)
    assert_same_gradients(got, exact, rtol=1e-5, floor=1e-6)


def test_lora_on_the_head(folder):
    own, streamed = both(folder)
    modules = ["query", "Wqkv", "decoder"]
    for model in (own, streamed):
        torch.manual_seed(0)
        model.add_adapter(LoraConfig(r=4, target_modules=modules, init_lora_weights=False))
    (expected, exact), (found, got) = (gradients(m.double(), "splade") for m in (own, streamed))
    assert found == pytest.approx(expected, rel=1e-6)
    assert any("decoder.lora_B" in name and g is not None for name, g in got.items())
    assert_same_gradients(got, exact, rtol=1e-5, floor=1e-6)


@pytest.mark.parametrize("loss", ["splade", "cached"])
def test_trainer(folder, loss, tmp_path):
    """Its own trainer: losses by step, evaluation and weights; what it saves is its own, and loads without us."""
    logs, weights = [], []
    for streamed in (False, True):
        model = encoder(folder)
        if streamed:
            ours.install(model)
        arguments = SparseEncoderTrainingArguments(
            str(tmp_path / str(streamed)), max_steps=4, per_device_train_batch_size=3, logging_steps=1,
            learning_rate=1e-3, report_to="none", use_cpu=True, save_strategy="no", disable_tqdm=True, seed=3,
        )  # fmt: skip
        trainer = SparseEncoderTrainer(
            model, arguments, train_dataset=triplets(), eval_dataset=triplets(), loss=LOSSES[loss](model)[0]
        )
        trainer.train()
        logs.append([x["loss"] for x in trainer.state.log_history if "loss" in x])
        logs[-1].append(trainer.evaluate()["eval_loss"])
        # a key's bias has a gradient of 0 but for rounding, which Adam blows up
        weights.append({name: p for name, p in model.named_parameters() if not name.endswith("key.bias")})
        path = tmp_path / f"saved-{streamed}"
        model.save_pretrained(str(path))
    assert logs[1] == pytest.approx(logs[0], rel=1e-4)
    assert len(set(logs[0])) == 5
    for name, x in weights[0].items():
        torch.testing.assert_close(weights[1][name], x, rtol=1e-3, atol=1e-4, msg=lambda m, n=name: f"{n}: {m}")
    kinds = [[m["type"] for m in json.loads((tmp_path / f"saved-{x}/modules.json").read_text())] for x in (False, True)]
    assert kinds[0] == kinds[1]
    loaded = SparseEncoder(str(path), device="cpu")
    torch.testing.assert_close(loaded.encode(TEXTS).to_dense(), model.encode(TEXTS).to_dense(), rtol=1e-5, atol=1e-5)


def test_no_logits_in_memory(folder):
    """A step of the host's own loss: nothing as large as the logits, and a peak below theirs."""
    own, streamed = both(folder)
    texts = [" ".join(WORDS[i : i + 50]) for i in range(32)]
    size = 4 * 32 * 52 * V

    def step(model):
        loss, _ = LOSSES["splade"](model.train())
        features = [model.preprocess(texts), model.preprocess(texts)]
        return lambda: sum(loss([dict(x) for x in features], None).values()).backward()

    dense, lean = (trace_allocations(step(m)) for m in (own, streamed))
    assert dense.largest >= size
    assert lean.largest <= size / 8
    assert lean.peak <= dense.peak - 4 * size


def test_a_router_of_queries_without_inference(folder):
    def asymmetric() -> SparseEncoder:
        document = Transformer(folder, transformer_task="fill-mask")
        torch.manual_seed(0)
        router = Router.for_query_document(
            query_modules=[SparseStaticEmbedding(tokenizer=document.tokenizer, frozen=False)],
            document_modules=[document, SpladePooling()],
        )
        return SparseEncoder(modules=[router], similarity_fn_name="dot", device="cpu").eval()

    own, streamed = asymmetric(), asymmetric()
    ours.install(streamed)
    for method in ("encode_query", "encode_document"):
        expected, found = (getattr(m, method)(TEXTS).to_dense() for m in (own, streamed))
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert streamed[0].sub_modules["document"][0].forward.__func__ is not Transformer.forward


def test_copies_pickles_and_uninstalling(folder):
    own, streamed = both(folder)
    expected = own.encode(TEXTS).to_dense()
    names = [set(m.state_dict()) for m in (own, streamed)]
    assert names[0] == names[1]
    twin = copy.deepcopy(streamed)
    with torch.no_grad():
        for p in streamed.parameters():
            p.zero_()
    for model in (twin, pickle.loads(pickle.dumps(twin))):
        torch.testing.assert_close(model.encode(TEXTS).to_dense(), expected, rtol=1e-5, atol=1e-5)
    ours.uninstall(twin)
    assert "forward" not in twin[0].__dict__
    assert twin({**twin.preprocess(TEXTS)})["token_embeddings"].dim() == 3
    torch.testing.assert_close(twin.encode(TEXTS).to_dense(), expected)
    ours.uninstall(twin)


def test_what_is_refused(folder):
    with pytest.raises(ConfigError, match="expected pooling_strategy='max', got 'sum', whose gradient needs every"):
        ours.install(encoder(folder, pooling_strategy="sum"))
    dense = Transformer(folder)
    with pytest.raises(
        ConfigError, match="expected a SparseEncoder whose Transformer is followed by SpladePooling, got"
    ):
        ours.install(torch.nn.Sequential(dense, Pooling(16)))
    with pytest.raises(ConfigError, match="expected transformer_task='fill-mask', got 'feature-extraction'"):
        ours.install(torch.nn.Sequential(dense, SpladePooling()))
    shared = Transformer(folder, transformer_task="fill-mask")
    other = copy.deepcopy(shared)
    other.backend = "onnx"
    with pytest.raises(ConfigError, match="Transformer: expected backend 'torch', got 'onnx'"):
        ours.install(torch.nn.Sequential(other, SpladePooling()))
    router = torch.nn.ModuleList(
        [torch.nn.Sequential(shared, SpladePooling()), torch.nn.Sequential(shared, Pooling(16))]
    )
    with pytest.raises(ConfigError, match="expected a Transformer for SpladePooling alone, got one that Pooling"):
        ours.install(router)
    model = encoder(folder)
    for size in (0, True, "1"):
        with pytest.raises(OptionError, match=f"memory_budget: expected a positive number of bytes.* got {size!r}"):
            ours.install(model, memory_budget=size)
    assert "forward" not in model[0].__dict__


def test_a_head_with_another_transform_is_refused_at_the_first_call(folder):
    model = encoder(folder)
    ours.install(model)
    inner = model[0].model
    whole = inner.forward
    inner.forward = lambda *a, **k: type(out := whole(*a, **k))(logits=2 * out.logits)
    with pytest.raises(ConfigError, match="changes its logits otherwise than by scale 1 and softcap None"):
        model.encode(TEXTS)


def test_another_version_is_named():
    moved = seam.Seam("sentence-transformers", ">=6.2,<7", {**ours.HOST.functions, "sentence_transformers:Gone": ()})
    with pytest.raises(
        ConfigError, match=r"sentence-transformers 6.* sentence_transformers:Gone is gone; install 'sen"
    ):
        moved.require()


def test_the_example_runs(tmp_path):
    command = [sys.executable, "examples/sentence_transformers_tiny.py", str(tmp_path), "2"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert "of 64 queries find their own document first; a document has" in done.stdout
    assert (tmp_path / "trained" / "modules.json").exists()
