"""Matrix products with stored weights: the one place that knows how a weight is represented.

A weight keeps the orientation of the checkpoint, `[out, in]`. Today it is a plain array; a quantised weight will be a
pytree that `linear` and `einsum` take as well, so no caller changes.
"""

from typing import Any

import jax
import jax.numpy as jnp


def linear(x: jax.Array, w: jax.Array) -> jax.Array:
    """`x [..., in]` times `w [out, in]` → `[..., out]`, accumulated in float32, in x's dtype."""
    return einsum("...i,oi->...o", x, w)


def einsum(spec: str, x: jax.Array, w: jax.Array, out_dtype: Any = None) -> jax.Array:
    """Einsum of activations and one weight. Full float32 products: TF32 would move discrete choices."""
    dtype = x.dtype if out_dtype is None else out_dtype
    return jnp.einsum(spec, x, w.astype(x.dtype), precision=jax.lax.Precision.HIGHEST, preferred_element_type=dtype)
