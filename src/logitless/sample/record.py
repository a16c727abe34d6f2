"""`SampleRecord`: what is kept of each token's distribution in the place of its logits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..algebra.options import whole_from, whole_within
from ..algebra.record import Derived, sizes_of
from ..errors import ConfigError, OptionError, ShapeError
from ..vocab.face import SamplingMask

if TYPE_CHECKING:
    import pyarrow


@dataclass(frozen=True, eq=False)
class SampleRecord(Derived):
    """Tokens, and enough of the distributions that they come from: 40 + 8·k bytes a token.

    Floating fields are fp32 (fp64 where the hidden states are), integers int32; (...) is (B, T) or any shape. "raw"
    is the head's own distribution, temperature 1 and every entry. Tokens that were never written are -1.
    token, token_logit, rank: (...) the token, its raw logit, and 1 + how many logits are higher.
    topk_logits, topk_ids: (..., k) the best raw logits, equal ones by id.
    logsumexp, mean_logit, entropy: (...) of the raw logits, over all entries.
    temperature, logsumexp_at_temperature, log_kept_mass, n_kept: (...) of the distribution that was drawn from:
    logsumexp(z / temperature), the log of the share that top-k, top-p and min-p kept, and how many entries that are;
    greedy tokens have temperature 0, and 0 for both logarithms. The entries that were kept are the n_kept best:
    `sampling_mask` gives them.
    processed: whether logits processors changed the rows that tokens were drawn from.
    """

    xp = torch

    token: Tensor
    token_logit: Tensor
    rank: Tensor
    topk_logits: Tensor
    topk_ids: Tensor
    logsumexp: Tensor
    mean_logit: Tensor
    entropy: Tensor
    temperature: Tensor
    logsumexp_at_temperature: Tensor
    log_kept_mass: Tensor
    n_kept: Tensor
    vocab_size: int
    processed: bool = False

    @classmethod
    def empty(
        cls,
        shape: tuple[int, ...],
        *,
        keep: int,
        vocab_size: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> SampleRecord:
        """A record of `shape` for `write` to fill. Raises OptionError, ShapeError."""
        vocab_size = whole_from("vocab_size", vocab_size, 1)
        shape, keep = sizes_of("shape", shape), whole_within("keep", keep, 0, vocab_size)
        whole = torch.zeros(shape, dtype=torch.int32, device=device)
        real = torch.zeros(shape, dtype=dtype, device=device)
        made: dict[str, Any] = {name: real.clone() for name in names()}
        made |= {"token": whole - 1, "rank": whole.clone(), "n_kept": whole.clone(), "vocab_size": vocab_size}
        made["topk_logits"] = real.new_zeros(*shape, keep)
        made["topk_ids"] = whole.new_full((*shape, keep), -1)
        return cls(**made)

    def write(self, index: Any, part: SampleRecord) -> None:
        """Put `part` at an index of (...), as in `record.write((slice(None), t), step)`. Raises OptionError."""
        self.check_part(part)
        if part.processed and not self.processed:
            raise OptionError(
                "record.write: expected rows that no logits processor changed, as the record says, got some that "
                "one did; write them into dataclasses.replace(record, processed=True)"
            )
        for name in names():
            field = getattr(self, name)
            field[self.place(index, field)] = getattr(part, name)

    def map(self, change: Callable[[Tensor], Tensor]) -> SampleRecord:
        """The record with `change` applied to every tensor."""
        return replace(self, **{name: change(getattr(self, name)) for name in names()})

    def __getitem__(self, index: Any) -> SampleRecord:
        """Some of the tokens, as views: an index of (...)."""
        return self.map(lambda x: x[self.place(index, x)])

    def reshape(self, *lead: int | tuple[int, ...]) -> SampleRecord:
        """The same tokens in another shape (...), in numbers or a tuple; -1 is what is left. Raises ShapeError."""
        trailing, sizes = self.token.dim(), self.lead(*lead)
        return self.map(lambda x: x.reshape((*sizes, *x.shape[trailing:])))

    @property
    def cut(self) -> Tensor:
        """Which tokens were drawn from more entries than the record holds, (...) bool."""
        return self.n_kept > self.keep

    def sampling_mask(self, *, cut: str = "refuse") -> SamplingMask:
        """The entries that each token could be drawn from, for `token_stats(sampling_mask=...)`, tokens flattened.

        Tokens that were never written have an empty set: ignore them, as label -100. cut: "refuse" raises OptionError
        where a set has more than `keep` entries, "empty" leaves these tokens an empty set, too (`cut` says which).
        Raises OptionError where logits processors changed the rows: a set is then not enough to replay them.
        """
        if cut not in ("refuse", "empty"):
            raise OptionError(f"cut: expected 'refuse' or 'empty', got {cut!r}")
        if self.processed:
            raise OptionError(
                "sampling_mask: expected rows that no logits processor changed, got some that one did; generate with "
                "temperature, top_k, top_p and min_p alone"
            )
        counts = torch.where(self.token >= 0, self.n_kept, 0).flatten()
        beyond = counts > self.keep
        if cut == "refuse" and bool(beyond.any()):
            raise OptionError(
                f"sampling_mask: expected sets of at most keep={self.keep} entries, got {int(beyond.sum())} tokens "
                f"with more, up to {int(counts.max())}; record with a larger keep, or pass cut='empty' and ignore these"
            )
        counts = torch.where(beyond, 0, counts).long()
        ids = self.topk_ids.reshape(counts.shape[0], self.keep)
        inside = torch.arange(self.keep, device=ids.device) < counts[:, None]
        return SamplingMask.of_counts(ids[inside], counts)

    def alternatives(self, *index: int) -> list[tuple[int, float]]:
        """(id, raw log-prob) of the best entries other than the token at one index, best first."""
        token = int(self.token[index])
        pairs = zip(self.topk_ids[index].tolist(), self.topk_logprob[index].tolist(), strict=True)
        return [(i, logprob) for i, logprob in pairs if i != token]

    def to_dict(self) -> dict[str, Any]:
        """Every field by name, as (nested) lists of numbers."""
        lists = {name: getattr(self, name).tolist() for name in names()}
        return lists | {"vocab_size": self.vocab_size, "processed": self.processed}

    def to_arrow(self) -> pyarrow.Table:
        """A table with a row per written token, in order.

        Columns: `sequence` and `position` int32 (the flattened index of all dimensions but the last, and the last),
        every field of the record, `topk_*` as lists of k; the schema's metadata has vocab_size and processed. Raises
        ConfigError.
        """
        try:
            import pyarrow as pa
        except ImportError:
            raise ConfigError("to_arrow: expected pyarrow, which is not installed; pip install pyarrow") from None
        length = self.shape[-1] if self.shape else 1
        flat = self.reshape(self.token.numel())
        index = (flat.token >= 0).nonzero().squeeze(1)
        columns: dict[str, Any] = {
            "sequence": (index // max(1, length)).int(),
            "position": (index % max(1, length)).int(),
        }
        some = flat[index]
        columns |= {name: getattr(some, name) for name in names()}
        arrays = {}
        for name, x in columns.items():
            values = pa.array(x.detach().cpu().reshape(-1).numpy())
            if x.dim() == 2 and self.keep:
                arrays[name] = pa.FixedSizeListArray.from_arrays(values, self.keep)
            elif x.dim() == 1:
                arrays[name] = values
        about = {"vocab_size": str(self.vocab_size), "processed": str(self.processed).lower()}
        return pa.table(arrays).replace_schema_metadata(about)

    def top_logprobs(self, decode: Callable[[int], str]) -> list[dict[str, Any]]:
        """`choices[].logprobs.content` of OpenAI's chat completions: raw log-probs, a dict per written token.

        The record of one sequence, (T,); decode: an id's text. Raises ShapeError.
        """

        def entry(token: int, logprob: float) -> dict[str, Any]:
            text = decode(token)
            return {"token": text, "logprob": logprob, "bytes": list(text.encode())}

        return [
            entry(token, logprob) | {"top_logprobs": [entry(i, x) for i, x in zip(ids, best, strict=True)]}
            for token, logprob, _, ids, best in _tokens(self)
        ]

    def vllm_logprobs(self, decode: Callable[[int], str] | None = None) -> list[dict[int, dict[str, Any]]]:
        """vLLM's `logprobs`: per written token {id: {logprob, rank, decoded_token}}, the token itself first.

        The record of one sequence, (T,); ranks count from 1, log-probs are raw. Raises ShapeError.
        """

        def entry(token: int, logprob: float, rank: int) -> dict[str, Any]:
            return {"logprob": logprob, "rank": rank, "decoded_token": None if decode is None else decode(token)}

        out = []
        for token, logprob, rank, ids, best in _tokens(self):
            row = {token: entry(token, logprob, rank)}
            for place, (i, x) in enumerate(zip(ids, best, strict=True), 1):
                row.setdefault(i, entry(i, x, place))
            out.append(row)
        return out


def names() -> list[str]:
    """The tensors of a record."""
    return [f.name for f in fields(SampleRecord) if f.name not in ("vocab_size", "processed")]


def _tokens(record: SampleRecord) -> list[tuple[int, float, int, list[int], list[float]]]:
    """(token, log-prob, rank, best ids, their log-probs) of each written token of one sequence."""
    if len(record.shape) != 1:
        raise ShapeError(f"logprobs: expected the record of one sequence (T,), got {record.shape}; take record[b]")
    written = record[(record.token >= 0).nonzero().squeeze(1)]
    columns = (written.token, written.logprob, written.rank, written.topk_ids, written.topk_logprob)
    return list(zip(*(x.tolist() for x in columns), strict=True))
