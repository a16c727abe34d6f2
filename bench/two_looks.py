"""What looks twice, and numbers and losses that only a head knows, against dense torch.

python -m bench.two_looks [--tokens 256 --vocab 65536 --hidden 512 --threads 1 --rounds 3 --out FILE]

A draft's step: a loss against a target's hidden states, with gradients of the draft's hidden states and head. `stream`
is token_loss; `dense` the same formula on whole logits, as speculators' eager losses are (these exist as kernels from
whole logits too, which keep the logits; for CUDA alone, so not here). Each result is held against dense first. Methods
in turn, CPU seconds, minima of rounds; the peak counts what a step allocates beside its inputs. The mean embedding of
the draft's tied weight, skewed KL, the gradient share (values alone), ArcFace and CosFace over normalised rows, and
three depths of multi-token prediction that share the head, of a third of the tokens each.
"""

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F

import logitless as ll
from bench.harness import in_turns, least, results
from logitless.diagnostics import gradient_share
from logitless.multi_token import multi_token_cross_entropy
from logitless.relax import expected_embedding
from tests.support.allocations import peak_new_bytes


class Draft:
    """A draft and its target."""

    def __init__(self, n, v, h):
        torch.manual_seed(0)
        self.hidden, self.weight = torch.randn(n, h, requires_grad=True), torch.randn(v, h) * 2 / h**0.5
        self.weight.requires_grad_()
        noise = torch.randn(n, h)
        self.labels = torch.randint(v, (n,))
        self.reference = (self.hidden.detach() + 0.3 * noise, ll.LMHead(self.weight.detach().clone()))

    def backward(self, loss):
        return loss.detach(), *torch.autograd.grad(loss, [self.hidden, self.weight])

    def stream(self, want, loss_fn, **options):
        head = ll.LMHead(self.weight)
        return self.backward(ll.token_loss(loss_fn, self.hidden, head, want=want, reference=self.reference, **options))

    def dense(self, loss):
        s = (self.hidden @ self.weight.T).log_softmax(-1)
        t = (self.reference[0] @ self.reference[1].weight.T).log_softmax(-1)
        return self.backward(loss(s, t).mean())

    def mean_stream(self):
        return self.backward(expected_embedding(self.hidden, ll.LMHead(self.weight)).embedding.square().sum())

    def mean_dense(self):
        return self.backward(((self.hidden @ self.weight.T).softmax(-1) @ self.weight).square().sum())

    def share_stream(self):
        return (gradient_share(self.hidden, ll.LMHead(self.weight), self.labels),)

    def share_dense(self):
        with torch.no_grad():
            g = (self.hidden @ self.weight.T).softmax(-1)
            g[torch.arange(len(g)), self.labels] -= 1
            return ((g @ self.weight).norm(dim=-1) / g.norm(dim=-1),)

    def margin_stream(self, want, loss_fn):
        head = ll.LMHead(F.normalize(self.weight, dim=-1), scale=SCALE)
        return self.backward(ll.token_loss(loss_fn, F.normalize(self.hidden, dim=-1), head, self.labels, want=want))

    def margin_dense(self, moved):
        """moved: the label's cosine with its margin."""
        cosine = F.normalize(self.hidden, dim=-1) @ F.normalize(self.weight, dim=-1).T
        at = torch.arange(len(cosine)), self.labels
        return self.backward(F.cross_entropy(SCALE * cosine.index_put(at, moved(cosine[at])), self.labels))

    def depths(self):
        each = len(self.hidden) // DEPTHS
        return self.hidden[: DEPTHS * each].view(DEPTHS, 1, each, -1), self.labels[None, :each]

    def multi_token_stream(self):
        hiddens, labels = self.depths()
        return self.backward(multi_token_cross_entropy(hiddens, ll.LMHead(self.weight), labels).loss)

    def multi_token_dense(self):
        hiddens, labels = self.depths()
        losses = [
            F.cross_entropy((x[:, : -1 - k] @ self.weight.T).flatten(0, 1), labels[:, 1 + k :].flatten())
            for k, x in enumerate(hiddens)
        ]
        return self.backward(sum(losses))


