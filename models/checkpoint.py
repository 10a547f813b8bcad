"""A checkpoint folder, opened: which tensors it has, how each is stored, and whether they are those of its network.

Only headers are read. Everything that is wrong with them is told here, by name and at once.
"""

import dataclasses
import itertools
import pathlib
import re
from collections.abc import Iterable, Iterator

import jax
import numpy as np

from dcpjax.errors import CheckpointError
from models.config import ModelConfig
from models.params import Params, Weight, declare, is_weight
from models.stored import Format, Parts, can_stay, parts_of
from models.tensorfile import TensorFile, open_file, read_json

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"

# Scales of activations and of a quantised cache: ours has its own, made from the values themselves.
_UNUSED_SCALES = re.compile(r"\.(input_scale|input_global_scale|k_scale|v_scale|kv_scale|q_scale|prob_scale)$")


@dataclasses.dataclass(frozen=True, eq=False)
class Checkpoint:
    """A folder's mapped tensors, known to be those of the network. tensors: read-only arrays `[…]`, in the dtype on
    disk."""

    folder: pathlib.Path
    files: tuple[TensorFile, ...]
    tensors: dict[str, np.ndarray]

    @classmethod
    def open(cls, folder: str | pathlib.Path, cfg: ModelConfig) -> "Checkpoint":
        """Raises `CheckpointError` that names the file which cannot be read, or every tensor that is missing,
        misshapen, unreadable or unknown."""
        folder = pathlib.Path(folder)
        single, index = folder / SINGLE, folder / INDEX
        if not single.is_file() and not index.is_file():
            raise CheckpointError(f"{folder} has neither {SINGLE} nor {INDEX}; give a folder with safetensors weights")
        where = {} if single.is_file() else _read_index(index)
        files = {name: open_file(folder / name) for name in sorted(set(where.values())) or [SINGLE]}
        found = cls(folder, tuple(files.values()), _merged(folder, files, where))
        found._check(cfg)
        return found

    def parts(self, w: Weight, name: str) -> Parts:
        """How one of the tensors of a leaf is stored."""
        return parts_of(self.tensors, name, len(disk_shape(w)) == 2)

    def form(self, w: Weight) -> Format | None:
        """The format in which a leaf can stay: that of all its tensors, None when they differ or must be widened."""
        if not can_stay(w):
            return None
        forms = {self.parts(w, name).form for _, name in entries(w)}
        return forms.pop() if len(forms) == 1 else None

    def release(self) -> None:
        """Takes what was read out of this process's memory."""
        for file in self.files:
            file.release()

    def _check(self, cfg: ModelConfig) -> None:
        expected = {}
        for w in leaves(declare(cfg)):
            for _, name in entries(w):
                expected |= self.parts(w, name).expected(disk_shape(w))
        unused, known = _unused_modules(cfg), {_module(name) for name in expected}
        tensors = self.tensors
        both = [(name, *wanted) for name, wanted in expected.items() if name in tensors]
        faults = {
            "missing": [name for name in expected if name not in tensors],
            "of another shape than config.json says": [
                f"{name} {list(tensors[name].shape)} instead of {[int(n) if n % 1 == 0 else n for n in shape]}"
                for name, shape, _ in both
                if tensors[name].shape != shape and not (shape == () and tensors[name].shape == (1,))
            ],
            "of a type that cannot be read": [
                f"{name} {tensors[name].dtype} instead of {' or '.join(dtype.name for dtype in dtypes)}"
                for name, _, dtypes in both
                if tensors[name].dtype not in dtypes
            ],
            "unknown": [
                name
                for name in tensors
                if name not in expected
                and _module(name) not in unused
                and not name.endswith("rotary_emb.inv_freq")
                and not (_UNUSED_SCALES.search(name) and self._near(name, known))
            ],
        }
        if any(faults.values()):
            told = "; ".join(f"{len(names)} {fault}: {_listed(names)}" for fault, names in faults.items() if names)
            draft = f"model.layers.{cfg.num_layers}."
            if cfg.has_mtp and not any(name.startswith(draft) for name in tensors):
                told += (
                    ". There is no draft layer in it: with num_nextn_predict_layers 0 in config.json, or "
                    """--hf-overrides '{"num_nextn_predict_layers": 0}', it runs without drafts"""
                )
            raise CheckpointError(f"the tensors in {self.folder} are not those of its config.json: {told}")

    @staticmethod
    def _near(name: str, known: set[str]) -> bool:
        """Whether a scale belongs to a module of the network, or to a part of its attention that is named otherwise."""
        module = _module(name)
        return module in known or f"{module.partition('.self_attn')[0]}.self_attn.o_proj" in known


