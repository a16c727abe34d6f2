"""`SamplingMask`: the entries of the vocabulary that each token was drawn from, ragged."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from ...errors import DeviceError, DtypeError, LabelError, OptionError, ShapeError
from ..dtypes import dtype_of, of_integers


class Places(NamedTuple):
    """The token of each entry, (n,), and where each token's label stands among the entries, (N,)."""

    tokens: Tensor
    labels: Tensor | None


@dataclass(frozen=True, eq=False)
class SamplingMask:
    """The ids that top-k, top-p or min-p kept for each token: token i has `token_ids[offsets[i] : offsets[i + 1]]`.

    Dense equivalent, of N tokens and V entries:

        kept = torch.zeros(N, V, dtype=torch.bool)
        kept[torch.arange(N).repeat_interleave(offsets.diff()), token_ids] = True
        z = z.masked_fill(~kept, -math.inf)

    token_ids: (n,) integer, without duplicates in a token's set, in any order; offsets: (N + 1,) integer, from 0 to n,
    tokens flattened. This is vLLM's `SamplingMask`. Ignored tokens may have an empty set, others have their label in
    theirs. Raises DtypeError, ShapeError, DeviceError; what the sets hold is checked by the call that takes them.
    Memory: 8 bytes an entry. Replayed masks: DeepSeek-V3.2, arXiv 2512.02556, section 3.1.
    """

    token_ids: Tensor  # (n,)
    offsets: Tensor  # (N + 1,)

    def __post_init__(self) -> None:
        for name in ("token_ids", "offsets"):
            x = getattr(self, name)
            if not of_integers(x):
                got = dtype_of(x)
                hint = "; SamplingMask.of takes lists" if isinstance(x, Sequence) else ""
                raise DtypeError(f"SamplingMask: {name} must be a tensor of integers, got {got}{hint}")
            if x.dim() != 1:
                raise ShapeError(f"SamplingMask: {name} must have one dimension, got shape {tuple(x.shape)}")
            object.__setattr__(self, name, x.long())
        if self.offsets.shape[0] == 0:
            raise ShapeError("SamplingMask: offsets must have a number more than there are tokens, got none")
        if self.offsets.device != self.token_ids.device:
            raise DeviceError(
                f"SamplingMask: token_ids are on {self.token_ids.device}, offsets on {self.offsets.device}; move one"
            )

    @classmethod
    def of(cls, sets: Iterable[Iterable[int]], device: torch.device | str = "cpu") -> SamplingMask:
        """From the ids of each token."""
        lists = [list(each) for each in sets]
        flat = torch.tensor([i for each in lists for i in each], dtype=torch.int64, device=device)
        return cls.of_counts(flat, torch.tensor([len(each) for each in lists], dtype=torch.int64, device=device))

    @classmethod
    def of_counts(cls, token_ids: Tensor, counts: Tensor) -> SamplingMask:
        """From the ids, end to end, and how many each token has, (N,)."""
        return cls(token_ids, torch.cat([counts.new_zeros(1), counts.cumsum(0)]))

    @classmethod
    def from_vllm(cls, masks: Iterable[Any], device: torch.device | str = "cpu") -> SamplingMask:
        """From vLLM's sampling masks, one a completion, end to end: anything with lists `token_ids` and `offsets`."""
        parts = [
            cls(*(torch.as_tensor(x, dtype=torch.int64, device=device) for x in (mask.token_ids, mask.offsets)))
            for mask in masks
        ]
        return cls.concatenated(parts).to(device)

    @classmethod
    def concatenated(cls, parts: Sequence[SamplingMask]) -> SamplingMask:
        """The sets of several masks, end to end; of none: a mask of no tokens."""
        if not parts:
            return cls.of([])
        counts = torch.cat([part.counts for part in parts])
        return cls.of_counts(torch.cat([part.token_ids for part in parts]), counts)

    def to_vllm(self) -> dict[str, list[int]]:
        """The fields of vLLM's SamplingMask."""
        return {"token_ids": self.token_ids.tolist(), "offsets": self.offsets.tolist()}

    def __len__(self) -> int:
        """The number of tokens."""
        return self.offsets.shape[0] - 1

    @property
    def counts(self) -> Tensor:  # (N,)
        """How many entries each token has."""
        return self.offsets.diff()

    @property
    def tokens(self) -> Tensor:  # (n,)
        """The token of each entry."""
        index = torch.arange(len(self), device=self.offsets.device)
        return index.repeat_interleave(self.counts, output_size=self.token_ids.shape[0])  # which is not asked for then

    def to(self, device: torch.device | str) -> SamplingMask:
        """The same sets on another device."""
        return SamplingMask(self.token_ids.to(device), self.offsets.to(device))

    def __getitem__(self, index: Tensor | slice) -> SamplingMask:
        """The sets of some tokens: a slice without steps, or a tensor of indices."""
        if isinstance(index, slice):
            index = torch.arange(len(self), device=self.offsets.device)[index]
        counts = self.counts[index]
        begin = self.offsets[:-1][index] - (counts.cumsum(0) - counts)
        at = begin.repeat_interleave(counts)
        return SamplingMask.of_counts(self.token_ids[at + torch.arange(at.shape[0], device=at.device)], counts)

    def check_layout(self, n_tokens: int, device: torch.device) -> None:
        """Raise where there are not `n_tokens` sets, on `device`, one after the other."""
        if len(self) != n_tokens:
            raise ShapeError(f"sampling_mask: expected a set for each of {n_tokens} tokens, got {len(self)}")
        if self.offsets.device != device:
            raise DeviceError(f"sampling_mask is on {self.offsets.device}, hidden on {device}; move one of them")
        steps = self.counts.clamp(-1, 0).sum()
        first, last, falls = torch.stack([self.offsets[0], self.offsets[-1], steps]).tolist()  # one wait for the device
        if first != 0 or last != self.token_ids.shape[0] or falls:
            raise OptionError(
                f"sampling_mask: expected offsets that rise from 0 to {self.token_ids.shape[0]}, the number of "
                f"token_ids, got {first} to {last}{', not all rising' if falls else ''}"
            )

    def check_sets(self, rows: int, labels: Tensor | None = None, names: Tensor | None = None) -> Places:
        """Raise where a set is empty, or holds an id twice, one that is none of `rows` entries, or not its label.

        labels: (N,); names: (N,), what errors call the tokens; their places unless given. Waits once for the device,
        but where it raises.
        """
        ids, tokens = self.token_ids, self.tokens
        ordered, order = (tokens * rows + ids).sort()
        wrong, twice = (ids < 0) | (ids >= rows), ordered[1:] == ordered[:-1]
        faults = [self.counts == 0, wrong, twice]
        places = None
        if labels is not None:
            wanted = torch.arange(len(self), device=ids.device) * rows + labels
            at = torch.searchsorted(ordered, wanted).clamp(max=max(ordered.shape[0] - 1, 0))
            places = order[at] if ordered.shape[0] else at
            faults.append(ordered[at] != wanted if ordered.shape[0] else torch.ones_like(at, dtype=torch.bool))
        if bool(torch.cat(faults).any()):
            self._raise(rows, ordered, faults, labels, names)
        return Places(tokens, places)

    def _raise(
        self, rows: int, ordered: Tensor, faults: list[Tensor], labels: Tensor | None, names: Tensor | None
    ) -> NoReturn:
        """Say the first of `check_sets`' faults."""
        empty, wrong, twice, *missing = (x.nonzero().squeeze(1).tolist() for x in faults)

        def name(token: int | Tensor) -> int:
            return int(token) if names is None else int(names[token])

        if empty:
            raise OptionError(
                f"sampling_mask: expected at least one id for a token that is not ignored, token {name(empty[0])} "
                "has none; give it its set, or ignore it"
            )
        if wrong:
            raise LabelError(
                f"sampling_mask: expected ids in 0..{rows - 1}, token {name(self.tokens[wrong[0]])} has "
                f"{int(self.token_ids[wrong[0]])}; fix the ids or vocab_size"
            )
        if twice:
            token, entry = divmod(int(ordered[twice[0]]), rows)
            raise OptionError(f"sampling_mask: expected each id once, token {name(token)} has {entry} twice")
        assert labels is not None
        token = missing[0][0]
        raise OptionError(
            f"sampling_mask: expected each label in its token's set, label {int(labels[token])} of token "
            f"{name(token)} is not; the mask belongs to other tokens, or the label was not drawn from it"
        )
