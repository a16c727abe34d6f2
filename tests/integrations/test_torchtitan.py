"""torchtitan's loss against its own, alone and in its trainer on two ranks; `make test-torchtitan` brings it."""

import importlib
import json
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

pytest.importorskip("torchtitan", reason="torchtitan is not installed here: make test-torchtitan", exc_type=ImportError)

import spmd_types as spmd
from spmd_types.checker import typecheck
from torchtitan.components.lora import LoRAConverter
from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss, MSELoss
from torchtitan.distributed.spmd_types import set_current_spmd_mesh
from torchtitan.models.common.linear import Linear
from torchtitan.models.muse_glimmer.model import SoftCappedLinear

from logitless.errors import ConfigError
from logitless.integrations import torchtitan as ours
from tests.support.allocations import trace_allocations
from tests.support.integrations.launching import torchrun

B, L, D, V = 2, 37, 32, 4000  # a length that no number of chunks divides


class Own(Linear):
    """A head with a transform of its own."""

    @dataclass(kw_only=True, slots=True)
    class Config(Linear.Config):
        pass

    def forward(self, input):
        return super().forward(input) / 2


HEADS = {
    "linear": lambda: Linear.Config(in_features=D, out_features=V).build(),
    "bias": lambda: Linear.Config(in_features=D, out_features=V, bias=True).build(),
    "softcap": lambda: SoftCappedLinear.Config(
        in_features=D, out_features=V, output_multiplier=0.7, output_soft_cap_temp=3.0
    ).build(),
    "scale": lambda: SoftCappedLinear.Config(in_features=D, out_features=V, output_multiplier=0.7).build(),
}


def batch():
    labels = torch.randint(V, (B, L))
    labels[0, :5] = -100
    return torch.randn(B, L, D), labels


def streamed(head: nn.Module, **options):
    loss = ours.StreamedLoss.Config(**options).build(compile_config=None)
    loss.set_lm_head(head)
    return loss


def gradients(head, hidden, compute, upstream):
    """(loss, gradients of hidden states and of the head) under an upstream gradient."""
    hidden = hidden.clone().requires_grad_()
    head.zero_grad()
    loss = compute(hidden)
    (loss * upstream).backward()
    return [loss.detach(), hidden.grad, *(p.grad.clone() for p in head.parameters())]


@pytest.mark.parametrize("count", [None, 69])
@pytest.mark.parametrize("name", HEADS)
def test_loss_and_gradients_are_torchtitans_own(name, count):
    """Under any upstream gradient, which torchtitan's chunked loss ignores, and at any length."""
    head, (hidden, labels) = HEADS[name](), batch()
    count = None if count is None else torch.tensor(count)
    dense = CrossEntropyLoss.Config().build(compile_config=None)
    want = gradients(head, hidden, lambda h: dense(head(h), labels, count)[0], 0.25)
    got = gradients(head, hidden, lambda h: streamed(head)(h, labels, count, positions=labels)[0], 0.25)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_the_z_loss_is_not_in_a_validation_loss():
    head, (hidden, labels) = HEADS["linear"](), batch()
    trained, _ = streamed(head, z_loss=0.1)(hidden, labels)
    with torch.no_grad():
        plain, _ = streamed(head)(hidden, labels)
        validated, _ = streamed(head, z_loss=0.1)(hidden, labels)
        squares = head(hidden)[labels >= 0].logsumexp(-1).square().sum()
    torch.testing.assert_close(validated, plain)
    torch.testing.assert_close(trained.detach(), plain + 0.1 * squares)


@pytest.fixture
def mesh():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1, 1, 1), mesh_dim_names=("dp", "cp", "tp"))
    dist.destroy_process_group()


def test_under_torchtitans_type_checks(mesh):
    """debug.spmd_typechecking, which refuses functions that it does not know; the loss has its own loss' type."""
    head, (hidden, labels) = HEADS["linear"](), batch()
    types = {"dp": spmd.S(0), "cp": spmd.S(1)}
    dense = CrossEntropyLoss.Config(global_vocab_size=V).build(compile_config=None)
    found = []
    for compute in (lambda: dense(head(hidden), labels), lambda: streamed(head)(hidden, labels)):
        with set_current_spmd_mesh(mesh), typecheck(local=False):
            spmd.assert_type(hidden, {**types, "tp": spmd.R})
            spmd.assert_type(labels, {**types, "tp": spmd.I})
            spmd.assert_type(head.weight, {"dp": spmd.R, "cp": spmd.R, "tp": spmd.I})
            loss, _ = compute()
            found.append((spmd.get_local_type(loss), loss.detach()))
    assert found[0][0] == found[1][0]
    torch.testing.assert_close(found[0][1], found[1][1])


