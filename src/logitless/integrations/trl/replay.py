"""What TRL's GRPO and RLOO sampled from, replayed: log-probs over each token's own set of entries."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...algebra.rules import Order
from ...errors import ConfigError, OptionError
from ...sample import SampleRecord, SamplingMask
from ...vocab.face import LMHead
from ..transformers.generation import Recorder
from ..transformers.lm_head import replaced
from .contract import calls_own_loss
from .scores import IGNORED, Wanted, scores

KEPT = 512  # entries of a token's set that a record holds where the trainer has no top_k
# options of generation that draw otherwise than by top_k, top_p and min_p, but at the value beside them
UNLIKE: dict[str, Any] = {
    "num_beams": 1,
    **dict.fromkeys(("encoder_repetition_penalty", "guidance_scale", "repetition_penalty", "typical_p"), 1),
    **dict.fromkeys(("encoder_no_repeat_ngram_size", "no_repeat_ngram_size", "min_length", "min_new_tokens"), 0),
    **dict.fromkeys(("epsilon_cutoff", "eta_cutoff"), 0),
    **dict.fromkeys(("bad_words_ids", "begin_suppress_tokens", "exponential_decay_length_penalty", "top_h")),
    **dict.fromkeys(("forced_bos_token_id", "forced_eos_token_id", "sequence_bias", "watermarking_config")),
}
SETS, SAMPLED, RATIO = "sampled_from", "sampling_per_token_logps", "importance_sampling_ratio"


@dataclass(frozen=True)
class SampledFrom:
    """What some tokens were drawn from: their sets, or whole rows less the mass that was kept, where it was too many.

    whole: (N,) bool, tokens of whole rows, whose sets are empty; log_kept: (N,), the log of that mass, 0 elsewhere.
    """

    sets: SamplingMask
    whole: Tensor
    log_kept: Tensor

    @classmethod
    def of(cls, record: SampleRecord) -> SampledFrom:
        """Of a record's tokens, flattened."""
        whole = (record.cut & (record.token >= 0)).flatten()
        return cls(record.sampling_mask(cut="empty"), whole, torch.where(whole, record.log_kept_mass.flatten(), 0.0))

    def __getitem__(self, index: slice) -> SampledFrom:
        return SampledFrom(self.sets[index], self.whole[index], self.log_kept[index])

    @classmethod
    def at(cls, valid: Tensor, parts: Sequence[SampledFrom]) -> SampledFrom:
        """The tokens of `parts`, end to end, in the valid places of a batch, (B, T) flattened."""
        sets = SamplingMask.concatenated([part.sets for part in parts]).to(valid.device)
        flat = valid.flatten()
        counts = torch.zeros(flat.shape, dtype=torch.int64, device=flat.device)
        whole, log_kept = torch.zeros_like(flat), torch.zeros(flat.shape, device=flat.device)
        counts[flat] = sets.counts
        whole[flat] = torch.cat([part.whole for part in parts]).to(flat.device)
        log_kept[flat] = torch.cat([part.log_kept for part in parts]).to(flat.device).float()
        return cls(SamplingMask.of_counts(sets.token_ids, counts), whole.view_as(valid), log_kept.view_as(valid))


