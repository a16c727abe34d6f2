"""The tables of docs/grade.md, a section for each part that `bench.grade.run` has measured."""

from collections.abc import Callable
from statistics import fmean
from typing import Any

from docs.tables.shared import grid
from logitless.workbench.grade.comparison.criteria import VARIANCE
from logitless.workbench.grade.comparison.report import MORE, TIMES

Record = dict[str, Any]


def machine(record: Record) -> str:
    env = record["environment"]
    commit = f", commit {env['commit']}" if env["commit"] else ""
    threads = "1 thread" if env["threads"] == 1 else f"{env['threads']} threads"
    versions = ", ".join(f"{name} {env['versions'][name]}" for name in ("torch", "transformers"))
    return f"{env['cpu']}, {threads}, {versions}, {env['date'][:10]}{commit}."


def setting(record: Record) -> str:
    s = record["sizes"]
    return (
        f"T={s['steps']}, V={s['vocab']:,}, k={s['k']}, batch {s['batch']}, prompts of {s['prompt']}; a random Qwen3 "
        f"of {s['layers']} layers and width {s['hidden']} with LoRA of rank 16, embedding and head frozen"
    )


def policy(record: Record) -> str:
    """The policy and its adapters."""
    p = record["policy"]
    trained = (
        f"LoRA of rank {record['config']['lora_rank']}"
        if record["config"]["lora_rank"]
        else "all of it trained"
    )
    return f"The policy: {p['parameters'] / 1e6:.2g}M parameters, V={p['vocab']:,}, {trained}."


def said(holds: bool) -> str:
    return "holds" if holds else "**does not hold**"


# memory


def memory_ratio(record: Record) -> float:
    """The smaller of the two ways to measure it."""
    rows = {(r["method"], r["carry"]): r for r in record["rows"]}
    ours, legacy = rows["ste", "sweeps"], rows["ste_legacy", None]
    return min(legacy[key] / ours[key] for key in ("allocated_mb", "resident_mb"))


def memory(record: Record) -> str:
    rows = record["rows"]
    legacy = {r["method"]: r for r in rows if r["method"].endswith("_legacy")}
    table = []
    for r in rows:
        old = legacy.get(f"{r['method']}_legacy", r)
        ratios = [f"{old[key] / r[key]:.1f}×" for key in ("allocated_mb", "resident_mb")]
        kept = [f"{r[key]:,.0f} MB" for key in ("allocated_mb", "resident_mb")]
        foretold = f"{r['told_mb']:,.0f} MB" if "told_mb" in r else ""
        cells = (
            [kept[0], ratios[0], kept[1], ratios[1]] if old is not r else [kept[0], "", kept[1], ""]
        )
        table.append([f"`{r['method']}`", r["carry"] or "T graphs", *cells, foretold])
    head = ["method", "carry", "allocated", "less", "resident set", "less", "foretold"]
    return "\n\n".join(
        [
            grid(head, table),
            f"Peak of one step (generation, KL, reward, backward) above the weights, which are "
            f"{rows[0]['weights_mb']:,.0f} MB. {setting(record)}. Allocated: what the step's operators make, counted; "
            "resident set: what the process grows by, sampled. Foretold: what the legacy method says before it runs, "
            "and by which it refuses.",
            machine(record),
        ]
    )


# storage


def per_entry(record: Record) -> tuple[float, float]:
    """Bytes of soft tokens for each step and entry, over all T and k."""
    found = [
        r["soft_bytes"] / (r["steps"] * r["k"] * record["sizes"]["batch"]) for r in record["rows"]
    ]
    return min(found), max(found)


def kept_per_entry(record: Record) -> tuple[float, float]:
    """By how many bytes what a rollout keeps grows with each step and entry, at the least and the greatest T."""
    found = []
    for t in (min(r["steps"] for r in record["rows"]), max(r["steps"] for r in record["rows"])):
        row = {r["k"]: r["kept_bytes"] for r in record["rows"] if r["steps"] == t}
        found.append(
            (row[max(row)] - row[min(row)]) / (t * (max(row) - min(row)) * record["sizes"]["batch"])
        )
    return found[0], found[1]


