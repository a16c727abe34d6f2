"""One model in several threads: each gets the numbers of one thread, and the model is itself afterwards."""

import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import logitless
from tests.integrations.transformers.test_trainer import data
from tests.support.integrations.tiny import TINY

IDS = torch.stack([row["input_ids"] for row in data()[:2]])


def loss(model, i):
    return model(IDS + i, labels=IDS + i).loss.detach()


def score(model, i):
    return logitless.score(model, {"input_ids": IDS + i})[0].logprob.nan_to_num()


def sample(model, i):
    seeds = torch.tensor([i, i + 1])
    return logitless.generate(model, {"input_ids": IDS}, seeds=seeds, max_new_tokens=4, do_sample=True, top_k=0).ids


def plain(model, i):
    with torch.no_grad():
        return model(IDS + i).logits


def greedy(model, i):
    return model.generate(IDS + i, max_new_tokens=4, do_sample=False)


@pytest.fixture
def switching():
    """Threads change places all the time."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("switching")
@pytest.mark.parametrize(
    "works", [(loss,), (score,), (sample,), (loss, plain), (loss, score, sample, plain, greedy)], ids=len
)
def test_threads_get_the_numbers_of_one(works):
    model = TINY["qwen3-tied"].build().eval()
    logitless.install(model)
    before = dict(vars(model)), dict(model._modules)
    tasks = [(work, i) for i in range(6) for work in works]
    expected = [work(model, i) for work, i in tasks]
    start = threading.Barrier(4)

    def run(_):
        start.wait()
        return [work(model, i) for work, i in tasks]

    with ThreadPoolExecutor(4) as pool:
        for found in pool.map(run, range(4)):
            for got, wanted in zip(found, expected, strict=True):
                torch.testing.assert_close(got, wanted)
    assert (dict(vars(model)), dict(model._modules)) == before
    torch.testing.assert_close(plain(model, 0), model(IDS).logits.detach())
