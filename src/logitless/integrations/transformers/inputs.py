"""What a model's inputs by name must be, so that a tokenizer's lists are refused in our words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ...errors import DtypeError

READ_HERE = ("input_ids", "attention_mask")


def check_by_name(argument: str, inputs: Any) -> None:
    """Raise DtypeError unless these are inputs by name whose ids and mask are no lists or numpy arrays.

    A mask may be no tensor and yet right, as transformers' dicts of masks and flex attention's are.
    """
    if not isinstance(inputs, Mapping):
        raise DtypeError(f"{argument}: expected a model's inputs by name in a dict, got {type(inputs).__name__}")
    for name in READ_HERE:
        if isinstance(x := inputs.get(name), Sequence | np.ndarray):
            raise DtypeError(f"{name}: expected a tensor, got {type(x).__name__}; pass return_tensors='pt'")
