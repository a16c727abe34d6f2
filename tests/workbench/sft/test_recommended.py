"""The how-to's command on two ranks, one of which dies: it goes on by the command that the error names."""

import re
import shlex

import pytest

from tests.docs.test_pages import ROOT, blocks
from tests.workbench.sft.test_ranks import launch
from tests.workbench.sft.test_run import losses

STEPS = 4


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_recommended_command_goes_on_after_a_rank_dies(tmp_path, monkeypatch):
    """Two ranks, FSDP, the shape of a 4B model, checkpointed layers, four passes a step: an unbroken run's losses."""
    monkeypatch.chdir(tmp_path)
    page = (ROOT / "docs" / "how-to" / "many-devices.md").read_text("utf-8")
    before, _, _ = blocks(page)[0].partition("subprocess.run(")
    namespace: dict[str, str] = {}
    exec(compile(before, "page", "exec"), namespace)  # writes the configuration and the text
    given = namespace["command"].split()
    given = given[given.index("logitless.cli") + 1 :]
    given[given.index("--max-steps") + 1] = str(STEPS)
    given = [str(tmp_path / x) if (tmp_path / x).is_file() else x for x in given]
    for needed in ("--gradient-checkpointing", "--sharding", "fsdp2", "--gradient-accumulation-steps"):
        assert needed in given
    *given, place = given
    for name, kill in (("unbroken", []), (place, ["KILL", 3])):
        status, written = launch(2, *kill, *given, tmp_path / name)
        assert (status == 0) == (not kill), written[-4000:]
    told = re.search(r"; (torchrun [^;]*) goes on from step (\d+)", " ".join(written.split()))
    assert told is not None, written[-4000:]
    assert 0 < int(told[2]) <= 3
    _, *again = shlex.split(told[1])
    at = again.index("-m")
    status, written = launch(2, *again[at + 2 :], by=("torch.distributed.run", "--standalone", *again[:at]))
    assert status == 0, written[-4000:]
    assert losses(tmp_path / place) == pytest.approx(losses(tmp_path / "unbroken"), rel=1e-5)
    assert sorted(losses(tmp_path / place)) == list(range(1, STEPS + 1))
