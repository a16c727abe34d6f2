"""What every loss keeps to: no argument is broadcast without a word, and each default is the paper's number."""

import inspect

import pytest
import torch

from logitless import losses
from logitless.errors import ShapeError

PER_TOKEN_AND_ENTRY = ("candidate_logits", "log_weights", "weights")
OPTIONAL = ("reverse_kl", "ref_logprob", "mask", "tail_logprob", "baseline")


def tensors_of(name: str) -> dict[str, torch.Tensor]:
    """Tensors of the right shapes: a loss per token of (3, 3), K = 2 in a record, one advantage per response."""
    found = {}
    for each, parameter in inspect.signature(getattr(losses, name)).parameters.items():
        if parameter.annotation is not torch.Tensor and each not in OPTIONAL:
            continue
        x = torch.full((3, 3), -1.0)
        if each in PER_TOKEN_AND_ENTRY:
            x = x[..., None].expand(3, 3, 2)
        found[each] = x[0] if name in ("gspo", "gmpo") and each == "advantages" else x
    return found


SEVERAL = [name for name in losses.__all__ if len(tensors_of(name)) > 1]


@pytest.mark.parametrize("name", SEVERAL)
def test_an_argument_of_another_shape_is_refused_by_its_name(name):
    given = tensors_of(name)
    more = {"scheme": "token"} if name == "batch_loss" else {}
    assert getattr(losses, name)(**given, **more).isfinite().all()
    for wrong in list(given)[1:]:
        with pytest.raises(ShapeError, match=f"^{wrong} must have"):
            getattr(losses, name)(**{**given, wrong: given[wrong][:1]}, **more)


def test_one_number_per_sequence_is_to_be_expanded_and_nothing_else_is():
    x = torch.zeros(2, 3)
    with pytest.raises(ShapeError, match=r"^advantages .* shape \(2, 3\), got \(2,\): expand one number per sequence"):
        losses.reinforce(x, x[:, 0])
    with pytest.raises(ShapeError, match=r"^old_logprob .* shape \(2, 3\), got \(2,\): give one number for each"):
        losses.ppo_clip(x, x[:, 0], x)  # a sum over tokens, which expanded would stand beside each of them
    with pytest.raises(ShapeError, match=r"shape \(2, 3\), got \(1, 3\): give one number for each of them$"):
        losses.reinforce(x, x[:1])
    with pytest.raises(ShapeError, match=r"shape \(2, 3\), got \(1,\): give one number for each of them$"):
        losses.reinforce(x, x[0, :1])
    with pytest.raises(ShapeError, match=r"^mask .* shape \(2, 3\), got \(2,\): expand one number per sequence"):
        losses.batch_loss(x, x[:, 0], "token")
    with pytest.raises(ShapeError, match=r"^rejected .* shape \(3,\), got \(2,\): give one number for each of them$"):
        losses.dpo(x[0], x[:, 0], x[0], x[0])


DEFAULTS = {
    "label_smoothing": {"smoothing": 0.1},
    "z_loss": {"weight": 1e-4},
    "focal": {"gamma": 2.0},
    "cosface": {"scale": 64.0, "margin": 0.35},
    "arcface": {"scale": 64.0, "margin": 0.5},
    "ppo_clip": {"clip_low": 0.2, "clip_high": 0.2, "delta": None},
    "grpo": {"ref_logprob": None, "clip": 0.2, "beta": 0.04, "delta": None},
    "dapo": {"clip_low": 0.2, "clip_high": 0.28},
    "dr_grpo": {"clip": 0.2},
    "cispo": {"clip_low": 1.0, "clip_high": 4.0, "epsilon_high": None},
    "sapo": {"temperature_positive": 1.0, "temperature_negative": 1.05},
    "gspo": {"clip_low": 3e-4, "clip_high": 4e-4},
    "gmpo": {"clip": 0.4},
    "kl_exact": {"beta": 0.04},
    "entropy_bonus": {"weight": 0.01},
    "group_advantages": {"scale": True, "epsilon": 1e-4},
    "token_weights": {"length": None},
    "batch_loss": {"length": None},
    "sequence_logprob": {"mask": None, "average": False},
    "dpo": {"beta": 0.1, "label_smoothing": 0.0},
    "robust_dpo": {"beta": 0.1, "label_smoothing": 0.1},
    "exo_pair": {"beta": 0.1, "label_smoothing": 1e-3},
    "discopop": {"beta": 0.05, "tau": 0.05},
    "bco_pair": {"beta": 0.1, "baseline": 0.0},
    **{name: {"beta": 0.1} for name in ("hinge", "nca_pair", "sppo_hard", "apo_zero", "apo_down", "orpo")},
    "ipo": {"tau": 0.1},
    "kto": {"beta": 0.1, "desirable_weight": 1.0, "undesirable_weight": 1.0},
    "simpo": {"beta": 2.0, "margin": 1.0, "label_smoothing": 0.0},
    **{name: {"temperature": 1.0} for name in ("forward_kl", "reverse_kl", "jsd", "skewed_kl", "skewed_reverse_kl")},
    "negative_log_acceptance": {"least": 0.0},
    "lk_hybrid": {"eta": 3.0},
    "soft_targets": {"tail": "bucket", "tail_logprob": None},
    "record_kl": {"direction": "forward"},
    "decoupled_kl": {"reverse_kl": None, "head_weight": 1.0, "tail_weight": 1.0},
    "tail_aware_kl": {"weight": 2.0},
}


def test_each_default_is_the_papers_number():
    """One that moves would train differently without a word."""
    parameters = {name: inspect.signature(getattr(losses, name)).parameters.values() for name in losses.__all__}
    found = {name: {x.name: x.default for x in each if x.default is not x.empty} for name, each in parameters.items()}
    assert {name: each for name, each in found.items() if each} == DEFAULTS