def storage(record: Record) -> str:
    ks = sorted({r["k"] for r in record["rows"]})
    rows: dict[int, dict[int, Record]] = {}
    for r in record["rows"]:
        rows.setdefault(r["steps"], {})[r["k"]] = r
    table = []
    for t, of in rows.items():
        sizes = [*(of[k]["soft_bytes"] for k in ks), t * record["whole_bytes_per_step"]]
        sizes += [of[k]["kept_bytes"] for k in (ks[0], ks[-1])]
        table.append([str(t), *(f"{x / 1e3:,.0f} kB" for x in sizes)])
    (low, high), kept = per_entry(record), kept_per_entry(record)
    kept_at = [f"kept in all, k={k:,}" for k in (ks[0], ks[-1])]
    return "\n\n".join(
        [
            grid(
                [
                    "T",
                    *(f"k={k:,}" for k in ks),
                    f"whole, V={record['sizes']['vocab']:,}",
                    *kept_at,
                ],
                table,
            ),
            f"Bytes of ids, weights, tokens and coverage that a rollout holds: {low:.2f} to {high:.2f} for each step "
            "and entry at every T and k. Whole: the weights alone of a (T, V) tensor. Kept in all: what a rollout "
            f"holds for its backward; it grows by {kept[0]:.1f} bytes with each step and entry at the least T, by "
            f"{kept[1]:.1f} at the greatest, and with the activations of one pass over T positions.",
            machine(record),
        ]
    )


# time


def timing(record: Record) -> str:
    rows = [
        [
            f"`{r['method']}`",
            f"{r['seconds']:.2f} s",
            f"{r['legacy_seconds']:.2f} s",
            f"{r['ratio']:.2f}",
            spread(r),
        ]
        for r in record["rows"]
    ]
    return "\n\n".join(
        [
            grid(["method", "a step", "its legacy's", "ratio", "over rounds"], rows),
            f"Medians of {record['rounds']} rounds, in turns in one process; the ratio within each round. "
            f"{setting(record)}.",
            machine(record),
        ]
    )


def spread(row: Record) -> str:
    return f"{min(row['ratios']):.2f} to {max(row['ratios']):.2f}"


# curves


def off(record: Record, name: str) -> tuple[float, float, float]:
    """The largest difference of a reward, of a KL relative to it (of 0.01 nat at least), and of the gradient."""
    rewards, kls, gradients = [], [], []
    for row in record["rows"]:
        ours = row[name]
        rewards += [abs(a - b) for a, b in zip(ours["reward"], row["reward"], strict=True)]
        kls += [abs(a - b) / max(b, 0.01) for a, b in zip(ours["kl"], row["kl"], strict=True)]
        gradients.append(ours["gradient_error"])
    return max(rewards), max(kls), max(gradients)


def means(record: Record, name: str) -> tuple[str, str]:
    """Mean reward and KL over all steps, beside the legacy's."""

    def mean(of: str, digits: int) -> str:
        ours = fmean(x for row in record["rows"] for x in row[name][of])
        return f"{ours:.{digits}f}, legacy {fmean(x for row in record['rows'] for x in row[of]):.{digits}f}"

    return mean("reward", 4), mean("kl", 3)


def curves(record: Record) -> str:
    rows = record["rows"]
    some = sorted({round(i * (len(rows) - 1) / 5) for i in range(6)})
    table = []
    for i in some:
        r = rows[i]
        cells = [
            f"{fmean(of[key]):.{digits}f}"
            for key, digits in (("reward", 6), ("kl", 5))
            for of in three(r)
        ]
        table.append(
            [str(r["step"] + 1), f"{r['tau']:.2f}", *cells, f"{1 - r['few']['outside']:.2%}"]
        )
    c = record["config"]
    k = c["top_k"]
    head = [
        "step",
        "τ",
        *(f"{what}, {who}" for what in ("reward", "KL") for who in ("legacy", "k=V", f"k={k}")),
    ]
    return "\n\n".join(
        [
            grid([*head, f"coverage of {k}"], table),
            f"The largest difference of any sequence in {len(rows)} steps, against `ste_legacy`:",
            grid(
                [
                    "",
                    "reward",
                    "KL, relative",
                    "gradient, relative norm",
                    "mean reward, all steps",
                    "mean KL",
                ],
                [
                    [name, *(f"{x:.0e}" for x in off(record, key)), *means(record, key)]
                    for name, key in (
                        (f"k=V={record['policy']['vocab']:,}", "all"),
                        (f"k={k}", "few"),
                    )
                ],
            ),
            f"`ste_legacy` trains; at each step `ste` gets the same parameters, prompts and noise. Batches of "
            f"{c['batch_size']}, T={c['completion_length']}. At the first step the KL is 0; against a reference that "
            f"has read one token more it would be {record['late_kl']:.1f} nats a token. {policy(record)}",
            machine(record),
        ]
    )


def three(row: Record) -> tuple[Record, Record, Record]:
    return row, row["all"], row["few"]


# variance


def ratios(record: Record, row: Record) -> list[float]:
    """reinforce's variance over this method's, for each block of draws."""
    score = record["rows"][0]
    return [a / b for a, b in zip(score["variances"], row["variances"], strict=True)]


