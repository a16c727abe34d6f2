"""The GPU benchmark's rows: shapes, operands, floors, and who is measured. Peers are imported when they are built."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor

import logitless as ll
from bench import peers
from bench.cases import CASES, CLIP, LOGIT_STD, Case, Shape, Tensors, ppo_loss, step
from logitless.algebra.costs import fused_slices_of
from logitless.sample import SamplingMask
from logitless.vocab.backends.logits import add_product, operand_dtype, product
from logitless.vocab.backends.triton.tuned import table_for

MIB = 1 << 20
Step = peers.Step
ORACLE_CHUNK = 256  # tokens
WHOLE = 4096 * MIB  # of results in the operands' dtype, which the fastest bare GEMMs may take


class Absent(RuntimeError):
    """A method that this machine does not have."""


@dataclass(frozen=True)
class Row:
    """One line of the table. `time_limit` is times the fastest floor; `memory_limit` MiB above inputs and gradients."""

    name: str
    title: str
    case: Case
    shape: Shape
    tiny: Shape
    time_limit: float | None
    memory_limit: float | None = None
    budget: int = 1024 * MIB
    gated: bool = True  # against float64, all of it
    dense: bool = True  # whether whole logits fit


def dense_sample(hidden: Tensor, weight: Tensor) -> Tensors:
    """A token, the 20 best, log-sum-exp and entropy from whole logits."""
    z = F.linear(hidden, weight).float()
    best = z.topk(min(20, z.shape[1]), dim=-1)
    logp = z.log_softmax(-1)
    p = logp.exp()
    torch.multinomial(p, 1)
    return {"top": best.values, "lse": z.logsumexp(-1), "entropy": -(p * logp).sum(-1)}


def dense_sets(hidden: Tensor, weight: Tensor, labels: Tensor, token_ids: Tensor) -> Tensors:
    """Log-prob and entropy over each token's set of entries."""
    logp = torch.einsum("nh,nkh->nk", hidden, weight[token_ids]).log_softmax(-1)
    return {"logprob": logp[token_ids == labels[:, None]], "entropy": -(logp.exp() * logp).sum(-1)}


_SETS = ("hidden", "weight", "labels", "token_ids")
SETS = Case("sets", "log-prob + entropy over sampling masks", 0, dense_sets, _SETS, (), 1.2, 96)
ENTRIES = 64  # of each token's set
SAMPLE = Case("sample", "sample + top-20 + log-sum-exp + entropy", 1, dense_sample, ("hidden", "weight"), (), 1.2, 96)
LLAMA, QWEN = Shape(4096, 4096, 128_256), Shape(8192, 4096, 151_936)
TINY, SMALL = Shape(48, 16, 301), Shape(40, 24, 517)
ROWS = {
    row.name: row
    for row in (
        Row("loss", "loss + gradients", CASES["loss"], LLAMA, TINY, 1.06, 1.1 * 1024),
        Row("loss-qwen", "loss + gradients", CASES["loss"], QWEN, SMALL, 1.10, 1.1 * 1024),
        Row("values", "log-prob + entropy, no gradient", CASES["entropy"], LLAMA, TINY, 1 / 0.88, budget=256 * MIB),
        Row("values-qwen", "log-prob + entropy, no gradient", CASES["entropy"], QWEN, SMALL, 1 / 0.88, None, 256 * MIB),
        Row("frozen", "log-prob, any upstream, frozen head", CASES["frozen"], LLAMA, TINY, 1.12, budget=256 * MIB),
        Row("ppo", "PPO + entropy bonus + exact KL", CASES["ppo"], LLAMA, TINY, None),
        Row("sample", SAMPLE.title, SAMPLE, Shape(64, 4096, 151_936), Shape(5, 16, 301), 1.2, budget=256 * MIB),
        Row("sets", SETS.title, SETS, LLAMA, TINY, 1.2, budget=256 * MIB),
        Row(
            *("long", "loss + gradients, 131,072 tokens", CASES["loss"], Shape(131_072, 2560, 151_936)),
            *(Shape(96, 8, 301), None, 2048.0, 1024 * MIB, False, False),
        ),
    )
}


