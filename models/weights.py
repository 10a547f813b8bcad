"""Checkpoint folders ↔ parameters on the mesh.

Names, shapes and splits all come from `params.declare`. Loading checks every header first, then fills one leaf after
another: each device gets its own part of each tensor straight from the mapped file, padded with zeros, and a stack too
large for host memory goes to the devices layer by layer. Saving is the same walk backwards, without the padding.
"""

import dataclasses
import functools
import itertools
import json
import math
import pathlib
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dcpjax.errors import CheckpointError
from dcpjax.mesh import MeshPlan
from models.config import ModelConfig
from models.params import Params, Weight, declare, is_weight, map_weights
from models.tensorfile import DTYPES, open_file, write_file

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_PLAIN = tuple(DTYPES[name] for name in ("F32", "BF16", "F16"))


def load(
    folder: str | pathlib.Path, cfg: ModelConfig, plan: MeshPlan, dtype: jnp.dtype, *, chunk_bytes: int = 1 << 30
) -> Params:
    """Parameters of the checkpoint in `folder`, padded and sharded for `plan`, in `dtype` (router bias: float32).

    Host memory holds one leaf of at most `chunk_bytes`, or one layer of one larger leaf. Raises `CheckpointError` that
    names the file which cannot be read, or every tensor that is missing, misshapen, unreadable or unknown.
    """
    tensors = open_checkpoint(pathlib.Path(folder))
    declared = declare(cfg, plan.pad)
    _check(folder, tensors, declared, cfg)
    return map_weights(lambda w: _place(w, tensors, plan, dtype, chunk_bytes), declared)


def open_checkpoint(folder: pathlib.Path) -> dict[str, np.ndarray]:
    """Tensor name → array mapped from `model.safetensors` or from the files of its index. No data is read."""
    if (folder / SINGLE).is_file():
        return open_file(folder / SINGLE)
    index = folder / INDEX
    if not index.is_file():
        raise CheckpointError(f"{folder} has neither {SINGLE} nor {INDEX}; give a folder with safetensors weights")
    try:
        where = dict(json.loads(index.read_text())["weight_map"])
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{index} is corrupt: no weight_map can be read ({error!r})") from None
    files = {name: open_file(folder / name) for name in sorted(set(where.values()))}
    lost = [f"{name} ({file})" for name, file in where.items() if name not in files[file]]
    if lost:
        raise CheckpointError(f"{index} names tensors that their files do not hold: {_listed(lost)}")
    found = {name: tensor for tensors in files.values() for name, tensor in tensors.items()}
    return found | {name: files[file][name] for name, file in where.items()}


def _entries(w: Weight) -> Iterator[tuple[tuple[int, ...], str]]:
    """Position in the stack and public name of each tensor that a leaf is made of."""
    for at in itertools.product(*map(range, w.stack)):
        yield at, w.name.format(i=w.layers[at[0]] if w.layers else None, e=at[-1] if w.experts else None)


def _disk_shape(w: Weight) -> tuple[int, ...]:
    return w.size if w.view is None else (w.view[0] * w.view[1], *w.view[2:])


def _check(folder: str | pathlib.Path, tensors: dict[str, np.ndarray], declared: Params, cfg: ModelConfig) -> None:
    """Compares headers with the declaration and reports all that is wrong at once."""
    shapes = {name: _disk_shape(w) for w in _leaves(declared) for _, name in _entries(w)}
    unused = _unused_modules(cfg)
    faults = {
        "missing": [name for name in shapes if name not in tensors],
        "of another shape than config.json says": [
            f"{name} {list(tensors[name].shape)} instead of {list(shape)}"
            for name, shape in shapes.items()
            if name in tensors and tensors[name].shape != shape
        ],
        "of a type that cannot be read (F32, BF16 and F16 can)": [
            f"{name} {tensors[name].dtype}" for name in shapes if name in tensors and tensors[name].dtype not in _PLAIN
        ],
        "unknown": [
            name
            for name in tensors
            if name not in shapes and _module(name) not in unused and not name.endswith("rotary_emb.inv_freq")
        ],
    }
    if any(faults.values()):
        told = "; ".join(f"{len(names)} {fault}: {_listed(names)}" for fault, names in faults.items() if names)
        raise CheckpointError(f"the tensors in {folder} are not those of its config.json: {told}")


def _unused_modules(cfg: ModelConfig) -> set[str]:
    """Modules a checkpoint may carry for nothing: indexers of layers that reuse a selection, a draft layer that the
    configuration leaves out, and the draft's copies of the embedding and the head."""
    widest = dataclasses.replace(
        cfg, has_mtp=True, layers=tuple(dataclasses.replace(kind, full=True) for kind in cfg.layers)
    )
    carried, used = ({_module(name) for w in _leaves(declare(c)) for _, name in _entries(w)} for c in (widest, cfg))
    draft = f"model.layers.{cfg.num_layers}"
    return (carried - used) | {f"{draft}.embed_tokens", f"{draft}.shared_head.head"}


def _module(name: str) -> str:
    return name.rpartition(".")[0]


def _leaves(tree: Params) -> list[Weight]:
    return jax.tree.leaves(tree, is_leaf=is_weight)


