"""`LogitlessLM`: lm-evaluation-harness' `HFLM`, whose log-likelihoods never make the logits of a batch.

`python -m logitless.integrations.lm_eval` is the harness' own command line, where `--model logitless` is known.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from lm_eval.api.registry import register_model  # pyright: ignore[reportMissingImports]
from lm_eval.models.huggingface import HFLM, eval_logger  # pyright: ignore[reportMissingImports]
from lm_eval.models.utils import Collator, normalize_gen_kwargs  # pyright: ignore[reportMissingImports]
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window  # pyright: ignore[reportMissingImports]
from torch import Tensor
from tqdm import tqdm

from ..errors import ConfigError, DataError
from ..sample.record import SampleRecord
from ..units import parse_bytes
from .lm_eval_records import KEPT, SCORED, Records, generated
from .transformers.continuations import Answer, Request, Tokens, Tree, continuation_scores
from .transformers.generation import Recorder
from .transformers.lm_head import causal_lm, output_head, replaced

ON_A_CPU = 8192  # tokens of a pass where batch_size is auto: more is no faster there, and no error says what fits


@dataclass
class Generating:
    """What is known of the texts that HFLM generates, between its batches and its answers."""

    longest: int  # tokens of a row
    instances: dict[Any, deque[Any]] = field(default_factory=dict)  # by their question
    cuts: list[int] = field(default_factory=list)  # tokens of each prompt of a batch that the model does not see
    sequences: deque[tuple[SampleRecord, int]] = field(default_factory=deque)  # of a batch, and their cuts

    @classmethod
    def of(cls, requests: Any, longest: int) -> Generating:
        found: dict[Any, deque[Any]] = {}
        for request in requests:
            found.setdefault(question_of(request.args), deque()).append(request)
        return cls(longest, found)


def question_of(arguments: tuple[Any, ...]) -> tuple[str, Any]:
    """A request's prompt and options, as HFLM compares these: a batch's answers come with the first one's options."""
    (options,) = Collator.group([arguments], lambda x: x[1])
    return arguments[0], options