def test_what_its_chunked_loss_does_not_do():
    """The reasons for the two sentences above, so that we know when they are no longer true."""
    head, (hidden, labels) = HEADS["linear"](), batch()
    chunked = ChunkedLossWrapper.Config(num_chunks=1).build(compile_config=None)
    chunked.set_lm_head(head)
    ignored = gradients(head, hidden, lambda h: chunked(h, labels, None)[0], 0.0)
    assert ignored[1].abs().max() > 0
    chunked.num_chunks = 8
    with pytest.raises(RuntimeError, match="divisible"):
        chunked(hidden, labels)


def test_memory():
    """Slices within the budget, where torchtitan's losses hold logits: of all tokens, or of a chunk."""
    head, (hidden, labels) = HEADS["linear"](), batch()
    hidden.requires_grad_()
    chunked = ChunkedLossWrapper.Config(num_chunks=1).build(compile_config=None)
    chunked.set_lm_head(head)

    def step(loss):
        found = trace_allocations(lambda: loss(hidden, labels)[0].backward())
        head.zero_grad()
        return found

    gradient = V * D * 4
    assert step(chunked).largest >= B * L * V * 4
    found = step(streamed(head, memory_budget=2**16))
    assert found.largest <= gradient
    assert found.peak <= 3 * gradient + 2**16


def test_refusals():
    head, (hidden, labels) = Own.Config(in_features=D, out_features=V).build(), batch()
    with pytest.raises(ConfigError, match=r"torchtitan 0\.3.* set_lm_head"):
        ours.StreamedLoss.Config().build(compile_config=None)(hidden, labels)
    with pytest.raises(ConfigError, match="expected a Linear or SoftCappedLinear, got Own"):
        streamed(head)(hidden, labels)
    with pytest.raises(ConfigError, match="expected CrossEntropyLoss, chunked or not, got MSELoss"):
        ours.streamed(MSELoss.Config())


@pytest.mark.parametrize("kind", [Linear, SoftCappedLinear])
def test_lora_on_the_head_is_refused(kind):
    """An adapter's logits are added after the softcap, which no head here does."""
    own, (hidden, labels) = kind.Config(in_features=D, out_features=V), batch()
    head = LoRAConverter.Config(rank=4).build()._make_lora_config(own).build()
    with pytest.raises(ConfigError, match=f"got LoRA{kind.__name__} with a forward of its own"):
        streamed(head)(hidden, labels)


def test_options_of_an_override_reach_a_loss_that_is_ours_already():
    found = ours.streamed(ours.StreamedLoss.Config(z_loss=0.1), memory_budget=2**20)
    assert (found.z_loss, found.memory_budget) == (0.1, 2**20)


def test_another_torchtitan_is_an_error_that_names_versions(monkeypatch):
    monkeypatch.delattr(ChunkedLossWrapper, "set_lm_head")
    with pytest.raises(ConfigError, match=r"torchtitan 0\.3\S*: .*set_lm_head is gone; install 'torchtitan>=0.3,<0.4'"):
        importlib.reload(ours)


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    found, place = {}, tmp_path_factory.mktemp("torchtitan")
    for ranks in (1, 2):
        torchrun("tests.support.integrations.torchtitan_ranks", str(place / "results.json"), at=place, ranks=ranks)
        found |= json.loads((place / "results.json").read_text())
    return found


PAIRS = {
    "streamed": "dense",
    "small": "dense",
    "override": "chunked",
    "streamed, alone": "dense, alone",
    "streamed, tied": "dense, tied",
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", PAIRS)
def test_training(results, kind):
    """Its own losses, gradient norms, validation losses and weights: two ranks under FSDP2, two passes a step, or one
    rank of its SPMD backend, four passes."""
    got, want = results[kind], results[PAIRS[kind]]
    assert got.pop("class") == "StreamedLoss" != want["class"]
    for name, numbers in got.items():
        assert numbers == pytest.approx(want[name], rel=1e-5), name


@pytest.mark.slow
def test_tensor_parallelism_is_refused(results):
    assert "leave tensor_parallel_degree at 1" in results["tensor parallel"]
