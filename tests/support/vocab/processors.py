"""What a test needs of the processor."""

import pytest
import torch

from logitless.vocab.backends import logits
from logitless.vocab.backends.compiled import library
from logitless.vocab.call import compiled_support
from logitless.vocab.devices import has_bf16_pairs, has_bf16_tiles

_why_not = compiled_support.why_not("cpu")
needs_a_compiler = pytest.mark.skipif(_why_not is not None, reason=str(_why_not))
if _why_not is None and (processor := torch.backends.cpu.get_cpu_capability()) not in library.FLAGS:
    _why_not = f"it is written for {' and '.join(library.FLAGS)}, got {processor}"
needs_library = pytest.mark.skipif(_why_not is not None, reason=str(_why_not))
needs_pairs = pytest.mark.skipif(not has_bf16_pairs(), reason="this processor has no AVX512-BF16")

TILES = library.TILES if has_bf16_tiles("cpu") else ("-DTILES_BY_VECTORS",)  # in the same layout
FLAGS = {"pairs": library.PAIRS, "tiles": library.PAIRS + TILES}


def multiply_by(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the library multiply bf16 operands by `pairs`, or by `tiles`, as on a processor that has these."""
    monkeypatch.setattr(library, "_more", lambda: FLAGS[kind])
    monkeypatch.setattr(logits, "has_bf16_tiles", lambda device_type: device_type == "cpu" and kind == "tiles")
    assert library.library().multiplies_tiles() == (kind == "tiles")