class Replay:
    """Has a trainer score its completions over the entries that top_k, top_p and min_p left when they were sampled.

    TRL's own log-probs are of whole rows, which is not what tokens were drawn from: their ratio to the sampler's is the
    mass that was kept, and not 1, for equal policies. Here generation records each token's set and its log-prob in it;
    policy, old policy and reference are scored over the same sets, at no product with the vocabulary. A token whose set
    has more than KEPT entries, or the trainer's top_k, is scored over its whole row, less the log of the mass that was
    kept when it was sampled: the ratio of equal policies is 1 as well. The record's log-probs are
    `sampling_per_token_logps`, where TRL's off-policy mask looks for them, and metrics say how far the trainer's are
    from them: `sampling/k1` and `sampling/k3`, nats a token.
    """

    def __init__(self, trainer: Any, corrected: bool, order: Order) -> None:
        check_replayable(trainer, corrected)
        self.trainer, self.corrected = trainer, corrected
        self.order: Order = order
        self.sampled: list[tuple[SampledFrom, Tensor]] = []  # of each completion, and log-probs (T,)
        self.sequences: Sequence[SampledFrom] | None = None  # those that are being scored
        self.next = 0  # of these, in the forward pass to come
        self.scored: list[Tensor] = []  # log-probs of the sequences so far, (B, T) each
        self.before = {name: getattr(trainer, name) for name in self.methods()}

    def methods(self) -> dict[str, Callable[..., Any]]:
        """What takes the place of the trainer's methods, by name."""
        return {
            "_generate_single_turn": self.generate,
            "_generate_and_score_completions": self.rollouts,
            "_get_per_token_logps_and_entropies": self.log_probs,
            "_compute_loss": self.compute_loss,
        }

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Completions, by transformers' own generation with a recorder for its loop."""
        trainer = self.trainer
        keep = min(trainer.top_k or KEPT, trainer.model.config.get_text_config().vocab_size)
        recorder = Recorder(keep, order=self.order)
        policy = trainer.accelerator.unwrap_model(trainer.model)
        recorded = functools.partial(policy.generate, custom_generate=recorder)
        with replaced(policy, "generate", recorded):
            made = self.before["_generate_single_turn"](*args, **kwargs)
        completions = made[0] if isinstance(made, tuple) else made  # RLOO's has no log-probs beside them
        record = recorder.record
        if record is None:
            raise ConfigError("replay: expected generation by transformers' own loop, which was never called")
        found, steps = SampledFrom.of(record), record.shape[1]
        for b, ids in enumerate(completions):
            own = slice(b * steps, b * steps + len(ids))
            self.sampled.append((found[own], record.behaviour_logprob[b, : len(ids)].float()))
        return made

    def rollouts(self, inputs: Any) -> dict[str, Any]:
        """Completions with their rewards, and with the sets that they were sampled from."""
        self.sampled = []
        self.sequences = _SoFar(self.sampled)
        try:
            out = self.before["_generate_and_score_completions"](inputs)
            mask = out["completion_mask"]
            out[SAMPLED] = _padded([logprob for _, logprob in self.sampled], mask)
            if self.corrected:
                self._correct(out)
        finally:
            self.sequences = None
        out[SETS] = [found for found, _ in self.sampled]
        return out

    def log_probs(self, *args: Any, **kwargs: Any) -> Any:
        """The trainer's scores of a batch, from its first sequence on."""
        self.next, self.scored = 0, []
        return self.before["_get_per_token_logps_and_entropies"](*args, **kwargs)

    def compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        """The trainer's loss over the sets of these completions."""
        self.sequences = inputs[SETS]
        try:
            # what multiplies the loss by the ratio asks whether vLLM sampled
            with replaced(self.trainer, "use_vllm", RATIO in inputs):
                loss = self.before["_compute_loss"](model, inputs)
        finally:
            self.sequences = None
        self._log(inputs)
        return loss

    def sampled_from(self, valid: Tensor) -> SampledFrom | None:
        """What the sequences were sampled from that a forward pass scores, (B, T)."""
        if self.sequences is None:
            return None
        part = self.sequences[self.next : self.next + valid.shape[0]]
        self.next += valid.shape[0]
        # mask_truncated_completions takes whole completions out, of which it is known all the same
        part = [one if counts else one[:0] for one, counts in zip(part, valid.any(1).tolist(), strict=False)]
        known = sum(len(one.sets) for one in part)
        if known != int(valid.sum()):
            raise ConfigError(
                f"replay: expected {int(valid.sum())} scored tokens that were sampled, got {known} of which is known "
                "what from; use no tools and no rollout of your own"
            )
        return SampledFrom.at(valid, part)

    def put(self, log_probs: Tensor) -> None:
        """Remember what a forward pass gave, (B, T)."""
        if self.sequences is not None:
            self.scored.append(log_probs.detach())

    def _correct(self, out: dict[str, Any]) -> None:
        """TRL's importance sampling correction, by its own options, which it applies to vLLM's samples alone."""
        trainer, mask = self.trainer, out["completion_mask"]
        if "old_per_token_logps" not in out:
            from trl.models.utils import disable_gradient_checkpointing

            ids, seen = (torch.cat([out[f"prompt_{x}"], out[f"completion_{x}"]], 1) for x in ("ids", "mask"))
            size, plain = trainer.args.per_device_train_batch_size, trainer.args.gradient_checkpointing_kwargs
            with torch.no_grad(), disable_gradient_checkpointing(trainer.model, plain):
                out["old_per_token_logps"] = self.log_probs(trainer.model, ids, seen, mask.shape[1], size)[0]
        out[RATIO] = importance_ratio(
            *((out["old_per_token_logps"] - out[SAMPLED]) * mask, trainer.vllm_importance_sampling_mode),
            *(trainer.vllm_importance_sampling_clip_min, trainer.vllm_importance_sampling_clip_max),
        )
        ratios = out[RATIO] if out[RATIO].shape[1] == 1 else out[RATIO][mask.bool()]
        ratios = ratios if ratios.numel() else ratios.new_zeros(1)  # of no token, as TRL has it
        for name, over in (("min", torch.min), ("mean", torch.mean), ("max", torch.max)):
            self._metric(f"sampling/importance_sampling_ratio/{name}", over(ratios), over)

    def _log(self, inputs: dict[str, Any]) -> None:
        mask = inputs["completion_mask"].bool()
        gap = (torch.cat(self.scored)[:, -mask.shape[1] :] - inputs[SAMPLED])[mask].double()
        count = max(1, gap.numel())  # none where every completion was cut short
        self._metric("sampling/k1", -gap.sum() / count)
        self._metric("sampling/k3", (torch.expm1(gap) - gap).sum() / count)

    def _metric(self, name: str, value: Tensor, over_ranks: Callable[[Tensor], Tensor] = torch.mean) -> None:
        mode = "train" if self.trainer.model.training else "eval"
        of_ranks = self.trainer.accelerator.gather(value.float())
        self.trainer._metrics[mode][name].append(over_ranks(of_ranks).item())


