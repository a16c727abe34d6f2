"""`Teacher`: what a run learns from a record that `logitless score` wrote, and the trainers that do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import Dataset
from transformers import Trainer

from ...errors import DataError, OptionError
from ...hashes import hash_of
from ...integrations.transformers.lm_head import forward_with, through_head
from ...losses import decoupled_kl, forward_kl, record_kl, reverse_kl, tail_aware_kl
from ...sample import TeacherRecord
from ...units import plural
from ...vocab.face import LMHead, TokenStats, linear_cross_entropy, token_loss, token_stats
from ..common.files import check_ends, parsed
from ..common.options import require
from ..common.written import is_result
from ..sources import chat
from ..sources.chat import Example
from ..sources.corpus import ending
from ..sources.identity import hash_of_text, known_of, text_files
from ..sources.packing import IGNORED, PackedRows, Stream, collate
from ..sources.tokenizer import TextTokenizer
from .config import TrainConfig
from .sharded import ShardedTrainer

Asked = tuple[dict[str, Any], Callable[..., Tensor]]  # options of the pass, and what becomes of its statistics
ROWS = "teacher_rows"  # of a row of text: where in the record each token's distribution lies
HIDDEN, BEST = ("teacher_hidden",), ("teacher_ids", "teacher_log_weights")


@dataclass(frozen=True, eq=False)
class Teacher:
    """A record, whose entries are the student's own or are `entries` (V,) of the teacher's, and how it is learned."""

    record: TeacherRecord
    config: TrainConfig
    entries: np.ndarray | None = None

    @classmethod
    def of(cls, config: TrainConfig, tokenizer: TextTokenizer, vocab_size: int) -> Teacher | None:
        """The teacher of a run, checked against its student and its text; None without one. Raises LogitlessError."""
        if config.teacher is None:
            return None
        record = TeacherRecord(config.teacher)
        _check_text(config, record)
        _check_kind(config, record, vocab_size)
        entries = None
        if config.teacher_ids is None:
            _check_vocabulary(config, record, tokenizer, vocab_size)
        else:
            entries = _read_entries(Path(config.teacher_ids), vocab_size, record.vocab_size)
        found = cls(record, config, entries)
        if record.kind == "hidden":
            found.head  # noqa: B018 (read now: a head that is missing or another's ends a run before it begins)
        return found

    @cached_property
    def head(self) -> LMHead:
        """The teacher's head over the student's entries."""
        head = self.record.head()
        if self.entries is None:
            return head
        entries = torch.from_numpy(self.entries)
        bias = None if head.bias is None else head.bias[entries]
        return replace(head, weight=head.weight[entries], bias=bias, vocab_size=None)  # pyright: ignore[reportArgumentType,reportIndexIssue]

    @cached_property
    def own_ids(self) -> np.ndarray | None:
        """The student's id of each of the teacher's, -1 where it has none."""
        if self.entries is None:
            return None
        own = np.full(self.record.vocab_size, -1, dtype=np.int64)
        own[self.entries] = np.arange(len(self.entries))
        return own

    def inputs(self) -> dict[str, str]:
        """What tells its ids from all others; of its record, the rows that are made of it say that."""
        ids = self.entries
        return {} if ids is None else {f"--teacher-ids {self.config.teacher_ids}": hash_of(ids.tobytes())}

    def summary(self) -> dict[str, Any]:
        """What a run's summary says of it."""
        options = ["loss", "tail", "weight", "temperature"]
        options += ["tail_weight"] if self.config.distill_tail == "tail-aware" else []
        asked = {name: getattr(self.config, f"distill_{name}") for name in options}
        return {"record": str(self.record.path), "stored": self.record.kind, **asked}

    def streams(self, length: int) -> tuple[Stream, Stream, list[str]]:
        """(train, held out, what is to be said): the record's documents, whole in a row where they fit.

        So a student sees what the teacher saw; a longer document goes on in a row of its own, with less before it.
        """
        start = self._own_start()
        opening = np.arange(len(self.record.opening))
        documents, tokens, silent, foreign = [], [start], 0, 0
        for first, read, scored in self.record.documents():
            ids = read if self.own_ids is None else self.own_ids[read]
            tokens.append(ids)
            unread = int(not len(opening))  # a first token without another before it
            if not scored[unread:].all() or len(read) == unread:
                silent += 1
            elif (ids < 0).any():
                foreign += 1
            else:
                places = np.concatenate([opening, len(start) + np.arange(first, first + len(read))])
                documents.append(Example(places, np.arange(len(places)) >= len(opening)))
        count = plural(len(tokens) - 1, "document")
        what = {
            "with tokens that have no score, as conversations have: left out": silent,
            "with tokens that the student has no entry for: left out": foreign,
            f"longer than {plural(length, 'token')}: what follows is read without them": sum(
                len(x.ids) > length for x in documents
            ),
        }
        remarks = [f"{number:,} of {count} {why}" for why, number in what.items() if number]
        if len(documents) < 2:
            found = "; ".join(remarks) or f"got {count}"
            expected = "two documents or more, one to train on and one to hold out"
            raise DataError(f"--teacher {self.record.path}: expected {expected}: {found}")
        every = np.concatenate(tokens)
        kept, held = (_packed(some, length, every, len(start)) for some in chat.hold_out(documents))
        return kept, held, remarks

    def _own_start(self) -> np.ndarray:
        """The student's ids of what the teacher's documents begin with; any id where they begin with nothing."""
        opening = np.array(self.record.opening, dtype=np.int64)
        own = opening if self.own_ids is None else self.own_ids[opening]
        if len(lost := opening[own < 0]):
            raise DataError(
                f"--teacher-ids {self.config.teacher_ids}: expected an entry of the student for id {lost[0]}, which "
                "the record's documents begin with, got none: add it, or score with --bos no"
            )
        return own if len(own) else np.zeros(1, np.int64)

    def batch(self, rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        """A batch of `TaughtRows`: beside the text, at each position, the teacher's distribution of what comes next."""
        found = collate(rows)
        source = F.pad(found.pop(ROWS), (0, 1), value=-1)[:, 1:]
        at = F.pad(found["labels"], (0, 1), value=IGNORED)[:, 1:] != IGNORED
        parts = [vars(self.record.read(begin, end)) for begin, end in _runs(source[at].numpy())]
        if self.record.kind == "hidden":
            learned = {HIDDEN[0]: torch.cat([part["hidden"] for part in parts])}
        else:
            ids, log_weights = (torch.cat([part[name] for part in parts]) for name in ("ids", "log_weights"))
            learned = dict(zip(BEST, self._own(ids, log_weights), strict=True))
            nothing = learned[BEST[1]].isneginf().all(-1)
            found["labels"][:, 1:][at[:, :-1]] = torch.where(nothing, IGNORED, found["labels"][:, 1:][at[:, :-1]])
        for name, values in learned.items():
            found[name] = values.new_zeros(*at.shape, values.shape[-1])
            found[name][at] = values
        return found

    def _own(self, ids: Tensor, log_weights: Tensor) -> tuple[Tensor, Tensor]:
        """Best entries by the student's ids; one that it has not is padding, and the tail's."""
        if self.own_ids is None:
            return ids, log_weights
        own = torch.from_numpy(self.own_ids)[ids]
        some = own.amax(-1, keepdim=True).clamp_min(0)
        return torch.where(own < 0, some, own), log_weights.masked_fill(own < 0, -torch.inf)

    def loss(self, model: Any, batch: dict[str, Tensor], items: Tensor | int | None) -> Tensor:
        """The loss of a batch, over `items` tokens or as many as it has; the wrapped model runs its own forward."""
        names = HIDDEN if self.record.kind == "hidden" else BEST
        learned = [batch[name] for name in names]
        text = {name: x for name, x in batch.items() if name not in names}
        targets = F.pad(batch["labels"], (0, 1), value=IGNORED)[..., 1:]

        def end(inner: Any, hidden: Tensor) -> Tensor:
            return through_head(inner, self.of_hidden, hidden, targets, *learned)

        counted = (targets != IGNORED).sum() if items is None else torch.as_tensor(items)
        return forward_with(model, text, end) / counted.clamp_min(1)

    def of_hidden(self, head: LMHead, hidden: Tensor, targets: Tensor, *learned: Tensor) -> Tensor:
        """The summed loss of a student's hidden states (B, T, H).

        Dense equivalent, of hidden states and forward KL:

            s, t = ((h @ w.T / temperature).log_softmax(-1) for h, w in ((hidden, head), (learned, self.head)))
            kl = (t.exp() * (t - s)).sum(-1)
            each = weight * temperature**2 * kl - (1 - weight) * (hidden @ head.T).log_softmax(-1)[targets]
            each[targets != -100].sum()
        """
        share, temperature = self.config.distill_weight, self.config.distill_temperature
        with_label = share < 1 and temperature == 1
        asked, divergence = self._apart(targets, *learned) if self._taken_apart else self._whole(*learned)
        asked["want"] = (*asked["want"], *(["logprob"] if with_label else []))

        def each(stats: TokenStats, *given: Tensor) -> Tensor:
            found = share * divergence(stats, *given)
            return found - (1 - share) * stats.logprob if with_label else found

        shared: dict[str, Any] = {"reduction": "sum", "memory_budget": self.config.memory_budget_bytes}
        total = token_loss(each, hidden, head, targets, temperature=temperature, **shared, **asked)
        if share < 1 and not with_label:  # the labels' loss knows no temperature: another look at the logits
            total = total + (1 - share) * linear_cross_entropy(hidden, head, targets, **shared)
        return total

    @property
    def _taken_apart(self) -> bool:
        """Whether the best entries stand apart from all others."""
        return self.record.kind == "topk" or self.config.distill_tail != "bucket"

    def _whole(self, hidden: Tensor) -> Asked:
        """What is asked of the pass for the divergence over the whole vocabulary, and how it is read."""
        temperature = self.config.distill_temperature
        reference = self._reference(hidden)
        if self.config.distill_loss == "forward":
            asked = {"want": ("reverse_kl",), "reference": reference}
            return asked, lambda stats: forward_kl(stats.reverse_kl, temperature)
        return {"want": ("kl",), "reference": reference}, lambda stats: reverse_kl(stats.kl, temperature)

    def _apart(self, targets: Tensor, *learned: Tensor) -> Asked:
        """The same for the divergence over the teacher's best entries and what it gives to all others."""
        config, want, more = self.config, ("logsumexp", "tail_logprob"), {}
        if self.record.kind == "hidden":
            reference = self._reference(*learned)
            learned = self._best(reference, targets)
            want, more = (*want, "reverse_kl"), {"reference": reference}
        ids, log_weights = learned

        def divergence(stats: TokenStats, t: Tensor, *mean_tail: Tensor) -> Tensor:
            known = (stats.candidate_logits, stats.logsumexp, t, stats.tail_logprob)
            if config.distill_tail == "bucket":
                return record_kl(*known, config.distill_loss)
            if config.distill_tail == "tail-aware":
                found = tail_aware_kl(*known, stats.reverse_kl, *mean_tail, weight=config.distill_tail_weight)
            else:
                found = decoupled_kl(*known, stats.reverse_kl if "reverse_kl" in want else None)
            return config.distill_temperature**2 * found

        mean_tail = [_mean_tail(log_weights, targets)] if config.distill_tail == "tail-aware" else []
        return {"want": want, "candidates": ids, "inputs": (log_weights, *mean_tail), **more}, divergence

    def _best(self, reference: tuple[Tensor, LMHead], targets: Tensor) -> tuple[Tensor, Tensor]:
        """The teacher's best entries and their log-probabilities, of stored hidden states: one product more."""
        config = self.config
        more: dict[str, Any] = {"top_k": config.distill_top_k, "memory_budget": config.memory_budget_bytes}
        with torch.no_grad():
            best = token_stats(*reference, targets, want=("logsumexp",), temperature=config.distill_temperature, **more)
        return best.top_k_ids, best.top_k_logits - best.logsumexp[..., None]

    def _reference(self, hidden: Tensor) -> tuple[Tensor, LMHead]:
        """The teacher as the pass takes it, on the device of its hidden states."""
        place, head = hidden.device, self.head
        if head.weight.device != place:
            bias = None if head.bias is None else head.bias.to(place)
            head = self.__dict__["head"] = replace(head, weight=head.weight.to(place), bias=bias)
        return hidden.to(head.weight.dtype), head


class TaughtRows(Dataset):
    """Rows of text that say where in the record each token's distribution lies: `teacher_rows` (length,) int64."""

    def __init__(self, rows: PackedRows) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, row: int) -> dict[str, Tensor]:
        found, length, source = self.rows[row], self.rows.length, self.rows.stream.rows
        if source is None:
            raise DataError("expected rows of a teacher's record, got text alone")
        return {**found, ROWS: torch.from_numpy(source[row * length : (row + 1) * length])}


