"""Presets are shapes that transformers accepts, of the size that their names say."""

import subprocess
import sys

import pytest
import torch
from torch.utils._device import _device_constructors
from transformers import AutoConfig, AutoModelForCausalLM

from logitless.errors import ConfigError
from logitless.models.presets import PRESETS, preset

_device_constructors()  # `with torch.device` learns once what torch.empty is: let it see the real one

# Parameters in millions, tied embeddings counted once; of published models, as their authors count.
MILLIONS = {
    "tiny": 36.7,
    "small": 60.7,
    "qwen3-0.6b": 596.0,
    "qwen3-1.7b": 1720.6,
    "qwen3-4b": 4022.5,
    "qwen3-8b": 8190.7,
    "smollm2-135m": 134.5,
    "llama-3.2-1b": 1235.8,
    "llama-3.2-3b": 3212.7,
}


@pytest.mark.parametrize("name", PRESETS)
def test_sizes(name):
    fields = preset(name)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(fields.pop("model_type"), **fields))
    assert sum(p.numel() for p in model.parameters()) / 1e6 == pytest.approx(MILLIONS[name], rel=2e-3)
    assert type(model).__name__ == fields["architectures"][0]


def test_a_preset_is_a_copy():
    copied = preset("tiny")
    copied["rope_parameters"]["rope_theta"] = 1.0
    copied["architectures"].append("another")
    assert PRESETS["tiny"]["rope_parameters"]["rope_theta"] == 1e6
    assert PRESETS["tiny"]["architectures"] == ["Qwen3ForCausalLM"]


@pytest.mark.parametrize(("name", "nearest"), [("tinny", "tiny"), ("qwen3-0.5b", "qwen3-0.6b"), ("Small", "small")])
def test_the_nearest_names(name, nearest):
    with pytest.raises(ConfigError, match=f"unknown model '{name}': did you mean .*{nearest}"):
        preset(name)


def test_nothing_near_lists_all():
    with pytest.raises(ConfigError, match="presets are tiny, small, "):
        preset("zzzz")


def test_needs_no_torch():
    code = "import sys, logitless.models.presets; raise SystemExit(bool({'torch', 'transformers'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
