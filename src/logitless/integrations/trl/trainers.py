"""`install`: TRL's trainers on the pass, with the outputs they know and the statistics they lack."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from ...algebra.rules import Order, Rules
from ...errors import ConfigError, OptionError
from ...models.positions import reach
from ...vocab.face import LMHead, encodes, explain
from ..transformers.evaluation import Evaluation
from ..transformers.installed import is_ours
from ..transformers.lm_head import causal_lm, output_head, replaced
from ..transformers.trainer import check_kernels
from .contract import FUSED_TRAINERS, ROLLOUT_TRAINERS, Settings, kind_of, only_own_loss, own_loss, require, settings_of
from .distillation import distillation_loss, gkd_loss
from .exact_kl import ExactKL
from .forward import STATISTIC_OF, Fused, TokenOutput
from .pairs import mean_logits, pairs_forward
from .replay import Replay
from .scores import Wanted

__all__ = ["STATISTICS", "TokenOutput", "adapted_head", "install", "uninstall"]
STATISTICS = ("logsumexp", "self_certainty")  # that can be asked for beside TRL's own
STATE = "_logitless"


def install(
    trainer: Any,
    *,
    statistics: str | tuple[str, ...] = (),
    top_k: int = 0,
    exact_kl: bool = False,
    replay: bool = False,
    corrected: bool = False,
    order: Order = "transformers",
    memory_budget: int | None = None,
    metrics: bool | None = None,
) -> None:
    """Puts a TRL trainer on the pass, in place; `uninstall` takes it back.

    Dense equivalent: the trainer as it is, but for logits that bf16 rounds.

        trainer = SFTTrainer(model, args, train_dataset=dataset)
        install(trainer)
        trainer.train()

    SFT, DPO, KTO, GRPO and RLOO: `model(..., labels=labels, fused_lm_head=True)` gives a `TokenOutput`, TRL's own
    output under TRL's own settings (temperature, fp32 head, fields); LoRA on lm_head and a sharded head get their
    gradients; all other calls are unchanged. Distillation and the experimental GKD get their divergence in one pass,
    CPO and ORPO a forward without logits. SFT's label_smoothing_factor and compute_loss_func still get whole logits.
    statistics: of `STATISTICS`, and top_k: entries, to be added to the policy's output. exact_kl: GRPO's penalty is
    the full-vocabulary KL(policy ‖ reference), not its one-sample estimate. replay: GRPO and RLOO score completions
    over the entries that top_k, top_p and min_p left when they were sampled (arXiv 2512.02556), entropy included, and
    log `sampling/k1` and `sampling/k3`, how far the trainer is from the sampler; corrected: GRPO's loss is weighted by
    their ratio too, by the vllm_importance_sampling_* options, for one forward pass more a rollout where TRL makes
    none itself; order: of top_k, top_p and min_p in that sampling, as `sample_tokens`. memory_budget: bytes of slices.
    metrics, of SFT, whose default it is: `evaluate` and `predict` give perplexity, accuracy, top-5 accuracy and
    entropy, means over tokens, and `compute_metrics` gets statistics of each token, never logits; False: they are TRL's
    own, by another forward for logits where they ask for them.
    Installing again changes the options. Raises ConfigError (another trainer, a loss of one's own where TRL's would
    be replaced, a TRL that moved what this relies on, a head that `LMHead.of` refuses, completions that the model's
    context does not hold) and OptionError; then the trainer is as it was.
    Price in GEMMs: SFT 3, the others 4, all of them 2 with a frozen head and 1 without gradients; distillation 4;
    GRPO with the exact KL or a bonus on a frozen head's entropy what `token_stats` costs, 6 with KL and trained head;
    replay 0.
    """
    statistics = (statistics,) if isinstance(statistics, str) else tuple(statistics)  # one name, as `want` takes it
    _install(trainer, Asked(statistics, top_k, exact_kl, replay, corrected, order, metrics, memory_budget))


def uninstall(trainer: Any) -> None:
    """Gives the trainer and its models back what `install` replaced; nothing happens where nothing was."""
    installed: Installed | None = vars(trainer).pop(STATE, None)
    if installed is not None:
        installed.undo()


@dataclass(frozen=True)
class Asked:
    """The options of one `install`."""

    statistics: tuple[str, ...]
    top_k: int
    exact_kl: bool
    replay: bool
    corrected: bool
    order: Order
    metrics: bool | None
    memory_budget: int | None


def _install(trainer: Any, asked: Asked) -> None:
    kind = kind_of(trainer)
    before: Installed | None = vars(trainer).get(STATE)
    if before is not None:
        before.undo()
    try:
        installed = _planned(trainer, kind, asked)
        if asked.metrics if asked.metrics is not None else kind == "SFTTrainer":
            installed.changes += _metrics(trainer, kind, asked.memory_budget)
    except Exception:
        if before is not None:
            before.apply()
        raise
    installed.apply()
    setattr(trainer, STATE, installed)


@contextmanager
def adapted_head(model: Any) -> Iterator[None]:
    """While it lasts, TRL's trainers take `model`, a PEFT model with LoRA on lm_head; `install` before training.

        with adapted_head(model):
            trainer = GRPOTrainer(model, reward_funcs, args, train_dataset=dataset)
        install(trainer)

    They refuse such a model because their own fused head would never train the adapter. Raises ConfigError.
    """
    base = getattr(output_head(model), "get_base_layer", None)
    if base is None:
        raise ConfigError("adapted_head: expected an adapter on lm_head, got none; make the trainer as usual")
    with replaced(model, "get_output_embeddings", base):
        yield


@dataclass
class Change:
    """An attribute of an instance, and what replaces it."""

    owner: Any
    name: str
    value: Any
    fused: Fused | None = None
    had: bool = False
    own: Any = None
    put: bool = False  # and not taken out again, but for where somebody has wrapped it

    def apply(self) -> None:
        if not self.put:
            self.had, self.own, self.put = self.name in vars(self.owner), vars(self.owner).get(self.name), True
            setattr(self.owner, self.name, self.value)
        if self.fused is not None:
            self.fused.on = True

    def undo(self) -> None:
        if self.fused is not None:
            self.fused.on = False  # enough where somebody has wrapped it since, as accelerate's autocast does
        if vars(self.owner).get(self.name) is not self.value:
            return
        self.put = False
        if self.had:
            setattr(self.owner, self.name, self.own)
        else:
            delattr(self.owner, self.name)


class Emptied(Change):
    """An attribute that is None from then on, and again from `undo` on: rollouts that are scored in another way."""

    def undo(self) -> None:
        self.put = False
        setattr(self.owner, self.name, None)


@dataclass
class Installed:
    """All changes of one `install`."""

    changes: list[Change]

    def apply(self) -> None:
        for change in self.changes:
            change.apply()

    def undo(self) -> None:
        for change in self.changes:
            change.undo()


def _planned(trainer: Any, kind: str, asked: Asked) -> Installed:
    """The changes to make; nothing is changed yet."""
    _check_replay(kind, asked)
    require(kind, exact_kl=asked.exact_kl, replay=asked.replay)
    if (asked.exact_kl or kind not in FUSED_TRAINERS) and not own_loss(trainer, kind):
        wish = "exact_kl" if asked.exact_kl else "install"
        raise ConfigError(
            f"trainer: {type(trainer).__name__} has a loss of its own in the place of {kind}'s, which {wish} would "
            f"replace; {'leave exact_kl out' if asked.exact_kl else 'call token_stats or token_loss in it'}"
        )
    policy = causal_lm(trainer.model)
    wanted = Wanted(("logprob", *asked.statistics), top_k=asked.top_k, memory_budget=asked.memory_budget)
    _check_model(trainer, policy)
    _check_options(kind, policy, wanted)
    if kind == "DistillationTrainer":
        return Installed([Change(trainer, "_compute_loss", distillation_loss(trainer, asked.memory_budget))])
    if kind == "GKDTrainer":
        return Installed([Change(trainer, "compute_loss", gkd_loss(trainer, asked.memory_budget))])
    if kind not in FUSED_TRAINERS:
        return _pairs(trainer, kind, policy, wanted)
    replay = Replay(trainer, asked.corrected, asked.order) if asked.replay else None
    return _fused(trainer, kind, policy, wanted, asked.exact_kl, replay)


def _fused(trainer: Any, kind: str, policy: Any, wanted: Wanted, exact_kl: bool, replay: Replay | None) -> Installed:
    reference = getattr(trainer, "ref_model", None)
    fused = _fused_forward(trainer, policy, wanted, *_gradients(trainer, kind))
    fused.replay = replay
    changes = [Change(policy, "forward", fused.method(policy), fused)]
    if reference is not None and not exact_kl:  # which reads its hidden states, and never scores with it
        reference = causal_lm(reference)
        scored = _fused_forward(trainer, reference, Wanted((), memory_budget=wanted.memory_budget))
        scored.replay = replay
        changes.append(Change(reference, "forward", scored.method(reference), scored))
    if exact_kl:
        fused.exact = _exact_kl(trainer, kind)
    own = fused.exact or replay  # never both
    if own is not None:
        changes += [Change(trainer, name, method) for name, method in own.methods().items()]
        changes.append(Emptied(trainer, "_buffered_inputs", None))
    return Installed(changes)


def _metrics(trainer: Any, kind: str, memory_budget: int | None) -> list[Change]:
    """What gives an evaluation its metrics."""
    if kind != "SFTTrainer":
        raise OptionError(f"metrics: expected an SFTTrainer, got a {kind}, which has metrics of its own; leave it out")
    evaluation, own = Evaluation(memory_budget), trainer.prediction_step

    def step(model: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: list[str] | None = None) -> Any:
        def own_step(alone: bool) -> Any:
            return own(model, inputs, alone, ignore_keys)

        return evaluation.step(trainer, own_step, inputs, prediction_loss_only)

    own_loop = trainer.evaluation_loop

    def loop(*given: Any, **more: Any) -> Any:
        found = evaluation.loop(own_loop, *given, **more)
        trainer._metrics["eval"].pop("entropy", None)  # of its batches' means, which would take our entropy's name
        return found

    return [Change(trainer, "prediction_step", step), Change(trainer, "evaluation_loop", loop)]


def _fused_forward(
    trainer: Any, model: Any, asked: Wanted, only_logprob: bool = False, equal_weights: bool = False
) -> Fused:
    """What replaces TRL's fused forward on a model, with the settings that TRL gave it."""
    if is_ours(model.forward):
        raise ConfigError(
            "trainer: logitless.install stands over TRL's forward of its model, and does nothing for TRL's trainers; "
            "call logitless.uninstall(trainer.model) before this install"
        )
    settings = settings_of(model.forward)
    names = tuple(dict.fromkeys(("logprob", *(STATISTIC_OF[name] for name in settings.outputs), *asked.statistics)))
    wanted = Wanted(names, settings.temperature, asked.top_k, asked.memory_budget, only_logprob, equal_weights)
    return Fused(model.forward, settings, wanted, _autocast(trainer, model))


