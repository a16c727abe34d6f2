"""A model of two layers that reads embeddings, and Gumbel-softmax through it from whole rows of logits."""

import torch
from torch import Tensor, nn

from logitless import LMHead, relax
from logitless.relax import Reader

B, P, T, V, H = 2, 3, 5, 23, 8
TAU = 0.8


class Tiny(nn.Module):
    """Two attention layers over embeddings, which hand out their keys and values flat."""

    def __init__(self, layers: int = 2, vocab: int = V, width: int = H, seed: int = 0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)

        def some(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.randn(*shape, generator=generator, dtype=torch.float64) / shape[-1] ** 0.5)

        self.mixing = nn.ParameterList([some(4, width, width) for _ in range(layers)])
        self.table, self.head = some(vocab, width), some(vocab, width)

    def body(self, embeds: Tensor, mask: Tensor, past: Tensor | None) -> tuple[Tensor, Tensor]:
        rows, n, width = embeds.shape
        layers = len(self.mixing)
        before = [None] * layers if past is None else list(past.view(-1, layers, 2, rows, width).unbind(1))
        positions = torch.arange(mask.shape[1])
        causal = positions[None, :] <= positions[-n:, None]
        keep = causal & mask.bool()[:, None, :]
        pieces, h = [], embeds
        for weights, old in zip(self.mixing, before, strict=True):
            q, k, v, out = weights
            new = torch.stack([h @ k, h @ v]).permute(2, 0, 1, 3)  # (n, 2, B, H)
            keys, values = (new if old is None else torch.cat([old, new])).permute(1, 2, 0, 3)
            scores = (h @ q) @ keys.transpose(1, 2) / width**0.5
            attention = scores.masked_fill(~keep, -1e9).softmax(-1)
            h = torch.tanh(h + attention @ values @ out)
            pieces.append(new)
        return h, torch.stack(pieces, 1).reshape(n, -1)

    def reader(self) -> Reader:
        return Reader(self.body, self.table, lambda: LMHead(4 * self.head))


def batch() -> tuple[Tensor, Tensor, Tensor]:
    """Prompts, the first padded on the left; seeds."""
    prompts = torch.randint(V, (B, P), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(prompts)
    mask[0, 0] = 0
    return prompts, mask, torch.tensor([5, 6])


def dense(model: Tiny, reference: Tiny, hard: bool, cotangent: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(loss, tokens, KL) from weights over the whole vocabulary and T passes over whole prefixes."""
    prompts, mask, seeds = batch()
    embeds, seen, loss, tokens, kls = model.table[prompts], reference.table[prompts], 0.0, [], []
    for t in range(T):
        z, z_ref = 4 * model.body(embeds, mask, None)[0][:, -1] @ model.head.T, None
        with torch.no_grad():
            z_ref = 4 * reference.body(seen, mask, None)[0][:, -1] @ reference.head.T
        noise = relax.gumbel(seeds, torch.full_like(seeds, t), slice(0, V)).double()
        weights = ((z + noise) / TAU).softmax(-1)
        if hard:
            weights = nn.functional.one_hot((z + noise).argmax(-1), V) + weights - weights.detach()
        tokens.append((z + noise).argmax(-1))
        logp = z.log_softmax(-1)
        kls.append((logp.exp() * (logp - z_ref.log_softmax(-1))).sum(-1))
        loss = loss + (weights * cotangent[:, t]).sum() + 0.3 * kls[-1].sum()
        embeds = torch.cat([embeds, (weights @ model.table)[:, None]], 1)
        seen = torch.cat([seen, (weights.detach() @ reference.table)[:, None]], 1)
        mask = torch.cat([mask, mask.new_ones(B, 1)], 1)
    return loss, torch.stack(tokens, 1), torch.stack(kls, 1)


def gradients(model: Tiny) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def distance(found: dict[str, Tensor], exact: dict[str, Tensor]) -> float:
    assert found.keys() == exact.keys()
    return max(float((found[name] - x).norm() / x.norm()) for name, x in exact.items())
