"""Writes the API reference, from docstrings, as HTML: `make docs`, or `python scripts/reference.py FOLDER`."""

import pathlib
import sys

import pdoc

ROOT = pathlib.Path(__file__).resolve().parent.parent
# How the tiny model was trained is a program, and nothing that others call.
LEFT_OUT = ("models/train",)


def modules() -> list[str]:
    """Every module with something to say, but for the package itself, whose names are those of `dcpjax.llm` and others."""
    paths = (path.relative_to(ROOT) for top in ("dcpjax", "models") for path in sorted((ROOT / top).rglob("*.py")))
    return [
        ".".join(path.with_suffix("").parts)
        for path in paths
        if not path.name.startswith("__") and not path.as_posix().startswith(LEFT_OUT)
    ]


def main() -> int:
    folder = pathlib.Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "build" / "docs"
    pdoc.pdoc(*modules(), output_directory=folder)
    print(folder / "index.html")
    return 0


if __name__ == "__main__":
    sys.exit(main())
