"""Every public name says what it is, and examples in docstrings run.

Public: modules, their functions and classes without a leading underscore, and the methods of what `dcpjax` exports.
"""

import ast
import doctest
import importlib
import inspect
import pathlib

import pytest

import dcpjax
from tests.test_floors import FILES, TREES

ROOT = pathlib.Path(__file__).parent.parent
DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def undocumented(tree: ast.Module, module: str) -> list[str]:
    """Public names at the top of a module that say nothing."""
    found = [node for node in tree.body if isinstance(node, DEFINITIONS) and not node.name.startswith("_")]
    return [f"{module}:{node.lineno} {node.name}" for node in found if not ast.get_docstring(node)]


def test_modules():
    empty = {path for path in FILES.values() if not path.read_text().strip()}
    assert not [name for name, tree in TREES.items() if FILES[name] not in empty and not ast.get_docstring(tree)]


def test_functions_and_classes():
    assert not [line for name, tree in TREES.items() for line in undocumented(tree, name)]


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


def test_names_without_a_docstring_are_seen():
    """The walk itself: it would pass everything if it saw nothing."""
    source = 'def f(): ...\nclass A: ...\ndef _g(): ...\ndef h():\n    "Says."\nasync def k(): ...'
    assert undocumented(ast.parse(source), "m") == ["m:1 f", "m:2 A", "m:6 k"]


EXAMPLES = [name for name, path in FILES.items() if ">>> " in path.read_text()]


def test_there_are_examples():
    assert {"dcpjax.layout", "dcpjax.pallas_kernels.lse_merge"} <= set(EXAMPLES)


@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_run(name):
    module = importlib.import_module(name)
    result = doctest.testmod(module, optionflags=doctest.NORMALIZE_WHITESPACE)
    assert result.attempted > 0 and result.failed == 0
