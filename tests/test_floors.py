"""The floors of the building: every import goes down or stays on its floor, and never in a circle.

A new module must be given a floor here. The same walk checks the rules that hold for whole floors.
"""

import ast
import graphlib
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parent.parent

# A name stands for the module and, for a package, for everything in it.
FLOORS = {
    0: ("dcpjax.errors", "dcpjax.layout", "dcpjax.mesh", "dcpjax.picture", "dcpjax.quant"),
    1: ("dcpjax.host", "dcpjax.pallas_kernels", "dcpjax.template", "dcpjax.text", "dcpjax.typed", "dcpjax.grammar"),
    2: ("dcpjax.batch", "dcpjax.cache", "dcpjax.collectives", "dcpjax.kernels", "dcpjax.sampling"),
    3: ("dcpjax.attention", "dcpjax.moe", "dcpjax.projections"),
    4: ("models",),
    5: (
        "dcpjax.buckets",
        "dcpjax.build",
        "dcpjax.capacity",
        "dcpjax.explanation",
        "dcpjax.footprint",
        "dcpjax.forecast",
        "dcpjax.liveness",
        "dcpjax.roofline",
        "dcpjax.runner",
        "dcpjax.spec",
        "dcpjax.step",
        "dcpjax.trace",
        "dcpjax.traffic",
    ),
    6: ("dcpjax.engine", "dcpjax.scheduler"),
    7: (
        "dcpjax.bench",
        "dcpjax.convert",
        "dcpjax.describe",
        "dcpjax.explain",
        "dcpjax.hub",
        "dcpjax.interrupts",
        "dcpjax.llm",
        "dcpjax.plan",
        "dcpjax.progress",
        "dcpjax.prompts",
        "dcpjax.serve",
        "dcpjax.server",
        "dcpjax.support",
        "dcpjax.transfer",
    ),
}
FLOOR_OF = {name: floor for floor, names in FLOORS.items() for name in names}

# Third-party packages that a part of floor 1 may use; its other imports are the standard library's.
HOST_ONLY = {
    "dcpjax.host": {"numpy", "xxhash"},
    "dcpjax.template": {"jinja2"},
    "dcpjax.text": {"jinja2", "numpy", "tokenizers"},
    "dcpjax.grammar": {"jinja2", "llguidance", "numpy", "tokenizers"},
}
ENVIRONMENT = "dcpjax.serve"


def module_of(path: pathlib.Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {module_of(path): path for top in ("dcpjax", "models") for path in sorted((ROOT / top).rglob("*.py"))}


def floor_of(module: str) -> int | None:
    """Floor of a module; the package `dcpjax` itself is what users import, above everything."""
    if module == "dcpjax":
        return max(FLOORS)
    prefixes = (module.rsplit(".", cut)[0] for cut in range(module.count(".") + 1))
    return next((FLOOR_OF[name] for name in prefixes if name in FLOOR_OF), None)


def imports_of(tree: ast.AST, module: str, is_package: bool) -> set[str]:
    """Every module that a file imports anywhere in it; `from package import module` names the inner one."""
    package = module if is_package else module.rpartition(".")[0]
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: package.count(".") + 2 - node.level] if node.level else []
            base = ".".join([*above, *filter(None, [node.module])])
            inner = {f"{base}.{alias.name}" for alias in node.names}
            found |= (inner & FILES.keys()) | ({base} if inner - FILES.keys() else set())
    return found


TREES = {module: ast.parse(path.read_text(), str(path)) for module, path in FILES.items()}
IMPORTS = {module: imports_of(tree, module, FILES[module].name == "__init__.py") for module, tree in TREES.items()}


def ours(names: set[str]) -> set[str]:
    return {name for name in names if name.partition(".")[0] in ("dcpjax", "models")}


def within(module: str, package: str) -> bool:
    return f"{module}.".startswith(f"{package}.")


def test_every_module_has_a_floor():
    assert not [module for module in FILES if floor_of(module) is None]


def test_every_import_exists():
    """A name that is no file of ours would make the other tests blind."""
    assert not [(module, name) for module, names in IMPORTS.items() for name in ours(names) if name not in FILES]


def test_the_architecture_page_tells_the_same_floors():
    rows = re.findall(r"^\| (\d) \| `([\w/.]+)`", (ROOT / "docs" / "architecture.md").read_text(), re.MULTILINE)
    assert rows
    for floor, path in rows:
        assert floor_of(path.removesuffix(".py").strip("/").replace("/", ".")) == int(floor), path


