"""How a checkpoint stores a matrix: plain, FP8 in blocks, or NVFP4 in groups; and how each lies on a mesh.

A tensor's own dtype and names decide, never what a configuration lists as quantised. `W` of `[out, in]` is

- plain: `X.weight`, F32, BF16 or F16;
- FP8: `X.weight` e4m3, and `X.weight_scale_inv`, which multiplies, for every 128 × 128 block (the last may be partial);
- NVFP4: `X.weight` U8 `[out, in/2]`, `X.weight_scale` e4m3 for every 16 numbers of a row, and `X.weight_scale_2`; or
  `X.weight_packed`, `X.weight_scale` and `X.weight_global_scale`, which divides.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from dcpjax.errors import ConfigError
from dcpjax.mesh import MeshPlan
from dcpjax.quant import QArray
from models.config import ModelConfig
from models.params import Params, Weight, declare, map_weights

PLAIN = tuple(map(np.dtype, (np.float32, ml_dtypes.bfloat16, np.float16)))
_E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)


@dataclasses.dataclass(frozen=True)
class Format:
    """A quantised format. block: (rows, columns) of a scale; per_byte: values in a byte; factor: one more scale for the
    whole matrix."""

    name: str
    block: tuple[int, int]
    values: np.dtype
    scales: np.dtype
    per_byte: int
    factor: bool


FP8 = Format("fp8", (128, 128), _E4M3, np.dtype(np.float32), 1, False)
NVFP4 = Format("nvfp4", (1, 16), np.dtype(np.uint8), _E4M3, 2, True)
FORMATS = {form.name: form for form in (FP8, NVFP4)}

# Which format each leaf has; None is plain.
FormOf = Callable[[Weight], Format | None]


def all_plain(w: Weight) -> None:
    """The `FormOf` of checkpoints without quantised weights: none, for every one."""


def published(name: str | None, cfg: ModelConfig) -> FormOf:
    """What published checkpoints of the quantisation `name` ("fp8", "nvfp4" or None) hold as quantised."""

    def form(w: Weight) -> Format | None:
        return FORMATS[name] if name is not None and in_published(name, w, cfg) and can_stay(w) else None

    return form


_FP8_MODULES = frozenset(
    [
        "q_a_proj",
        "q_b_proj",
        "kv_a_proj_with_mqa",
        "kv_b_proj",
        "o_proj",
        "wq_b",
        "wk",
        "gate_proj",
        "up_proj",
        "down_proj",
    ]
)


def in_published(name: str, w: Weight, cfg: ModelConfig) -> bool:
    """Whether published checkpoints of this quantisation store the tensors of `w` quantised.

    FP8: all projections but the indexer's head weights and the draft's joining one. NVFP4: the target's routed experts.
    """
    if name == NVFP4.name:
        return w.experts > 0 and w.layers[0] < cfg.num_layers
    return w.name.endswith(".weight") and w.name.split(".")[-2] in _FP8_MODULES


def can_stay(w: Weight) -> bool:
    """Whether the network multiplies with `w` as it is stored; others are widened when they are loaded.

    The halves of kv_b are cut inside blocks; embedding and head are read in other ways than by `quant.einsum`.
    """
    return len(w.size) == 2 and w.view is None and "vocab" not in w.axes


def arrays(w: Weight, form: Format | None, plan: MeshPlan, dtype: Any) -> Any:
    """The arrays of one leaf on the mesh: a `jax.ShapeDtypeStruct` with its sharding, or a `QArray` of such."""

    def array(shape: tuple[int, ...], axes: tuple[str | None, ...], dtype: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=plan.sharding(*axes))

    if form is None:
        return array(w.full_shape, w.full_axes, jnp.float32 if w.float32 else dtype)
    *lead, out, into = w.full_shape
    rows, columns = block = _uncut_block(w, form, plan)
    return QArray(
        values=array((*lead, out, into // form.per_byte), w.full_axes, form.values),
        scales=array((*lead, -(-out // rows), -(-into // columns)), w.full_axes, form.scales),
        factor=array(tuple(lead), w.full_axes[:-2], jnp.float32) if form.factor else None,
        block=block,
    )


def _uncut_block(w: Weight, form: Format, plan: MeshPlan) -> tuple[int, int]:
    """The checkpoint's block, or along a sharded axis the largest divisor of it that cuts a device's part evenly: then
    every device has the scales of its own values."""
    block = []
    for axis, size, columns in zip(w.axes, w.shape, form.block, strict=True):
        (part,) = plan.sharding(axis).shard_shape((size,))
        block.append(columns if part == size else math.gcd(columns, part))
    if block[1] % form.per_byte:
        raise ConfigError(
            f"{w.name}: {form.name} packs {form.per_byte} values in a byte, and its {w.size[1]} columns over these devices "
            f"are parts of {part}; use a tensor parallel size that gives even parts, or whole experts on a device each"
        )
    return block[0], block[1]


def abstract(cfg: ModelConfig, plan: MeshPlan, dtype: Any, form_of: FormOf = all_plain) -> Params:
    """Shapes, dtypes and shardings of the parameters on this mesh, without any memory."""
    return map_weights(lambda w: arrays(w, form_of(w), plan, dtype), declare(cfg, plan.pad))


def bytes_per_device(tree: Any) -> int:
    """Bytes of a tree of arrays (or of their shapes) on one device."""
    leaves = jax.tree.leaves(tree)
    return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in leaves)


@dataclasses.dataclass(frozen=True)
class Parts:
    """The tensors that store one matrix, by name. `divides`: the factor divides."""

    form: Format | None
    values: str
    scales: str | None = None
    factor: str | None = None
    divides: bool = False

    def expected(self, shape: tuple[int, ...]) -> dict[str, tuple[tuple[int, ...], tuple[np.dtype, ...]]]:
        """Tensor name → the shape and the dtypes it may have, for a matrix of `shape`."""
        if self.form is None:
            return {self.values: (shape, PLAIN)}
        out, into = shape
        rows, columns = self.form.block
        scales = (-(-out // rows), -(-into // columns))
        # Half a byte fits no tensor.
        width, rest = divmod(into, self.form.per_byte)
        found = {
            self.values: ((out, width + rest / self.form.per_byte if rest else width), (self.form.values,)),
            self.scales: (scales, (_E4M3,) if self.form is NVFP4 else PLAIN),
        }
        return found | ({self.factor: ((), PLAIN)} if self.factor else {})


def published_parts(form: Format | None, name: str) -> Parts:
    """The tensors that store the matrix `name` in published checkpoints."""
    if form is None:
        return Parts(None, name)
    if form is FP8:
        return Parts(FP8, name, f"{name}_scale_inv")
    return Parts(NVFP4, name, f"{name}_scale", f"{name}_scale_2")


def parts_of(tensors: Mapping[str, np.ndarray], name: str, matrix: bool) -> Parts:
    """How the tensor `name` `[…]` is stored. `matrix`: whether it may be quantised, so that its dtype decides."""
    stem = name.removesuffix(".weight")
    if matrix and name not in tensors and f"{stem}.weight_packed" in tensors:
        packed, scale, factor = f"{stem}.weight_packed", f"{stem}.weight_scale", f"{stem}.weight_global_scale"
        return Parts(NVFP4, packed, scale, factor, divides=True)
    stored = tensors[name].dtype if matrix and name in tensors else None
    return published_parts(FP8 if stored == _E4M3 else NVFP4 if stored == np.uint8 else None, name)
