"""Tests marked `calls_peer` run where the package is installed; a report of what held is written on demand."""

import json
from collections import Counter
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

import pytest

HERE = Path(__file__).parent
# The distribution of each peer, by the name of its tests' file; None where an index has none that could be called here.
DISTRIBUTIONS = {
    "liger": "liger-kernel",
    "cut_cross_entropy": "cut-cross-entropy",
    "quack": None,
    "opinfo": "torch",
    "verl": "verl",
    "fla": "fla-core",
    "prime_rl": None,
    "torchtune": "torchtune",
    "trl": "trl",
}


def pytest_addoption(parser):
    parser.addoption("--peers-report", metavar="PATH", help="write how many cases of each peer held, as JSON")


def pytest_configure(config):
    place = config.getoption("--peers-report", default=None)
    if place and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Report(Path(place)))


def pytest_collection_modifyitems(items):
    found = cache(find_spec)  # asked thousands of times
    for item in items:
        if item.path.parent != HERE:
            continue
        item.add_marker(pytest.mark.peers)
        for mark in item.iter_markers("calls_peer"):
            item.add_marker(pytest.mark.slow)
            item.add_marker(pytest.mark.filterwarnings("ignore"))  # what a peer warns of is its own
            for package in mark.args:
                if found(package) is None:
                    item.add_marker(pytest.mark.skip(reason=f"no {package} here: `make test-peers` installs it"))


class Report:
    """Counts, for each peer, the cases held against dense formulas and those held against its own functions.

    What a run has no case of stays as it is in the file, so that peers can be run one after the other.
    """

    def __init__(self, place: Path):
        self.place = place
        self.counts = {peer: Counter() for peer in DISTRIBUTIONS}

    def pytest_runtest_logreport(self, report):
        if "peers" in report.keywords and (report.when == "call" or report.failed):
            peer = Path(report.fspath).stem.removeprefix("test_")
            kind = "own function" if "calls_peer" in report.keywords else "dense float64"
            self.counts[peer][kind if not report.failed else "failed"] += report.passed or report.failed

    def pytest_sessionfinish(self):
        rows = json.loads(self.place.read_text()) if self.place.exists() else {}
        for peer, counts in self.counts.items():
            if counts:
                before = {kind: count for kind, count in rows.get(peer, {}).items() if kind != "failed"}
                rows[peer] = {**before, "version": _version(peer), **counts}
        self.place.write_text(json.dumps({peer: rows[peer] for peer in DISTRIBUTIONS if peer in rows}, indent=2) + "\n")


def _version(peer: str) -> str | None:
    try:
        return version(DISTRIBUTIONS[peer] or "")
    except (PackageNotFoundError, ValueError):
        return None
