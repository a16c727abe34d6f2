"""What every adapter of a host has, and what it says of a host that is another."""

import os
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
    assert moved("json:detect_encoding", ("b",)) == moved("json:detect_encoding", ("a|b",)) == ""
    assert moved("json:detect_encoding", ("a|c",)) == "detect_encoding takes (b), expected (a|c)"
    assert moved("json.nowhere:load", ()) == "json.nowhere:load is gone"


def test_a_host_that_is_not_there():
    missing = "no_such_host is not installed: pip install 'no-such-host>=1'"
    with pytest.raises(ModuleNotFoundError, match=missing) as told:
        Seam("no-such-host", ">=1", {"no_such_host.loss:Loss": ()}).require()
    assert told.value.name == "no_such_host"


def test_a_host_that_lacks_a_module_of_its_own_says_so_itself(tmp_path, monkeypatch):
    (tmp_path / "host_in_part.py").write_text("import no_such_module")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="No module named 'no_such_module'"):
        Seam("host-in-part", ">=1", {"host_in_part:Loss": ()}).require()


@pytest.mark.parametrize("host", HOSTS)
def test_each_host_has_a_page_an_example_an_extra_and_its_tests(host):
    name = host.replace("-", "_")
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    page = (ROOT / "docs" / "how-to" / f"{host}.md").read_text("utf-8")
    versions = (ROOT / "tests" / "support" / "integrations" / f"{name}.txt").read_text()
    (requirement,) = extras[host]
    package = requirement.split("=")[0].rstrip("><").partition("[")[0]
    assert f"\n{package}==" in versions
    assert f"pip install '.[{host}]'" in page
    assert f"make test-{host}" in page
    assert f"\ntest-{host}: " in (ROOT / "Makefile").read_text()
    assert f"how-to/{host}.md" in (ROOT / "mkdocs.yml").read_text()
    assert (ROOT / "tests" / "integrations" / f"test_{name}.py").exists()
    assert list((ROOT / "examples").glob(f"{name}_tiny.*"))


def test_no_host_is_imported_before_it_is_used(tmp_path):
    """Nor any of them where all are installed: by the package, any of its public names or its command."""
    packages = {"nemo_automodel", *(host.replace("-", "_") for host in HOSTS)} - {"automodel"}
    for name in packages:
        (tmp_path / f"{name}.py").touch()
    light = "import sys, logitless, logitless.integrations, logitless.integrations.seam; print(*sys.modules)"
    whole = f"import logitless.cli.main; [getattr(logitless, name) for name in logitless.__all__]; {light}"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(None, sys.path)])}
    for code, more in ((light, {"torch"}), (whole, set())):
        command = [sys.executable, "-c", code]
        done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
        assert not (packages | more) & set(done.stdout.split())
