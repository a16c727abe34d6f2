"""A policy-gradient step's price at the head: log-probs over sampling masks, over whole rows, and dense with a mask.

python -m bench.sampling.masks [--tokens 1024 --vocab 131072 --hidden 1024 --threads 1 --rounds 3 --out FILE]
python -m bench.sampling.masks --model smollm2 [--top-p 0.95 --top-k 0 --tokens 1024 ...]

Sets have about the sizes that were measured elsewhere on 2.5M-token steps (a median of 2 entries, a mean of 8, a 99th
percentile of 82, 46 % singletons); with a model they are its own, of the tokens of its answers, as the sampler's record
writes them, with its hidden states and head. The result says which sizes they had. Each method gives the chosen tokens'
log-probs and the gradients of hidden states and weight; methods in turn, CPU seconds, minima of rounds. The peak counts
what the step's operators allocate beside its inputs.
"""

import argparse
from pathlib import Path

import torch

import logitless as ll
from bench.harness import in_turns, least, results
from bench.real.text import read
from logitless.sample import SamplingMask
from tests.support.allocations import peak_new_bytes

ANSWERS, KEEP = 16, 2048  # questions that a model answers, and entries that a record keeps
QUANTILES = ((0.46, 1), (0.60, 2), (0.80, 5), (0.90, 12), (0.97, 40), (0.99, 82), (1.0, 300))


def sizes_of_sets(n):
    """Set sizes of n tokens, by linear steps between the measured quantiles."""
    at = torch.rand(n)
    sizes, before = torch.ones(n), (0.0, 1)
    for share, size in QUANTILES:
        inside = (at > before[0]) & (at <= share)
        sizes = torch.where(inside, before[1] + (size - before[1]) * (at - before[0]) / (share - before[0]), sizes)
        before = share, size
    return sizes.round().long()


class Step:
    """The tensors of a step: hidden states, the head's weight, each token's set and the token drawn from it."""

    def __init__(self, hidden, weight, mask, labels):
        self.hidden, self.weight = hidden.requires_grad_(), torch.nn.Parameter(weight)
        self.mask, self.labels = mask, labels
        self.old = torch.randn(len(labels))

    @classmethod
    def made(cls, n, v, h):
        """Random; each label is the first of its set."""
        torch.manual_seed(0)
        hidden, weight = torch.randn(n, h), torch.randn(v, h) / h**0.5
        sets = [torch.randperm(v)[:k].tolist() for k in sizes_of_sets(n).tolist()]
        return cls(hidden, weight, SamplingMask.of(sets), torch.tensor([each[0] for each in sets]))

    @classmethod
    def of(cls, model, n, rule):
        """Of a model's own answers: the first `n` tokens whose sets are at most KEEP entries, as records hold them."""
        reading = read(model, ANSWERS, 8 * n // ANSWERS, kinds=("own answers",))
        seed = torch.Generator().manual_seed(0)
        hidden = reading.hidden[: 5 * n // 4]  # some sets are larger than a record keeps
        record = ll.sample_tokens(hidden, reading.head, **rule, keep=KEEP, generator=seed)
        whole = (~record.cut).nonzero()[:n, 0]
        if len(whole) < n:
            raise SystemExit(f"expected {n} tokens, the model's answers have {len(whole)} with sets of at most {KEEP}")
        mask = record[whole].sampling_mask()
        return cls(hidden[whole], reading.head.weight.detach().clone(), mask, record.token[whole].long())

    def loss(self, logprob):
        return -torch.exp(logprob - self.old.to(logprob)).mean()

    def backward(self, loss):
        self.hidden.grad = self.weight.grad = None
        loss.backward()
        return loss.detach(), self.hidden.grad, self.weight.grad

    def kept(self):
        head = ll.LMHead(self.weight)
        return self.backward(self.loss(ll.token_stats(self.hidden, head, self.labels, sampling_mask=self.mask).logprob))

    def full(self):
        head = ll.LMHead(self.weight)
        return self.backward(
            ll.token_loss(
                lambda s, old: -torch.exp(s.logprob - old), self.hidden, head, self.labels, inputs=(self.old,)
            )
        )

    def dense(self):
        outside = torch.ones(self.hidden.shape[0], self.weight.shape[0], dtype=torch.bool)
        outside[self.mask.tokens, self.mask.token_ids] = False
        z = (self.hidden @ self.weight.T).masked_fill(outside, -torch.inf)
        return self.backward(self.loss(z.log_softmax(-1).gather(1, self.labels[:, None])[:, 0]))


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in {"tokens": 1024, "vocab": 131_072, "hidden": 1024, "threads": 1, "rounds": 3}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--model", help="such as smollm2: its own sets, hidden states and head")
    parser.add_argument("--top-p", type=float, default=0.95, help="of the model's sets")
    parser.add_argument("--top-k", type=int, default=0, help="of the model's sets; 0: all entries")
    parser.add_argument("--out", type=Path, help="write JSON lines here; must not exist")
    o = parser.parse_args(arguments)
    torch.set_num_threads(o.threads)
    write, rule = results(o.out), {"top_p": o.top_p, "top_k": o.top_k}
    step = Step.of(o.model, o.tokens, rule) if o.model else Step.made(o.tokens, o.vocab, o.hidden)
    methods = {
        "over the sets": step.kept,
        "whole rows, token_loss": step.full,
        "dense logits with a mask": step.dense,
    }
    ours, theirs = step.kept(), step.dense()
    for name, a, b in zip(("loss", "dhidden", "dweight"), ours, theirs, strict=True):
        if not torch.allclose(a, b, rtol=1e-4, atol=1e-5 * float(b.abs().max())):
            raise SystemExit(f"{name} over the sets is not that of dense logits with a mask")
    del ours, theirs
    turns = in_turns(methods, o.rounds)
    counts = step.mask.counts.double()
    sets = {"mean": float(counts.mean()), "median": float(counts.median()), "p99": float(counts.quantile(0.99))}
    sets["singletons"] = float((counts == 1).double().mean())
    print(", ".join(f"{name} {value:.3g}" for name, value in sets.items()), flush=True)
    rows = []
    for name, method in methods.items():
        seconds, peak = least(turns[name]), peak_new_bytes(method)
        rows.append({"method": name, "cpu_seconds": seconds, "peak_bytes": peak})
        print(f"{name:26s} {seconds:8.3f} s {peak / 2**20:9.1f} MiB", flush=True)
    v, h = step.weight.shape
    sizes = {"tokens": o.tokens, "vocab": v, "hidden": h, "threads": o.threads, "rounds": o.rounds}
    whose = {"model": o.model, **rule} if o.model else {}
    write({"kind": "sampling_masks", "sizes": sizes, **whose, "sets": sets, "rows": rows})


if __name__ == "__main__":
    main()