def _listed(names: Iterable[str], most: int = 50) -> str:
    names = list(names)
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def _place(w: Weight, tensors: dict[str, np.ndarray], plan: MeshPlan, dtype: jnp.dtype, chunk_bytes: int) -> jax.Array:
    """One leaf on the mesh."""
    kind = np.dtype(np.float32 if w.float32 else dtype)
    sharding = plan.sharding(*w.full_axes)

    def make(w: Weight) -> jax.Array:
        # Devices that hold the same part ask for it one after another; it is read once.
        @functools.lru_cache(maxsize=1)
        def part(spans: tuple[range, ...]) -> np.ndarray:
            return _read(w, tensors, spans, kind)

        return jax.make_array_from_callback(
            w.full_shape,
            sharding,
            lambda index: part(tuple(range(*s.indices(n)) for s, n in zip(index, w.full_shape))),
        )

    if len(w.layers) < 2 or math.prod(w.full_shape) * kind.itemsize <= chunk_bytes:
        return make(w)
    stack = jax.jit(lambda: jnp.zeros(w.full_shape, kind), out_shardings=sharding)()
    for at, layer in enumerate(w.layers):
        stack = _set_layer(stack, make(dataclasses.replace(w, layers=(layer,))), np.int32(at))
        # Without this the host would run ahead and hold many layers that wait for their turn.
        stack.block_until_ready()
    return stack


@functools.partial(jax.jit, donate_argnums=0)
def _set_layer(stack: jax.Array, layer: jax.Array, at: jax.Array) -> jax.Array:
    """`stack [N, …]` with row `at` replaced by `layer [1, …]`, in place."""
    return jax.lax.dynamic_update_slice_in_dim(stack, layer, at, 0)


def _read(w: Weight, tensors: dict[str, np.ndarray], spans: tuple[range, ...], kind: np.dtype) -> np.ndarray:
    """The part `spans` of the padded stack, copied from the mapped files."""
    depth = len(w.stack)
    out = np.zeros([len(span) for span in spans], kind)
    source = tuple(slice(span.start, min(span.stop, n)) for span, n in zip(spans[depth:], w.size))
    filled = tuple(slice(0, max(0, s.stop - s.start)) for s in source)
    for at, name in _entries(w):
        if all(i in span for i, span in zip(at, spans)):
            place = tuple(i - span.start for i, span in zip(at, spans))
            out[place + filled] = _part(w, tensors[name])[source]
    return out


def _part(w: Weight, tensor: np.ndarray) -> np.ndarray:
    """What of a tensor on disk belongs to this leaf, `[*size]`."""
    return tensor if w.view is None else tensor.reshape(w.view)[:, slice(*w.take)]


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
    replaced, and only when the new ones are complete. `raw_config` is written as `config.json`.
    """
    folder = pathlib.Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    leaves = jax.tree.leaves(jax.tree.map(_Leaf, declare(cfg), params, is_leaf=is_weight))
    owners: dict[str, list[tuple[_Leaf, tuple[int, ...]]]] = {}
    for leaf in leaves:
        for at, name in _entries(leaf.weight):
            owners.setdefault(name, []).append((leaf, at))
    specs = {name: (parts[0][0].kind(dtype), _disk_shape(parts[0][0].weight)) for name, parts in owners.items()}

    # Two: the halves of one tensor take turns.
    host = functools.lru_cache(maxsize=2)(lambda leaf, layer: leaf.to_host(layer))

    def fetch(name: str) -> np.ndarray:
        parts = [leaf.part(host, at, chunk_bytes) for leaf, at in sorted(owners[name], key=lambda o: o[0].order)]
        return (parts[0] if len(parts) == 1 else np.concatenate(parts, axis=1)).reshape(specs[name][1])

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
        _write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": where})
    if raw_config is not None:
        # The file says how the weights are stored now, whatever they were read from.
        stale = ("torch_dtype", "quantization_config")
        kept = {key: value for key, value in raw_config.items() if key not in stale}
        _write_json(folder / "config.json", kept | {"dtype": str(leaves[0].kind(dtype))})


@dataclasses.dataclass(frozen=True, eq=False)
class _Leaf:
    """A declared weight beside its (possibly padded) array."""

    weight: Weight
    array: jax.Array

    def __post_init__(self):
        w, depth = self.weight, len(self.weight.stack)
        shape = self.array.shape
        if shape[:depth] != w.stack or len(shape) != depth + len(w.size) or any(map(int.__lt__, shape[depth:], w.size)):
            raise CheckpointError(f"{w.name}: an array {list(shape)} cannot hold {list(w.stack + w.size)}")

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


def _bytes(spec: tuple[np.dtype, tuple[int, ...]]) -> int:
    return math.prod(spec[1]) * spec[0].itemsize


def _cut(specs: dict[str, tuple], file_bytes: int) -> list[dict[str, tuple]]:
    """Consecutive groups of at most `file_bytes`, or of one tensor."""
    groups: list[dict[str, tuple]] = [{}]
    size = 0
    for name, spec in specs.items():
        if groups[-1] and size + _bytes(spec) > file_bytes:
            groups.append({})
            size = 0
        groups[-1][name] = spec
        size += _bytes(spec)
    return groups


def _write_json(path: pathlib.Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")
