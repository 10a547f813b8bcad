"""Tells whether the environment that runs this file is the one that the repository describes.

`environment.py` exits with 0 when it is. `environment.py --seal` imports what counts and then records that it is. The
record names the contents of pyproject.toml and constraints.txt, the extras and the folder, so a change of any of them
(or a folder that was moved) makes the next `make` install again.
"""

import hashlib
import importlib
import importlib.util
import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
SEAL = ROOT / ".venv" / "sealed"
MODULES = ("dcpjax", "models", "jax", "jaxlib", "flax", "numpy", "tokenizers", "starlette", "uvicorn")
TEST_MODULES = ("pytest", "xdist", "hypothesis", "chex", "ruff")


def state(extras: str) -> str:
    parts = [(ROOT / name).read_bytes() for name in ("pyproject.toml", "constraints.txt")]
    parts += [str(ROOT).encode(), extras.encode(), sys.version.encode()]
    return hashlib.sha256(b"\0".join(hashlib.sha256(part).digest() for part in parts)).hexdigest()


def main(extras: str, seal: bool) -> int:
    if sys.version_info < (3, 12) or pathlib.Path(sys.prefix).resolve() != (ROOT / ".venv").resolve():
        return 1
    names = MODULES + (TEST_MODULES if "test" in extras.split(",") else ())
    if seal:
        for name in names:
            importlib.import_module(name)
        SEAL.write_text(state(extras))
    found = all(importlib.util.find_spec(name) for name in names)
    return int(not (found and SEAL.is_file() and SEAL.read_text() == state(extras)))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], "--seal" in sys.argv))