def _autocast(trainer: Any, model: Any) -> Callable[[], AbstractContextManager[Any]]:
    """A model that accelerate has prepared runs its forward in autocast: what comes to lie outside does the same."""
    return trainer.accelerator.autocast if "_original_forward" in vars(model) else nullcontext


def _gradients(trainer: Any, kind: str) -> tuple[bool, bool]:
    """(only log-probs get a gradient, all of them the same one), of TRL's own losses."""
    if not only_own_loss(trainer, kind):
        return False, False
    if kind == "GRPOTrainer":
        return not trainer._entropy_bonus_enabled, False
    return True, kind == "SFTTrainer" and trainer.args.loss_type == "nll"


def _check_replay(kind: str, asked: Asked) -> None:
    if asked.corrected and not asked.replay:
        raise OptionError("corrected: expected replay, whose log-probs are the sampler's; pass replay=True")
    Rules(order=asked.order)
    if asked.order != "transformers" and not asked.replay:
        raise OptionError(f"order: expected replay, which does the sampling, with {asked.order!r}; pass replay=True")
    if asked.replay and kind not in ROLLOUT_TRAINERS:
        raise OptionError(f"replay: expected a trainer that samples, {' or '.join(ROLLOUT_TRAINERS)}, got {kind}")
    if asked.replay and (asked.exact_kl or asked.top_k):
        other = "exact_kl" if asked.exact_kl else "top_k"
        raise OptionError(f"replay: {other} is of the whole row, which replay never forms; leave one of them out")


