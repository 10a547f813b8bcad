"""What crosses the jit boundary: the step's tokens, the rows' state on the device, and the tokens that come back."""

import jax
from flax import struct

from dcpjax.pallas_kernels.boxes import Boxes
from dcpjax.sampling import SamplingRows, VocabState


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
    boxes: what attention sends parts through, if it does: every array with a first axis of devices, and each device's own
        there; see `attention.with_boxes`.
    """

    tokens: jax.Array
    positions: jax.Array
    slots: jax.Array
    write_slots: jax.Array
    row_of: jax.Array
    pages: jax.Array
    boxes: Boxes | None = None


@struct.dataclass
class RowState:
    """What the device knows of each of R running requests; donated from step to step.

    kv_len: `[R]` int32 tokens whose cache rows are valid: where the next query starts.
    last_token: `[R]` int32 newest sampled token, the first query token of a decode row.
    limit: `[R]` int32 tokens at most; no slot at or past it is written or seen.
    sampling: parameters of the rows, `[R]` each.
    vocab: penalty counts and biases, `[R, V]` each.
    drafts: `[R, k]` int32 for the next step, of which the first num_drafts `[R]` int32 are real.
    draft_weights: `[R, k, V]` float32 log-weights they were drawn with; `[R, 0, V]` unless acceptance is by rejection.
    credit: `[R]` float32 tokens that a pinned acceptance owes; 0 without a pin.
    """

    kv_len: jax.Array
    last_token: jax.Array
    limit: jax.Array
    sampling: SamplingRows
    vocab: VocabState
    drafts: jax.Array
    num_drafts: jax.Array
    draft_weights: jax.Array
    credit: jax.Array


@struct.dataclass
class StepOutput:
    """tokens `[B, k + 1]` int32 and accepted `[B]` int32 go to the host, and drafts for the next step `[B, drafted]` int32
    where a grammar must look at them; logits `[B·(k + 1), V]` float32 stay on the
    device, for the requests that ask for log-probabilities, and so do the hidden states of its tokens `[T, D]`, for those
    that ask for their prompt's."""

    tokens: jax.Array
    accepted: jax.Array
    drafts: jax.Array
    logits: jax.Array
    hidden: jax.Array
