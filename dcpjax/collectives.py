"""Everything that crosses devices; the only module that names collectives.

All functions run inside `shard_map` over the mesh's `("tp", "dcp")` axes. On an axis of one device they return their
input: that keeps size-1 collectives out of the compiled program.
"""

from typing import Any

import jax

from dcpjax.errors import ConfigError
from dcpjax.layout import CacheLayout
from dcpjax.mesh import ALL
from dcpjax.pallas_kernels.boxes import Boxes
from dcpjax.pallas_kernels.lse_merge import merge_packed, pack_parts, part_weights, weigh

BACKENDS = ("ag_rs", "a2a", "psum")


def check_backend(name: str) -> str:
    """The name itself, if it is one of `BACKENDS`. Raises `ConfigError`."""
    if name not in BACKENDS:
        raise ConfigError(f"dcp comm backend {name!r} is not known; use one of {list(BACKENDS)}")
    return name


def rank(layout: CacheLayout) -> jax.Array | int:
    """This device's rank among the shards of a pool: an int32 scalar, 0 where there is one shard."""
    return jax.lax.axis_index("dcp") if layout.shards > 1 else 0


def sum_devices(x: jax.Array) -> jax.Array:
    """Sum of `x […]`, of any dtype, over all devices of the mesh; all of them get it."""
    return x if jax.lax.axis_size(ALL) == 1 else jax.lax.psum(x, ALL)


def device_index() -> jax.Array:
    """This device's place in an axis sharded over the whole mesh: an int32 scalar."""
    return jax.lax.axis_index(ALL)


def gather_ranks(x: jax.Array, axis: int = 0) -> jax.Array:
    """Concatenates the ranks' arrays `x […, n, …]`, of any dtype, along `axis`, in rank order: `[…, N·n, …]`."""
    return jax.lax.all_gather(x, "dcp", axis=axis, tiled=True)


def stack_ranks(x: jax.Array) -> jax.Array:
    """Stacks the ranks' arrays `x […]`, of any dtype, along a new axis 0: `[N, …]`."""
    return jax.lax.all_gather(x, "dcp")


def open_boxes(tokens: int, heads: int, width: int, dtype: Any) -> Boxes:
    """Boxes of this rank for merges of up to `tokens` tokens, all `heads` of the dcp group, in parts of `width` values.

    What they are: `pallas_kernels/boxes.py`. Devices must reach each other's memory (`MeshPlan.peers`).
    """
    # Not before it is needed: it brings a compiler along.
    from dcpjax.pallas_kernels import lse_merge_mosaic

    mine = jax.lax.axis_index("dcp")
    boxes = lse_merge_mosaic.open_boxes(tokens, heads, width, dtype, jax.lax.axis_size("dcp"), mine)
    return boxes.replace(addresses=gather_ranks(boxes.addresses))


def merge_ranks(
    out: jax.Array, lse: jax.Array, backend: str, kernel: str = "xla", boxes: Boxes | None = None
) -> jax.Array:
    """Merges the ranks' parts and deals the heads back out.

    `out [T, H, L]` (any float dtype) and `lse [T, H]` (natural log, float32) hold all heads of the dcp group over this
    rank's tokens; returns `[T, H/N, L]` float32: this rank's heads over all tokens. backend: one of `BACKENDS`. kernel:
    what sums parts after an all-to-all. boxes: what they are sent through instead of that.
    """
    if boxes is not None:
        from dcpjax.pallas_kernels.lse_merge_mosaic import merge_boxed

        return merge_boxed(out, lse, boxes)
    if backend == "a2a":
        return _merge_a2a(out, lse, "triton" if kernel == "mosaic" else kernel)
    weight, _ = part_weights(stack_ranks(lse))
    mine = jax.lax.axis_index("dcp")
    part = weigh(out, weight[mine])
    if backend == "ag_rs":
        return jax.lax.psum_scatter(part, "dcp", scatter_dimension=1, tiled=True)
    heads = out.shape[1] // jax.lax.axis_size("dcp")
    return jax.lax.dynamic_slice_in_dim(jax.lax.psum(part, "dcp"), mine * heads, heads, axis=1)


def _merge_a2a(out: jax.Array, lse: jax.Array, kernel: str) -> jax.Array:
    """One all-to-all over heads: the LSE travels in the same array as the output, bit for bit."""
    packed = pack_parts(out, lse)
    ranks, (tokens, heads, width) = jax.lax.axis_size("dcp"), packed.shape
    packed = packed.reshape(tokens, ranks, heads // ranks, width)
    packed = jax.lax.all_to_all(packed, "dcp", split_axis=1, concat_axis=0)
    packed = packed.reshape(ranks, tokens, heads // ranks, width)
    return merge_packed(packed, out.shape[-1], out.dtype, backend=kernel)
