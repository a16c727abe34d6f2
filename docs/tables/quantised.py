"""Quantised heads: their bytes and time."""

from typing import Any

from docs.tables.shared import grid, machine

Record = dict[str, Any]


def quantised(records: list[Record]) -> str:
    """The bytes of each head, and processor seconds of each kind of work with their ratio to the fp32 head's."""
    parts = []
    for shape in dict.fromkeys(r["shape"] for r in records[1:]):
        some = [r for r in records[1:] if r["shape"] == shape]
        works = list(dict.fromkeys(r["work"] for r in some))
        rows = []
        for head in dict.fromkeys(r["head"] for r in some):
            found = {r["work"]: r for r in some if r["head"] == head}
            cells = [
                f"{found[work]['seconds']:.3f} s ({found[work]['ratio']:.2f} ×)" for work in works
            ]
            rows.append([head, f"{found[works[0]]['head_bytes'] / 1e6:,.1f} MB", *cells])
        title = f"**{shape}**, V={some[0]['vocabulary']:,}, H={some[0]['hidden']:,}"
        columns = [
            f"{work}, {next(r['tokens'] for r in some if r['work'] == work):,} tokens"
            for work in works
        ]
        parts.append(f"{title}\n\n{grid(['head', 'bytes', *columns], rows)}")
    return "\n\n".join([*parts, f"{machine(records)} Processor time, the least of the rounds."])
