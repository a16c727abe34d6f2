"""House rules that nobody should have to remember: who may import whom, and how long functions may be."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import logitless

ROOT = Path(logitless.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))

# Imports run one way: a layer may use the layers before it and itself, not its neighbours in the same layer.
LAYERS = (
    {"errors", "hashes", "pages", "printable", "resident", "versions"},
    {"units", "upstream"},
    {"algebra", "losses"},
    {"vocab", "logits", "jax"},
    {"relax", "sample", "retrieval", "multi_token", "models", "diagnostics"},
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


@cache
def nodes(path: Path) -> tuple[ast.AST, ...]:
    """All of a file's syntax tree, which most rules look at."""
    return tuple(ast.walk(ast.parse(path.read_text())))


@cache
def imported(path: Path) -> tuple[str, ...]:
    """Dotted names of everything a file imports, anywhere in it, relative imports resolved."""
    package, found = ["logitless", *path.relative_to(ROOT).parent.parts], []
    for node in nodes(path):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*above, *filter(None, [node.module])])
            found += [f"{base}.{alias.name}" for alias in node.names]
    return tuple(found)


def packages(path: Path) -> set[str]:
    return {name.split(".")[0] for name in imported(path)}


def own_parts(path: Path) -> set[str]:
    """The parts of logitless that a file imports, the bare `logitless` face as ''."""
    names = [name.split(".") for name in imported(path)]
    return {next((p for p in name[1:2] if p in RANK), "") for name in names if name[0] == "logitless"}


def functions(path: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    return (node for node in nodes(path) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def test_every_part_has_a_layer():
    assert {part_of(path) for path in FILES} - {"__init__", "__main__"} <= set(RANK)


@each_file
def test_imports_run_one_way(path):
    part = part_of(path)
    if part in RANK:
        allowed = {other for other in RANK if RANK[other] < RANK[part]} | {part}
        # The public face is for users; below the integrations a name comes from where it is defined.
        assert own_parts(path) <= allowed | ({""} if RANK[part] >= RANK["integrations"] else set())


# Packages of a package, from the ground up: each may use those before it and itself.
FLOORS = {
    "vocab": ("sizing", "devices", "dtypes", "head", "ranks", "call", "backends", "passes"),
    "workbench": (
        "common",
        "sources",
        "runs",
        "profile",
        "plan",
        "page",
        "sft",
        "sampling",
        "scoring",
        "evaluation",
        "align",
        "grade",
        "demo",
    ),
    "integrations": ("transformers", "trl"),
}
# Rooms of `vocab` that stand beside its floors, and where: `stats` is read by the passes, the others see all of it.
ABOVE = {
    "vocab": {"stats": "passes", "noise": "head", "reference": "head"},
    "integrations": {"seam": "transformers"},
}
FACES = {"vocab": "logitless.vocab.face"}  # what other packages may import of one
KERNELS_OWN = {"sample/triton_draw.py"}  # draws with the Triton backend's kernels, which the face cannot import


def module_of(path: Path) -> str:
    return ".".join(["logitless", *path.relative_to(ROOT).with_suffix("").parts]).removesuffix(".__init__")


MODULES = {module_of(path): path for path in FILES}


@cache
def files_imported(path: Path) -> set[str]:
    """The modules of logitless that a file imports, TYPE_CHECKING and local imports included."""
    found = set()
    for name in imported(path):
        parts = name.split(".")
        while parts and ".".join(parts) not in MODULES:
            parts.pop()
        if parts:
            found.add(".".join(parts))
    return found


def groups_in_circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """The groups of files that import each other (strongly connected components, Tarjan 1972)."""
    order: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(name: str) -> None:
        order[name] = low[name] = len(order)
        stack.append(name)
        for other in graph[name]:
            if other not in order:
                visit(other)
                low[name] = min(low[name], low[other])
            elif other in stack:
                low[name] = min(low[name], order[other])
        if low[name] == order[name]:
            group = stack[stack.index(name) :]
            del stack[stack.index(name) :]
            if len(group) > 1:
                found.append(sorted(group))

    for name in graph:
        if name not in order:
            visit(name)
    return found


def test_no_files_import_each_other():
    graph = {name: files_imported(path) - {name} for name, path in MODULES.items() if path.name != "__init__.py"}
    graph = {name: {other for other in to if other in graph} for name, to in graph.items()}
    assert groups_in_circles(graph) == []


def test_a_circle_is_found():
    assert groups_in_circles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == [["a", "b", "c"]]


@each_file
def test_floors_of_a_package(path):
    part, *rest = path.relative_to(ROOT).parts
    floors = FLOORS.get(part)
    here = rest[0] if len(rest) > 1 else None
    if floors is None or here not in floors:
        return
    beside = ABOVE.get(part, {})
    for name in files_imported(path):
        package, *inner = name.removeprefix("logitless.").split(".")
        if package == part and inner:
            floor = inner[0] if inner[0] in floors else beside.get(inner[0])
            assert floor is not None, f"{name} stands above the floors of {part}"
            assert floors.index(floor) <= floors.index(here), f"{here} imports {name}"


@each_file
def test_a_package_is_used_through_its_face(path):
    if part_of(path) in FACES or path.name == "__init__.py" or str(path.relative_to(ROOT)) in KERNELS_OWN:
        return
    for part, face in FACES.items():
        own = {name for name in files_imported(path) if name.startswith(f"logitless.{part}")}
        assert own <= {face}


@each_file
def test_names_with_an_underscore_stay_in_their_file(path):
    for node in nodes(path):
        if isinstance(node, ast.ImportFrom) and (node.level or (node.module or "").startswith("logitless")):
            assert not [a.name for a in node.names if a.name.startswith("_") and not a.name.startswith("__")]


@each_file
def test_who_may_import_which_package(path):
    part, names = part_of(path), packages(path)
    if part == "algebra":
        assert names <= sys.stdlib_module_names | {"logitless"}
    if part not in ("cli", "__main__"):
        assert "cli" not in own_parts(path)
    if "triton" not in str(path.relative_to(ROOT)):
        assert "triton" not in names
    if path.name != "quack.py":
        assert "quack" not in names
    if part not in ECOSYSTEM_PARTS:
        assert not names & ECOSYSTEM
    assert not names & ({"torch"} if part == "jax" or path.name == "gemma.py" else {"jax", "jaxlib"})


def test_light_modules_import_no_torch():
    each = (f"import logitless{suffix}\nassert 'torch' not in sys.modules, '{suffix}'" for suffix in WITHOUT_TORCH)
    assert subprocess.run([sys.executable, "-c", "\n".join(("import sys", *each))], timeout=60).returncode == 0


@each_file
def test_functions_stay_short(path):
    if "kernels" not in path.name:
        long = {f.name: f.end_lineno - f.lineno + 1 for f in functions(path)}
        assert {name: lines for name, lines in long.items() if lines > 50} == {}


@each_file
def test_user_input_is_never_asserted_and_errors_never_swallowed(path):
    asserts = [node for node in nodes(path) if isinstance(node, ast.Assert)]
    assert not [node.lineno for node in asserts if not ast.unparse(node.test).endswith("is not None")]
    handlers = [node for node in nodes(path) if isinstance(node, ast.ExceptHandler)]
    swallowing = [h for h in handlers if all(isinstance(s, ast.Pass) for s in h.body)]
    broad = {"Exception", "BaseException"}
    assert not [h.lineno for h in swallowing if getattr(h.type, "id", None) in broad]
    assert not [h.lineno for h in handlers if h.type is None]
