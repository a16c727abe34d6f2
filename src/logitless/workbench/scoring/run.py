"""`run`: text scored by a model, from a `ScoreConfig` to a parquet file and a summary; `measured`: what all such do."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from rich.console import Console
from torch import Tensor

from ...errors import DataError, OptionError
from ...integrations.transformers.scoring import token_scores
from ...models.positions import reach
from ...resident import peak_bytes, reset_peak
from ...sample.columns import STORED, packed_hidden
from ...vocab.face import LMHead
from ..common.device import device_of
from ..common.files import folders_for
from ..common.say import quiet, say
from ..common.space import OutOfSpace, room_wanted
from ..runs.ending import stoppable
from ..runs.ranks import agree, first, lost, together
from ..sft.default_model import default_model
from ..sources.identity import files_of, known_of
from ..sources.model import ModelSource, load_model, load_tokenizer, resolve_trained
from ..sources.tokenizer import TextTokenizer
from .block import Measure, Scorer, Subject, blocks, score_block
from .config import MOST_CONTEXT, ScoreConfig, TextOptions
from .documents import Documents
from .parts import Parts
from .progress import Progress
from .summary import conclude

NEVER = timedelta(days=100)  # ranks wait for the slowest one
COLUMNS = {  # of the record's names: the pass's, and what holds them
    "token_logit": ("label_logit", np.float32),
    "logprob": ("logprob", np.float32),
    "rank": ("rank", np.int32),
    "logsumexp": ("logsumexp", np.float32),
    "mean_logit": ("mean_logit", np.float32),
    "entropy": ("entropy", np.float32),
    "self_certainty": ("self_certainty", np.float32),
    "topk_ids": ("top_k_ids", np.int32),
    "topk_logits": ("top_k_logits", np.float32),
}
Wanted = Callable[[Subject], Measure]
Conclude = Callable[[Scorer, Parts, int, dict[str, Any]], dict[str, Any]]


def run(config: ScoreConfig, console: Console | None = None) -> dict[str, Any]:
    """Scores as `config` says and returns the summary.

    Writes config.place, whole or not at all, and just before it the head of hidden states that are stored; until then
    a part file per block of documents lies beside it, from which the same call goes on where a killed one stopped.
    Documents that are no text are reported, counted and passed over. Under torchrun each rank scores blocks of its own,
    and the first one merges them.
    Raises LogitlessError for bad input and Interrupted. On the other ranks the summary is empty.
    """

    def wanted(subject: Subject) -> Measure:
        if config.store == "hidden":
            begun = config.place.exists() or Parts(config.place).folder.exists()
            if config.head_place.exists() and not begun:
                raise OptionError(f"--out {config.place}: its head {config.head_place} exists already: remove it")
            return hidden_states(subject.model, config.hidden_dtype, config.memory_budget_bytes)
        most = subject.source.vocab_size
        if config.keep > most:
            raise OptionError(f"--keep must be at most the vocabulary, here {most}, got {config.keep}")
        return scores(subject.model, config.keep, config.memory_budget_bytes)

    return measured(config.check(), wanted, lambda *done: conclude(config, *done), console)


def scores(model: Any, keep: int, memory_budget: int) -> Measure:
    """What `logitless score` writes of each token."""

    def read(inputs: dict[str, Tensor], at: tuple[Tensor, Tensor], labels: Tensor) -> dict[str, Tensor]:
        return _named(vars(token_scores(model, inputs, at, labels, keep=keep, memory_budget=memory_budget)[0]))

    columns = {name: (dtype, (keep,) * name.startswith("topk")) for name, (_, dtype) in COLUMNS.items()}
    return Measure({name: kind for name, kind in columns.items() if 0 not in kind[1]}, read)


def hidden_states(model: Any, stored: str, memory_budget: int) -> Measure:
    """Beside the scores of each token, what the head was called with, as `stored` says."""
    plain = scores(model, 0, memory_budget)
    width = LMHead.of(model).hidden_size * STORED[stored].itemsize
    columns = {"hidden": (np.uint8, (width,)), **({"hidden_scale": (np.float32, ())} if stored == "fp8" else {})}

    def read(inputs: dict[str, Tensor], at: tuple[Tensor, Tensor], labels: Tensor) -> dict[str, Tensor]:
        packed: dict[str, Tensor] = {}

        def keep(hidden: Tensor) -> None:
            packed.update(packed_hidden(hidden, stored))

        found = token_scores(model, inputs, at, labels, keep=0, memory_budget=memory_budget, look=keep)[0]
        return {**_named(vars(found)), **packed}

    return Measure({**plain.columns, **columns}, read)


def _named(found: dict[str, Tensor]) -> dict[str, Tensor]:
    """The pass's numbers by the record's names."""
    return {name: found[theirs] for name, (theirs, _) in COLUMNS.items() if theirs in found}


def measured(config: TextOptions, wanted: Wanted, conclude: Conclude, console: Console | None) -> dict[str, Any]:
    """Each token of the text measured as `wanted` says: written as `run` says it, and whatever `conclude` makes of it.

    conclude: gets the scorer, the parts, their number and what the run took, once all parts are there.
    """
    console = console or Console(stderr=True)
    quiet()
    device_of(config.device)
    with folders_for(config.written()):
        return _measured(config, wanted, conclude, console)


def _measured(config: TextOptions, wanted: Wanted, conclude: Conclude, console: Console) -> dict[str, Any]:
    rank, ranks = joined()
    default_model(config.model, config.device, console)
    source = resolve_trained(config.model, "score with")
    scorer = _scorer(config, source, load_tokenizer(source), wanted, rank)
    parts = Parts(config.place)
    documents = Documents(Path(config.data or ""), scorer.subject.context, (*config.written(), parts.folder))
    with explained(config.place), opened(config, parts, lambda: _manifest(config, scorer, documents), console):
        reset_peak(scorer.subject.device)
        begin = time.perf_counter()
        with Progress(console if rank == 0 else None) as progress:
            count = _score(scorer, documents, parts, (rank, ranks), progress)
            tokens = sum_over_ranks(progress.tokens)
        if rank:
            return {}
        seconds = time.perf_counter() - begin
        took = {
            "tokens_scored_now": tokens,
            "seconds": round(seconds, 3),
            "tokens_per_second": round(tokens / seconds, 1),
            "peak_memory_bytes": peak_bytes(scorer.subject.device),
            "ranks": ranks,
        }
        return conclude(scorer, parts, count, took)


@contextmanager
def opened(
    config: TextOptions, parts: Parts, manifest: Callable[[], dict[str, Any]], console: Console
) -> Iterator[None]:
    """The parts' folder, which the first rank locks for all while it lasts.

    Raises, on every rank, OptionError where it cannot be had, and RankError or DataError where ranks would write parts
    that are of other options or files, or that the first one does not see.
    """
    mine = together(manifest)
    agree(out=str(config.place), **mine)
    with ExitStack() as stack:

        def begin() -> None:
            stack.enter_context(parts.locked())
            if parts.open(mine, config.at_out()):
                say(console, f"going on with the unfinished run in {parts.folder}")

        def look() -> None:
            if not parts.folder.exists():
                raise DataError(f"{parts.folder} is not on this machine: all ranks need an --out that all of them see")

        first(begin)
        together(look)
        yield


def joined() -> tuple[int, int]:
    """(rank, ranks) of a torchrun launch, joined; (0, 1) without one."""
    if dist.is_torchelastic_launched() and not dist.is_initialized():
        dist.init_process_group("gloo", timeout=NEVER)
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def sum_over_ranks(number: int) -> int:
    """The sum over ranks, once all are here."""
    if not dist.is_initialized():
        return number
    total = torch.tensor([number])
    dist.all_reduce(total)
    return int(total)


def _scorer(config: TextOptions, source: ModelSource, tokenizer: TextTokenizer, wanted: Wanted, rank: int) -> Scorer:
    """The model and what it is to do, checked."""
    longest = reach(source.config) or MOST_CONTEXT
    context = config.context_length or min(longest, MOST_CONTEXT)
    stride = config.stride or max(1, context // 2)
    if stride > context:
        raise OptionError(f"--stride must be at most --context-length, here {context}, got {stride}")
    opening = _opening(config.bos, tokenizer)
    device = device_of(config.device, rank)
    model = load_model(source, dtype=config.dtype, length=context).eval().to(device)
    subject = Subject(model, source, tokenizer, device, context)
    return Scorer(subject, stride, opening, config.batch_tokens, wanted(subject))


def _opening(wanted: str, tokenizer: TextTokenizer) -> tuple[int, ...]:
    """The ids to put before each text: by themselves what the tokenizer puts there, as `logitless train` does."""
    bos = tokenizer.saved.bos_token_id
    if wanted == "yes" and bos is None:
        raise OptionError("--bos yes: the tokenizer has no begin-of-text token; use --bos no")
    return {"yes": (bos,), "no": (), "auto": tokenizer.opening}[wanted]


def _manifest(config: TextOptions, scorer: Scorer, documents: Documents) -> dict[str, Any]:
    """What an unfinished run must have in common with the one that goes on with it."""
    files: dict[str, str] = {}
    for name, (size, found) in documents.contents().items():
        files |= {f"the file {name}": f"of {size} bytes", f"the content of {name}": found}
    decided = {"context_length": scorer.subject.context, "stride": scorer.stride, "bos": [*scorer.opening]}
    decided |= {"a budget of bytes": config.memory_budget_bytes, "device": scorer.subject.device.type}  # of sums' order
    models = {"model": scorer.subject.source, **scorer.measure.others}
    read = identities(scorer.subject.tokenizer, models)
    return {"schema": 4, **config.deciding(), **decided, **read, **files}


def identities(tokenizer: TextTokenizer, models: Mapping[str, ModelSource]) -> dict[str, str]:
    """What tells a tokenizer, and models by their options, from all others."""
    known = {"the tokenizer": known_of(tokenizer)}
    for option, source in models.items():
        known |= files_of(option, source)
    return known


def _score(scorer: Scorer, documents: Documents, parts: Parts, rank: tuple[int, int], progress: Progress) -> int:
    """Writes the parts of this rank's blocks that are not there; returns how many blocks there are in all."""
    count = 0
    for number, block in enumerate(blocks(documents)):
        count, share = number + 1, block[-1].done
        if number % rank[1] == rank[0]:
            whole = parts.whole(number)
            if whole is False:
                progress.say(f"{parts.part(number)} is damaged or of another run: scoring its documents again")
                parts.discard(number)
            progress.kept |= bool(whole)
            if not whole:
                scored = score_block(scorer, block, partial(progress.scored, share=share))
                parts.write(number, scored)
                progress.problems(scored.pieces)
        progress.passed(share)
    return count


@contextmanager
def explained(place: Path) -> Iterator[None]:
    """Turns an interruption, a lost rank and a full disk into one line that says how to go on."""

    def same() -> str:
        return "the same command goes on with what is not finished"  # a block that was begun is scored again

    try:
        with stoppable(same), lost(same):
            yield
    except Exception as error:  # safetensors has an error of its own for a full disk
        if not (wanted := room_wanted(error, place.parent)):  # the file itself is not there yet
            raise
        raise OutOfSpace(f"{wanted}, then the same command goes on") from error
