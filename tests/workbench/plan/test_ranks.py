"""The plan of several ranks against what real ranks hold, byte by byte of weights, gradients and optimizer state."""

import json

import pytest

from logitless.models.catalog import from_config
from logitless.workbench.plan.plan import plan
from logitless.workbench.plan.setting import Setting
from tests.support.integrations.launching import torchrun
from tests.support.workbench.rank_bytes import CONFIG, LENGTH, ROWS


@pytest.mark.slow
def test_what_each_rank_holds(tmp_path):
    place = tmp_path / "results.json"
    torchrun("tests.support.workbench.rank_bytes", str(place))
    for rank, results in enumerate(json.loads(place.read_text())):
        for sharding, found in results.items():
            setting = Setting(
                from_config(CONFIG, "tiny"),
                batch_size=2 * ROWS,
                response_length=LENGTH,
                gpus=2,
                sharding=sharding,
                optimizer="adamw-bf16",
                master_weights=False,
            )
            planned = {c.name: c.nbytes for c in plan(setting).components}
            for name, nbytes in found.items():
                assert planned[name] == pytest.approx(nbytes, rel=0.02), (rank, sharding, name)
