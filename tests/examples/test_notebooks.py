"""The notebooks run from their first cell to their last, and make every figure that they show.

Each in a process of its own, as `python scripts/notebooks.py` runs it; the kept file is left as it is.
"""

import ast
import os
import pathlib
import re
import subprocess
import sys

import jax
import nbformat
import pytest

ROOT = pathlib.Path(__file__).parent.parent.parent
NOTEBOOKS = sorted((ROOT / "examples").glob("*.ipynb"))
# What notebooks may import of this repository: names of the package, and modules whose functions are documented for it.
PUBLIC = {"dcpjax", "dcpjax.bench", "dcpjax.errors", "dcpjax.layout", "models.dense"}


def cells(path: pathlib.Path) -> list:
    return [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]


def figures(cell) -> int:
    """Pictures that a cell shows."""
    kinds = ("image/png", "image/svg+xml")
    return sum(any(kind in output.get("data", {}) for kind in kinds) for output in cell.outputs)


def test_there_are_notebooks():
    assert "dcp_in_one_sitting" in {path.stem for path in NOTEBOOKS}


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_runs(path, tmp_path):
    # Compiled programs are kept where those of the other tests are.
    environment = os.environ | {
        "JAX_COMPILATION_CACHE_DIR": jax.config.jax_compilation_cache_dir,
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    command = [sys.executable, "scripts/notebooks.py", path.stem, "--out", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    kept, new = cells(path), cells(tmp_path / path.name)
    assert [cell.execution_count for cell in new] == list(range(1, len(new) + 1))
    # The kept one is this one, executed: nothing was pasted in, and nothing was left out.
    assert [cell.source for cell in kept] == [cell.source for cell in new]
    assert [cell.execution_count for cell in kept] == [cell.execution_count for cell in new]
    assert [figures(cell) for cell in kept] == [figures(cell) for cell in new]
    assert sum(map(figures, new)) >= 3
    assert not [output for cell in kept + new for output in cell.outputs if output.get("name") == "stderr"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_uses_what_is_public(path):
    tree = ast.parse("\n".join(cell.source for cell in cells(path)))
    froms = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    froms |= {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    ours = {name for name in froms if name.partition(".")[0] in ("dcpjax", "models")}
    assert "dcpjax" in ours and ours <= PUBLIC
    private = [
        node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and re.match("_(?!_)", node.attr)
    ]
    assert not private
