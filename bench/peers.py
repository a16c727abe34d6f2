"""Who is measured: for each case, how to build a step. Peers' packages are imported only when one is built."""

import math
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.cases import CASES, Case, Tensors, ppo_loss, step
from logitless.vocab.devices import bf16_products, has_bf16_tiles

Step = Callable[[], Tensors]
Forward = Callable[..., Tensors]
TOKEN_SLICE = 256  # rows of logits in the bare GEMMs' reused buffer
VOCAB_SLICE = 2048
TILE = 512  # rows of the vocabulary, times a block of tokens: what the pass streams
TOKEN_BLOCK = 2048


@dataclass(frozen=True)
class Method:
    """`build(case, tensors)` returns the step to be timed. A floor computes no result that could be checked."""

    name: str
    build: Callable[[Case, Tensors], Step]
    kind: str = "peer"  # ours | peer | floor

    def begins(self, start: str) -> bool:
        """Whether its name begins so, its own or the shown one."""
        return self.name.startswith(start) or shown(self.name).startswith(start)


def shown(name: str) -> str:
    """A method's name in tables and plots, where plain torch is what logitless is set against, by either backend."""
    names = {"torch": "dense", "torch by oneDNN": "dense by oneDNN", "logitless": "logitless, eager"}
    return names.get(name, name)


# ---------------------------------------------------------------- floors: matrix products and nothing else


def bare_gemms(case: Case, t: Tensors) -> Step:
    """The case's products in slices of 256 tokens, into buffers that are reused from call to call."""
    n, v = t["hidden"].shape[0], t["weight"].shape[0]
    buffer = torch.empty(min(n, TOKEN_SLICE), v)
    grads = {name: torch.empty_like(t[name]) for name in case.wrt}

    def run() -> Tensors:
        for start in range(0, n, TOKEN_SLICE):
            rows = slice(start, start + TOKEN_SLICE)
            h = t["hidden"][rows]
            z = buffer[: len(h)]
            if "ref_weight" in case.takes:
                torch.mm(t["ref_hidden"][rows], t["ref_weight"].t(), out=z)
            torch.mm(h, t["weight"].t(), out=z)
            if "hidden" in grads:
                torch.mm(z, t["weight"], out=grads["hidden"][rows])
            if "weight" in grads:
                torch.addmm(grads["weight"], z.t(), h, beta=float(start > 0), out=grads["weight"])
        return {}

    return run


def tile_gemms(case: Case, t: Tensors) -> Step:
    """`vocab_gemms` into a tile that stays in the caches."""
    return vocab_gemms(case, t, TILE)