def replayed_scores(
    wanted: Wanted, head: LMHead, hidden: Tensor, targets: Tensor, sampled: SampledFrom
) -> dict[str, Tensor]:
    """As `scores`, over what each target was sampled from; price 0 but for the tokens of whole rows."""
    found = scores(wanted, head, hidden, targets.masked_fill(sampled.whole, IGNORED), sampling_mask=sampled.sets)
    if bool(sampled.whole.any()):
        rows = scores(wanted, head, hidden, targets.masked_fill(~sampled.whole, IGNORED))
        found = {name: x + rows[name] for name, x in found.items()}  # each is 0 where it is ignored
        found["logprob"] = found["logprob"] - sampled.log_kept
    return found


def check_replayable(trainer: Any, corrected: bool) -> None:
    """Raises ConfigError and OptionError where what was sampled from cannot be recorded."""
    if trainer.use_vllm or getattr(trainer, "use_transformers_continuous_batching", False):
        raise ConfigError("replay: expected generation by transformers' generate, got another engine; leave replay out")
    for name in ("tools", "rollout_func"):
        if getattr(trainer, name, None):
            raise ConfigError(f"replay: expected completions that the policy sampled alone, got {name}; leave one out")
    _check_sampling(trainer)
    if corrected and not calls_own_loss(trainer, "GRPOTrainer"):
        raise OptionError(
            f"corrected: expected GRPO's importance ratio in the loss, got {type(trainer).__name__}, whose loss is "
            "another; leave corrected out, or call super()._compute_loss in a GRPOTrainer of your own"
        )
    if corrected and not trainer.vllm_importance_sampling_correction:
        raise OptionError(
            "corrected: expected GRPO's importance ratio in the loss, got vllm_importance_sampling_correction=False, "
            "which leaves it out; leave one of them out"
        )


