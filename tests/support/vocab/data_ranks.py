"""What `test_training_tools.py` runs on each of two ranks: DDP's gradients beside those of one process."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from tests.support.integrations.launching import leave
from tests.vocab.passes.test_training_tools import batch, model


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    for what in ("cross_entropy", "token_stats", "token_loss"):
        x, labels = batch(12)
        labels[1] = 3
        module = model(what)
        wrapped = DistributedDataParallel(module)
        rows = slice(6 * rank, 6 * rank + 6)
        for _ in range(2):  # the second step uses the buckets that the first one built
            module.zero_grad()
            wrapped(x[rows], labels[rows]).backward()
        got = [p.grad.clone() for p in module.parameters()]
        alone = model(what)
        loss = (alone(x[:6], labels[:6]) + alone(x[6:], labels[6:])) / 2
        for a, b in zip(got, torch.autograd.grad(loss, list(alone.parameters())), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    leave()


if __name__ == "__main__":
    main()
