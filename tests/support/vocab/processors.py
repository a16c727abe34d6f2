"""What a test needs of the processor."""

import pytest
import torch

from logitless.vocab.backends.compiled import library
from logitless.vocab.call import compiled_support
from logitless.vocab.devices import has_bf16_pairs

_why_not = compiled_support.why_not("cpu")
needs_a_compiler = pytest.mark.skipif(_why_not is not None, reason=str(_why_not))
if _why_not is None and (processor := torch.backends.cpu.get_cpu_capability()) not in library.FLAGS:
    _why_not = f"it is written for {' and '.join(library.FLAGS)}, got {processor}"
needs_library = pytest.mark.skipif(_why_not is not None, reason=str(_why_not))
needs_pairs = pytest.mark.skipif(not has_bf16_pairs(), reason="this processor has no AVX512-BF16")