@register_model("logitless")
class LogitlessLM(HFLM):
    """`HFLM` that asks its model for the log-prob and rank of the continuations' tokens, and for nothing else.

    It takes HFLM's arguments; memory_budget, what slices of the logits may take ("256MiB" unless given, up to "1GiB" on
    a GPU); over_ranks, whether the ranks of a process group that was joined share the documents, each with a model that
    it was given; and records, a file for the log-prob, rank, entropy and confidence of every token that was scored or
    generated, with RANK in its name where there are several. Its answers are HFLM's to rounding. Contexts that several
    continuations share are computed once (logits_cache=False: each on its own). batch_size="auto" finds the largest
    batch whose body fits; on a CPU, which has no such limit, it is about 8,192 tokens. Generation is HFLM's own; with
    records its tokens are drawn without logits, but for beams. Raises ConfigError for an encoder-decoder and for a
    tokenizer without a token to begin texts with, DataError for a continuation without a token or longer than the model
    sees.
    """

    def __init__(
        self,
        *arguments: Any,
        memory_budget: str | int | None = None,
        over_ranks: bool = False,
        records: str | Path | None = None,
        **options: Any,
    ) -> None:
        super().__init__(*arguments, **options)
        self.over_ranks = over_ranks and dist.is_initialized()
        if self.over_ranks:
            self._rank, self._world_size = dist.get_rank(), dist.get_world_size()
        if self.backend != "causal":
            raise ConfigError(f"backend {self.backend}: expected a causal language model; use the harness' own hf")
        output_head(self.model)
        self.memory_budget = None if memory_budget is None else parse_bytes(memory_budget, "memory_budget")
        self.records = None if records is None else Records(self._of_rank(Path(records)), self.tokenizer)
        self.asked: Any = None  # the harness' requests while log-likelihoods are computed
        self.generating = Generating(self.max_length)

    def _of_rank(self, path: Path) -> Path:
        """A file of its own for each process, also of those that HFLM counts as one (tp_plan)."""
        alone = not dist.is_initialized() or dist.get_world_size() == 1
        return path if alone else path.with_stem(f"{path.stem}-{dist.get_rank()}")

    @property
    def prefix_token_id(self) -> int:
        found = super().prefix_token_id
        if found is None:
            raise ConfigError(
                "the tokenizer has no begin-of-text and no end-of-text token, and one of them stands where a text has "
                "no context: set one, or give prefix_token_id=ID"
            )
        return found

    @property
    def beams(self) -> int:
        """Of generation, where a task does not say."""
        return self.model.generation_config.num_beams or 1

    def all_gather(self, tensor: Tensor) -> Tensor:
        if not self.over_ranks:
            return super().all_gather(tensor)
        found = [torch.empty_like(tensor, device="cpu") for _ in range(self.world_size)]
        dist.all_gather(found, tensor.cpu())
        return torch.stack(found)

    def barrier(self) -> None:
        if self.over_ranks:
            dist.barrier()
        else:
            super().barrier()

    def loglikelihood(self, requests: Any, disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        for number, request in enumerate(requests):
            if not request.args[1]:
                raise DataError(f"{_said(number, request)}: expected a continuation to score, got none")
        with replaced(self, "asked", requests):
            return super().loglikelihood(requests, disable_tqdm=disable_tqdm)

    def _loglikelihood_tokens(
        self,
        requests: list[tuple[tuple[str, str] | None, list[int], list[int]]],
        disable_tqdm: bool = False,
        override_bs: int | None = None,
    ) -> list[tuple[float, bool]]:
        def answered(number: int, answer: Answer, tokens: Tokens) -> None:
            strings, context, continuation = requests[number]
            if self.records is not None and self.asked is not None:
                cut = self._cut(len(context), len(continuation))
                self.records.write(self.asked[number], continuation, cut, tokens, answer)
            if strings is not None:
                self.cache_hook.add_partial("loglikelihood", strings, answer)

        pairs: list[Request] = [(context, continuation) for _, context, continuation in requests]
        return self._scores(pairs, "Running loglikelihood requests", disable_tqdm, answered, override_bs)

    def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> list[float]:
        """The log-prob of each whole text, in HFLM's windows; a text's answer is kept with the last of them."""
        windows = [self._windows(request.args[0]) for request in requests]
        places = [(text, i) for text, found in enumerate(windows) for i in range(len(found))]
        known: list[dict[int, Tokens]] = [{} for _ in requests]
        totals = [0.0] * len(requests)

        def conclude(text: int) -> None:
            if self.records is not None:
                ids = [i for _, continuation in windows[text] for i in continuation]
                values = {name: [x for w in sorted(known[text]) for x in known[text][w][name]] for name in SCORED}
                self.records.write(requests[text], ids, 0, values, totals[text])
            self.cache_hook.add_partial("loglikelihood_rolling", requests[text].args, totals[text])

        def answered(number: int, answer: Answer, tokens: Tokens) -> None:
            text, window = places[number]
            known[text][window] = tokens
            totals[text] += answer[0]
            if len(known[text]) == len(windows[text]):
                conclude(text)

        for text in (text for text, found in enumerate(windows) if not found):  # no token: 0, as HFLM
            conclude(text)
        pairs = [window for found in windows for window in found]
        self._scores(pairs, "Running loglikelihood_rolling requests", disable_tqdm, answered)
        return totals

    def _windows(self, text: str) -> list[Request]:
        found = get_rolling_token_windows(
            token_list=self.tok_encode(text),
            prefix_token=self.prefix_token_id,
            max_seq_len=self.max_length,
            context_len=1,
        )
        return [make_disjoint_window(window) for window in found]

    def _scores(
        self,
        pairs: list[Request],
        said: str,
        disable_tqdm: bool,
        answered: Callable[[int, Answer, Tokens], None],
        override_bs: int | None = None,
    ) -> list[Answer]:
        """`continuation_scores` with these options and a progress bar."""
        self.batch_sizes: dict[int, int] = {}
        self._warn_of_cuts(pairs)
        with tqdm(total=len(pairs), disable=disable_tqdm or self.rank != 0, desc=said) as bar, self._precision():

            def heard(number: int, answer: Answer, tokens: Tokens) -> None:
                answered(number, answer, tokens)
                bar.update(1)

            return continuation_scores(
                self.model,
                pairs,
                longest=self.max_length,
                batch_size=override_bs or (self._size_at if self.batch_size == "auto" else self.batch_size),
                share=bool(self.logits_cache),
                memory_budget=self.memory_budget,
                certainty=self.records is not None,
                answered=heard,
            )

    def _cut(self, context: int, continuation: int) -> int:
        """Tokens of a context that the model does not see: the last token of all is only predicted."""
        return max(0, context + continuation - self.max_length - 1)

    def _warn_of_cuts(self, pairs: list[Request]) -> None:
        for context, continuation in pairs:
            if cut := self._cut(len(context), len(continuation)):
                eval_logger.warning(
                    f"Combined length of context ({len(context)}) and continuation ({len(continuation)}) exceeds "
                    f"model's maximum length ({self.max_length}). Truncating {cut} tokens from the left."
                )

    def generate_until(self, requests: Any, disable_tqdm: bool = False) -> list[str]:
        if not requests:
            return []
        new = max(normalize_gen_kwargs(request.args[1], self.max_gen_toks)["max_gen_toks"] for request in requests)
        prompts = [len(self.tok_encode(request.args[0])) for request in requests]
        if 0 in prompts:
            number = prompts.index(0)
            raise DataError(f"{_said(number, requests[number])}: expected a prompt to go on from, got none")
        self.generating = Generating.of(requests, min(max(prompts) + new, self.max_length))
        size = self._detect_batch_size() if self.batch_size == "auto" else self.batch_size
        own = self.cache_hook

        def add_partial(kind: str, arguments: tuple[Any, ...], text: str) -> None:
            instance = self.generating.instances[question_of(arguments)].popleft()
            self._write_generated(instance, text)
            own.add_partial(kind, instance.args, text)

        hook = SimpleNamespace(add_partial=add_partial)
        with replaced(self, "cache_hook", hook), replaced(self, "batch_size_per_gpu", size):
            return super().generate_until(requests, disable_tqdm=disable_tqdm)

    def _write_generated(self, instance: Any, text: str) -> None:
        """The record of the next sequence of a batch, of which HFLM has just made its answer."""
        if self.records is None or not self.generating.sequences:
            return
        sequence, cut = self.generating.sequences.popleft()
        ids, values = generated(sequence)
        self.records.write(instance, ids, cut, {"text": text, **values}, text)

    def tok_batch_encode(self, strings: Any, *given: Any, left_truncate_len: int | None = None, **more: Any) -> Any:
        if left_truncate_len is not None and self.records is not None:
            self.generating.cuts = [max(0, len(self.tok_encode(s)) - left_truncate_len) for s in strings]
        return super().tok_batch_encode(strings, *given, left_truncate_len=left_truncate_len, **more)

    def _model_generate(self, context: Tensor, max_length: int, stop: list[str], **options: Any) -> Tensor:
        if self.records is None or options.get("num_beams", self.beams) != 1:
            return super()._model_generate(context, max_length, stop, **options)
        loop = Recorder(keep=KEPT, memory_budget=self.memory_budget)
        ids = super()._model_generate(context, max_length, stop, custom_generate=loop, **options)
        if loop.record is not None:
            rows = (loop.record[b] for b in range(len(context)))
            self.generating.sequences = deque(zip(rows, self.generating.cuts, strict=True))
        return ids

    def _size_at(self, number: int, trees: list[Tree]) -> int:
        """Rows of the batch that begins with a tree, found anew as often as batch_size="auto:N" says."""
        schedule = int(number * self.batch_schedule / len(trees))
        if schedule not in self.batch_sizes:
            self.batch_sizes[schedule] = self._fitting(max(1, len(trees[number].stem.fed)))
        return self.batch_sizes[schedule]

    def _detect_batch_size(self, requests: Any = None, pos: int = 0) -> int:
        """Rows of a batch that is generated: as long as the model sees, on a CPU as the longest of them."""
        return self._fitting(self.generating.longest if self.device.type == "cpu" else self.max_length)

    def _fitting(self, length: int) -> int:
        """Rows of so many tokens that a pass can have."""
        from accelerate.utils import find_executable_batch_size

        if self.device.type == "cpu":
            return max(1, min(self.max_batch_size, ON_A_CPU // length))

        @find_executable_batch_size(starting_batch_size=self.max_batch_size)
        def tried(batch_size: int) -> int:
            for endings in ([[0]], [[0, 0], [1, 1]]):  # whole rows; and contexts that two answers go on from
                contexts = self._unlike(max(1, batch_size // len(endings)), length)
                pairs = [(context, ending) for context in contexts for ending in endings]
                with self._precision():
                    continuation_scores(
                        self.model,
                        pairs,
                        longest=length + 1,
                        batch_size=batch_size,
                        share=bool(self.logits_cache),
                        memory_budget=self.memory_budget,
                    )
            return batch_size

        try:
            return tried()  # pyright: ignore[reportCallIssue]
        except RuntimeError as error:
            if "No executable batch size found" not in str(error):
                raise
            return 1  # as HFLM: the texts may be shorter than what was tried

    def _unlike(self, rows: int, length: int) -> list[list[int]]:
        """Rows of ids that are all different, as equal ones would be fed once: their numbers, digit by digit."""
        base = causal_lm(self.model).config.get_text_config().vocab_size
        return [[row // base**place % base for place in range(length)] for row in range(rows)]

    def _precision(self) -> Any:
        kind = self.mixed_precision_dtype
        return torch.autocast(self.device.type, dtype=kind, enabled=kind is not None)


def _said(number: int, request: Any) -> str:
    """Which document it is that a request asks of."""
    return f"document {number + 1} of task {request.task_name}" if request.task_name else f"document {number + 1}"


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate  # pyright: ignore[reportMissingImports]

    cli_evaluate()
