"""Self-certainty of one completion from whole float64 logits."""

import copy
import math

import torch


def dense(model, prompt, completion, temperature=1.0, shift=1, mask=None):
    """The mean over a completion's tokens of lse - mean - log V, from whole float64 logits of this row alone."""
    exact = copy.deepcopy(model).double().eval()
    with torch.no_grad():
        z = exact(torch.tensor([prompt + completion])).logits[0].double() / temperature
    first = len(prompt) - shift
    z = z[first : first + len(completion)]
    certainty = z.logsumexp(-1) - z.mean(-1) - math.log(z.shape[-1])
    counted = torch.ones(len(completion), dtype=torch.bool) if mask is None else torch.tensor(mask, dtype=torch.bool)
    return float(certainty[counted].mean())
