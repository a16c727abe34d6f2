"""A vocabulary sharded over devices, in a process that has four of them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("jax", reason="jax is not installed: pip install 'logitless[jax]'")


QUICK = (
    "tokens_and_vocabulary",
    "what_varies_alone",
    "what_would_be_merged_wrongly_is_refused",
    "gathered_tokens_are_not_refused",
    "a_key_gives_each_device_noise_of_its_own",
)
SLOW = ("tokens_for_any_number_of_devices", "every_device_has_the_same_bits", "vocabulary_alone")


@pytest.mark.parametrize(
    "names",
    [pytest.param(QUICK, id="quick"), *(pytest.param((name,), id=name, marks=pytest.mark.slow) for name in SLOW)],
)
def test_sharded_heads_give_what_one_device_gives(names):
    """Those that are quick one after another in one process: JAX takes longer to start than most of them."""
    script = Path(__file__).parents[1] / "support" / "jax" / "sharded.py"
    flags = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=4"
    four = {"XLA_FLAGS": flags, "JAX_ENABLE_X64": "1", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, script, *names]
    done = subprocess.run(command, env=os.environ | four, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
