"""What a GPU would be asked for, from `bench/results/gpu_counts.jsonl`."""

from typing import Any

from bench.gpu_counts import show


def counts(records: list[dict[str, Any]]) -> str:
    """Predicted times against goals, what they are made of, and the kernels' machine code."""
    return "\n\n".join(
        [
            "## Predicted times",
            show.times_table(records),
            show.machine_line(records),
            "## What they are made of",
            show.parts_table(records),
            "## Launches and waits",
            show.launches_table(records),
            "## Products",
            show.products_table(records),
            "## Bytes",
            show.bytes_table(records),
            "## Kernels",
            show.kernels_table(records),
        ]
    )
