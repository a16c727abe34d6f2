"""What this process runs on: versions that results and pages name."""

from __future__ import annotations

import sys

SOURCE_TREE = "0.0.0"


def version_of(package: str) -> str | None:
    """The version of an installed package, None where it is not; logitless also runs from a source tree, as 0.0.0."""
    if package == "torch" and package in sys.modules:  # which build it is, CUDA's say, a wheel's metadata may leave out
        return str(sys.modules[package].__version__)
    from importlib.metadata import PackageNotFoundError, version  # takes longer than the rest of a command's start

    try:
        return version(package)
    except PackageNotFoundError:
        return SOURCE_TREE if package == "logitless" else None


def installing(extras: str) -> str:
    """The command that adds extras: of the package where one is installed, which pip then keeps, else of the clone."""
    if version_of("logitless") == SOURCE_TREE:
        return f"pip install '.[{extras}]' in the clone"
    return f"pip install 'logitless[{extras}]'"


def versions(*packages: str) -> dict[str, str | None]:
    """Name -> version, of logitless first."""
    return {name: version_of(name) for name in ("logitless", *packages)}
