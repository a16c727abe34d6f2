"""A vocabulary sharded over devices, in a process that has four of them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("jax", reason="jax is not installed: pip install 'logitless[jax]'")


@pytest.mark.parametrize(
    "name",
    [
        "tokens_and_vocabulary",
        "what_varies_alone",
        "what_would_be_merged_wrongly_is_refused",
        "gathered_tokens_are_not_refused",
        "a_key_gives_each_device_noise_of_its_own",
        pytest.param("tokens_for_any_number_of_devices", marks=pytest.mark.slow),
        pytest.param("every_device_has_the_same_bits", marks=pytest.mark.slow),
        pytest.param("vocabulary_alone", marks=pytest.mark.slow),
    ],
)
def test_sharded_heads_give_what_one_device_gives(name):
    script = Path(__file__).parents[1] / "support" / "jax" / "sharded.py"
    four = {"XLA_FLAGS": "--xla_force_host_platform_device_count=4", "JAX_ENABLE_X64": "1", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, script, name], env=os.environ | four, capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
