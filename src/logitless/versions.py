"""What this process runs on: versions that results and pages name."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version


def version_of(package: str) -> str | None:
    """The version of an installed package, None where it is not; logitless also runs from a source tree, as 0.0.0."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "0.0.0" if package == "logitless" else None


def versions(*packages: str) -> dict[str, str | None]:
    """Name -> version, of logitless first."""
    return {name: version_of(name) for name in ("logitless", *packages)}