def _check_sampling(trainer: Any) -> None:
    """Raises ConfigError where generation draws otherwise than by rules that are recorded, or than is scored."""
    if _asked(trainer, "suppress_tokens"):
        raise ConfigError(
            "replay: expected top_k, top_p and min_p alone, got suppress_tokens, as TRL sets them for a model with "
            "images; leave replay out"
        )
    for name, plain in UNLIKE.items():
        value = _asked(trainer, name)
        if value is not None and value != plain:
            raise ConfigError(
                f"replay: expected top_k, top_p and min_p alone, got {name}={value!r}; leave one of the two out"
            )
    do_sample, temperature = _asked(trainer, "do_sample"), _asked(trainer, "temperature")
    if not do_sample:
        raise ConfigError(f"replay: expected completions that are sampled, got do_sample={do_sample}; leave it out")
    if (1.0 if temperature is None else temperature) != trainer.temperature:
        raise ConfigError(
            f"replay: expected completions sampled at the temperature of {trainer.temperature} that scores them, got "
            f"{temperature}; leave it out of generation_kwargs, and set the trainer's temperature instead"
        )


def _asked(trainer: Any, name: str) -> Any:
    """An option of generation: the trainer's, or the model's own, which generate takes where that is None."""
    value = getattr(trainer.generation_config, name, None)
    return getattr(trainer.model.generation_config, name, None) if value is None else value


def importance_ratio(
    log_ratio: Tensor,  # (B, T), 0 where nothing was sampled
    mode: str,
    low: float | None,
    high: float | None,
) -> Tensor:
    """The weight of each token, (B, T), or of each sequence, (B, 1), for what another policy sampled.

    Dense equivalent, of the sampler's p and the trainer's q of the tokens that were drawn:

        ratio = q / p                     # sequence_*: of the sequence's product
        ratio = ratio.clamp(low, high)    # *_truncate
        ratio = ratio * ((ratio >= low) & (ratio <= high))  # *_mask

    mode: token_truncate, token_mask, sequence_truncate or sequence_mask, as GRPOConfig's
    vllm_importance_sampling_mode. low, high: None for no bound. Truncated importance sampling: Yao et al. 2025, "Your
    efficient RL framework secretly brings you off-policy RL training".
    """
    level, _, bound = mode.partition("_")
    ratio = (log_ratio.sum(1, keepdim=True) if level == "sequence" else log_ratio).exp()
    if bound == "truncate":
        return ratio.clamp(low, high) if (low, high) != (None, None) else ratio
    inside = torch.ones_like(ratio, dtype=torch.bool)
    inside &= True if low is None else ratio >= low
    inside &= True if high is None else ratio <= high
    return ratio.masked_fill(~inside, 0.0)


class _SoFar(Sequence[SampledFrom]):
    """The completions that are sampled while their scoring is already set up."""

    def __init__(self, sampled: list[tuple[SampledFrom, Tensor]]) -> None:
        self.sampled = sampled

    def __len__(self) -> int:
        return len(self.sampled)

    def __getitem__(self, index: Any) -> Any:
        return [found for found, _ in self.sampled[index]]


def _padded(rows: list[Tensor], mask: Tensor) -> Tensor:
    """Ragged rows in the places of a mask, (B, T), 0 elsewhere."""
    out = torch.zeros(mask.shape, device=mask.device)
    for b, row in enumerate(rows):
        out[b, : row.shape[0]] = row
    return out
