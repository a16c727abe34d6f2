"""Records as other programs read them: arrow tables, OpenAI's and vLLM's log-probs."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..errors import ConfigError, ShapeError

if TYPE_CHECKING:
    import pyarrow

    from .record import SampleRecord


def to_arrow(record: SampleRecord) -> pyarrow.Table:
    """A table with a row per written token, in order.

    Columns: `sequence` and `position` int32 (the flattened index of all dimensions but the last, and the last), every
    field of the record, `topk_*` as lists of k; the schema's metadata has vocab_size. Raises ConfigError.
    """
    try:
        import pyarrow as pa
    except ImportError:
        raise ConfigError("to_arrow: expected pyarrow, which is not installed; pip install pyarrow") from None
    length = record.shape[-1] if record.shape else 1
    flat = record.reshape(record.token.numel())
    index = (flat.token >= 0).nonzero().squeeze(1)
    columns: dict[str, Any] = {"sequence": (index // max(1, length)).int(), "position": (index % max(1, length)).int()}
    columns |= {name: x for name, x in vars(flat[index]).items() if name != "vocab_size"}
    arrays = {}
    for name, x in columns.items():
        values = pa.array(x.detach().cpu().reshape(-1).numpy())
        if x.dim() == 2 and record.keep:
            arrays[name] = pa.FixedSizeListArray.from_arrays(values, record.keep)
        elif x.dim() == 1:
            arrays[name] = values
    return pa.table(arrays).replace_schema_metadata({"vocab_size": str(record.vocab_size)})


def top_logprobs(record: SampleRecord, decode: Callable[[int], str]) -> list[dict[str, Any]]:
    """`choices[].logprobs.content` of OpenAI's chat completions: raw log-probs, a dict per written token.

    record: one sequence, (T,); decode: an id's text. Raises ShapeError.
    """

    def entry(token: int, logprob: float) -> dict[str, Any]:
        text = decode(token)
        return {"token": text, "logprob": logprob, "bytes": list(text.encode())}

    return [
        entry(token, logprob) | {"top_logprobs": [entry(i, x) for i, x in zip(ids, best, strict=True)]}
        for token, logprob, _, ids, best in _tokens(record)
    ]


def vllm_logprobs(record: SampleRecord, decode: Callable[[int], str] | None = None) -> list[dict[int, dict[str, Any]]]:
    """vLLM's `logprobs`: per written token {id: {logprob, rank, decoded_token}}, the token itself first.

    record: one sequence, (T,); ranks count from 1, log-probs are raw. Raises ShapeError.
    """

    def entry(token: int, logprob: float, rank: int) -> dict[str, Any]:
        return {"logprob": logprob, "rank": rank, "decoded_token": None if decode is None else decode(token)}

    out = []
    for token, logprob, rank, ids, best in _tokens(record):
        row = {token: entry(token, logprob, rank)}
        for place, (i, x) in enumerate(zip(ids, best, strict=True), 1):
            row.setdefault(i, entry(i, x, place))
        out.append(row)
    return out


def _tokens(record: SampleRecord) -> list[tuple[int, float, int, list[int], list[float]]]:
    """(token, log-prob, rank, best ids, their log-probs) of each written token of one sequence."""
    if len(record.shape) != 1:
        raise ShapeError(f"logprobs: expected the record of one sequence (T,), got {record.shape}; take record[b]")
    written = record[(record.token >= 0).nonzero().squeeze(1)]
    columns = (written.token, written.logprob, written.rank, written.topk_ids, written.topk_logprob)
    return list(zip(*(x.tolist() for x in columns), strict=True))
