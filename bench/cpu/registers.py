"""Products whose logits are added up in registers, beside torch's: `python -m bench.cpu.registers [--out FILE]`.

Billions of floating point operations a CPU second, which is what one core does of the product, least time of the rounds
in turn in one process: torch's product in slices that it writes over, in rows and in columns; whole calls of the
backend `compiled` for more and more statistics, the last of which stores its logits in columns as well; and calls with
gradients, through a head that is frozen and one that is trained. Behind docs/decisions/0051 to 0054.
"""

import argparse
from collections.abc import Callable
from pathlib import Path

import torch

import logitless as ll
from bench.harness import THREADS, in_turns, least, results
from logitless.vocab.backends.compiled import stream

WIDTH = 2048  # entries of a slice of torch's
WANT = ("logprob", "entropy", "rank", "self_certainty")
KEPT = 20


def torchs(hidden: torch.Tensor, weight: torch.Tensor, columns: bool) -> Callable[[], None]:
    """Every logit by torch, one slice of the vocabulary after another in one buffer."""
    n = len(hidden)
    z = torch.empty(WIDTH, n).t() if columns else torch.empty(n, WIDTH)

    def run() -> None:
        for start in range(0, len(weight), WIDTH):
            part = weight[start : start + WIDTH]
            torch.mm(hidden, part.t(), out=z[:, : len(part)])

    return run


def ways(tokens: int, size: int, vocab: int) -> dict[str, tuple[int, Callable[[], object]]]:
    """By name, how many products of the tokens with the vocabulary it makes, and a call."""
    hidden, weight = torch.randn(tokens, size), torch.randn(vocab, size) / size**0.5
    labels, head = torch.randint(vocab, (tokens,)), ll.LMHead(weight)
    reference = hidden + 0.1 * torch.randn_like(hidden), head
    leaf, trained = hidden.clone().requires_grad_(), weight.clone().requires_grad_()

    def frozen(*want: str, **options: object) -> Callable[[], object]:
        @torch.enable_grad()
        def run() -> tuple[torch.Tensor, ...]:
            found = ll.token_stats(leaf, head, labels, want=want, backend="compiled", **options)
            return torch.autograd.grad(sum(getattr(found, name) for name in want).sum(), leaf)

        return run

    @torch.enable_grad()
    def loss() -> tuple[torch.Tensor, ...]:
        found = ll.linear_cross_entropy(leaf, ll.LMHead(trained), labels, backend="compiled")
        return torch.autograd.grad(found, [leaf, trained])

    def values(want: tuple[str, ...], **options: object) -> Callable[[], object]:
        return lambda: ll.token_stats(hidden, head, labels, want=want, backend="compiled", **options)

    return {
        "torch, rows": (1, torchs(hidden, weight, False)),
        "torch, columns": (1, torchs(hidden, weight, True)),
        "log-prob": (1, values(("logprob",))),
        "log-prob, entropy": (1, values(WANT[:2])),
        "and rank, self-certainty": (1, values(WANT)),
        f"and the best {KEPT}": (1, values(WANT, top_k=KEPT)),
        "log-prob, entropy, KL": (2, values((*WANT[:2], "kl"), reference=reference)),
        "log-prob, entropy, KL, JSD": (2, values((*WANT[:2], "kl", "jsd"), reference=reference)),
        "log-prob, a frozen head's gradient": (2, frozen("logprob")),
        "and Σp², a frozen head's gradient": (3, frozen("logprob", "sum_sq_prob")),
        "and KL, a frozen head's gradient": (4, frozen("logprob", "kl", reference=reference)),
        "cross-entropy, gradients": (3, loss),
    }


@torch.no_grad()
def measured(tokens: int, size: int, vocab: int, rounds: int) -> list[dict]:
    known = ways(tokens, size, vocab)
    turns = in_turns({name: run for name, (_, run) in known.items()}, rounds)
    flop = 2e-9 * tokens * size * vocab
    about = {"kind": "registers", "tokens": tokens, "hidden": size, "vocab": vocab, "threads": torch.get_num_threads()}
    return [
        about | {"way": name, "gflop a CPU second": round(products * flop / least(turns[name]), 1)}
        for name, (products, _) in known.items()
    ]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", default="32,64,128,256,512,2048", help="comma-separated, instead of %(default)s")
    parser.add_argument(
        "--hidden", default="512", help="sizes of hidden states, comma-separated, instead of %(default)s"
    )
    parser.add_argument("--vocab", type=int, default=32_768, help="entries, instead of %(default)s")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--threads", type=int, default=THREADS)
    parser.add_argument("--whatever", action="store_true", help="on an Intel processor, too, where torch is faster")
    parser.add_argument("--out", type=Path, help="write JSON lines here; must not exist")
    o = parser.parse_args(arguments)
    torch.set_num_threads(o.threads)
    if o.whatever:
        stream.is_intel = lambda: False
    write = results(o.out, o.threads)
    for size in map(int, o.hidden.split(",")):
        for tokens in map(int, o.tokens.split(",")):
            for row in measured(tokens, size, o.vocab, o.rounds):
                print(f"H={size}, {tokens} tokens: {row['way']}: {row['gflop a CPU second']} GF/s a core", flush=True)
                write(row)


if __name__ == "__main__":
    main()