def make_operands(row: Row, shape: Shape, device: str, dtype: torch.dtype) -> Tensors:
    """Operands as `bench.cases.make_tensors` draws them, but on the device."""
    g = torch.Generator(device).manual_seed(20)
    n, h, v = shape.tokens, shape.hidden, shape.vocab

    def randn(*sizes: int, scale: float = 1.0) -> Tensor:
        return torch.randn(*sizes, generator=g, device=device).mul_(scale).to(dtype)

    out = {"hidden": randn(n, h), "weight": randn(v, h, scale=LOGIT_STD / math.sqrt(h))}
    out["labels"] = torch.randint(v, (n,), generator=g, device=device)
    out["cotangent"] = torch.randn(n, generator=g, device=device)
    if "advantages" in row.case.takes:
        out["old_logprob"] = logprobs(out) - off_the_edges(0.15 * torch.randn(n, generator=g, device=device))
        out["advantages"] = torch.randn(n, generator=g, device=device)
    if "token_ids" in row.case.takes:  # a label first, and others as far apart as they can be
        k = min(ENTRIES, v // 64)
        out["token_ids"] = spread_ids(out["labels"], v, k)
    if "ref_hidden" in row.case.takes:
        out["ref_hidden"] = out["hidden"] + randn(n, h, scale=0.2)
        out["ref_weight"] = out["weight"] + randn(v, h, scale=0.2 * LOGIT_STD / math.sqrt(h))
    return out


def spread_ids(labels: Tensor, v: int, k: int) -> Tensor:
    """A set of k entries for each token: its label first, and others as far apart as they can be."""
    return (labels[:, None] + torch.arange(k, device=labels.device) * (v // k)) % v


def mask_of(ids: Tensor) -> SamplingMask:
    """The sampling mask of sets of one size, (N, k)."""
    return SamplingMask(ids.flatten(), torch.arange(0, ids.numel() + 1, ids.shape[1], device=ids.device))


def logprobs(tensors: Tensors) -> Tensor:
    """The labels' log-probs, some tokens at a time."""
    weight, found = tensors["weight"].float(), []
    for hidden, labels in zip(*(tensors[name].split(ORACLE_CHUNK) for name in ("hidden", "labels")), strict=True):
        found.append(F.linear(hidden.float(), weight).log_softmax(-1).gather(1, labels[:, None])[:, 0])
    return torch.cat(found)


def off_the_edges(step: Tensor) -> Tensor:
    """Logarithms of ratios none of which lies where clipping begins: there a last digit decides about a gradient."""
    near = torch.stack([(step.exp() - edge).abs() < 1e-3 for edge in (1 - CLIP, 1 + CLIP)]).any(0)
    return torch.where(near, step + 0.01, step)


def oracle(row: Row, tensors: Tensors) -> Tensors:
    """The dense definition in float64 on the same operands, some tokens at a time, on the same device."""
    n, out = tensors["labels"].shape[0], {}
    whole = {k: t.detach().double() for k, t in tensors.items() if k.endswith("weight")}
    for start in range(0, n, ORACLE_CHUNK):
        rows = slice(start, start + ORACLE_CHUNK)
        part = {k: whole[k] if k in whole else t.detach()[rows] for k, t in tensors.items()}
        part = {k: t.double() if t.is_floating_point() else t for k, t in part.items()}
        for name, value in step(row.case, row.case.dense, part, share=len(part["labels"]) / n).items():
            if name in ("loss", "grad_weight") and name in out:
                out[name][0] += value
            else:
                out.setdefault(name, []).append(value)
    return {name: torch.cat(parts) if parts[0].dim() else parts[0] for name, parts in out.items()}


def errors_of(expected: Tensors, got: Tensors) -> dict[str, float]:
    """Largest absolute error of the numbers; of gradients, the largest over the largest entry."""
    out = {}
    for name, true in expected.items():
        if name not in got:
            out[name] = math.inf
            continue
        error = (got[name].double() - true).abs().max()
        out[name] = float(error / true.abs().max()) if name.startswith("grad") else float(error)
    return {name: x if x == x else math.inf for name, x in out.items()}


# ------------------------------------------------------------------------------------------------- the floors


def bare_gemms(row: Row, t: Tensors) -> Step:
    """The row's products in slices of the memory budget, fp32 results into a reused buffer, and nothing else.

    In the order that such a call needs: whole rows for a trainable head or two heads, of as many tokens as fill the
    device best, else slices of the vocabulary for up to 4,096 tokens.
    """
    narrow = operand_dtype(t["hidden"], t["weight"].dtype, torch.float32)
    t = {k: x.detach().to(narrow) if x.is_floating_point() else x for k, x in t.items()}
    if "weight" in row.case.wrt or "ref_weight" in row.case.takes:
        return _by_tokens(row, t, narrow)
    return _by_entries(row, t, narrow)


def gathered(t: Tensors) -> Step:
    """The rows of the weight that a call over sets needs, written end to end, and nothing else."""
    weight, ids = t["weight"], t["token_ids"].flatten()
    out = weight.new_empty(len(ids), weight.shape[1])

    def run() -> Tensors:
        torch.index_select(weight, 0, ids, out=out)
        return {}

    return run


def gathered_sums(t: Tensors) -> Step:
    """The same rows added up by token, so that next to nothing is written."""

    def run() -> Tensors:
        F.embedding_bag(t["token_ids"], t["weight"], mode="sum")
        return {}

    return run


def processors(device: torch.device) -> int:
    """How many the device has, 0 for a CPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 0


def _slopes(case: Case, z: Tensor, narrow: torch.dtype) -> Tensor:
    """What backward's products read for the logits' gradient: z itself, or where they take bf16 such numbers, once."""
    return torch.rand_like(z, dtype=narrow) if case.wrt and narrow != z.dtype else z


def narrow_gemms(row: Row, t: Tensors) -> Step:
    """The row's products with results in the operands' dtype, of all tokens at once where these fit into 4 GiB.

    Half the bytes to write, and no sum over chunks: on some GPUs the faster kind, though too coarse for the numbers.
    """
    case, (n, width) = row.case, t["hidden"].shape
    narrow = operand_dtype(t["hidden"], t["weight"].dtype, torch.float32)
    t = {k: x.detach().to(narrow) if x.is_floating_point() else x for k, x in t.items()}
    v = t["weight"].shape[0]
    tokens = min(n, max(1, WHOLE // (v * t["weight"].element_size())))
    z = t["weight"].new_empty(tokens, v)
    d_hidden, d_weight = t["hidden"].new_empty(tokens, width), torch.empty_like(t["weight"])

    def run() -> Tensors:
        for start in range(0, n, tokens):
            h = t["hidden"][start : start + tokens]
            if "ref_weight" in case.takes:
                torch.mm(t["ref_hidden"][start : start + tokens], t["ref_weight"].t(), out=z[: len(h)])
            torch.mm(h, t["weight"].t(), out=z[: len(h)])
            if "hidden" in case.wrt:
                torch.mm(z[: len(h)], t["weight"], out=d_hidden[: len(h)])
            if "weight" in case.wrt:
                torch.addmm(d_weight, z[: len(h)].t(), h, beta=float(start > 0), out=d_weight)
        return {}

    return run


def _by_tokens(row: Row, t: Tensors, narrow: torch.dtype) -> Step:
    case, device = row.case, t["hidden"].device
    n, v = t["hidden"].shape[0], t["weight"].shape[0]
    heads = 1 + ("ref_weight" in case.takes)
    sizes = {"budget": row.budget, "heads": heads, "whole": True, "hidden": t["hidden"].shape[1]}
    tokens = fused_slices_of(n, v, **sizes, processors=processors(device)).tokens
    buffers = [torch.empty(tokens, v, device=device) for _ in range(heads)]
    slopes = _slopes(case, buffers[0], narrow)
    d_weight = torch.empty(t["weight"].shape, device=device) if "weight" in case.wrt else None
    d_hidden = torch.empty(tokens, t["hidden"].shape[1], device=device)

    def run() -> Tensors:
        for start in range(0, n, tokens):
            h = t["hidden"][start : start + tokens]
            z = buffers[0][: len(h)]
            if heads == 2:
                product(t["ref_hidden"][start : start + tokens], t["ref_weight"].t(), buffers[1][: len(h)])
            product(h, t["weight"].t(), z)
            dz = slopes[: len(h)]
            if "hidden" in case.wrt:
                product(dz, t["weight"], d_hidden[: len(h)])
            if d_weight is not None:
                (add_product if start else product)(dz.t(), h, d_weight)
        return {}

    return run


def _by_entries(row: Row, t: Tensors, narrow: torch.dtype) -> Step:
    n, v = t["hidden"].shape[0], t["weight"].shape[0]
    tokens = -(-n // -(-n // 4096))
    width = max(1, min(v, row.budget // (4 * tokens)))
    buffer = torch.empty(tokens * width, device=t["hidden"].device)
    slopes = _slopes(row.case, buffer, narrow)
    d_hidden = torch.empty(tokens, t["hidden"].shape[1], device=buffer.device)

    def run() -> Tensors:
        for start in range(0, n, tokens):
            h = t["hidden"][start : start + tokens]
            for first in range(0, v, width):
                w = t["weight"][first : first + width]
                z = buffer[: len(h) * len(w)].view(len(h), len(w))
                product(h, w.t(), z)
                if "hidden" in row.case.wrt:
                    dz = slopes[: z.numel()].view_as(z)
                    (add_product if first else product)(dz, w, d_hidden[: len(h)])
        return {}

    return run


# --------------------------------------------------------------------------------------------- ours and peers


def ours(row: Row, backend: str | None) -> Callable[[Case, Tensors], Step]:
    """The row through logitless."""

    def forward(hidden: Tensor, weight: Tensor, labels: Tensor | None = None, **t: Tensor) -> Tensors:
        head, same = ll.LMHead(weight), {"memory_budget": row.budget, "backend": backend}
        if row.case.name == "sample":
            record = ll.sample_tokens(hidden, head, keep=min(20, len(weight)), memory_budget=row.budget)
            return {"top": record.topk_logits, "lse": record.logsumexp, "entropy": record.entropy}
        if row.case.name == "sets":
            mask = mask_of(t["token_ids"])
            stats = ll.token_stats(hidden, head, labels, want=("logprob", "entropy"), sampling_mask=mask, **same)
            return {"logprob": stats.logprob, "entropy": stats.entropy}
        if row.case.name == "loss":
            return {"loss": ll.linear_cross_entropy(hidden, head, labels, **same)}
        if row.case.name == "ppo":
            loss = ll.token_loss(
                lambda s, *inputs: ppo_loss(s.logprob, s.entropy, s.kl, *inputs), hidden, head, labels,
                inputs=(t["advantages"], t["old_logprob"]), want=("logprob", "entropy", "kl"),
                reference=(t["ref_hidden"], ll.LMHead(t["ref_weight"])), **same,
            )  # fmt: skip
            return {"loss": loss}
        want = ("logprob", "entropy") if row.case.name == "entropy" else ("logprob",)
        stats = ll.token_stats(hidden, head, labels, want=want, **same)
        return {name: getattr(stats, name) for name in want}

    return lambda case, tensors: lambda: step(case, forward, tensors)


def ours_in_fp32(row: Row, backend: str | None) -> Callable[[Case, Tensors], Step]:
    """The same with the head's gradient handed over in fp32, as it is summed; others' stay in the weight's dtype."""

    def build(case: Case, tensors: Tensors) -> Step:
        weight, plain = tensors["weight"], ours(row, backend)(case, tensors)

        def run() -> Tensors:
            weight.grad_dtype = torch.float32
            try:
                return plain()
            finally:
                weight.grad_dtype = weight.dtype

        return run

    return build


def with_weights(step: Callable[[], Any], used: int = 1) -> Callable[[], Any]:
    """With sums and weights by the kernel of the products, or without, whatever this GPU's launch sizes say."""

    def run() -> Any:
        table = table_for(torch.device("cuda"))
        with patch.dict(table["weights"], used=used), patch.dict(table["sums"], used=used):
            return step()

    return run


def runs_weights() -> bool:
    """Whether this GPU has the descriptors, and the shared memory, of the kernel that writes weights."""
    return torch.version.hip is None and torch.cuda.get_device_capability()[0] in (9, 10)


def ours_with_weights(row: Row, backend: str | None, used: int) -> Callable[[Case, Tensors], Step]:
    """The row with its weights written by the kernel of the products, or with slices of logits."""

    def build(case: Case, tensors: Tensors) -> Step:
        if tensors["weight"].device.type != "cuda":
            raise Absent("the launch sizes that say who writes weights are a GPU's")
        if used and not runs_weights():
            raise Absent("the kernel that writes weights needs compute capability 9 or 10")
        return with_weights(ours(row, backend)(case, tensors), used)

    return build


IN_A_GRAPH, IN_FP32 = "logitless, CUDA graph", "logitless, fp32 dW"
RIVAL, FASTER = "QuACK", ("logitless", IN_FP32)  # whose time each of these is to beat, where it is measured


def ours_in_a_graph(row: Row, backend: str | None) -> Callable[[Case, Tensors], Step]:
    """The call captured once and replayed, as a decode loop would: the host then has nothing to launch."""

    def build(case: Case, tensors: Tensors) -> Step:
        if not torch.cuda.is_available():
            raise Absent("CUDA graphs need a GPU")
        plain, stream = ours(row, backend)(case, tensors), torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                plain()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = plain()

        def run() -> Tensors:
            graph.replay()
            return out

        return run

    return build


def liger(case: Case, tensors: Tensors) -> Step:
    from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

    def forward(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensors:
        return {"loss": liger_fused_linear_cross_entropy(hidden, weight, labels)}

    return lambda: step(case, forward, tensors)


def liger_cute(case: Case, tensors: Tensors) -> Step:
    """Liger's kernels for Hopper, written in CuTe."""
    from liger_kernel.ops.cutedsl.ops.fused_linear_cross_entropy_sm90 import liger_fused_linear_cross_entropy_sm90

    def forward(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensors:
        return {"loss": liger_fused_linear_cross_entropy_sm90(hidden, weight, labels)}

    return lambda: step(case, forward, tensors)


def liger_scaled(case: Case, tensors: Tensors) -> Step:
    """Liger's log-prob and entropy of each token, for which it has kernels on Hopper."""
    from liger_kernel.ops.fused_linear_scaled_cross_entropy import LigerFusedLinearScaledCrossEntropyFunction

    def forward(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensors:
        if case.name == "frozen":
            return {"logprob": -LigerFusedLinearScaledCrossEntropyFunction.apply(hidden, weight, labels)}
        nll, entropy = LigerFusedLinearScaledCrossEntropyFunction.apply(hidden, weight, labels, return_entropy=True)
        return {"logprob": -nll, "entropy": entropy}

    return lambda: step(case, forward, tensors)


def cut_cross_entropy(case: Case, tensors: Tensors) -> Step:
    from cut_cross_entropy import linear_cross_entropy

    def forward(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensors:
        if case.name == "loss":
            return {"loss": linear_cross_entropy(hidden, weight, labels, impl="cce")}
        return {"logprob": -linear_cross_entropy(hidden, weight, labels, impl="cce", reduction="none")}

    return lambda: step(case, forward, tensors)


def quack(case: Case, tensors: Tensors) -> Step:
    from quack.linear_cross_entropy import chunked_linear_cross_entropy

    def forward(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensors:
        return {"loss": chunked_linear_cross_entropy(hidden, weight, labels)}

    return lambda: step(case, forward, tensors)


def methods(row: Row, backend: str | None) -> Iterator[peers.Method]:
    """Who is measured, the most telling first."""
    name = row.case.name
    if name == "sets":
        yield peers.Method("rows gathered", lambda _, t: gathered(t), "floor")
        yield peers.Method("rows gathered and added up", lambda _, t: gathered_sums(t), "floor")
    else:
        yield peers.Method("bare GEMMs", lambda _, t: bare_gemms(row, t), "floor")
        yield peers.Method("bare GEMMs, narrow results", lambda _, t: narrow_gemms(row, t), "floor")
    yield peers.Method("logitless", ours(row, backend), "ours")
    if name == "sample":
        yield peers.Method(IN_A_GRAPH, ours_in_a_graph(row, backend), "ours")
    if "weight" in row.case.wrt:
        yield peers.Method(IN_FP32, ours_in_fp32(row, backend), "ours")
    if name == "loss":
        yield peers.Method("logitless, weights", ours_with_weights(row, backend, 1), "ours")
        yield peers.Method("logitless, QuACK", ours(row, "quack"), "ours")
    if name in ("loss", "entropy", "frozen") and row.shape == LLAMA:
        yield peers.Method("logitless, slices", ours_with_weights(row, backend, 0), "ours")
    if backend is None and row.name == "loss":
        yield peers.Method("logitless, eager", ours(row, "eager"), "ours")
    if row.dense:
        yield peers.Method("torch", peers.dense)
    if name == "loss":
        yield peers.Method(RIVAL, quack)
        yield peers.Method("Liger, CuTe", liger_cute)
        yield peers.Method("Liger", liger)
    if name in ("entropy", "frozen"):
        yield peers.Method("Liger, scaled cross-entropy", liger_scaled)
    if name in ("loss", "frozen"):
        yield peers.Method("cut-cross-entropy", cut_cross_entropy)
        yield peers.Method("F.linear_cross_entropy, chunked", peers.torch_chunked)
    if name not in ("sample", "sets"):
        yield peers.Method("TRL chunked", peers.trl_chunked)
    if row.dense:
        yield peers.Method("torch.compile", peers.compiled)