SCALE, DEPTHS = 16.0, 3


def skewed(s, t):
    return (t.exp() * (t - (0.1 * t.exp() + 0.9 * s.exp()).log())).sum(-1)


def overlap(s, t):
    return torch.minimum(s.exp(), t.exp()).sum(-1)


def hybrid(s, t):
    accepted = overlap(s, t)
    weight = torch.exp(-3 * accepted.detach())
    return weight * F.kl_div(s, t, reduction="none", log_target=True).sum(-1) + (1 - weight) * (1 - accepted)


MARGINS = {
    "ArcFace": (
        ("logprob", "label_logit"), lambda s: ll.losses.arcface(s.logprob, s.label_logit, SCALE),
        lambda cosine: (cosine.acos() + 0.5).cos(),
    ),
    "CosFace": (("logprob",), lambda s: ll.losses.cosface(s.logprob, SCALE), lambda cosine: cosine - 0.35),
}  # fmt: skip
LOSSES = {
    "negative log-acceptance": (
        ("acceptance",), lambda s: ll.losses.negative_log_acceptance(s.acceptance), lambda s, t: -overlap(s, t).log(),
    ),
    "LK hybrid": (
        ("reverse_kl", "total_variation"), lambda s: ll.losses.lk_hybrid(s.reverse_kl, s.total_variation), hybrid,
    ),
    "skewed KL": (("reverse_kl_mixture",), lambda s: ll.losses.skewed_kl(s.reverse_kl_mixture), skewed),
}  # fmt: skip


def hold(name, ours, theirs):
    """Raise SystemExit where a result is not dense torch's, in norm: of entries that both policies find equally likely
    to rounding, which of the two is larger is rounding's, and the gradient of an overlap jumps there."""
    for part, a, b in zip(("value", "dhidden", "dweight")[: len(theirs)], ours, theirs, strict=True):
        apart = float((a - b).norm() / b.norm())
        if not apart <= 1e-3:
            raise SystemExit(f"{name}: {part} is not that of dense logits, {apart:.1e} of its norm apart")


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in {"tokens": 256, "vocab": 65_536, "hidden": 512, "threads": 1, "rounds": 3}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--out", type=Path, help="write JSON lines here; must not exist")
    o = parser.parse_args(arguments)
    torch.set_num_threads(o.threads)
    write = results(o.out)
    step = Draft(o.tokens, o.vocab, o.hidden)
    methods = {
        "mean embedding": (step.mean_stream, step.mean_dense),
        "gradient share": (step.share_stream, step.share_dense),
        f"{DEPTHS} depths": (step.multi_token_stream, step.multi_token_dense),
    }
    for name, (want, loss_fn, moved) in MARGINS.items():
        methods[name] = (
            lambda want=want, loss_fn=loss_fn: step.margin_stream(want, loss_fn),
            lambda moved=moved: step.margin_dense(moved),
        )
    for name, (want, loss_fn, dense) in LOSSES.items():
        methods[name] = (
            lambda want=want, loss_fn=loss_fn: step.stream(want, loss_fn, jsd_beta=0.1),
            lambda dense=dense: step.dense(dense),
        )
    rows = []
    for name, pair in methods.items():
        hold(name, *(method() for method in pair))
        ways = dict(zip(("stream", "dense"), pair, strict=True))
        for way, turns in in_turns(ways, o.rounds).items():
            seconds, peak = least(turns), peak_new_bytes(ways[way])
            rows.append({"what": name, "way": way, "cpu_seconds": seconds, "peak_bytes": peak})
            print(f"{name:26s} {way:8s} {seconds:8.3f} s {peak / 2**20:9.1f} MiB", flush=True)
    sizes = {name: value for name, value in vars(o).items() if name != "out"}
    write({"kind": "two_looks", "sizes": sizes, "rows": rows})


if __name__ == "__main__":
    main()
