"""What this process runs on: versions that results and pages name."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version


def version_of(package: str) -> str | None:
    """The version of an installed package, None where it is not; logitless also runs from a source tree, as 0.0.0."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "0.0.0" if package == "logitless" else None


def installing(extras: str) -> str:
    """The command that adds extras: of the package where one is installed, which pip then keeps, else of the clone."""
    try:
        version("logitless")
    except PackageNotFoundError:
        return f"pip install '.[{extras}]' in the clone"
    return f"pip install 'logitless[{extras}]'"


def versions(*packages: str) -> dict[str, str | None]:
    """Name -> version, of logitless first."""
    return {name: version_of(name) for name in ("logitless", *packages)}
