"""What every adapter of a host has, and what it says of a host that is another."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from logitless.errors import ConfigError
from logitless.integrations.seam import Seam, moved

ROOT = Path(__file__).parents[2]
HOSTS = ("automodel", "axolotl", "llamafactory", "sentence-transformers", "speculators", "torchtitan", "verl")


def seam(**functions):
    return Seam("pytest", ">=8,<99", {f"json:{name}": parameters for name, parameters in functions.items()})


def test_what_has_moved_is_named_with_versions():
    seam(dumps=(), load=()).require()
    with pytest.raises(ConfigError, match=r"pytest \d+\S*: json:lost is gone; install 'pytest>=8,<99' or a newer"):
        seam(dumps=(), lost=()).require()
    with pytest.raises(ConfigError, match=r"detect_encoding takes \(b\), expected \(a, b\)"):
        seam(detect_encoding=("a", "b")).require()
    assert moved("json:detect_encoding", ("b",)) == ""
    assert moved("json.nowhere:load", ()) == "json.nowhere:load is gone"


def test_a_host_that_is_not_there():
    with pytest.raises(ModuleNotFoundError, match="no_such_host"):
        Seam("no-such-host", ">=1", {"no_such_host.loss:Loss": ()}).require()


@pytest.mark.parametrize("host", HOSTS)
def test_each_host_has_a_page_an_example_an_extra_and_its_tests(host):
    name = host.replace("-", "_")
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    page = (ROOT / "docs" / "how-to" / f"{host}.md").read_text("utf-8")
    versions = (ROOT / "tests" / "support" / "integrations" / f"{name}.txt").read_text()
    (requirement,) = extras[host]
    package = requirement.split("=")[0].rstrip("><").partition("[")[0]
    assert f"\n{package}==" in versions
    assert f"pip install 'logitless[{host}]'" in page
    assert f"make test-{host}" in page
    assert f"\ntest-{host}: " in (ROOT / "Makefile").read_text()
    assert f"how-to/{host}.md" in (ROOT / "mkdocs.yml").read_text()
    assert (ROOT / "tests" / "integrations" / f"test_{name}.py").exists()
    assert list((ROOT / "examples").glob(f"{name}_tiny.*"))


def test_no_host_is_imported_before_it_is_used():
    """Nor does the package import any of them, installed or not."""
    code = "import sys, logitless, logitless.integrations, logitless.integrations.seam; print(*sys.modules)"
    names = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {"nemo_automodel", "torch", *(host.replace("-", "_") for host in HOSTS)} & set(names)
