"""The algorithms as a table: what each keeps, and the phases of its step."""

from __future__ import annotations

from dataclasses import dataclass

# A step in the order of its phases. Backward has two ends: first all activations are alive and the head's gradient
# alone, at last one layer's activations and the gradients of all others. The embedding's comes after everything else.
ROLLOUT, SCORING, FORWARD, LOSS, LOSS_BACKWARD, BACKWARD, BACKWARD_END, EMBEDDING, OPTIMIZER = PHASES = (
    "rollout",
    "scoring",
    "forward",
    "loss",
    "loss backward",
    "backward",
    "backward's end",
    "embedding",
    "optimizer",
)
TRAINING = PHASES[2:]


@dataclass(frozen=True)
class Algorithm:
    """One row: phases of a step, sequences per row of the batch, further models, what it wants to know of a token."""

    what: str
    phases: tuple[str, ...]
    wants: tuple[str, ...] = ("logprob",)  # statistics of the loss
    scores: tuple[str, ...] = ()  # statistics computed without gradient before it
    separable: bool = True  # its loss is a sum over tokens, so the gradient is formed in the forward pass
    sequences: int = 1  # a preference is two sequences
    reference: bool = False
    critic: bool = False
    reward_model: bool = False
    soft_tokens: bool = False  # gradient flows through the generated tokens


ALGORITHMS: dict[str, Algorithm] = {
    "sft": Algorithm("supervised fine-tuning", TRAINING),
    "dpo": Algorithm(
        "direct preference optimisation: chosen and rejected, and a reference model",
        (SCORING, *TRAINING),
        scores=("logprob",),
        separable=False,
        sequences=2,
        reference=True,
    ),
    "ppo": Algorithm(
        "proximal policy optimisation: reference, critic and reward model",
        PHASES,
        scores=("logprob",),
        reference=True,
        critic=True,
        reward_model=True,
    ),
    "grpo": Algorithm(
        "group-relative policy optimisation: a reference model, rewards from functions",
        PHASES,
        scores=("logprob",),
        reference=True,
    ),
    "intuitor": Algorithm(
        "group-relative policy optimisation on self-certainty, which is computed without gradient",
        PHASES,
        scores=("logprob", "self_certainty"),
        reference=True,
    ),
    "reinforce": Algorithm("policy gradient with a baseline, no further model", PHASES, scores=("logprob",)),
    "grade": Algorithm(
        "gradient through soft tokens into a reward model, KL to a reference",
        TRAINING,
        wants=("kl",),
        reference=True,
        reward_model=True,
        soft_tokens=True,
    ),
}
