"""What is relied on in transformers' generation that has no public name, and a check that says what has moved.

A decoding loop of one's own (`custom_generate`) is public; these are what transformers' own loop is made of, and what
its guide to such loops calls. All else that the loop here touches is public.
"""

from __future__ import annotations

import inspect
from importlib.metadata import version
from typing import Any

from ..errors import ConfigError

# Method: (what it is called with, all of its parameters as of transformers 5.23)
METHODS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "_prefill": (
        ("input_ids", "generation_config", "model_kwargs"),
        ("input_ids", "generation_config", "model_kwargs", "is_first_iteration"),
    ),
    "_update_model_kwargs_for_generation": (
        ("outputs", "model_kwargs"),
        ("outputs", "model_kwargs", "is_encoder_decoder", "num_new_tokens"),
    ),
}


def require(model: Any) -> None:
    """Raises ConfigError that names what the installed transformers no longer takes as it is called here."""
    changed = [line for name in METHODS if (line := moved(model, name))]
    if changed:
        raise ConfigError(
            f"transformers {version('transformers')}: {'; '.join(changed)}; install transformers>=5.0,<6 or a newer "
            "logitless"
        )


def moved(model: Any, name: str) -> str:
    """What is no longer as expected about one method, '' where nothing is."""
    method, given = getattr(model, name, None), METHODS[name][0]
    if method is None:
        return f"GenerationMixin.{name} is gone"
    signature = inspect.signature(method)
    try:
        bound = signature.bind(*given).arguments
    except TypeError:
        bound = {}
    if tuple(bound) == given:
        return ""
    return f"GenerationMixin.{name} takes ({', '.join(signature.parameters)}), expected ({', '.join(given)}, ...)"