def variance(record: Record) -> str:
    score, halves = record["rows"][0], max(0.0, record["halves"])
    most = (
        2 * halves / (1 + halves)
    ) ** 0.5  # Spearman and Brown: from half the draws to all, to the truth
    table = []
    for r in record["rows"]:
        blocks = ratios(record, r)
        own = r is score
        table.append(
            [
                f"`{r['method']}`", "" if own else f"{r['tau']:g}", f"{r['variance']:.2e}",
                "" if own else f"{score['variance'] / r['variance']:.3g}×",
                "" if own else f"{min(blocks):.3g} to {max(blocks):.3g}",
                noise(r), f"at most {most:.2f}" if own else f"{r['cosine']:.2f}",
            ]
        )  # fmt: skip
    head = [
        "method",
        "τ",
        "variance",
        "reinforce's over it",
        "in blocks",
        "noise over signal",
        "cosine",
    ]
    c = record["config"]
    return "\n\n".join(
        [
            grid(head, table),
            f"The trace of the gradient's covariance over {record['samples']} draws of the noise for one batch of "
            f"{c['batch_size']} prompts, T={c['completion_length']}, the policy untrained. Noise over signal: that "
            "variance over the mean gradient's square, what a method pays in samples. Cosine: of the mean gradient "
            "with reinforce's, which alone has no bias; at most: what an exact gradient would have on average with "
            "that noisy mean, from the cosine of two halves of its draws. "
            f"{policy(record)}",
            machine(record),
        ]
    )


def noise(row: Record) -> str:
    return f"{row['variance'] / row['mean_square']:.3g}" if row["mean_square"] else "no signal"


# what is learned


def learning(record: Record) -> str:
    c, legacy = record["config"], record["legacy"]
    samples = record["steps"] * c["batch_size"] * c["gradient_accumulation_steps"]
    out = (
        f" Not run: {', '.join(f'`{name}`' for name in record['missing'])}."
        if record["missing"]
        else ""
    )
    parts = [
        learned(record),
        f"{record['seeds']} seeds, {record['steps']} steps, {samples:,} continuations of {c['completion_length']} "
        f"tokens for every method, {record['test_samples']} test prompts; means, and {record['intervals']}. "
        f"Coverage is of training. {policy(record)}{out}",
        "The validation reward on the way, by steps, means over seeds:",
        on_the_way(record),
    ]
    if not legacy["missing"]:
        parts += [
            f"The legacy (whole distributions) beside `ste` (k={c['top_k']}), {legacy['seeds']} seeds:",
            learned(legacy),
        ]
    return "\n\n".join([*parts, machine(record)])


def learned(record: Record) -> str:
    head = [
        "method",
        "test reward",
        "less `ste`'s",
        "in training less test",
        "KL, nats",
        "coverage",
    ]
    rows = []
    for name, m in record["methods"].items():
        less = m.get("test_reward_minus_ste")
        rows.append(
            [
                f"`{name}`", within(m["test_reward"]), within(less) if less else "", within(m["generalisation_gap"]),
                within(m["test_kl"]), f"{m['coverage']:.1%}",
            ]
        )  # fmt: skip
    return grid(head, rows)


def on_the_way(record: Record) -> str:
    found = record["validation"]
    steps = list(next(iter(found.values())))
    return grid(
        ["method", *steps],
        [[f"`{m}`", *(f"{of[n]:.3f}" for n in steps)] for m, of in found.items()],
    )


def within(x: Record) -> str:
    return f"{x['mean']:.3f}" + (f" ({x['low']:.3f} to {x['high']:.3f})" if "low" in x else "")


def learning_claims(record: Record) -> list[list[str]]:
    rows = []
    for name in ("reinforce", "ppo"):
        if (less := record["methods"].get(name, {}).get("test_reward_minus_ste")) and "low" in less:
            shown = (
                said(less["high"] < 0)
                if less["high"] < 0 or less["low"] > 0
                else "not shown either way"
            )
            measured = f"{-less['mean']:+.3f} ({-less['high']:+.3f} to {-less['low']:+.3f})"
            rows.append(
                [f"test reward, `ste` less `{name}` at equal samples", "above 0", measured, shown]
            )
    less = record["legacy"]["methods"].get("ste_legacy", {}).get("test_reward_minus_ste")
    if less and "low" in less:
        equal = said(less["low"] <= 0 <= less["high"])
        rows.append(
            ["test reward, `ste_legacy` less `ste`", "0 within its interval", within(less), equal]
        )
    return rows