def entries(w: Weight) -> Iterator[tuple[tuple[int, ...], str]]:
    """Position in the stack and public name of each tensor that a leaf is made of."""
    for at in itertools.product(*map(range, w.stack)):
        yield at, w.name.format(i=w.layers[at[0]] if w.layers else None, e=at[-1] if w.experts else None)


def disk_shape(w: Weight) -> tuple[int, ...]:
    """Shape of each of those tensors."""
    return w.size if w.view is None else (w.view[0] * w.view[1], *w.view[2:])


def leaves(tree: Params) -> list[Weight]:
    """The declared weights of a tree, in its order."""
    return jax.tree.leaves(tree, is_leaf=is_weight)


def _read_index(path: pathlib.Path) -> dict[str, str]:
    """Tensor name → file name."""
    try:
        text = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from None
    where = read_json(text, f"{path} is corrupt: it").get("weight_map")
    if not isinstance(where, dict) or not where or not all(isinstance(file, str) for file in where.values()):
        raise CheckpointError(f"{path} is corrupt: no weight_map can be read (it must map tensor names to file names)")
    # They are joined to the folder, and a file elsewhere could be anything.
    odd = sorted({file for file in where.values() if not re.fullmatch(r"(?!\.)[^/\\\0]+\.safetensors", file)})
    if odd:
        raise CheckpointError(f"{path} names files that are not *.safetensors in its own folder: {_listed(odd)}")
    return where


def _merged(folder: pathlib.Path, files: dict[str, TensorFile], where: dict[str, str]) -> dict[str, np.ndarray]:
    """All tensors by name; each lies in one file, and in that of the index `where` there is one."""
    found: dict[str, np.ndarray] = {}
    holders: dict[str, str] = {}
    for file, opened in files.items():
        twice = [f"{name} ({holders[name]} and {file})" for name in opened.tensors if name in found]
        if twice:
            raise CheckpointError(f"{folder} holds tensors twice: {_listed(twice)}")
        found |= opened.tensors
        holders |= dict.fromkeys(opened.tensors, file)
    lost = [f"{name} ({file})" for name, file in where.items() if holders.get(name) != file]
    if lost:
        raise CheckpointError(f"{folder / INDEX} names tensors that their files do not hold: {_listed(lost)}")
    return found


def _unused_modules(cfg: ModelConfig) -> set[str]:
    """Modules a checkpoint may carry for nothing: indexers of layers that reuse a selection, a draft layer that the
    configuration leaves out, and the draft's copies of the embedding and the head."""
    widest = dataclasses.replace(
        cfg, has_mtp=True, layers=tuple(dataclasses.replace(kind, full=True) for kind in cfg.layers)
    )
    carried, used = ({_module(name) for w in leaves(declare(c)) for _, name in entries(w)} for c in (widest, cfg))
    draft = f"model.layers.{cfg.num_layers}"
    return (carried - used) | {f"{draft}.embed_tokens", f"{draft}.shared_head.head"}


def _module(name: str) -> str:
    return name.rpartition(".")[0]


def _listed(names: Iterable[str], most: int = 50) -> str:
    names = [name if name.isprintable() else repr(name) for name in names]
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
