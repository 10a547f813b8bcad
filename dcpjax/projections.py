"""Products with dense matrices on a mesh: by the partitioner, or by kernels on each device's part."""

import jax

from dcpjax import collectives
from dcpjax.mesh import MeshPlan
from dcpjax.pallas_kernels.projection import fitting, project
from dcpjax.quant import LayerOf, QArray, linear, specs


def on_device(x: jax.Array, w: jax.Array | QArray | LayerOf, backend: str) -> jax.Array:
    """`linear` of `x [T, in]` and a device's part of a matrix, `w [out, in]`, inside `shard_map`: `[T, out]` in x's dtype.
    `backend`: of `project`, where it serves them."""
    return project(x, w, backend=fitting(backend, len(x), w))


def projected(
    x: jax.Array, w: jax.Array | QArray | LayerOf, plan: MeshPlan, backend: str,
    out: str | None = None, into: str | None = None,
) -> jax.Array:  # fmt: skip
    """`linear` of `x [T, in]` and `w [out, in]`: `[T, out]` in x's dtype. `out`, `into`: logical axes of the matrix; the
    result lies as its rows do, and sums over a sharded `into` are whole."""
    if fitting(backend, len(x), w) == "xla":
        return linear(x, w)

    def body(x, w):
        part = on_device(x, w, backend)
        return part if into is None else collectives.sum_devices(part)

    return plan.per_device(body, (plan.spec(None, into), specs(w, plan.spec(out, into))), plan.spec(None, out))(x, w)
