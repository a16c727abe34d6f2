"""The pass in JAX beside dense."""

from typing import Any

from docs.tables.shared import grid

Record = dict[str, Any]


def in_jax(records: list[Record]) -> str:
    """Seconds and XLA's own account of temporaries, logitless beside dense, of each work."""
    head = ["work", "method", "time", "× dense", "× bare", "temporaries"]
    of = {(r["work"], r["method"]): r for r in records[1:]}
    rows = []
    for (work, method), r in of.items():
        ratio = r["seconds"] / of[work, "dense"]["seconds"]
        bare = min(
            (
                x["seconds"]
                for (w, m), x in of.items()
                if w == work and m.startswith("bare products")
            ),
            default=None,
        )
        rows.append(
            [
                work,
                method,
                f"{1e3 * r['seconds']:,.0f} ms",
                f"{ratio:.2f}",
                f"{r['seconds'] / bare:.2f}" if bare else "",
                f"{r['temporaries_mb']:,.0f} MB",
            ]
        )
    env, sizes = records[0], records[0]["sizes"]
    where = f"{env['cpu']}, {env['cores']} cores, jax {env['versions']['jax']}, {env['date'][:10]}"
    what = "N={tokens:,}, steps of {step}, H={hidden}, V={vocab:,}, {keep} best entries".format(
        **sizes
    )
    return f"{grid(head, rows)}\n\n{what}; {where}: `python -m bench.jax_loss`."
