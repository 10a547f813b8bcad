"""The one attention: indexer selection, then sparse MLA over the selected rows, for every dcp, target and draft.

Geometry comes from the pools. Where a pool is cut into shards, queries (or rows) are gathered over the ranks and parts
are merged by LSE; where it is not, nothing moves. Two movements give the same result and a step picks the one that moves
fewer bytes when it is traced: *queries* go to the rows (decode), or *rows* come to the queries tile by tile (long prefill).
"""

import dataclasses
import functools
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from dcpjax import collectives
from dcpjax.batch import ForwardBatch
from dcpjax.cache import Pool, pool_slots, pool_spec
from dcpjax.kernels import Kernels
from dcpjax.mesh import MeshPlan
from dcpjax.pallas_kernels import boxes
from dcpjax.pallas_kernels.indexer_scores import indexer_scores
from dcpjax.pallas_kernels.lse_merge import merge_parts
from dcpjax.pallas_kernels.sparse_mla import fitting, sparse_mla
from dcpjax.pallas_kernels.topk import NO_SLOT, merge_candidates, topk_candidates, topk_slots


@dataclasses.dataclass(frozen=True)
class AttentionOptions:
    """How parts travel and what computes them. `movement` None lets the byte count decide; tests force "queries" or
    "rows". `debug`: every device prints a line a layer to standard error; slow, and nothing of it is compiled without."""

    backend: str = "ag_rs"
    movement: str | None = None
    tile_tokens: int = 32768
    debug: bool = False
    kernels: Kernels = Kernels()


@struct.dataclass
class Selection:
    """The slots each token attends to, shared by all layers of a block.

    slots: `[T, K]` int32 sequence slots, ascending, `NO_SLOT` past the end; the same on every rank.
    rows: `[ranks, T, K]` int32 rows of the latent pool, the rank's own ones first; ranks is the pool's shards.
    count: `[ranks, T]` int32, how many of them are the rank's.
    """

    slots: jax.Array
    rows: jax.Array
    count: jax.Array


def select(
    q: jax.Array, weight: jax.Array, index: Pool, layer: jax.Array | int, latent: Pool, batch: ForwardBatch,
    topk: int, first_slot: int, plan: MeshPlan, kernels: Kernels = Kernels(),
) -> Selection:  # fmt: skip
    """Exact global top-k of the indexer's scores over the visible slots `first_slot … batch.slots[t]`.

    `q [T, heads, dim]`, `weight [T, heads]` (float32, both scale factors folded in), replicated. topk: slots at most;
    all visible ones where there are fewer. Source: the lightning indexer of DeepSeek-V3.2.
    """
    layout = index.layout
    batch = batch.replace(boxes=None)  # they are each device's own

    def body(q, weight, data, batch):
        rank = collectives.rank(layout)
        score, slot = _scores(q, weight, data, layer, batch, layout, rank, first_slot, kernels)
        if layout.shards > 1:
            score, slots = topk_candidates(score, slot, topk, backend=kernels.topk)
            packed = jnp.stack([jax.lax.bitcast_convert_type(score, jnp.int32), slots])
            packed = collectives.gather_ranks(packed, axis=2)
            score = jax.lax.bitcast_convert_type(packed[0], jnp.float32)
            found = merge_candidates(score, packed[1], topk, backend=kernels.topk)
            # Rows are sorted anyway; whoever does not look at slots does not pay for theirs.
            slots = jnp.sort(found, axis=1)
        else:
            found = slots = topk_slots(score, slot, topk, backend=kernels.topk)
        rows, count = _own_rows(found, latent, batch)
        return slots, rows[None], count[None]

    ranks = "ranks" if latent.layout.shards > 1 else None
    whole = plan.spec()
    return Selection(
        *plan.per_device(
            body,
            (whole, whole, pool_spec(layout, plan), whole),
            (whole, plan.spec(ranks), plan.spec(ranks)),
        )(q, weight, index.data, batch)
    )


def _scores(q, weight, data, layer, batch, layout, rank, first_slot, kernels):
    """Scores `[T, columns]` on this rank, −inf where a slot is not visible, and the columns' slots, ascending."""
    if kernels.indexer == "xla":
        score = indexer_scores(q, weight, data, layer, batch.pages, batch.row_of)
        slot = layout.slot(jnp.arange(score.shape[1]), rank)
        visible = (slot >= first_slot) & (slot <= batch.slots[:, None])
        return jnp.where(visible, score, -jnp.inf), slot
    # The visible slots are one range, and so are their columns; the kernel reads nothing beyond it.
    visible = (layout.local_len(first_slot, rank), layout.local_len(batch.slots + 1, rank))
    score = indexer_scores(
        q, weight, data, layer, batch.pages, batch.row_of,
        visible=visible, backend=kernels.indexer, invariant=kernels.invariant,
    )  # fmt: skip
    return score, layout.slot(jnp.arange(score.shape[1]), rank)


