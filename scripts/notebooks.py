"""Executes the notebooks of `examples/` from their first cell on and keeps their outputs.

`python scripts/notebooks.py` does all; names pick some, `--out FOLDER` leaves the kept ones as they are. A kernel sees
this repository and the CPU; a cell that raises ends the run.
"""

import argparse
import os
import pathlib
import sys

import nbformat
from nbclient import NotebookClient

ROOT = pathlib.Path(__file__).resolve().parent.parent
FOLDER = ROOT / "examples"


def execute(notebook: nbformat.NotebookNode, seconds: int = 600) -> None:
    """Runs all cells, each within so many seconds; outputs replace those that were there."""
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    NotebookClient(notebook, timeout=seconds, kernel_name="python3", record_timing=False).execute(cwd=str(FOLDER))
    # What depends on the machine and not on the notebook.
    notebook.metadata = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="without .ipynb; none: all")
    parser.add_argument("--out", type=pathlib.Path, default=FOLDER)
    args = parser.parse_args()
    os.environ.update(PYTHONPATH=str(ROOT), JAX_PLATFORMS="cpu", PYTHONWARNINGS="ignore")
    for path in sorted(FOLDER.glob("*.ipynb")):
        if args.names and path.stem not in args.names:
            continue
        notebook = nbformat.read(path, as_version=4)
        execute(notebook)
        nbformat.write(notebook, args.out / path.name)
        print(args.out / path.name, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
