"""The reward of a wrapped policy: two gloo ranks, each with rows of its own, against the whole model."""

import pytest

from tests.support.integrations.launching import torchrun


@pytest.mark.slow
def test_a_wrapped_policy_scores_as_the_whole_one():
    """Under DDP, and FSDP2 with the head in the root, grouped with the norm, or a unit of its own."""
    torchrun("tests.support.integrations.reward_ranks")