def small_tile_gemms(case: Case, t: Tensors) -> Step:
    """`tile_gemms` of half as many tokens, which some processors multiply a fiftieth faster."""
    return vocab_gemms(case, t, TILE, TOKEN_BLOCK // 2)


def vocab_gemms(case: Case, t: Tensors, width: int = VOCAB_SLICE, tokens: int = TOKEN_BLOCK) -> Step:
    """The same products of a slice of the vocabulary with some tokens: on this kind of machine the faster order."""
    n, v = t["hidden"].shape[0], t["weight"].shape[0]
    buffer = torch.empty(min(n, tokens) * min(v, width))
    grads = {name: torch.empty_like(t[name]) for name in case.wrt}

    def run() -> Tensors:
        for start in range(0, v, width):
            rows = slice(start, start + width)
            w = t["weight"][rows]
            for first in range(0, n, tokens):
                some = slice(first, first + tokens)
                h = t["hidden"][some]
                z = buffer[: len(h) * len(w)].view(len(h), len(w))
                if "ref_weight" in case.takes:
                    torch.mm(t["ref_hidden"][some], t["ref_weight"][rows].t(), out=z)
                torch.mm(h, w.t(), out=z)
                if "hidden" in grads:
                    into = grads["hidden"][some]
                    torch.addmm(into, z, w, beta=float(start > 0), out=into)
                if "weight" in grads:
                    into = grads["weight"][rows]
                    torch.addmm(into, z.t(), h, beta=float(first > 0), out=into)
        return {}

    return run


def by_onednn(step: Step) -> Step:
    """The same with oneDNN's products in fp32, which torch has beside MKL's: see docs/how-to/cpu.md."""

    def run() -> Tensors:
        with bf16_products(True):  # which a processor without tiles (AMX) multiplies in fp32
            return step()

    return run


def onednn_gemms(case: Case, t: Tensors) -> Step:
    return by_onednn(vocab_gemms(case, t))


def small_onednn_gemms(case: Case, t: Tensors) -> Step:
    return by_onednn(small_tile_gemms(case, t))


# ---------------------------------------------------------------------------------------- plain torch


def _bind(case: Case, forward: Forward, tensors: Tensors) -> Step:
    return lambda: step(case, forward, tensors)


def dense(case: Case, tensors: Tensors) -> Step:
    return _bind(case, case.dense, tensors)


def dense_by_onednn(case: Case, tensors: Tensors) -> Step:
    return by_onednn(dense(case, tensors))


def _compile_in_this_process() -> None:
    """Inductor's helper processes would hold memory and processor time that nobody accounts for."""
    import torch._inductor.config as inductor  # here, since most methods' processes start a second sooner without

    inductor.compile_threads = 1


def compiled(case: Case, tensors: Tensors) -> Step:
    _compile_in_this_process()
    return _bind(case, torch.compile(case.dense), tensors)


def _torch_linear_cross_entropy(case: Case, tensors: Tensors, options: Any) -> Step:
    def forward(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensors:
        if case.name == "loss":
            return {"loss": F.linear_cross_entropy(hidden, weight, labels, options=options)}
        loss = F.linear_cross_entropy(hidden, weight, labels, reduction="none", options=options)
        return {"logprob": -loss}

    return _bind(case, forward, tensors)


def torch_default(case: Case, tensors: Tensors) -> Step:
    return _torch_linear_cross_entropy(case, tensors, None)


def torch_chunked(case: Case, tensors: Tensors) -> Step:
    return _torch_linear_cross_entropy(case, tensors, torch.nn.LinearCrossEntropyOptions())


def torch_chunked_256(case: Case, tensors: Tensors) -> Step:
    options = torch.nn.LinearCrossEntropyOptions(batch_chunk_size=256, chunking_method=None)
    return _torch_linear_cross_entropy(case, tensors, options)


# -------------------------------------------------------------- cut-cross-entropy, transformers, TRL


def cut_cross_entropy(case: Case, tensors: Tensors) -> Step:
    from cut_cross_entropy import linear_cross_entropy

    _compile_in_this_process()

    def forward(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensors:
        return {"loss": linear_cross_entropy(hidden, weight, labels, impl="torch_compile")}

    return _bind(case, forward, tensors)


def transformers_loss(case: Case, tensors: Tensors) -> Step:
    from transformers.loss.loss_utils import ForCausalLMLoss

    def forward(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensors:
        logits = F.linear(hidden, weight)
        return {"loss": ForCausalLMLoss(logits, labels=None, vocab_size=len(weight), shift_labels=labels)}

    return _bind(case, forward, tensors)


def trl_functions(case: Case, tensors: Tensors) -> Step:
    from trl.trainer.utils import entropy_from_logits, selective_log_softmax

    def forward(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensors:
        logits = F.linear(hidden, weight)
        batch = 8  # the loop inside goes over sequences, so give it some
        logprob = selective_log_softmax(logits.unflatten(0, (batch, -1)), labels.unflatten(0, (batch, -1)))
        return {"logprob": logprob.flatten(), "entropy": entropy_from_logits(logits)}

    return _bind(case, forward, tensors)


def trl_chunked(case: Case, tensors: Tensors) -> Step:
    """TRL's chunked kernels: log-prob and its by-products in one, the divergence in another."""
    from trl.kernels.chunked_divergence import ChunkedDivergenceFunction
    from trl.kernels.chunked_logprob import ChunkedLogProbFunction

    chunk = 32_768  # what TRL's own fused head passes

    def kl(hidden: Tensor, weight: Tensor, ref_hidden: Tensor, ref_weight: Tensor) -> Tensor:
        reverse = 1.0  # KL(student || teacher)
        return ChunkedDivergenceFunction.apply(hidden, weight, None, ref_hidden, ref_weight, None, reverse)[0]

    def logprob(hidden: Tensor, weight: Tensor, labels: Tensor, *outputs: str) -> tuple[Tensor, ...]:
        return ChunkedLogProbFunction.apply(hidden, weight, None, labels, 1.0, chunk, None, 1.0, outputs)

    def forward(hidden: Tensor, weight: Tensor, labels: Tensor, **t: Tensor) -> Tensors:
        if case.name == "loss":
            return {"loss": -logprob(hidden, weight, labels)[0].mean()}
        if case.name == "frozen":
            return {"logprob": logprob(hidden, weight, labels)[0]}
        if case.name == "stats":
            logp, entropy, _, mean, _ = logprob(hidden, weight, labels, "entropy", "mean_logits")
            certainty = (hidden * weight[labels]).sum(-1) - logp - mean - math.log(len(weight))
            divergence = kl(hidden, weight, t["ref_hidden"], t["ref_weight"])
            return {"logprob": logp, "entropy": entropy, "self_certainty": certainty, "kl": divergence}
        logp, entropy, *_ = logprob(hidden, weight, labels, "entropy")
        if case.name == "entropy":
            return {"logprob": logp, "entropy": entropy}
        divergence = kl(hidden, weight, t["ref_hidden"], t["ref_weight"])
        return {"loss": ppo_loss(logp, entropy, divergence, t["advantages"], t["old_logprob"]).mean()}

    return _bind(case, forward, tensors)


# ------------------------------------------------------------------------------------------------- ours

_STATISTICS = {
    "entropy": ("logprob", "entropy"),
    "stats": ("logprob", "entropy", "self_certainty", "kl"),
    "frozen": ("logprob",),
}


def logitless_compiled(case: Case, tensors: Tensors) -> Step:
    return logitless(case, tensors, backend="compiled")


def logitless_roomy(case: Case, tensors: Tensors) -> Step:
    return logitless(case, tensors, backend="compiled", memory_budget=1 << 30)


def logitless(case: Case, tensors: Tensors, backend: str | None = "eager", memory_budget: int | None = None) -> Step:
    import logitless as ll

    how: Any = {"backend": backend, "memory_budget": memory_budget}

    def forward(hidden: Tensor, weight: Tensor, labels: Tensor, **t: Tensor) -> Tensors:
        head = ll.LMHead(weight)
        if case.name == "loss":
            return {"loss": ll.linear_cross_entropy(hidden, head, labels, **how)}
        reference = (t["ref_hidden"], ll.LMHead(t["ref_weight"])) if "ref_hidden" in t else None
        if case.name == "ppo":
            loss = ll.token_loss(
                lambda stats, *inputs: ppo_loss(stats.logprob, stats.entropy, stats.kl, *inputs),
                hidden,
                head,
                labels,
                inputs=(t["advantages"], t["old_logprob"]),
                want=("logprob", "entropy", "kl"),
                reference=reference,
                **how,
            )
            return {"loss": loss}
        want = _STATISTICS[case.name]
        stats = ll.token_stats(hidden, head, labels, want=want, reference=reference, **how)
        return {name: getattr(stats, name) for name in want}

    return _bind(case, forward, tensors)


_OURS = Method("logitless", logitless, "ours")
# oneDNN's switch rounds operands on a processor with tiles, and perhaps on one that is no x86
HAS_ONEDNN = torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512") and not has_bf16_tiles("cpu")
_BY_ONEDNN = (
    Method("bare GEMMs by oneDNN, vocabulary slices", onednn_gemms, "floor"),
    Method("bare GEMMs by oneDNN, smaller tiles", small_onednn_gemms, "floor"),
    Method("torch by oneDNN", dense_by_onednn),
)
_ALWAYS = (
    _OURS,
    Method("logitless, compiled", logitless_compiled, "ours"),
    Method("bare GEMMs", bare_gemms, "floor"),
    Method("bare GEMMs, vocabulary slices", vocab_gemms, "floor"),
    Method("bare GEMMs, vocabulary tiles", tile_gemms, "floor"),
    Method("bare GEMMs, smaller tiles", small_tile_gemms, "floor"),
    Method("torch", dense),
    Method("torch.compile", compiled),
    *(_BY_ONEDNN if HAS_ONEDNN else ()),
    Method("TRL chunked", trl_chunked),
)
_FUSED = (
    Method("F.linear_cross_entropy", torch_default),
    Method("F.linear_cross_entropy, chunked", torch_chunked),
    Method("F.linear_cross_entropy, chunks of 256", torch_chunked_256),
)
_ROOMY = Method("logitless, compiled, 1 GiB", logitless_roomy, "ours")
METHODS: dict[str, tuple[Method, ...]] = dict.fromkeys(CASES, _ALWAYS) | {
    "loss": (
        *_ALWAYS,
        _ROOMY,
        *_FUSED,
        Method("cut-cross-entropy, torch_compile", cut_cross_entropy),
        Method("transformers", transformers_loss),
    ),
    "entropy": (*_ALWAYS, Method("TRL functions", trl_functions)),
    "frozen": (*_ALWAYS, *_FUSED),
    "ppo": (*_ALWAYS, _ROOMY),
}


def check_begun(starts: Sequence[str], methods: Mapping[str, Sequence[Method]]) -> None:
    """Raises ValueError for a beginning that no method of all these cases, or rows, has."""
    known = [m for found in methods.values() for m in found]
    for start in starts:
        if not any(m.begins(start) for m in known):
            names = ", ".join(dict.fromkeys(shown(m.name) for m in known))
            raise ValueError(f"no method of {', '.join(methods)} begins with {start!r}; they are {names}")


def chosen(cases: Sequence[str], starts: Sequence[str], always: Container[str]) -> dict[str, list[Method]]:
    """By case, the methods whose names begin with one of `starts`, and those whose kind is in `always`.

    Raises ValueError for a case that does not exist, and for a beginning that no method of all these cases has.
    """
    if unknown := [name for name in cases if name not in METHODS]:
        raise ValueError(f"unknown case {unknown[0]!r}; choose from {', '.join(METHODS)}")
    check_begun(starts, {case: METHODS[case] for case in cases})
    return {case: [m for m in METHODS[case] if m.kind in always or any(map(m.begins, starts))] for case in cases}
