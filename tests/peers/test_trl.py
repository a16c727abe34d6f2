"""TRL's trainings: every loss and option of its trainers' tests, as TRL has it and with `install`.

Logs, the first step's gradients and the parameters in the end are the same to fp32's rounding.
"""

from functools import partial
from typing import Any

import pytest

pytest.importorskip("trl")

from tests.support.integrations.trl import runs  # after the check
from tests.support.integrations.trl.runs import assert_same_training, saved_model

# What TRL and transformers warn about is theirs.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*checkpointing.* is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:`(label_smoothing|compute_loss_func).*:FutureWarning"),
]

DPO = ("sigmoid", "hinge", "ipo", "exo_pair", "nca_pair", "robust", "bco_pair", "sppo_hard", "aot", "aot_unpaired")
DPO_MORE = ("apo_zero", "apo_down", "discopop", "sft", "sigmoid_norm")
SMOOTHED = {"exo_pair": 1e-3, "robust": 0.1}
F_DIVERGENCES = ("reverse_kl", "forward_kl", "js_divergence", "alpha_divergence")
GRPO = ("bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo", "grpo")
GRPO_OPTIONS: dict[str, dict[str, Any]] = {
    "delta": {"delta": 2.0},
    "no penalty": {"beta": 0.0},
    "rewards as they are": {"scale_rewards": False},
    "scaled by the batch": {"scale_rewards": "batch"},
    "several iterations": {"num_iterations": 2},
    "truncated completions masked": {"mask_truncated_completions": True, "max_completion_length": 56},  # some end
    "an entropy filter": {"top_entropy_quantile": 0.5},
    "a corrected penalty": {"use_bias_correction_kl": True},
    "a ratio per response": {"importance_sampling_level": "sequence"},
}
TRAININGS: dict[str, Any] = {
    **{f"sft, {loss}": partial(runs.sft, loss_type=loss) for loss in ("nll", "dft")},
    "sft, packed": partial(runs.sft, packing=True, max_length=16),
    "sft, checkpointed": partial(runs.sft, gradient_checkpointing=True),
    **{
        f"dpo, {loss}": partial(runs.dpo, loss_type=loss, label_smoothing=SMOOTHED.get(loss, 0.0))
        for loss in (*DPO, *DPO_MORE)
    },
    **{f"dpo, {name}": partial(runs.dpo, f_divergence_type=name) for name in F_DIVERGENCES},
    "dpo, wpo": partial(runs.dpo, use_weighting=True),
    "dpo, ld": partial(runs.dpo, ld_alpha=0.5),
    **{f"kto, {loss}": partial(runs.kto, loss_type=loss) for loss in ("kto", "apo_zero_unpaired")},
    **{f"grpo, {loss}": partial(runs.grpo, loss_type=loss) for loss in GRPO},
    **{f"grpo, {name}": partial(runs.grpo, **options) for name, options in GRPO_OPTIONS.items()},
    "rloo": runs.rloo,
    "rloo, no penalty": partial(runs.rloo, beta=0.0),
    "rloo, normalised": partial(runs.rloo, normalize_advantages=True),
    **{f"distillation, {beta}": partial(runs.distillation, beta=beta) for beta in (0.0, 0.3, 0.5, 1.0)},
}


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Any:
    """A tiny Qwen3 with tied embeddings."""
    return saved_model(tmp_path_factory.mktemp("tied"))


@pytest.mark.slow
@pytest.mark.calls_peer("trl")
@pytest.mark.parametrize("name", TRAININGS)
def test_the_same_training(place, name):
    assert_same_training(partial(TRAININGS[name], place, max_steps=2))
