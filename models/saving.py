"""Parameters on the mesh → a checkpoint folder, under their public names and without padding."""

import dataclasses
import functools
import json
import math
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dcpjax.errors import CheckpointError
from dcpjax.quant import is_quantised
from models.checkpoint import INDEX, SINGLE, disk_shape, entries
from models.config import ModelConfig
from models.params import Params, Weight, declare, is_weight
from models.tensorfile import write_file

# Dtype and shape of a tensor to be written.
Spec = tuple[np.dtype, tuple[int, ...]]


def save(
    params: Params,
    cfg: ModelConfig,
    folder: str | pathlib.Path,
    dtype: jnp.dtype | None = None,
    *,
    raw_config: dict[str, Any] | None = None,
    file_bytes: int = 5_000_000_000,
    chunk_bytes: int = 1 << 30,
) -> None:
    """Writes `params` (padded or not) under their public names, without padding, in `dtype` (None: as they are).

    A checkpoint larger than `file_bytes` is cut into files with an index. Weights that the folder held before are
    replaced, and only when the new ones are complete. `raw_config` is written as `config.json`. The host holds
    `chunk_bytes` of a leaf at most, or one layer of it. Raises `CheckpointError` for quantised parameters.
    """
    if any(map(is_quantised, jax.tree.leaves(params, is_leaf=is_quantised))):
        raise CheckpointError("quantised parameters cannot be saved: widen them with dcpjax.quant.plain first")
    folder = pathlib.Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    leaves = jax.tree.leaves(jax.tree.map(_Leaf, declare(cfg), params, is_leaf=is_weight))
    owners: dict[str, list[tuple[_Leaf, tuple[int, ...]]]] = {}
    for leaf in leaves:
        for at, name in entries(leaf.weight):
            owners.setdefault(name, []).append((leaf, at))
    specs = {name: (parts[0][0].kind(dtype), disk_shape(parts[0][0].weight)) for name, parts in owners.items()}

    # Two: the halves of one tensor take turns.
    host = functools.lru_cache(maxsize=2)(lambda leaf, layer: leaf.to_host(layer))

    def fetch(name: str) -> np.ndarray:
        parts = [leaf.part(host, at, chunk_bytes) for leaf, at in sorted(owners[name], key=lambda o: o[0].order)]
        return (parts[0] if len(parts) == 1 else np.concatenate(parts, axis=1)).reshape(specs[name][1])

    write_folder(folder, specs, fetch, file_bytes)
    if raw_config is not None:
        # The file says how the weights are stored now, whatever they were read from.
        stale = ("torch_dtype", "quantization_config")
        kept = {key: value for key, value in raw_config.items() if key not in stale}
        write_json(folder / "config.json", kept | {"dtype": str(leaves[0].kind(dtype))})


def write_folder(
    folder: pathlib.Path,
    specs: Mapping[str, Spec],
    fetch: Callable[[str], np.ndarray],
    file_bytes: int = 5_000_000_000,
) -> None:
    """Writes tensors in the order of `specs` (name → dtype, shape `[…]`); `fetch(name)` gives each when its turn has
    come. See `save`."""
    groups = _cut(specs, file_bytes)
    files = (
        [SINGLE]
        if len(groups) == 1
        else [f"model-{i:05}-of-{len(groups):05}.safetensors" for i in range(1, len(groups) + 1)]
    )
    for file, group in zip(files, groups):
        write_file(folder / f"{file}.partial", group, fetch)
    for old in [*folder.glob("model*.safetensors"), folder / INDEX]:
        old.unlink(missing_ok=True)
    for file in files:
        (folder / f"{file}.partial").rename(folder / file)
    if len(files) > 1:
        total = sum(_bytes(spec) for spec in specs.values())
        where = {name: file for file, group in zip(files, groups) for name in group}
        write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": where})


@dataclasses.dataclass(frozen=True, eq=False)
class _Leaf:
    """A declared weight beside its (possibly padded) array."""

    weight: Weight
    array: jax.Array

    def __post_init__(self):
        w = self.weight
        shape = self.array.shape
        least, layers = w.stack + w.size, 1 if w.layers else 0
        if len(shape) != len(least) or shape[:layers] != least[:layers] or any(map(int.__lt__, shape, least)):
            raise CheckpointError(f"{w.name}: an array {list(shape)} cannot hold {list(least)}")

    @property
    def order(self) -> tuple[int, int]:
        return self.weight.take or (0, 0)

    def kind(self, dtype: jnp.dtype | None) -> np.dtype:
        return np.dtype(self.array.dtype if dtype is None or self.weight.float32 else dtype)

    def to_host(self, layer: int | None) -> np.ndarray:
        return np.asarray(self.array if layer is None else self.array[layer])

    def part(self, host: Any, at: tuple[int, ...], chunk_bytes: int) -> np.ndarray:
        """The unpadded `[*size]` at one position of the stack; large stacks leave the devices by layer."""
        if len(self.weight.layers) > 1 and self.array.nbytes > chunk_bytes:
            value = host(self, at[0])[at[1:]]
        else:
            value = host(self, None)[at]
        return value[tuple(map(slice, self.weight.size))]


def _bytes(spec: Spec) -> int:
    return math.prod(spec[1]) * spec[0].itemsize


def _cut(specs: Mapping[str, Spec], file_bytes: int) -> list[dict[str, Spec]]:
    """Consecutive groups of at most `file_bytes`, or of one tensor."""
    groups: list[dict[str, Spec]] = [{}]
    size = 0
    for name, spec in specs.items():
        if groups[-1] and size + _bytes(spec) > file_bytes:
            groups.append({})
            size = 0
        groups[-1][name] = spec
        size += _bytes(spec)
    return groups


def write_json(path: pathlib.Path, value: dict[str, Any]) -> None:
    """Writes `value`, indented, with a newline at its end."""
    path.write_text(json.dumps(value, indent=2) + "\n")
