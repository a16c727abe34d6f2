"""SPLADE's maximum over tokens."""

from typing import Any

from docs.tables.shared import grid, machine

Record = dict[str, Any]


def pooling(records: list[Record]) -> str:
    """Processor time of each way to a maximum over tokens, its peak, and how many documents a memory holds."""
    head = ["active pairs", "way", "time", "products", "× dense", "peak", "documents in 24 GiB"]
    parts = []
    for vocabulary in dict.fromkeys(r["vocabulary"] for r in records[1:]):
        some = [r for r in records[1:] if r["vocabulary"] == vocabulary]
        rows = [
            [
                f"{r['active']:.1%}",
                r["method"],
                f"{r['cpu_seconds']:.2f} s",
                f"{r['to_bare']:.2f}",
                f"{r['to_dense']:.2f}",
                f"{r['peak_mib']:,.0f} MiB",
                f"{r['documents_in_24_gib']:,}",
            ]
            for r in some
        ]
        sizes = "V={vocabulary:,}, H={hidden}, {documents} documents of {length} tokens".format(
            **some[0]
        )
        parts.append(f"**{sizes}**\n\n{grid(head, rows)}")
    busy = max(r["others_busy"] for r in records[1:])
    return "\n\n".join(
        [
            *parts,
            "A training step of the head alone in fp32, `products` in bare products of the forward pass. "
            f"{machine(records)} Processor time, the least of the rounds, while others kept up to {busy:.0%} of the "
            f"machine busy (load {records[0]['load']:.1f}).",
        ]
    )
