"""Long contexts: the steps of a peak, sparse against full attention, and a run of 131,072 tokens."""

from typing import Any

from docs.tables.shared import grid

Record = dict[str, Any]
GIB, MIB = 1 << 30, 1 << 20


def steps(records: list[Record]) -> str:
    what, *rows = records
    table = grid(
        ["", "peak on the GPU", "during", "on the host"],
        [
            [
                r["step"],
                f"{r['peak_bytes'] / GIB:.2f} GiB",
                r["stage"],
                f"{r['host_bytes'] / GIB:.2f} GiB",
            ]
            for r in rows
        ],
    )
    said = f"`{what['model']}`, one sequence of {what['context_length']:,} tokens, bf16, AdamW with bf16 state"
    return f"{table}\n\n{said}; traced on fake tensors with torch {what['versions']['torch']}."


def sparse(records: list[Record]) -> str:
    what, *rows = records
    table = grid(
        ["tokens", "full", "sparse", "sparse / full", "full, peak", "sparse, peak"],
        [
            [
                f"{r['length']:,}",
                *(f"{r[name]['seconds']:.2f} s" for name in ("full", "nsa")),
                f"{r['nsa']['seconds'] / r['full']['seconds']:.2f}",
                *(f"{r[name]['peak_bytes'] / MIB:,.0f} MiB" for name in ("full", "nsa")),
            ]
            for r in rows
        ],
    )
    sizes = what["sizes"]
    said = f"{sizes['heads']} heads of {sizes['dim']}, {sizes['kv_heads']} of keys, fp32, forward and backward"
    return (
        f"{table}\n\n{said}; {what['cpu']}, {sizes['threads']} threads, torch {what['versions']['torch']}, "
        f"{what['date'][:10]}."
    )


def run(records: list[Record]) -> str:
    what, r = records
    losses = ", ".join(f"{loss:.2f}" for _, loss in r["losses"])
    rows = [
        ["tokens of a sequence", f"{r['context_length']:,}"],
        ["vocabulary", f"{r['vocab']:,}"],
        ["parameters", f"{r['parameters']:,} (hidden {r['hidden']}, {r['layers']} layers)"],
        ["one sequence's logits, fp32", f"{r['dense_logits_bytes'] / GIB:.0f} GiB"],
        ["peak resident memory of the process", f"{r['peak_resident_bytes'] / GIB:.2f} GiB"],
        ["training loss, step by step", losses],
        ["time in all", f"{r['seconds'] / 60:.0f} minutes"],
    ]
    return (
        f"{grid(['', ''], rows)}\n\n{what['cpu']}, {r['threads']} threads, torch {what['versions']['torch']}, "
        f"{what['date'][:10]}."
    )
