"""Which options of a command a test has not given."""

from dataclasses import fields
from typing import Any

from logitless.workbench.common.options import INVOCATION


def at_default(*configs: Any) -> set[str]:
    """The options of a dataclass that none of its instances sets, beside those of an invocation."""
    options = [field for field in fields(configs[0]) if field.name not in INVOCATION]
    return {x.name for x in options if all(getattr(config, x.name) == x.default for config in configs)}
