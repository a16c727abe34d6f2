"""How far the numbers are from float64."""

from typing import Any

from docs.tables.shared import grid, machine

Record = dict[str, Any]


def precision(records: list[Record]) -> str:
    """Errors against float64: the pass beside whole logits with a float32 log-softmax."""
    of: dict[str, list[Record]] = {}
    for r in records[1:]:
        of.setdefault(r["kind"], []).append(r)
    tokens, hidden, vocab = records[0]["shape"]
    numbers = {(r["name"], r["dtype"]): r for r in of["statistic"]}
    names = list(dict.fromkeys(r["name"] for r in of["statistic"]))
    keys = [(dtype, key) for dtype in ("fp32", "bf16") for key in ("error", "plain_error")]
    values = [[f"`{n}`", *(f"{numbers[n, d][k]:.0e}" for d, k in keys)] for n in names]
    slopes = {(r["name"], r["dtype"]): r for r in of["gradient"]}
    keys = [(dtype, key) for dtype in ("fp32", "bf16") for key in ("relative", "plain_relative")]
    grads = [
        [f"gradient of {n}", *(f"{slopes[n, d][k]:.0e}" for d, k in keys)]
        for n in ("hidden", "weight")
    ]
    both = ["fp32: the pass", "fp32: whole logits", "bf16: the pass", "bf16: whole logits"]
    sure = [
        [f"{r['margin']:g}", *(f"{r[k]:.0e}" for k in ("loss", "relative", "plain_relative"))]
        for r in of["margin"]
    ]
    near = [
        [f"{r[k]:.0e}" for k in ("kl", "relative", "plain_relative", "moments_relative")]
        for r in of["kl"]
    ]
    return "\n\n".join(
        [
            "Largest error of a token in nats (of `sum_sq_prob`, `el2n`, `acceptance` and `total_variation` in "
            f"probability), N={tokens}, H={hidden}, V={vocab:,}:",
            grid(["statistic", *both], values),
            "Gradients of log-prob and entropy under a random cotangent, norm of the error over norm of the gradient:",
            grid(["", *both], grads),
            "A sure token, float32: relative error of its loss, the label leading all others together by a margin:",
            grid(["margin (nat)", "loss", "the pass", "`F.cross_entropy`"], sure),
            "KL to a reference, float32: largest relative error of a token:",
            grid(
                [
                    "KL (median)",
                    "the pass",
                    "Σ p·(log p - log q)",
                    "two moments and two log-sum-exps",
                ],
                near,
            ),
            machine(records),
        ]
    )
