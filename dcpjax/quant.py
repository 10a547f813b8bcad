"""Matrix products with stored weights: the one place that knows how a weight is represented.

A weight keeps the orientation of the checkpoint, `[out, in]`. It is a plain array, a `QArray`, or a layer's place in a
stack of these; `linear` and `einsum` take all. Products with a quantised one are W8A16 and W4A16: its values are widened
and scaled, then multiplied in the dtype of the activations, which are never quantised.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import PartitionSpec


@struct.dataclass
class QArray:
    """A stack of quantised matrices `[…, out, in]`: small numbers, and a scale for every block of them.

    values: float8_e4m3fn `[…, out, in]` (FP8), or uint8 `[…, out, in/2]` (NVFP4), two e2m1 numbers a byte, the first one in
    the low bits. scales: float32 or float8_e4m3fn `[…, ceil(out / rows), ceil(in / columns)]`; the last block of an axis may
    be partial. factor: float32 `[…]`, one number a matrix, or None. block: (rows, columns) of a scale. Checkpoints have
    (128, 128) and (1, 16); an axis that is cut for several devices may have a divisor of it, so that no block is cut.
    """

    values: Any
    scales: Any
    factor: Any = None
    block: tuple[int, int] = struct.field(pytree_node=False, default=(128, 128))

    @property
    def packed(self) -> bool:
        """Whether a byte holds two values."""
        return self.values.dtype == jnp.uint8

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the matrices, not of the bytes."""
        *most, last = self.values.shape
        return (*most, 2 * last if self.packed else last)

    @property
    def ndim(self) -> int:
        """Axes: those of the stack, and the matrix's two."""
        return self.values.ndim

    def __len__(self) -> int:
        return len(self.values)


@struct.dataclass
class LayerOf:
    """One matrix `[out, in]` of a stack `[N, out, in]` that it is not cut out of: kernels read it where it lies, and what
    knows no such thing cuts it out. layer: its number, an int32 scalar."""

    stack: QArray
    layer: Any

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the matrix."""
        return self.stack.shape[1:]

    @property
    def ndim(self) -> int:
        """Axes of the matrix."""
        return self.stack.ndim - 1

    def cut(self) -> QArray:
        """The matrix by itself."""
        return jax.tree.map(lambda a: a[self.layer], self.stack)


def layer_of(tree: Any, layer: jax.Array | int) -> Any:
    """A layer's weights out of a tree of stacks `[N, …]`; quantised ones as `LayerOf`."""
    return jax.tree.map(lambda x: LayerOf(x, layer) if is_quantised(x) else x[layer], tree, is_leaf=is_quantised)


def dequantise(w: jax.Array | QArray | LayerOf, dtype: Any) -> jax.Array:
    """The matrices `[…, out, in]` in `dtype`, scaled in float32; a plain array is cast."""
    if isinstance(w, LayerOf):
        return dequantise(w.cut(), dtype)
    if not isinstance(w, QArray):
        return w.astype(dtype)
    values = _unpack(w.values) if w.packed else w.values.astype(jnp.float32)
    scales = w.scales.astype(jnp.float32)
    for axis, size in zip((-2, -1), w.block):
        scales = jnp.repeat(scales, size, axis=axis)
    # Values times e4m3 scales are exact in float32, so the factor comes last.
    values = values * scales[..., : w.shape[-2], : w.shape[-1]]
    return (values if w.factor is None else values * w.factor[..., None, None]).astype(dtype)


def _unpack(packed: jax.Array) -> jax.Array:
    """Bytes `[…, n]` as e2m1 numbers `[…, 2n]` float32."""
    return jnp.stack(unpack_e2m1(packed), axis=-1).reshape(*packed.shape[:-1], -1)


def unpack_e2m1(packed: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The numbers in the low and in the high half of bytes `[…]`, float32: a sign, two bits of exponent, one of mantissa."""
    wide = packed.astype(jnp.int32)
    return tuple(_e2m1(code) for code in (wide & 15, wide >> 4))


def _e2m1(code: jax.Array) -> jax.Array:
    exponent, mantissa = (code >> 1) & 3, code & 1
    double = jnp.where(exponent == 0, mantissa, ((2 + mantissa) << exponent) >> 1)
    return jnp.where(code & 8 != 0, -double, double).astype(jnp.float32) * 0.5


def plain(tree: Any, dtype: Any) -> Any:
    """The tree with every `QArray` as an array in `dtype`; arrays stay what they are."""
    return jax.tree.map(lambda x: dequantise(x, dtype) if is_quantised(x) else x, tree, is_leaf=is_quantised)


def is_quantised(x: Any) -> bool:
    """Whether `x` is a quantised matrix and not a plain array."""
    return isinstance(x, QArray)


def specs(w: jax.Array | QArray | LayerOf, spec: PartitionSpec) -> Any:
    """`spec` of the matrices `[…, out, in]` as `shard_map` wants it for this representation: one for each array of
    it."""
    if isinstance(w, LayerOf):
        return LayerOf(specs(w.stack, PartitionSpec(None, *spec)), PartitionSpec())
    if not isinstance(w, QArray):
        return spec
    return w.replace(values=spec, scales=spec, factor=None if w.factor is None else PartitionSpec(*spec[:-2]))


def linear(x: jax.Array, w: jax.Array | QArray | LayerOf) -> jax.Array:
    """`x [..., in]` times `w [out, in]` → `[..., out]`, accumulated in float32, in x's dtype."""
    return einsum("...i,oi->...o", x, w)


def einsum(spec: str, x: jax.Array, w: jax.Array | QArray | LayerOf, out_dtype: Any = None) -> jax.Array:
    """Einsum `spec` of activations `x […]` and one weight, in `out_dtype` (default: x's dtype). Full float32 products:
    TF32 would move discrete choices."""
    dtype = x.dtype if out_dtype is None else out_dtype
    return jnp.einsum(
        spec, x, dequantise(w, x.dtype), precision=jax.lax.Precision.HIGHEST, preferred_element_type=dtype
    )
