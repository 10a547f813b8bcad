"""What crosses the jit boundary: the step's tokens, the rows' state on the device, and the tokens that come back."""

import jax
from flax import struct


@struct.dataclass
class ForwardBatch:
    """One step's query tokens, T of them, from B requests. There is no mode: a decode row is a short query.

    tokens: `[T]` int32 token ids.
    positions: `[T]` int32 RoPE positions.
    slots: `[T]` int32 the token's own sequence slot; it sees slots up to and including this one. −1: a padding token,
        which sees nothing.
    write_slots: `[T]` int32 slot of the pool its rows are written to; `layout.nowhere` where they are not.
    row_of: `[T]` int32 row of `pages`.
    pages: `[B, P]` int32 block tables, page ids; 0 is the dummy page.
    """

    tokens: jax.Array
    positions: jax.Array
    slots: jax.Array
    write_slots: jax.Array
    row_of: jax.Array
    pages: jax.Array
