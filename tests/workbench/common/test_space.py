"""What is said where a file cannot be written whole, by whichever library."""

import errno
import resource
import shutil
from types import SimpleNamespace

import pytest

from logitless.workbench.common import space
from logitless.workbench.common.space import room_wanted

FULL = "no space left at {}: free some"
LIMITED = "a file at {} is larger than this process may write: raise its limit (ulimit -f)"


@pytest.mark.parametrize(
    ("error", "free", "limit", "expected"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), 10**9, -1, FULL),
        (OSError(errno.EDQUOT, "Disk quota exceeded"), 10**9, -1, FULL),
        (RuntimeError("I/O error: No space left on device (os error 28)"), 10**9, -1, FULL),
        (RuntimeError("PytorchStreamWriter failed writing file data/0"), 0, -1, FULL),
        (OSError(errno.EFBIG, "File too large"), 10**9, 1000, LIMITED),
        (RuntimeError("I/O error: File too large (os error 27)"), 10**9, 1000, LIMITED),
        (RuntimeError("PytorchStreamWriter failed writing file data/0"), 10**9, 1000, LIMITED),
        (RuntimeError("PytorchStreamWriter failed writing file data/0"), 10**9, -1, ""),
        (OSError(errno.EACCES, "Permission denied"), 10**9, -1, ""),
        (ValueError("a shape"), 0, 1000, ""),
    ],
)
def test_what_is_wanted(tmp_path, monkeypatch, error, free, limit, expected):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=free))
    monkeypatch.setattr(resource, "getrlimit", lambda which: (limit, -1))
    assert space.resource is resource
    assert room_wanted(error, tmp_path) == expected.format(tmp_path)


def test_a_file_on_another_disk(tmp_path):
    error = OSError(errno.ENOSPC, "No space left on device", "/other/scores.json")
    assert room_wanted(error, tmp_path) == FULL.format("/other/scores.json")