def _exact_kl(trainer: Any, kind: str) -> ExactKL:
    if kind != "GRPOTrainer":
        raise OptionError(f"exact_kl: expected GRPO's penalty in the loss, got a {kind}, which has none; leave it out")
    if trainer.beta == 0.0:
        raise OptionError("exact_kl: expected a KL penalty, got beta=0.0; set GRPOConfig's beta or leave exact_kl out")
    if trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled:
        raise ConfigError("exact_kl: expected a reference model that is whole on every rank, got FSDP or DeepSpeed")
    if any(config.is_prompt_learning for config in getattr(trainer.model, "peft_config", {}).values()):
        raise ConfigError(
            "exact_kl: expected a reference that reads what the policy reads, got a soft prompt, which the policy's "
            "forward has before its ids; train adapters of its layers, or leave exact_kl out"
        )
    return ExactKL(trainer)


def _pairs(trainer: Any, kind: str, policy: Any, wanted: Wanted) -> Installed:
    check_kernels(trainer.args)  # the trainers with a fused head see to it themselves
    fused = Fused(
        policy.forward, Settings(), wanted, _autocast(trainer, policy), pair_means=functools.partial(mean_logits, kind)
    )
    forward = Change(policy, "forward", fused.method(policy), fused)
    return Installed([forward, Change(trainer, "concatenated_forward", pairs_forward(trainer, kind))])


