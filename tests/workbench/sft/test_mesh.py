"""Groups of ranks on four processes."""

from tests.support.vocab.sharding import launch


def test_every_group_waits_as_long_as_asked(tmp_path):
    found = launch("tests.support.workbench.mesh_ranks", tmp_path)
    assert {rank: cases["last"] for rank, cases in found.items()} == dict.fromkeys("0123", "ok")
