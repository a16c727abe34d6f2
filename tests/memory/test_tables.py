"""A profile's tables on consoles of several widths."""

import io

import pytest
from rich.console import Console

from logitless.memory.stages import Recording
from logitless.memory.tables import show
from logitless.memory.tracker import Allocation

GIB = 1 << 30
MODULES = ("model.layers.35.self_attn.q_norm", "model.layers.35.mlp.down_proj.lora_B.default", "")
OPS = ("_to_copy", "_scaled_dot_product_flash_attention_for_cpu", "mm")


def recording() -> Recording:
    shapes = [(1, 131_072, 32, 128), (1, 131_072, 9728), (151_936, 2560)]
    made = [
        Allocation(2 * GIB, shape, "bfloat16", op, module, "activation gradients", i + 1)
        for i, (shape, op, module) in enumerate(zip(shapes, OPS, MODULES, strict=True))
    ]
    return Recording(made, [0, 2 * GIB, 4 * GIB, 6 * GIB], [("parameters", 0), ("backward", 3)])


@pytest.mark.parametrize("width", [80, 100, 120, 160])
def test_names_are_never_broken(width):
    written = io.StringIO()
    found = recording()
    show({"dense": found, "chunked": found}, "chunked", Console(file=written, width=width, color_system=None))
    lines = written.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    table = "\n".join(lines[lines.index("largest tensors at the peak, chunked") :])
    for text in ("1 × 131,072 × 32 × 128 bf16", "layers.35.self_attn.q_norm", "layers.35.mlp.down_proj.lora_B.default"):
        assert text in table
    assert len(table.splitlines()) < 16
