"""`backend="quack"` where it cannot run, or cannot do what a call asks for: one line that says which."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

import logitless as ll
from logitless.errors import BackendError
from logitless.vocab.call import quack_support
from logitless.vocab.call.choice import CANDIDATES, choose, passed_over
from logitless.vocab.call.validate import flatten
from logitless.vocab.head.quantised import QuantisedWeight
from logitless.vocab.head.sparse import SparseBackward
from tests.support.vocab.refusing import refused

H, V = 16, 256
HIDDEN, WEIGHT = torch.randn(6, H).bfloat16(), torch.randn(V, H).bfloat16()
MISPLACED = torch.zeros(V * H + 1, dtype=torch.bfloat16)[1:].view(V, H)  # as a part of a buffer may lie
LABELS = torch.arange(6)


@pytest.fixture
def here(monkeypatch):
    """A machine on which it runs, as far as it is asked."""
    monkeypatch.setitem(CANDIDATES, "quack", replace(CANDIDATES["quack"], why_not=lambda device: None))


@pytest.fixture
def hopper(monkeypatch):
    """What torch and the package's index say where it would run."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(quack_support, "installed", lambda: "0.6.4")
    monkeypatch.setattr(quack_support, "misplaced", lambda: None)


def test_where_it_runs(hopper):
    assert quack_support.why_not("cuda") is None
    assert choose(None, "cuda") != "quack"
    assert "quack" not in passed_over("eager", "cuda", 0)


@pytest.mark.parametrize("device", ["cpu", "mps", "meta"])
def test_elsewhere(device, hopper):
    assert quack_support.why_not(device) == f"it needs a CUDA device, got {device}"


@pytest.mark.parametrize(
    ("version", "line"),
    [
        (None, "quack-kernels is not installed: pip install quack-kernels"),
        ("0.6.1", "it needs quack-kernels 0.6.2 or later, got 0.6.1: pip install --upgrade quack-kernels"),
        ("0.5", "it needs quack-kernels 0.6.2 or later, got 0.5: pip install --upgrade quack-kernels"),
    ],
)
def test_without_the_package(version, line, hopper, monkeypatch):
    monkeypatch.setattr(quack_support, "installed", lambda: version)
    assert quack_support.why_not("cuda") == line


@pytest.mark.parametrize("version", ["0.6.2", "0.6.10", "0.7.0rc1", "0.6.4.post1", "1.0"])
def test_later_versions(version, hopper, monkeypatch):
    monkeypatch.setattr(quack_support, "installed", lambda: version)
    assert quack_support.why_not("cuda") is None


@pytest.mark.parametrize("folder", ["plain", "site-packages", "venv/lib/site-packages/nvidia_cutlass_dsl/dsl_packages"])
def test_where_cutlass_lies(folder, tmp_path, monkeypatch):
    """QuACK 0.6.5 raises `no fail-closed semantic key` as it is imported where it takes CUTLASS for its own."""
    monkeypatch.setattr(quack_support, "installed", lambda: "0.6.5")
    monkeypatch.syspath_prepend(tmp_path / folder)
    place = tmp_path / folder / "cutlass"
    place.mkdir(parents=True)
    (place / "__init__.py").touch()
    quack_support.misplaced.cache_clear()
    said = quack_support.why_not("cuda")
    quack_support.misplaced.cache_clear()
    wrong = f"it takes CUTLASS for its own, and fails, but in a folder named site-packages, got {place}"
    assert (said == wrong) == (folder == "plain")


@pytest.mark.parametrize("capability", [(8, 0), (10, 0), (12, 0)])
def test_other_gpus(capability, hopper, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    got = ".".join(map(str, capability))
    assert quack_support.why_not("cuda") == f"it needs compute capability 9.0, got {got}"


def test_rocm_whose_numbers_look_alike(hopper, monkeypatch):
    monkeypatch.setattr(torch.version, "hip", "7.0")
    assert quack_support.why_not("cuda") == "it needs an NVIDIA GPU, got one of ROCm"


def test_no_gpu_that_torch_sees(hopper, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert quack_support.why_not("cuda") == "torch sees no CUDA device"


def loss(head: ll.LMHead | None = None, hidden: Tensor = HIDDEN, **options) -> Tensor:
    return ll.linear_cross_entropy(hidden, head or ll.LMHead(WEIGHT), LABELS, backend="quack", **options)


def test_the_reason_is_in_the_error():
    line = "backend 'quack' cannot run here: it needs a CUDA device, got cpu; backend=None takes one that can"
    refused(BackendError, loss, line)


@pytest.mark.parametrize(
    "call",
    [
        lambda **kw: ll.token_stats(HIDDEN, ll.LMHead(WEIGHT), LABELS, **kw),
        lambda **kw: ll.token_loss(lambda s: -s.logprob, HIDDEN, ll.LMHead(WEIGHT), LABELS, **kw),
        lambda **kw: ll.explain(HIDDEN, ll.LMHead(WEIGHT), LABELS, **kw),
    ],
    ids=["token_stats", "token_loss", "explain"],
)
def test_other_functions(call, here):
    line = "backend 'quack': expected linear_cross_entropy, which is all that it computes; leave backend out"
    refused(BackendError, lambda: call(backend="quack"), line)


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"reduction": "none"}, "expected reduction 'mean' or 'sum', got 'none'"),
        ({"weight": torch.ones(V)}, "expected no class weights, got some"),
        ({"label_smoothing": 0.1}, "expected label_smoothing 0, got 0.1"),
        ({"z_loss": 1e-4}, "expected z_loss 0, got 0.0001"),
        ({"temperature": 0.7}, "expected temperature 1, got 0.7"),
        ({"temperature": torch.ones(6)}, "expected temperature 1, got one for each token"),
    ],
)
def test_options(options, line, here):
    refused(BackendError, lambda: loss(**options), f"backend 'quack': {line}; leave backend out")


