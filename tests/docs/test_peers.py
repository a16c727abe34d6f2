"""The page of other projects' tests says what was counted, of every peer that has a file of tests."""

import json
from pathlib import Path

from docs.tables import peers

ROOT = Path(__file__).parents[2]
RESULTS = json.loads(peers.RESULTS.read_text("utf-8"))


def test_every_peer_is_on_the_page():
    files = {path.stem.removeprefix("test_") for path in (ROOT / "tests" / "peers").glob("test_*.py")}
    assert files == set(RESULTS) == set(peers.NAMES)


def test_none_failed_and_some_held():
    for counts in RESULTS.values():
        assert counts.get("failed", 0) == 0
        assert counts.get("dense float64", 0) + counts.get("own function", 0) > 20


def test_a_count_is_a_cell(tmp_path):
    place = tmp_path / "results.json"
    counted = {name: {"version": None, "dense float64": 1000} for name in peers.NAMES}
    place.write_text(json.dumps({**counted, "trl": {"version": "1.2", "own function": 7, "failed": 1}}))
    table = peers.peers(place)
    assert "| TRL | 1.2 | 0 | 7 | 1 |" in table
    assert "| **all** |  | **8,000** | **7** | **1** |" in table
