"""A product of tokens with one stored matrix, and the choice of what computes it.

With few tokens the time is that of reading the matrix, of which a quantised one has half or a quarter of the bytes: the
kernel reads those alone. With many tokens a widened copy costs less than the products.
"""

import jax

from dcpjax.pallas_kernels.projection_triton import ProjectionConfig, projection_triton
from dcpjax.pallas_kernels.tiles import served
from dcpjax.quant import LayerOf, QArray, linear

MOST_ROWS = 64


def fitting(backend: str, tokens: int, w: jax.Array | QArray | LayerOf) -> str:
    """The backend that serves so many tokens and `w [out, in]`, plain of any dtype or quantised: `backend` for up to
    `MOST_ROWS` and a quantised matrix that the kernel can read, "xla" for all else."""
    stack = w.stack if isinstance(w, LayerOf) else w
    return backend if tokens <= MOST_ROWS and isinstance(stack, QArray) and served(stack) else "xla"


def project(
    x: jax.Array, w: jax.Array | QArray | LayerOf, *, config: ProjectionConfig | None = None, backend: str = "xla"
) -> jax.Array:
    """`linear` of `x [T, in]` and `w [out, in]`, plain or quantised: `[T, out]` in x's dtype.

    `backend` is "xla" or "triton" ("interpret" for tests). Raises `NotImplementedError` where the kernel does not serve it.
    """
    if backend == "xla":
        return linear(x, w)
    return projection_triton(x, w, config, backend == "interpret")