def adapter(rows: int) -> ll.LowRank:
    return ll.LowRank(torch.randn(2, H).bfloat16(), torch.randn(rows, 2).bfloat16())


@pytest.mark.parametrize(
    ("head", "line"),
    [
        (ll.LMHead(WEIGHT, torch.zeros(V)), "expected a head without bias, got one that has it"),
        (ll.LMHead(WEIGHT, adapters=(adapter(V),)), "expected a head without adapters, got 1"),
        (ll.LMHead(WEIGHT, softcap=30.0), "expected a head without softcap, got 30.0"),
        (ll.LMHead(WEIGHT, scale=0.5), "expected a head of scale 1, got 0.5"),
        (ll.LMHead(WEIGHT, sparse=SparseBackward(1e-3)), "expected a head without sparse, got a SparseBackward"),
        (ll.LMHead(WEIGHT, vocab_size=V - 1), "expected a head all of whose rows exist, got vocab_size 255 of 256"),
        (ll.LMHead(WEIGHT.float()), "expected a weight in torch.bfloat16, got torch.float32"),
        (ll.LMHead(WEIGHT.half()), "expected a weight in torch.bfloat16, got torch.float16"),
        (ll.LMHead(WEIGHT.t().contiguous().t()), "expected a contiguous weight, got one with gaps between its numbers"),
        (ll.LMHead(MISPLACED), "expected a weight at a multiple of 16 bytes, got one 2 bytes past it"),
        (ll.LMHead(WEIGHT[:250]), "expected a vocabulary that 128 divides, got 250 entries"),
    ],
    ids=lambda x: x.removeprefix("expected ").partition(",")[0] if isinstance(x, str) else "",
)
def test_heads(head, line, here):
    refused(BackendError, lambda: loss(head), f"backend 'quack': {line}; leave backend out")
    with torch.no_grad():
        refused(BackendError, lambda: loss(head), line)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_hidden_states(dtype, here):
    refused(BackendError, lambda: loss(hidden=HIDDEN.to(dtype)), f"hidden states in torch.bfloat16, got {dtype}")


def test_a_narrow_head(here):
    head, hidden = ll.LMHead(WEIGHT[:, :12].contiguous()), HIDDEN[:, :12]
    refused(BackendError, lambda: loss(head, hidden), "expected a hidden size that 8 divides, got 12")


def test_a_quantised_head(here):
    head = ll.LMHead(QuantisedWeight.gguf(torch.zeros(V, 34, dtype=torch.uint8), "Q8_0"))  # 32 columns
    refused(
        BackendError, lambda: loss(head, HIDDEN.repeat(1, 2)), "expected a weight of plain numbers, got a quantised one"
    )


def test_a_sharded_head():
    call = flatten(HIDDEN, ll.LMHead(WEIGHT), LABELS)
    object.__setattr__(call.head, "shard", SimpleNamespace(offset=0, total=V))
    refused(BackendError, lambda: quack_support.check_call(call), "expected a whole head, got one that is sharded")


def test_in_a_cuda_graph(here, monkeypatch):
    monkeypatch.setattr(quack_support, "capturing", lambda x: True)
    refused(BackendError, loss, "backend 'quack': expected no CUDA graph, got one being captured; leave backend out")


@pytest.mark.parametrize(
    ("options", "got"),
    [
        ({"want": ("logprob", "entropy")}, "want="),
        ({"top_k": 2}, "top_k"),
        ({"candidates": torch.zeros(6, 1, dtype=torch.int64)}, "candidates"),
        ({"want": ("kl",), "reference": (HIDDEN, ll.LMHead(WEIGHT))}, "want="),
    ],
    ids=["want", "top_k", "candidates", "reference"],
)
def test_explain_of_other_losses(options, got, here):
    call = {"loss": True, "backend": "quack", **options}
    refused(
        BackendError,
        lambda: ll.explain(HIDDEN, ll.LMHead(WEIGHT), LABELS, **call),
        "backend 'quack': expected cross-entropy alone, got " + got,
    )
