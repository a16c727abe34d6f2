"""The oldest versions that logitless' own ranges allow, as requirements for pip: `python -m tests.support.lowest`.

Torch stays as it is: another version would be another gigabyte.
"""

import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version

PROJECT = Path(__file__).parents[2] / "pyproject.toml"


def lowest(extras: tuple[str, ...]) -> dict[str, Version]:
    """Each package's lowest version that the library and all of these extras allow."""
    project = tomllib.loads(PROJECT.read_text())["project"]
    found: dict[str, Version] = {}
    for line in [*project["dependencies"], *(x for extra in extras for x in project["optional-dependencies"][extra])]:
        required = Requirement(line)
        bounds = [Version(x.version) for x in required.specifier if x.operator in (">=", "==")]
        found[required.name] = max(*bounds, found.get(required.name, Version("0")))
    return found


if __name__ == "__main__":
    print("\n".join(f"{name}=={version}" for name, version in lowest(("train", "rl")).items() if name != "torch"))