def _check_options(kind: str, policy: Any, wanted: Wanted) -> None:
    extra = wanted.statistics[1:]
    unknown = [name for name in extra if name not in STATISTICS]
    if unknown:
        raise OptionError(f"statistics: expected names among {', '.join(STATISTICS)}, got {unknown[0]!r}")
    if kind not in FUSED_TRAINERS and (extra or wanted.top_k):
        raise OptionError(f"statistics, top_k: {kind} has no fused output to add them to; leave them out")
    weight = output_head(policy).weight
    if hasattr(weight, "ds_id") or hasattr(weight, "full_tensor"):
        return  # ZeRO-3 and FSDP2 have it whole only while the head's forward runs
    head = LMHead.of(policy)
    hidden = torch.empty(1, head.hidden_size, dtype=head.weight.dtype, device=head.weight.device)
    explain(hidden, head, torch.zeros(1, dtype=torch.long, device=hidden.device), **wanted.options())


def _check_model(trainer: Any, policy: Any) -> None:
    if encodes(policy.config):
        raise ConfigError(f"trainer: expected a decoder, got the encoder-decoder {type(policy).__name__}")
    context = reach(policy.config)
    longest = getattr(trainer.args, "max_completion_length", None)
    if context is not None and longest is not None and longest > context:
        raise ConfigError(
            f"max_completion_length: expected at most the model's context of {context} tokens, got {longest}; lower it"
        )
