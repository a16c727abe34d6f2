"""What an evaluation knows of each token and of each document: of one model, or of two that are compared."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...errors import OptionError
from ...integrations.transformers.scoring import head_inputs, token_scores
from ...units import perplexity
from ...vocab.face import token_stats
from ..scoring.block import Measure, Rows, Subject
from ..scoring.summary import numbers
from ..sources.model import ModelSource, load_model, load_tokenizer, resolve_trained, said_of
from .config import EvalConfig

WANT = ("logprob", "rank", "logsumexp", "entropy", "self_certainty")
DIVERGENCES = ("kl", "reverse_kl", "jsd")
MEANS = ("entropy", "self_certainty")
FINITE = {"logsumexp": "model", "logprob": "model"}  # an impossible token leaves its document no perplexity


def measure(config: EvalConfig, subject: Subject) -> Measure:
    """Of the subject alone, or beside config.against. Raises LogitlessError where the two cannot be compared.

    OptionError for a rank that no token can have.
    """
    highest, most = max(config.top_k, default=0), subject.source.vocab_size
    if highest > most and config.top_k != EvalConfig.top_k:  # the ranks of any model may be more than a small one has
        raise OptionError(f"--top-k must be at most the vocabulary, here {most}, got {highest}")
    columns: dict[str, Any] = dict.fromkeys((*WANT, "confidence"), (np.float32, ()))
    columns["rank"] = (np.int32, ())
    if config.against is None:
        return Measure(columns, _alone(config, subject), lambda rows: _sums(rows, config.top_k), finite=FINITE)
    columns |= dict.fromkeys((*DIVERGENCES, "against_logprob"), (np.float32, ()))
    columns["agrees"] = (np.bool_, ())
    other, model = _other(config, config.against, subject)
    return Measure(
        columns,
        _beside(config, subject, model),
        lambda rows: _sums(rows, config.top_k) | _compared(rows),
        finite={**FINITE, "jsd": "against", "against_logprob": "against"},
        others={"against": other},
    )


def _other(config: EvalConfig, name: str, subject: Subject) -> tuple[ModelSource, Any]:
    """The model to compare with, on the subject's device. Raises LogitlessError where it cannot be compared."""
    with said_of("against"):
        other = resolve_trained(name, "compare with")
        entries = load_tokenizer(other).saved.get_vocab()
        model = load_model(other, dtype=config.dtype, length=subject.context)
    if entries != subject.tokenizer.saved.get_vocab():
        raise OptionError(f"--against {name}: expected the tokenizer of --model, got one with other entries")
    if other.vocab_size != subject.source.vocab_size:
        sizes = f"{subject.source.vocab_size:,} entries as --model has, got {other.vocab_size:,}"
        raise OptionError(f"--against {name}: expected a vocabulary of {sizes}")
    return other, model.eval().to(subject.device)


def _alone(config: EvalConfig, subject: Subject) -> Any:
    def read(inputs: dict[str, Tensor], at: tuple[Tensor, Tensor], labels: Tensor) -> Mapping[str, Tensor]:
        budget = config.memory_budget_bytes
        stats, _ = token_scores(subject.model, inputs, at, labels, keep=1, memory_budget=budget, want=WANT)
        return vars(stats) | {"confidence": _confidence(stats)}

    return read


def _beside(config: EvalConfig, subject: Subject, other: Any) -> Any:
    budget = config.memory_budget_bytes

    def read(inputs: dict[str, Tensor], at: tuple[Tensor, Tensor], labels: Tensor) -> Mapping[str, Tensor]:
        hidden, head = head_inputs(other, inputs, at)
        with torch.no_grad():
            theirs = token_stats(hidden, head, labels, top_k=1, memory_budget=budget)
        want, reference = (*WANT, *DIVERGENCES), (hidden, head)
        stats, _ = token_scores(
            subject.model, inputs, at, labels, keep=1, memory_budget=budget, want=want, reference=reference
        )
        return vars(stats) | {
            "confidence": _confidence(stats),
            "against_logprob": theirs.logprob,
            "agrees": (stats.top_k_ids == theirs.top_k_ids)[:, 0],
        }

    return read


def _confidence(stats: Any) -> Tensor:
    """The probability of the best entry."""
    return (stats.top_k_logits[:, 0] - stats.logsumexp).exp()


def _sums(rows: Rows, top_k: tuple[int, ...]) -> dict[str, float]:
    within = {f"top_{k}": int((rows["rank"] <= k).sum()) for k in (1, *top_k)}
    return within | {name: float(rows[name].sum(dtype=np.float64)) for name in MEANS}


def _compared(rows: Rows) -> dict[str, float]:
    sums = {name: float(rows[name].sum(dtype=np.float64)) for name in DIVERGENCES}
    nats = -float(rows["against_logprob"].sum(dtype=np.float64))
    return sums | {"agrees": int(rows["agrees"].sum()), "against_nats": nats}


def numbers_of(known: Mapping[str, Any], top_k: tuple[int, ...]) -> dict[str, Any]:
    """The sums of a document, or of all, as people read them; None where nothing was scored."""
    scored = known["scored"]

    def mean(name: str) -> float | None:
        return known[name] / scored if scored else None

    found = numbers(known) | {"accuracy": mean("top_1")}
    found["top_k_accuracy"] = {str(k): mean(f"top_{k}") for k in top_k}
    found |= {name: mean(name) for name in MEANS}
    if "agrees" in known:
        more = known["nats"] - known["against_nats"]
        found["compared"] = {
            "perplexity": perplexity(known["against_nats"] / scored) if scored else None,
            "perplexity_ratio": perplexity(more / scored) if scored else None,
            **{name: mean(name) for name in DIVERGENCES},
            "agreement": mean("agrees"),
        }
    return found
