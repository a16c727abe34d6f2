"""What starts a run's ranks: accelerate's launcher must ask for nothing that the run's own options do not say."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

from accelerate.utils import patch_environment

from ...errors import OptionError
from .config import TrainConfig

Setting = tuple[str, str, str]  # the variable that says it, the only value that a run here can have, what to do
NOT_COMPILED: Setting = ("ACCELERATE_DYNAMO_BACKEND", "no", "nothing is compiled")
ALWAYS: tuple[Setting, ...] = (
    ("ACCELERATE_USE_DEEPSPEED", "false", "--sharding fsdp2 divides the model"),
    ("ACCELERATE_USE_MEGATRON_LM", "false", "--sharding fsdp2 divides the model"),
    ("ACCELERATE_USE_PARALLELISM_CONFIG", "false", "options of logitless train divide the ranks"),
    ("ACCELERATE_MIXED_PRECISION", "no", "--mixed-precision bf16 is this command's own"),
    NOT_COMPILED,
)
WITH_FSDP2: tuple[Setting, ...] = (
    ("FSDP_VERSION", "2", "--sharding fsdp2 is that"),
    ("FSDP_OFFLOAD_PARAMS", "false", "weights stay where they are multiplied"),
    ("FSDP_ACTIVATION_CHECKPOINTING", "false", "--gradient-checkpointing does it"),
)
WITH_DDP: tuple[Setting, ...] = (("ACCELERATE_USE_FSDP", "false", "or add --sharding fsdp2"),)


def by_options_alone(config: TrainConfig) -> AbstractContextManager[None]:
    """A context in which accelerate sees no FSDP of its launcher's beside the run's own.

    The launcher passes what it was told in environment variables, which are not kept with the run: a resumed run
    would be another. Raises OptionError for a setting that would change the run.
    """
    check_told("train", *ALWAYS, *(WITH_FSDP2 if config.sharding == "fsdp2" else WITH_DDP))
    return _without_fsdp()


def check_told(command: str, *settings: Setting) -> None:
    """OptionError for the first setting of accelerate's launcher that a command cannot have."""
    for name, possible, hint in settings:
        value = os.environ.get(name, possible).lower()
        if value != possible:
            setting = name.removeprefix("ACCELERATE_").lower()
            raise OptionError(
                f"accelerate was told {setting} {value}, logitless {command} goes by its own options: launch with "
                f"{setting} {possible}; {hint}"
            )


@contextmanager
def _without_fsdp() -> Iterator[None]:
    told = {name: os.environ.pop(name) for name in [*os.environ] if name.startswith("FSDP_")}
    try:
        with patch_environment(accelerate_use_fsdp="false"):
            yield
    finally:
        os.environ.update(told)
