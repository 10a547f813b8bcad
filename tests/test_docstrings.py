"""Every public name says what it is, and examples in docstrings run.

Public: modules, their functions and classes without a leading underscore, and the methods of those classes. A method may be
told of in its class's docstring. What has arrays in its signature or fields gives a shape and a dtype (which may be the
module's, or stand behind a field), and what raises an error of its own names it.
"""

import ast
import dataclasses
import doctest
import importlib
import inspect
import re
from collections.abc import Iterator

import pytest

import dcpjax
from tests.test_floors import FILES, TREES

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
ARRAY = re.compile(r"\b(jax\.Array|np\.ndarray)\b")
SHAPE = re.compile(r"\[[^\]]*\]|\bscalars?\b")
DTYPE = re.compile(r"\b(u?int(8|16|32|64)|b?float(16|32|64)?|bool|dtypes?|words)\b")
# The caller's own faults, in methods that only tests call; no error that anybody handles.
UNNAMED = ("AssertionError",)


@dataclasses.dataclass(frozen=True)
class Name:
    """A public name. told: its docstring. context: that of its class, and of its module."""

    where: str
    node: ast.AST
    told: str
    context: str

    @property
    def annotations(self) -> list[str]:
        if isinstance(self.node, ast.ClassDef):
            found = [item.annotation for item in self.node.body if isinstance(item, ast.AnnAssign)]
        else:
            args = self.node.args
            every = [*args.posonlyargs, *args.args, *args.kwonlyargs, args.vararg, args.kwarg]
            found = [arg.annotation for arg in every if arg is not None] + [self.node.returns]
        return [ast.unparse(item) for item in found if item is not None]

    @property
    def errors(self) -> set[str]:
        """Of what stands in the function itself."""
        raised = [item.exc for item in ast.walk(self.node) if isinstance(item, ast.Raise) and item.exc is not None]
        names = {ast.unparse(item.func if isinstance(item, ast.Call) else item).rpartition(".")[2] for item in raised}
        return {name for name in names if name.endswith("Error") and name not in UNNAMED}


def names(source: str, module: str) -> Iterator[Name]:
    """The public names of a module. Comments behind fields are part of what a class says."""
    tree, lines = ast.parse(source), source.splitlines()
    about = ast.get_docstring(tree) or ""
    for node in tree.body:
        if not isinstance(node, (*FUNCTIONS, ast.ClassDef)) or node.name.startswith("_"):
            continue
        where, told = f"{module}:{node.lineno} {node.name}", ast.get_docstring(node) or ""
        if not isinstance(node, ast.ClassDef):
            yield Name(where, node, told, about)
            continue
        fields = [lines[item.end_lineno - 1] for item in node.body if isinstance(item, ast.AnnAssign)]
        comments = [line.partition("  # ")[2] for line in fields]
        yield Name(where, node, "\n".join([told, *comments]) if told else "", about)
        for item in node.body:
            if isinstance(item, FUNCTIONS) and (item.name == "__init__" or not item.name.startswith("_")):
                yield Name(f"{where}.{item.name}", item, ast.get_docstring(item) or "", f"{told}\n{about}")


def undocumented(name: Name) -> bool:
    method = name.where.rpartition(".")[2]
    is_method = "." in name.where.partition(" ")[2]
    if is_method and (method == "__init__" or re.search(rf"\b{method}\b", name.context)):
        return False
    return not name.told


def shapeless(name: Name) -> bool:
    return any(map(ARRAY.search, name.annotations)) and not SHAPE.search(name.told)


def typeless(name: Name) -> bool:
    return any(map(ARRAY.search, name.annotations)) and not DTYPE.search(f"{name.told}\n{name.context}")


def silent_about_errors(name: Name) -> bool:
    if isinstance(name.node, ast.ClassDef):  # its methods speak for themselves
        return False
    return any(error not in f"{name.told}\n{name.context}" for error in name.errors)


CHECKS = (undocumented, shapeless, typeless, silent_about_errors)
NAMES = [name for module, path in FILES.items() for name in names(path.read_text(), module)]


def test_modules():
    empty = {path for path in FILES.values() if not path.read_text().strip()}
    assert not [name for name, tree in TREES.items() if FILES[name] not in empty and not ast.get_docstring(tree)]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_public_names(check):
    assert len(NAMES) > 500
    assert not [name.where for name in NAMES if check(name)]


def test_names_that_say_too_little_are_seen():
    """The walk itself: it would pass everything if it saw nothing."""
    source = '''
"""A module."""
def f(): ...
async def k(): ...
def _g(): ...
class A:
    """Has m. Raises ValueError."""
    x: jax.Array  # [S] int32
    def __init__(self): raise ValueError(1)
    def m(self): ...
    def n(self): ...
class B:
    """Has no shape."""
    x: np.ndarray | None
def whole(x: jax.Array) -> jax.Array:
    "`x [T]` float32; raises `KeyError`."
    raise KeyError(x)
def part(*, x: dict[str, jax.Array]):
    "`x [T]`."
    raise errors.MyError
'''
    found = {check.__name__: [n.where.partition(" ")[2] for n in names(source, "m") if check(n)] for check in CHECKS}
    assert found == {
        "undocumented": ["f", "k", "A.n"],
        "shapeless": ["B"],
        "typeless": ["B", "part"],
        "silent_about_errors": ["part"],
    }


@pytest.mark.parametrize("name", [name for name in dcpjax.__all__ if name != "__version__"])
def test_what_is_exported(name):
    """Its docstring is its own, and so is that of each of its methods and properties."""
    value = getattr(dcpjax, name)
    assert inspect.getdoc(value) and not value.__doc__.startswith(f"{name}("), f"{name} has no docstring of its own"
    if not inspect.isclass(value):
        return
    members = {key: item for key, item in vars(value).items() if not key.startswith("_")}
    methods = [key for key, item in members.items() if inspect.isfunction(item) or isinstance(item, property)]
    assert not [key for key in methods if not inspect.getdoc(members[key])]


EXAMPLES = [name for name, path in FILES.items() if ">>> " in path.read_text()]


def test_there_are_examples():
    assert {"dcpjax.layout", "dcpjax.pallas_kernels.lse_merge"} <= set(EXAMPLES)


@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_run(name):
    module = importlib.import_module(name)
    result = doctest.testmod(module, optionflags=doctest.NORMALIZE_WHITESPACE)
    assert result.attempted > 0 and result.failed == 0
