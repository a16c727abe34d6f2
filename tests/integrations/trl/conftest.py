"""One saved model for all runs; what TRL and transformers warn about is theirs."""

import pytest

pytest.importorskip("trl")

from tests.support.integrations.trl.runs import saved_model  # after the check


def pytest_collection_modifyitems(items):
    for item in items:
        if "integrations/trl" in str(item.path):
            # TRL 1.16 and PEFT use names that transformers 5.23 gives up
            item.add_marker(pytest.mark.filterwarnings("ignore:.*checkpointing.* is deprecated:FutureWarning"))
            item.add_marker(pytest.mark.filterwarnings("ignore:`(label_smoothing|compute_loss_func).*:FutureWarning"))


@pytest.fixture(scope="session")
def place(tmp_path_factory):
    """Where the tiny Qwen3 with tied embeddings lies."""
    return saved_model(tmp_path_factory.mktemp("tied"))


@pytest.fixture(scope="session")
def untied(tmp_path_factory):
    """The same with a head of its own."""
    return saved_model(tmp_path_factory.mktemp("untied"), tie_word_embeddings=False)