def _own_rows(slots: jax.Array, pool: Pool, batch: ForwardBatch) -> tuple[jax.Array, jax.Array]:
    """The rows of `slots [T, K]` on this rank, own ones first, and their count."""
    layout = pool.layout
    place = pool_slots(layout, batch.pages, batch.row_of[:, None], jnp.where(slots == NO_SLOT, -1, slots))
    mine = (place != layout.nowhere) & (layout.owner(place) == collectives.rank(layout))
    rows = jnp.where(mine, layout.row(place), layout.num_rows)
    # Where one rank has all, slots come first in their own order already, and a sort costs as much as their selection.
    return jnp.sort(rows, axis=1) if layout.shards > 1 else rows, jnp.sum(mine, axis=1, dtype=jnp.int32)


def with_boxes(
    batch: ForwardBatch, heads: int, value_width: int, dtype: Any, pool: Pool, options: AttentionOptions, plan: MeshPlan
) -> ForwardBatch:
    """`batch` for calls of `attend` with so many heads over all devices, and parts of `value_width` values in `dtype`.

    Where ranks merge parts through boxes, it has those of the program, which all batches of as many tokens or fewer may share:
    a step's drafts do. What is merged through them must come one after the other.
    """
    tokens = max(batch.tokens.shape[0], batch.pages.shape[0])
    kernels = options.kernels
    # Larger batches have another kernel, which rounds differently.
    wanted = kernels.merge == "mosaic" and not kernels.invariant and boxes.is_ahead(tokens, plan.dcp)
    if pool.layout.shards == 1 or options.backend != "a2a" or not wanted:
        return batch

    def body():
        return jax.tree.map(lambda x: x[None], collectives.open_boxes(tokens, heads // plan.tp, value_width, dtype))

    return batch.replace(boxes=plan.per_device(body, (), plan.spec("devices"))())


def attend(
    q: jax.Array, pool: Pool, layer: jax.Array | int, selection: Selection, batch: ForwardBatch,
    value_width: int, scale: float, options: AttentionOptions, plan: MeshPlan,
) -> jax.Array:  # fmt: skip
    """Attention of `q [T, H, W]` (absorbed, heads sharded over the mesh) over the selected rows of one layer.

    Returns `[T, H, value_width]` in q's dtype, sharded as q. scale: factor of the scores. A token without visible slots
    gives zeros. Source: the absorbed form of MLA (DeepSeek-V2, section 2.1), merged over ranks as `lse_merge` says.
    """
    layout = pool.layout
    rows_move = layout.shards > 1 and _movement(q, pool, batch, options) == "rows"
    through = batch.boxes if layout.shards > 1 and not rows_move else None
    batch = batch.replace(boxes=None)

    def body(q, data, rows, count, slots, batch, through):
        if rows_move:
            out, lse = _attend_gathered(q, data, layer, slots, batch, pool, value_width, scale, options)
            if options.debug:
                _report(layer, pool, q, rows[0], count[0], lse)
            return out.astype(q.dtype)
        flat = data.reshape(data.shape[0], layout.num_rows, data.shape[3])
        if layout.shards > 1:
            q = collectives.gather_ranks(q, axis=1)
        # Parts travel in float32 unless they are dealt out first (a2a), where each is rounded once.
        dtype = jnp.float32 if layout.shards > 1 and options.backend != "a2a" else q.dtype
        out, lse = _part(q, flat, layer, rows[0], count[0], value_width, scale, options.kernels, layout.shards, dtype)
        if options.debug:
            _report(layer, pool, q, rows[0], count[0], lse)
        if layout.shards > 1:
            through = jax.tree.map(lambda x: x[0], through)
            out = collectives.merge_ranks(out, lse, options.backend, options.kernels.merge, through)
        return out.astype(q.dtype)

    heads, whole = plan.spec(None, "heads", None), plan.spec()
    ranks = plan.spec("ranks" if layout.shards > 1 else None)
    own = plan.spec("devices")
    return plan.per_device(body, (heads, pool_spec(layout, plan), ranks, ranks, whole, whole, own), heads)(
        q, pool.data, selection.rows, selection.count, selection.slots, batch, through
    )


def parts(
    q: jax.Array, pool: Pool, layer: jax.Array | int, slots: jax.Array, batch: ForwardBatch,
    value_width: int, scale: float, options: AttentionOptions, plan: MeshPlan,
) -> tuple[jax.Array, jax.Array, jax.Array]:  # fmt: skip
    """What `attend` would merge, for `slots [T, K]` of a `Selection`: every rank's output over its own rows
    `[ranks, T, H, value_width]` float32, its natural-log LSE `[ranks, T, H]`, and its number of rows `[ranks, T]`."""
    shards = pool.layout.shards

    def body(q, data, slots, batch):
        rows, count = _own_rows(slots, pool, batch)
        if shards > 1:
            q = collectives.gather_ranks(q, axis=1)
        flat = data.reshape(data.shape[0], pool.layout.num_rows, data.shape[3])
        out, lse = _part(q, flat, layer, rows, count, value_width, scale, options.kernels, shards)
        return out[None], lse[None], count[None]

    ranks, heads = ("ranks", "group_heads") if shards > 1 else (None, "heads")
    out_specs = plan.spec(ranks, None, heads, None), plan.spec(ranks, None, heads), plan.spec(ranks)
    in_specs = plan.spec(None, "heads", None), pool_spec(pool.layout, plan), plan.spec(), plan.spec()
    return plan.per_device(body, in_specs, out_specs)(q, pool.data, slots, batch)


def _part(q, flat, layer, rows, count, value_width, scale, kernels, shards=1, dtype=jnp.float32):
    """`sparse_mla`, with output 0 and LSE −inf set by count where a token has no rows here.

    Kernels differ in what they report for no keys (LSE 0 or +inf, any output), and a finite LSE would get weight.
    Ours report what is asked for, and a pass over their output would show in the time of a step.
    """
    # Lists are as wide as a selection, but hold the share of it that lies here.
    share = -(-rows.shape[1] // shards)
    backend, config = fitting(kernels.sparse_mla, q.shape, value_width, flat.dtype, dtype, share, kernels.invariant)
    out, lse = sparse_mla(
        q, flat, layer, rows, count,
        value_width=value_width, scale=scale, out_dtype=dtype, config=config, backend=backend,
    )  # fmt: skip
    if kernels.sparse_mla != "xla":
        return out, lse
    some = count[:, None] > 0
    return jnp.where(some[..., None], out, 0), jnp.where(some, lse, -jnp.inf)


def _movement(q: jax.Array, pool: Pool, batch: ForwardBatch, options: AttentionOptions) -> str:
    """Which movement sends fewer bytes: all queries and outputs, or all rows of the block tables."""
    if options.movement is not None:
        return options.movement
    if options.kernels.invariant:
        return "queries"  # parts are summed in another order where rows move
    tokens, heads, width = q.shape
    queries = 2 * tokens * heads * width * q.dtype.itemsize
    rows = batch.pages.shape[0] * batch.pages.shape[1] * pool.layout.page_tokens * pool.record.nbytes
    return "rows" if rows < queries else "queries"


def _attend_gathered(q, data, layer, slots, batch, pool, value_width, scale, options):
    """Attention of this device's own heads and its LSE, with the rows of all ranks gathered one tile at a time."""
    layout = pool.layout
    width = batch.pages.shape[1]
    tile = min(width, max(1, options.tile_tokens // layout.page_tokens))
    parts = []
    for first in range(0, width, tile):
        pages = batch.pages[:, first : first + tile]
        own = data[layer, pages]  # [B, tile, page_rows, W]
        gathered = collectives.stack_ranks(own)  # [ranks, B, tile, page_rows, W]
        flat = gathered.reshape(1, -1, gathered.shape[-1])
        offset = slots - first * layout.page_tokens
        inside = (slots != NO_SLOT) & (offset >= 0) & (offset < pages.shape[1] * layout.page_tokens)
        # The tile is a little pool of its own: per rank, every request's pages in order.
        per_request = pages.shape[1] * layout.page_rows
        row = layout.row(offset) + batch.row_of[:, None] * per_request
        row = layout.owner(offset) * (pages.shape[0] * per_request) + row
        row = jnp.sort(jnp.where(inside, row, flat.shape[1]), axis=1)
        count = jnp.sum(inside, axis=1, dtype=jnp.int32)
        parts.append(_part(q, flat, 0, row, count, value_width, scale, options.kernels))
    if len(parts) == 1:
        return parts[0]
    return merge_parts(jnp.stack([out for out, _ in parts]), jnp.stack([lse for _, lse in parts]))


def _report(layer, pool, q, rows, count, lse):
    """Prints what this device holds of the selection, and the range of its LSE."""
    shapes = f"q {list(q.shape)}, rows {list(rows.shape)}"
    say = functools.partial(_print_report, pool.data.shape[0], pool.layout.shards, shapes)
    jax.debug.callback(say, layer, jax.lax.axis_index("tp"), jax.lax.axis_index("dcp"), count, lse)


def _print_report(num_layers, shards, shapes, layer, tp, dcp, count, lse):
    finite = np.asarray(lse)[np.isfinite(lse)]
    span = f"{finite.min():.4g}…{finite.max():.4g}" if finite.size else "none"
    # In one piece: the devices write at the same time.
    sys.stderr.write(
        f"attention: layer {int(layer)} of {num_layers}, tp {int(tp)}, dcp {int(dcp)}, {shards} shards: "
        f"{int(np.sum(count))} selected rows here, at most {int(np.max(count))} a token; LSE {span}; {shapes}\n"
    )


def heads_sharded(x: jax.Array, plan: MeshPlan) -> jax.Array:
    """Constrains `x [T, H, …]`, of any dtype, to lie with its heads over the whole mesh."""
    return plan.constrain(x, None, "heads", *(None,) * (x.ndim - 2))
