"""`LogitlessLM`: lm-evaluation-harness' `HFLM`, whose log-likelihoods never make the logits of a batch.

`python -m logitless.integrations.lm_eval` is the harness' own command line, where `--model logitless` is known.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from lm_eval.api.registry import register_model  # pyright: ignore[reportMissingImports]
from lm_eval.models.huggingface import HFLM  # pyright: ignore[reportMissingImports]
from torch import Tensor
from tqdm import tqdm

from ..errors import ConfigError, DataError
from ..units import parse_bytes
from .transformers.continuations import Tree, continuation_scores
from .transformers.lm_head import output_head

ON_A_CPU = 8192  # tokens of a pass where batch_size is auto: more is no faster there, and no error says what fits


@register_model("logitless")
class LogitlessLM(HFLM):
    """`HFLM` that asks its model for the log-prob and rank of the continuations' tokens, and for nothing else.

    It takes HFLM's arguments; memory_budget, what slices of the logits may take ("256MiB" unless given); and
    over_ranks, whether the ranks of a process group that was joined share the documents, each with a model that it was
    given. Its answers are HFLM's to rounding. Contexts that several continuations share are computed once
    (logits_cache=False: each on its own). batch_size="auto" finds the largest batch whose body fits; on a CPU, which
    has no such limit, it is about 8,192 tokens. Generation is HFLM's own. Raises ConfigError for an encoder-decoder
    and for a tokenizer without a token to begin texts with, DataError for a continuation without a token or longer than
    the model sees.
    """

    def __init__(
        self, *arguments: Any, memory_budget: str | int | None = None, over_ranks: bool = False, **options: Any
    ) -> None:
        super().__init__(*arguments, **options)
        self.over_ranks = over_ranks and dist.is_initialized()
        if self.over_ranks:
            self._rank, self._world_size = dist.get_rank(), dist.get_world_size()
        if self.backend != "causal":
            raise ConfigError(f"backend {self.backend}: expected a causal language model; use the harness' own hf")
        output_head(self.model)
        self.memory_budget = None if memory_budget is None else parse_bytes(memory_budget, "memory_budget")

    @property
    def prefix_token_id(self) -> int:
        found = super().prefix_token_id
        if found is None:
            raise ConfigError(
                "the tokenizer has no begin-of-text and no end-of-text token, and one of them stands where a text has "
                "no context: set one, or give prefix_token_id=ID"
            )
        return found

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
        for number, request in enumerate(requests, 1):
            if not request.args[1]:
                task = f" of task {request.task_name}" if request.task_name else ""
                raise DataError(f"document {number}{task}: expected a continuation to score, got none")
        return super().loglikelihood(requests, disable_tqdm=disable_tqdm)

    def _loglikelihood_tokens(
        self,
        requests: list[tuple[tuple[str, str] | None, list[int], list[int]]],
        disable_tqdm: bool = False,
        override_bs: int | None = None,
    ) -> list[tuple[float, bool]]:
        self.batch_sizes: dict[int, int] = {}
        silent = disable_tqdm or self.rank != 0
        with tqdm(total=len(requests), disable=silent, desc="Running loglikelihood requests") as bar:

            def answered(number: int, answer: tuple[float, bool]) -> None:
                asked = requests[number][0]
                if asked is not None:  # a window of a rolling request, which is put together first
                    self.cache_hook.add_partial("loglikelihood", asked, answer)
                bar.update(1)

            with self._precision():
                return continuation_scores(
                    self.model,
                    [(context, continuation) for _, context, continuation in requests],
                    longest=self.max_length,
                    batch_size=override_bs or (self._size_at if self.batch_size == "auto" else self.batch_size),
                    share=bool(self.logits_cache),
                    memory_budget=self.memory_budget,
                    answered=answered,
                )

    def _size_at(self, number: int, trees: list[Tree]) -> int:
        """Rows of the batch that begins with a tree, found anew as often as batch_size="auto:N" says."""
        schedule = int(number * self.batch_schedule / len(trees))
        if schedule not in self.batch_sizes:
            self.batch_sizes[schedule] = self._fitting(max(1, len(trees[number].stem.fed)))
        return self.batch_sizes[schedule]

    def _detect_batch_size(self, requests: Any = None, pos: int = 0) -> int:
        """What HFLM asks for before rolling requests: of windows as long as the model sees."""
        return self._fitting(self.max_length)

    def _fitting(self, length: int) -> int:
        """Rows of so many tokens that a pass can have."""
        from accelerate.utils import find_executable_batch_size

        if self.device.type == "cpu":
            return max(1, min(self.max_batch_size, ON_A_CPU // length))

        @find_executable_batch_size(starting_batch_size=self.max_batch_size)
        def tried(batch_size: int) -> int:
            requests = [([0] * length, [0])] * batch_size
            with self._precision():
                continuation_scores(
                    self.model, requests, longest=length, batch_size=batch_size, memory_budget=self.memory_budget
                )
            return batch_size

        return tried()  # pyright: ignore[reportCallIssue]

    def _precision(self) -> Any:
        kind = self.mixed_precision_dtype
        return torch.autocast(self.device.type, dtype=kind, enabled=kind is not None)


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate  # pyright: ignore[reportMissingImports]

    cli_evaluate()
