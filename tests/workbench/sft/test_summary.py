"""What a run says at its end."""

import pytest

from logitless.workbench.sft.summary import _loss_method

MIB = 1 << 20


@pytest.mark.parametrize(
    ("asked", "threshold", "said"),
    [
        ("logitless", 256, "logitless: logits of 48 MiB fit the budget of 256 MiB"),
        ("auto", 256, "auto → dense: logits of 48 MiB fit the budget of 256 MiB"),
        ("auto", 16, "auto → logitless: logits of 48 MiB exceed the threshold of 16 MiB"),
        ("auto", 1024, "auto → dense: logits of 48 MiB fit the threshold of 1,024 MiB"),
    ],
)
def test_a_loss_is_held_against_what_decided(asked, threshold, said):
    method = "dense" if asked == "auto" and threshold > 48 else "logitless"
    loss = {"asked": asked, "method": method, "logits_bytes": 48 * MIB, "memory_budget_bytes": 256 * MIB}
    assert _loss_method({**loss, "threshold_bytes": threshold * MIB}, 1) == said
