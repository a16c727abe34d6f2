"""House rules that nobody should have to remember: who may import whom, and how long things may be."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import logitless

ROOT = Path(logitless.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))

# Imports run one way: a layer may use the layers before it and itself, not its neighbours in the same layer.
LAYERS = (
    {"errors", "pages", "resident", "versions"},
    {"units"},
    {"algebra", "losses"},
    {"vocab", "logits", "jax"},
    {"relax", "sample", "models"},
    {"integrations"},
    {"workbench"},
    {"memory"},
    {"cli"},
)
RANK = {part: rank for rank, layer in enumerate(LAYERS) for part in layer}
ECOSYSTEM = {"transformers", "trl", "peft", "accelerate"}
ECOSYSTEM_PARTS = {"integrations", "models", "workbench", "cli"}
WITHOUT_TORCH = (
    "",
    ".errors",
    ".algebra",
    ".algebra.online_softmax",
    ".algebra.stats",
    ".algebra.costs",
    ".jax",
    ".cli",
    ".cli.main",
)

each_file = pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))


def part_of(path: Path) -> str:
    """`vocab` for src/logitless/vocab/head/lm_head.py, `logits` for src/logitless/logits.py."""
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def imported(path: Path) -> Iterator[str]:
    """Dotted names of everything a file imports, anywhere in it, relative imports resolved."""
    package = ["logitless", *path.relative_to(ROOT).parent.parts]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*above, *filter(None, [node.module])])
            yield from (f"{base}.{alias.name}" for alias in node.names)


def packages(path: Path) -> set[str]:
    return {name.split(".")[0] for name in imported(path)}


def own_parts(path: Path) -> set[str]:
    """The parts of logitless that a file imports, the bare `logitless` face as ''."""
    names = [name.split(".") for name in imported(path)]
    return {next((p for p in name[1:2] if p in RANK), "") for name in names if name[0] == "logitless"}


def functions(path: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    nodes = ast.walk(ast.parse(path.read_text()))
    return (node for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def test_every_part_has_a_layer():
    assert {part_of(path) for path in FILES} - {"__init__", "__main__"} <= set(RANK)


@each_file
def test_imports_run_one_way(path):
    part = part_of(path)
    if part in RANK:
        allowed = {other for other in RANK if RANK[other] < RANK[part]} | {part}
        # The public face is for users; below the integrations a name comes from where it is defined.
        assert own_parts(path) <= allowed | ({""} if RANK[part] >= RANK["integrations"] else set())


@each_file
def test_who_may_import_which_package(path):
    part, names = part_of(path), packages(path)
    if part == "algebra":
        assert names <= sys.stdlib_module_names | {"logitless"}
    if part != "cli":
        assert "cli" not in own_parts(path)
    if "triton" not in str(path.relative_to(ROOT)):
        assert "triton" not in names
    if part not in ECOSYSTEM_PARTS:
        assert not names & ECOSYSTEM
    assert not names & ({"torch"} if part == "jax" or path.name == "gemma.py" else {"jax", "jaxlib"})


@pytest.mark.parametrize("suffix", WITHOUT_TORCH)
def test_light_modules_import_no_torch(suffix):
    code = f"import sys, logitless{suffix}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


@each_file
def test_functions_stay_short(path):
    if "kernels" not in path.name:
        long = {f.name: f.end_lineno - f.lineno + 1 for f in functions(path)}
        assert {name: lines for name, lines in long.items() if lines > 50} == {}


@each_file
def test_user_input_is_never_asserted_and_errors_never_swallowed(path):
    nodes = list(ast.walk(ast.parse(path.read_text())))
    asserts = [node for node in nodes if isinstance(node, ast.Assert)]
    assert not [node.lineno for node in asserts if not ast.unparse(node.test).endswith("is not None")]
    handlers = [node for node in nodes if isinstance(node, ast.ExceptHandler)]
    swallowing = [h for h in handlers if all(isinstance(s, ast.Pass) for s in h.body)]
    broad = {"Exception", "BaseException"}
    assert not [h.lineno for h in swallowing if getattr(h.type, "id", None) in broad]
    assert not [h.lineno for h in handlers if h.type is None]