def test_imports_go_down():
    unlisted = -1  # another test reports these
    floors = {module: unlisted if floor_of(module) is None else floor_of(module) for module in FILES}
    upward = [
        f"{module} (floor {floors[module]}) imports {name} (floor {floors[name]})"
        for module, names in IMPORTS.items()
        for name in ours(names) & FILES.keys()
        if floors[name] > floors[module]
    ]
    assert not upward


def test_no_circles():
    graph = {module: ours(names) - {module} for module, names in IMPORTS.items()}
    list(graphlib.TopologicalSorter(graph).static_order())


def test_kernels_know_no_mesh():
    """They take arrays; only floors above them know that there are several devices."""
    kernels = {module: names for module, names in IMPORTS.items() if within(module, "dcpjax.pallas_kernels")}
    assert kernels
    assert not [(module, name) for module, names in kernels.items() for name in names if name == "dcpjax.mesh"]


@pytest.mark.parametrize("part", HOST_ONLY)
def test_host_parts_use_no_jax(part):
    """Everything they reach is ours, the standard library's, or in their list."""
    reached, todo = set(), [module for module in FILES if within(module, part)]
    assert todo
    while todo:
        module = todo.pop()
        if module in reached:
            continue
        reached.add(module)
        todo += ours(IMPORTS.get(module, set()))
    foreign = {
        (module, name)
        for module in reached
        for name in IMPORTS[module] - ours(IMPORTS[module])
        if name.partition(".")[0] not in sys.stdlib_module_names | HOST_ONLY[part]
    }
    assert not foreign


def test_models_do_not_speak_of_dcp():
    """What a network is does not depend on how its cache is dealt out."""
    for module, path in FILES.items():
        if within(module, "models"):
            assert not re.search("dcp(?!jax)", path.read_text(), re.IGNORECASE), module


def test_environment_is_read_in_one_place():
    """Settings reach everything else as arguments."""
    names = {"environ", "environb", "getenv", "getenvb"}
    readers = {
        module
        for module, tree in TREES.items()
        for node in ast.walk(tree)
        if (isinstance(node, ast.Attribute) and node.attr in names)
        or (isinstance(node, ast.ImportFrom) and node.module == "os" and names & {a.name for a in node.names})
    }
    assert readers <= {ENVIRONMENT}


def test_no_hasattr():
    """What an object can do is known from its type."""
    users = [
        f"{module}:{node.lineno}"
        for module, tree in TREES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Name) and node.id == "hasattr"
    ]
    assert not users


START_CHECK = """
import importlib, sys
from jax._src import xla_bridge
for name in sys.argv[1:]:
    importlib.import_module(name)
    assert not xla_bridge.backends_are_initialized(), name
"""


def test_importing_starts_no_backend():
    """A value made by jax.numpy at module level would fix the device count before anyone could choose it."""
    modules = [module for module in FILES if not module.endswith("__main__")]
    command = [sys.executable, "-c", START_CHECK, *modules]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_server_parts_without_jax():
    """What `dcpjax.serve` imports before its two processes part: threads of JAX would be in one of them alone."""
    command = [sys.executable, "-c", "import sys, dcpjax.serve; sys.exit('jax' in sys.modules)"]
    assert subprocess.run(command, cwd=ROOT, check=False).returncode == 0


# The walk itself, on small sources: a rule that sees nothing would pass everything.


@pytest.mark.parametrize(
    ("source", "module", "is_package", "want"),
    [
        ("import dcpjax.mesh as m, os", "dcpjax.cache", False, {"dcpjax.mesh", "os"}),
        ("from dcpjax import mesh, errors", "dcpjax.cache", False, {"dcpjax.mesh", "dcpjax.errors"}),
        ("from dcpjax import mesh, LLM", "dcpjax.cache", False, {"dcpjax.mesh", "dcpjax"}),
        ("from dcpjax.mesh import MeshPlan", "models.params", False, {"dcpjax.mesh"}),
        ("from .mesh import MeshPlan", "dcpjax.cache", False, {"dcpjax.mesh"}),
        ("from . import mesh", "dcpjax", True, {"dcpjax.mesh"}),
        ("from ..mesh import MeshPlan", "dcpjax.host.pages", False, {"dcpjax.mesh"}),
        ("def f():\n    from dcpjax import mesh", "dcpjax.cache", False, {"dcpjax.mesh"}),
    ],
)
def test_imports_are_seen(source, module, is_package, want):
    assert imports_of(ast.parse(source), module, is_package) == want


def test_floors_are_found():
    assert floor_of("models.tiny.anything") == 4
    assert floor_of("dcpjax.host.pages") == 1
    assert floor_of("dcpjax") == 7
    assert floor_of("dcpjax.hosted") is None
    assert {"dcpjax.mesh", "models.params", "models"} <= FILES.keys()