def beside_legacy(record: Record) -> str:
    """A column for each new method."""
    pairs, c = record["pairs"], record["config"]
    rows = [[title, *(times(x.get(key)) for x in pairs.values())] for key, title in TIMES.items()]
    rows += [[name, *(more_or_less(x[name]) for x in pairs.values())] for name in MORE]
    rewards = "; ".join(
        f"`{name}` {within(x)}" for of in pairs.values() for name, x in of["rewards"].items()
    )
    verdicts = [
        [f"`{x['method']}`: {x['criterion']} {x['expected']}", f"**{x['verdict']}**", x["why"]]
        for of in pairs.values()
        for x in of["criteria"]
    ]
    seeds = " and ".join(f"{of['seeds']} seeds of `{new}`" for new, of in pairs.items())
    return "\n\n".join(
        [
            grid(["", *(f"`{new}` beside `{of['legacy']}`" for new, of in pairs.items())], rows),
            f"{seeds}, {record['steps']} steps, batches of {c['batch_size']}, {c['completion_length']} tokens, "
            f"k={c['top_k']}; means, and {record['intervals']}, paired; times: of the legacy's. "
            f"Test rewards: {rewards}. {policy(record)}",
            grid(["promise", "verdict", ""], verdicts),
            "±: what two seeds of the legacy differ by.",
            machine(record),
        ]
    )


def times(x: Record | None) -> str:
    return (
        ""
        if x is None
        else f"{x['mean']:.3g} ×" + (f" ({x['low']:.3g} to {x['high']:.3g})" if "low" in x else "")
    )


def more_or_less(x: Record) -> str:
    return f"{x['mean']:+.3f}" + (f" ({x['low']:+.3f} to {x['high']:+.3f})" if "low" in x else "")


# all of it

SECTIONS: dict[str, tuple[str, Callable[[Record], str]]] = {
    "memory": ("Memory", memory),
    "storage": ("What soft tokens take", storage),
    "time": ("Time", timing),
    "curves": ("The same curves", curves),
    "variance": ("Gradient variance", variance),
    "learning": ("What is learned", learning),
    "legacy": ("Each new method beside its own legacy", beside_legacy),
}


def claims(found: dict[str, Record]) -> list[list[str]]:
    """(claim, to reach, measured, whether it holds) of what is there."""
    rows = []
    if "memory" in found:
        ratio = memory_ratio(found["memory"])
        rows.append(
            [
                "peak memory above the weights, `ste`",
                "5× less than legacy",
                f"{ratio:.1f}×",
                said(ratio >= 5),
            ]
        )
    if "storage" in found:
        low, high = per_entry(found["storage"])
        cells = [f"{low:.2f} to {high:.2f} bytes per step and entry", said(high < 1.1 * low)]
        rows.append(["soft tokens' storage", "O(T·k)", *cells])
    if "curves" in found:
        reward, kl, slope = off(found["curves"], "all")
        measured = f"reward {reward:.0e}, KL {kl:.0e}, gradient {slope:.0e}"
        rows.append(
            [
                "`ste` at k=V against legacy, step by step",
                "fp32 rounding",
                measured,
                said(max(reward, kl, slope) < 1e-3),
            ]
        )
    if "time" in found:
        ratio = found["time"]["rows"][0]["ratio"]
        rows.append(
            [
                "time of a step, `ste`",
                "no slower than legacy",
                f"{ratio:.2f} of legacy's",
                said(ratio <= 1),
            ]
        )
    if "variance" in found:
        rows += [variance_claim(found["variance"])]
    return rows + (learning_claims(found["learning"]) if "learning" in found else [])


def variance_claim(record: Record) -> list[str]:
    score, *others = record["rows"]
    ours = [r for r in others if r["method"] == "ste"]
    times = [score["variance"] / r["variance"] for r in ours]
    measured = f"{min(times):.3g} to {max(times):.3g}× lower, by τ"
    if all(r["mean_square"] for r in (score, *ours)):
        worth = [
            x * r["mean_square"] / score["mean_square"] for x, r in zip(times, ours, strict=True)
        ]
        measured += (
            f"; in units of the mean gradient's square {min(worth):.2g} to {max(worth):.2g}×"
        )
    return [
        "gradient variance, `ste` against `reinforce`",
        f"reported: over {VARIANCE:g}× lower",
        measured,
        said(min(times) > VARIANCE),
    ]


def grade(records: list[Record]) -> str:
    """The whole page's figures."""
    found = {r["kind"]: r for r in records}
    parts = [grid(["claim", "to reach", "measured", ""], claims(found))]
    for kind, (title, make) in SECTIONS.items():
        parts.append(f"## {title}")
        parts.append(
            make(found[kind])
            if kind in found
            else f"Not measured yet: `python -m bench.grade.run --part {kind}`."
        )
    return "\n\n".join(parts)