class Taught:
    """A Trainer whose loss is a teacher's: `teacher` says how, other arguments are the Trainer's."""

    def __init__(self, *args: Any, teacher: Teacher, **kwargs: Any) -> None:
        self.teacher = teacher
        super().__init__(*args, **kwargs)

    def compute_loss(
        self: Any,
        model: Any,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Tensor:
        """As Trainer's, which averages over the ranks where `num_items_in_batch` counts the tokens of all of them."""
        with self.accelerator.autocast():  # that of the model's own forward ended before its head
            loss = self.teacher.loss(model, inputs, num_items_in_batch)
        if self.args.average_tokens_across_devices and num_items_in_batch is not None:
            loss = loss * (self.accelerator.num_processes // self.get_tp_size())
        return loss


class TaughtTrainer(Taught, Trainer):
    """On one device, or on ranks that share the data."""


class TaughtShardedTrainer(Taught, ShardedTrainer):
    """On ranks that share the weights too."""


def _packed(documents: list[Example], length: int, every: np.ndarray, before: int) -> Stream:
    """Documents, given as their places in `every`, in rows of `length` tokens, filled with its first one.

    Of its tokens all but the `before` first have a row of the record, in this order.
    """
    parts = [
        Example(x.ids[i : i + length], x.said[i : i + length]) for x in documents for i in range(0, len(x.ids), length)
    ]
    stream, _ = chat.packed([part for part in parts if len(part.ids) > 1], length, 0)
    places = stream.ids.astype(np.int64)
    return Stream(every[places].astype(np.uint32), stream.starts, stream.said, places - before)


def _mean_tail(log_weights: Tensor, targets: Tensor) -> Tensor:
    """What a record's entries (B, T, K) leave of 1, its mean over the tokens of each row that count, (B, T)."""
    counts = targets != IGNORED
    tail = (1 - log_weights.exp().sum(-1)).masked_fill(~counts, 0)
    return (tail.sum(-1, keepdim=True) / counts.sum(-1, keepdim=True).clamp_min(1)).expand_as(tail)


def _runs(rows: np.ndarray) -> list[tuple[int, int]]:
    """Rows in order as (begin, end) of those that lie side by side."""
    edges = [0, *(np.flatnonzero(np.diff(rows) != 1) + 1).tolist(), len(rows)]
    return [(int(rows[begin]), int(rows[end - 1]) + 1) for begin, end in pairwise(edges) if begin < end]


def _check_kind(config: TrainConfig, record: TeacherRecord, vocab_size: int) -> None:
    """OptionError for what cannot be learned of a record of best entries, or of hidden states."""
    if record.kind == "hidden":
        if config.distill_tail != "bucket":
            most = f"at most {vocab_size:,}, the vocabulary"
            require(config.distill_top_k <= vocab_size, "distill_top_k", most, config.distill_top_k)
        return
    if config.distill_temperature != 1:
        raise OptionError(
            f"--distill-temperature {config.distill_temperature:g}: expected 1 for a record of best entries, whose "
            "tail is known at no other: score with --store hidden"
        )
    if config.distill_tail == "tail-aware":
        raise OptionError(
            "--distill-tail tail-aware: expected a record of hidden states, got one of best entries, which does "
            "not say what is in the tail: score with --store hidden"
        )
    if config.distill_top_k != TrainConfig.distill_top_k:
        raise OptionError(
            f"--distill-top-k {config.distill_top_k}: expected a record of hidden states, got one of best entries, all "
            "of which are set apart: leave it out, or score with --store hidden"
        )


def _check_text(config: TrainConfig, record: TeacherRecord) -> None:
    """DataError where --data is not the text of the record, with or without the results that lie among it."""
    if config.data is None:
        return
    data, own = Path(config.data), _files_of(record)
    found = hash_of_text(data, own)  # earlier results were text to the teacher, later ones were not there
    if found != record.text and hash_of_text(data, (*own, *_results(data))) != record.text:
        raise DataError(
            f"--teacher {record.path} is of another text than --data {config.data} (hash {record.text}, now {found}): "
            "score that text, or leave out --data, since the record holds its tokens"
        )


def _files_of(record: TeacherRecord) -> tuple[Path, ...]:
    """A record's own files."""
    return (record.path, record.head_path) if record.kind == "hidden" else (record.path,)


def _results(data: Path) -> Iterator[Path]:
    """The files below a folder that `logitless score` wrote."""
    for path in text_files(data):
        if is_result(path):
            yield path
        elif ending(path) == ".parquet":
            with suppress(DataError):  # of a table that is no record
                yield from _files_of(TeacherRecord(path))


def _check_vocabulary(config: TrainConfig, record: TeacherRecord, tokenizer: TextTokenizer, vocab_size: int) -> None:
    """OptionError where teacher and student do not read alike."""
    if record.tokenizer is None:
        raise DataError(f"--teacher {record.path} says of no tokenizer, as earlier versions wrote it: score again")
    hint = "take a student of the teacher's vocabulary, or give --teacher-ids"
    if vocab_size != record.vocab_size:
        raise OptionError(
            f"--teacher {record.path} has a vocabulary of {record.vocab_size:,} entries, --model {config.model} of "
            f"{vocab_size:,}: {hint}"
        )
    if known_of(tokenizer) != record.tokenizer:
        raise OptionError(
            f"--teacher {record.path} was written with another tokenizer than that of --model {config.model}: {hint}"
        )


def _read_entries(path: Path, vocab_size: int, theirs: int) -> np.ndarray:
    """The teacher's id of each of the student's entries (V,), from a JSON list or a .npy file. Raises DataError."""
    try:
        check_ends(path)
        found = np.lib.format.open_memmap(path, mode="r") if path.suffix == ".npy" else np.array(parsed(path))
    except Exception as error:  # json, and numpy, which reads a header as Python
        why = getattr(error, "strerror", None) or "neither .npy nor a JSON list of ids"
        raise DataError(f"--teacher-ids {path}: {why}") from None
    if found.shape != (vocab_size,) or not np.issubdtype(found.dtype, np.integer):
        got = f"{found.dtype} of shape {found.shape}"
        raise DataError(f"--teacher-ids {path}: expected a list of {vocab_size:,} ids, one for each entry, got {got}")
    if found.min() < 0 or found.max() >= theirs:
        raise DataError(f"--teacher-ids {path}: expected ids in 0..{theirs - 1}, got {found.min()}..{found.max()}")
    if len(np.unique(found)) != len(found):
        raise DataError(f"--teacher-ids {path}: expected each of the teacher's ids once, got some twice")
    return np.array(found, dtype=np.int64)
