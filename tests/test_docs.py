"""Documents say what the code says: those that are made from it, and every flag, route, metric and file that they name."""

import ast
import doctest
import json
import pathlib
import re
import shlex

import pytest

from dcpjax import support
from dcpjax.server import flags
from dcpjax.server.arguments import parse
from dcpjax.server.echo import EchoLLM
from dcpjax.server.engine_side import EngineSide

ROOT = pathlib.Path(__file__).parent.parent
SERVING = (ROOT / "docs/serving.md").read_text()
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def test_support_page_is_what_the_checks_say():
    raw = json.loads((ROOT / "tests/data/glm-5.2/config.json").read_text())
    page = (ROOT / "docs/support.md").read_text()
    assert support.render(raw) == page, "make it again: python -m dcpjax.support tests/data/glm-5.2/config.json"
    assert "| runs |" in page and "refused: " in page


def test_architecture_names_every_module():
    text = (ROOT / "docs/architecture.md").read_text()
    modules = [
        path.relative_to(ROOT).as_posix()
        for folder in ("dcpjax", "models")
        for path in (ROOT / folder).rglob("*.py")
        if path.name not in ("__init__.py", "__main__.py")
    ]
    missing = [module for module in modules if f"`{module}`" not in text]
    assert not missing, f"docs/architecture.md has no line for {missing}"


def test_examples_in_documents_run():
    told = [page for page in PAGES if ">>> " in page.read_text()]
    assert ROOT / "docs/architecture.md" in told
    for page in told:
        result = doctest.testfile(str(page), module_relative=False, encoding="utf-8")
        assert result.attempted > 0 and result.failed == 0


def commands(text: str, module: str) -> list[list[str]]:
    """The arguments of every `python -m module …` in a page's blocks of code."""
    blocks = [block for _, block in re.findall(r"^```(\w*)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)]
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    found = [line.partition(f"python -m {module}")[2] for line in lines if f"python -m {module} " in f"{line} "]
    return [shlex.split(line, comments=True) for line in found]


def known_flags() -> set[str]:
    """Of the server, and whatever else is written as one in a program of ours or of its tests."""
    known = {word for action in flags.make_parser()._actions for word in action.option_strings}
    for path in [*(ROOT / "dcpjax").rglob("*.py"), *(ROOT / "models").rglob("*.py"), ROOT / "tests/conftest.py"]:
        known |= set(re.findall(r'"(--[a-z][a-z-]*)"', path.read_text()))
    return known


# Of other programs: ruff, hypothesis; and what stands for any flag.
FOREIGN = {"--check", "--hypothesis-profile", "--flag", "--flag-name"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_flags_that_are_named_are_flags(page):
    named = set(re.findall(r"(?<![\w-])--[a-z]+(?:-[a-z]+)*(?![\w]*_)", page.read_text()))
    assert named - known_flags() - FOREIGN == {"--no"} & named


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_are_named_are_there(page):
    named = re.findall(r"(?<![\w./])((?:dcpjax|models|tests|docs|examples|scripts)/[\w./-]+\.\w+)", page.read_text())
    missing = [name for name in named if not (ROOT / name).exists()]
    assert not [name for name in missing if not name.startswith("tests/kernels/test_<")]


def test_commands_of_the_serving_page_are_read():
    """With the parser that the command has, which refuses what could not run."""
    serve = commands(SERVING, "dcpjax.serve")
    assert len(serve) >= 5
    for words in serve:
        if "--config" not in words:  # the file is an example
            parse(words)
    recipe = parse(max(serve, key=len)).llm
    assert (recipe["tensor_parallel_size"], recipe["decode_context_parallel_size"]) == (8, 4)


def test_routes_of_the_serving_page_exist():
    tree = ast.parse((ROOT / "dcpjax/server/app.py").read_text())
    makers = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)]
    places = {"add": 1, "hide": 0}  # of the path among the arguments
    routes = {call.args[places[call.func.attr]].value for call in makers if call.func.attr in places}
    named = set(re.findall(r"`(?:GET |POST )?(/[\w/.]*)`", SERVING))
    assert len(named) > 15 and named <= routes
    assert {route for route in routes if "{" not in route} <= named, "routes that operators are not told of"


def test_metrics_of_the_serving_page_exist():
    settings = parse(["--engine", "echo", "--spec-method", "mtp"])

    side = EngineSide(EchoLLM(settings.llm), settings.options, tell=lambda message: None)
    text = side.metrics.render().decode()
    known = set(re.findall(r"^# TYPE (\S+)", text, re.MULTILINE))
    named = {name.removesuffix("_total") for name in re.findall(r"\b(?:vllm|dcpjax):\w+", SERVING)}
    assert len(named) > 15 and named <= {name.removesuffix("_total") for name in known}


def test_variables_of_the_serving_page_are_read():
    source = (ROOT / "dcpjax/serve.py").read_text()
    named = set(re.findall(r"`((?:DCPJAX|VLLM)_[A-Z_]+)`", SERVING))
    assert named == set(re.findall(r'"((?:DCPJAX|VLLM)_[A-Z_]+)"', source))
