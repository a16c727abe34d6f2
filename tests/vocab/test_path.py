"""How far a reader goes from the public function to the first product."""

import traceback
from pathlib import Path

import torch

import logitless as ll

ROOT = Path(ll.__file__).parent
FILES = 9  # that a reader opens at most, those that check and make the call included


def test_few_files_lie_between_token_stats_and_the_product(monkeypatch):
    opened: set[str] = set()
    product = torch.mm

    def watched(*args, **kwargs):
        opened.update(frame.filename for frame in traceback.extract_stack())
        return product(*args, **kwargs)

    monkeypatch.setattr(torch, "mm", watched)
    ll.token_stats(
        torch.randn(3, 4), ll.LMHead(torch.randn(7, 4)), torch.tensor([0, 1, 2]), want=("logprob", "entropy")
    )
    own = {str(Path(name).relative_to(ROOT)) for name in opened if Path(name).is_relative_to(ROOT)}
    assert any(name.endswith("eager/backend.py") for name in own)
    made_by = {"vocab/call/validate.py", "vocab/call/call.py"}
    assert len(own | made_by) <= FILES
