"""Sparse MLA with LSE on Hopper's matrix instructions: one block is up to 64 heads of one token over one split of its list, or
of several such parts in turn, whose rows are brought while the part before is still computed.

A producer brings tiles of 64 rows into two slots. Each of two consumers holds half of the output's columns and computes the
scores of every other tile; what its softmax gives goes to the other one through shared memory. So no score is computed
twice, and one consumer's softmax runs beside the other's products. The running maximum follows the order of the tiles in
both, and splits are merged by LSE, in order: bits repeat. The blocks of a list merge them as a cluster, or a second kernel
does.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from dcpjax.pallas_kernels import mosaic_cluster
from dcpjax.pallas_kernels.lse_merge_triton import MergeConfig, merge_splits
from dcpjax.pallas_kernels.mosaic_cluster import Shares
from dcpjax.pallas_kernels.mosaic_config import HEADS, PAIR, MosaicMLAConfig, has_shape
from dcpjax.pallas_kernels.mosaic_ptx import TRANSFORMS
from dcpjax.pallas_kernels.mosaic_records import RecordRows
from dcpjax.pallas_kernels.mosaic_rows import TILE, AsyncRows, PlainRows, Source
from dcpjax.pallas_kernels.records import packed_words, unpack_rows

_LOG2_E = 1.0 / math.log(2.0)
# Lower than any score; not −inf, whose difference with itself is NaN.
_LOWEST = -1e30


def sparse_mla_mosaic(
    q: jax.Array, pool: jax.Array, layer: jax.Array | int, rows: jax.Array, count: jax.Array, *,
    value_width: int, scale: float, out_dtype: Any, config: MosaicMLAConfig,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """The kernel behind `sparse_mla`, with its arguments: `out [T, H, value_width]` out_dtype and LSE `[T, H]` float32.

    Raises `NotImplementedError` for shapes that it has not, and `ValueError` for a config that cannot be.
    """
    tokens, heads, width = q.shape
    rope = width - value_width
    if not has_shape(heads, value_width, rope, pool.dtype) or q.dtype != jnp.bfloat16:
        raise NotImplementedError(
            f"the kernel for Hopper has 8, 16, 32 or whole 64 heads over bfloat16 or packed rows of 512 and 64, got {heads} "
            f"{q.dtype} over {pool.dtype} rows of {value_width} and {rope}; use backend triton"
        )
    words = packed_words(value_width, rope) if pool.dtype == jnp.uint32 else width
    if pool.shape[2] != words:
        raise ValueError(f"rows of {value_width} and {rope} in {pool.dtype} are {words} wide, got {pool.shape[2]}")
    if config.split_rows is not None and config.split_rows % PAIR:
        raise ValueError(f"split_rows {config.split_rows} must be a multiple of {PAIR}")
    spare = -rows.shape[1] % PAIR
    if spare:
        rows = jnp.pad(rows, ((0, 0), (0, spare)))
    out, lse = _parts(q, pool, layer, rows, count, scale, out_dtype, config)
    if out.shape[1] == 1:
        return out[:, 0], lse[:, 0]
    merge = MergeConfig.choose(tokens * heads, value_width, config.interpret)
    return merge_splits(out, lse, out_dtype=out_dtype, config=merge)


def _parts(q, pool, layer, rows, count, scale, out_dtype, config):
    """Outputs `[T, splits, H, value]` and LSE `[T, splits, H]` of the splits, or of one where a cluster merges them. The LSE of
    an empty one is −inf; its output is 0 where there is no other, and else not written."""
    tokens, heads, width = q.shape
    value, num_rows = width - 64, pool.shape[1]
    real = min(heads, HEADS)
    fixed = config.split_rows is not None
    splits = pl.cdiv(rows.shape[1], config.split_rows) if fixed else min(config.splits, rows.shape[1] // PAIR)
    # As in Triton: parts that are rounded are half the bytes to merge.
    dtype = jnp.dtype(out_dtype) if fixed or splits == 1 else q.dtype if splits <= 16 else jnp.dtype(jnp.float32)
    # What leaves through one slot must fit there.
    in_turn = min(config.in_turn, tokens * splits) if dtype == q.dtype else 1
    packed = pool.dtype == jnp.uint32
    if packed and config.interpret:
        pool, packed = unpack_rows(pool, value, width - value).astype(q.dtype), False
    tiles = PlainRows(width) if config.interpret else RecordRows() if packed else AsyncRows(width)
    # Of clusters the interpreter knows nothing.
    clustered = config.clustered(splits, heads) and not config.interpret and jnp.dtype(out_dtype) == jnp.bfloat16
    clustered = clustered and mosaic_cluster.has_room()
    if config.cluster and not clustered:  # blocks that share a part would only have less to send to each other
        config = dataclasses.replace(config, columns=1)
    half = value // (2 * config.columns)
    shares = Shares(splits, real, half)
    runs = tokens if clustered else pl.cdiv(tokens * splits, in_turn)
    grid, grid_names = _grid(runs, heads // real * config.columns)

    def kernel(
        q_ref, pool_ref, layer_ref, rows_ref, count_ref, out_ref, lse_ref,
        query, keys_or_out, weights, stats, loaded, free, ready, done, seen, landed,
    ):  # fmt: skip
        keys, (*_, staged) = keys_or_out
        top = stats.at[0]
        block, warpgroup = lax.axis_index("block"), lax.axis_index("warpgroup")
        block_heads = pl.ds(lax.div(block, jnp.int32(config.columns)) * real, real)
        begin = lax.axis_index("run") * (splits if clustered else in_turn)
        if clustered:
            begin += lax.axis_index("split")
        end = jnp.minimum(begin + in_turn, tokens * splits)
        base = layer_ref[0] * num_rows

        def part_of(item):
            """A part's token and split, rows of the token's list, and pairs of tiles before and after the part."""
            token, split = lax.div(item, jnp.int32(splits)), lax.rem(item, jnp.int32(splits))
            number = count_ref[token]
            return token, split, number, *_bounds(number, split, splits, config)

        # What all wait for first is asked for first.
        first_part = part_of(begin)
        tiles.start(landed)

        def source_of(token, number, pair):
            return Source(pool_ref, rows_ref, token, pair * PAIR, number, base)

        def consumer(me):
            other = 1 - me
            layout = plgpu.Layout.WGMMA
            a_head = layout.reduce(1)
            plgpu.set_max_registers(tiles.registers[0], action="increase")
            column = plgpu.broadcasted_iota(jnp.int32, (HEADS, TILE), 1, layout=layout)
            mine = pl.ds((2 * lax.rem(block, jnp.int32(config.columns)) + me) * half, half)

            def ask(token):
                for i in range(HEADS // real):
                    into = query.at[0, pl.ds(i * real, real)]
                    plgpu.copy_gmem_to_smem(q_ref.at[token, block_heads], into, loaded)

            def scores(turn, left):
                tiles.wait(landed, me, turn)

                def product(score):
                    plgpu.wgmma(score, query.at[tiles.index(0)], keys.at[tiles.index(me)].transpose((1, 0)))
                    return score[...]

                score = pl.run_scoped(product, plgpu.ACC((HEADS, TILE), jnp.float32))
                return jnp.where(column < left, score * (scale * _LOG2_E), _LOWEST)

            def own(score, carry, kept, ahead):
                values, old, sum_ = carry
                new = jnp.maximum(old, score.max(axis=1))
                keep = jnp.exp2(old - new)
                # Without any row the maximum is the lowest, and all must be 0.
                weight = jnp.exp2(score - _columns(jnp.maximum(new, _LOWEST / 2), score))
                sum_ = sum_ * keep + weight.sum(axis=1)
                weight = weight.astype(q.dtype)
                weights[0] = weight
                top[...] = new
                plgpu.commit_smem()
                plgpu.barrier_arrive(ready.at[me])
                if me == 1 and kept:  # both have these scores, the last ones
                    ahead()
                return add(values, keep, weight, me, kept), new, sum_

            def others(turn, carry, kept):
                values, old, sum_ = carry
                plgpu.barrier_wait(ready.at[other])
                new = plgpu.load(top, layout=a_head)
                keep = jnp.exp2(old - new)
                tiles.wait(landed, other, turn)
                return add(values, keep, None, other, kept), new, sum_ * keep

            def add(values, keep, weight, slot, kept):
                """Values so far, reduced to `keep`, and those of a tile, which is then free, unless it is the last one,
                `kept` for the output. The other's weights are in shared memory, own ones still in registers."""
                values = values * _columns(keep, values)

                def product(total, weight):
                    weight = weights.at[tiles.index(0)] if weight is None else weight
                    plgpu.wgmma(total, weight, keys.at[tiles.index(slot), :, mine])

                if config.interpret:  # which has neither sums that begin with something, nor operands in registers
                    empty = plgpu.ACC((HEADS, half), jnp.float32)
                    values += pl.run_scoped(lambda total: (product(total, None), total[...])[1], empty)
                else:
                    values = pl.run_state(lambda total: product(total, weight))(plgpu.ACC.init(values))
                if slot == 0 or not kept:
                    plgpu.barrier_arrive(free.at[slot])
                return values

            def together(token, split, some, values, lse):
                """Merges a share of the outputs that all blocks of the list have: this one `some`, or none."""
                values = values.astype(dtype)
                mosaic_cluster.wait()
                if me == 0:
                    # What is not a number counts as empty, as it does in `merge_splits`.
                    shares.send_scores(stats.at[3], jnp.where(lse < jnp.inf, lse, -jnp.inf), split)
                pl.when(some)(lambda: shares.send(keys.at[0], values, split, me))
                mosaic_cluster.arrive()
                mosaic_cluster.wait()
                out, lse = out_ref.at[token, 0], lse_ref.at[token, 0]
                shares.merge(keys.at[0], stats.at[3], out, lse, split, block_heads.start, mine.start, me)

            def part(item, turns):
                """One part, from its first product to its output, after `turns` pairs of tiles."""
                token, split, number, since, until = first_part if in_turn == 1 else part_of(item)

                def first_tiles():
                    if packed:
                        tiles.help(landed, source_of(token, number, since), keys, me)

                if in_turn == 1:

                    @pl.when(until > since)
                    def _():
                        if me == 0:
                            ask(token)
                        first_tiles()
                        plgpu.barrier_wait(loaded)

                else:
                    before, *_, since_before, until_before = part_of(jnp.maximum(item - 1, begin))
                    after, *_, since_after, until_after = part_of(jnp.minimum(item + 1, end - 1))
                    asked = (item > begin) & (until_before > since_before)
                    if me == 1:
                        pl.when((until > since) & jnp.logical_not(asked))(lambda: ask(token))
                    pl.when((until > since) & (turns == 0))(first_tiles)
                    here = asked & (before == token)
                    pl.when((until > since) & jnp.logical_not(here))(lambda: plgpu.barrier_wait(loaded))

                def ahead():
                    pl.when((after != token) & (until_after > since_after))(lambda: ask(after))

                def first_done(i):
                    if clustered:  # others may write to the first slot
                        pl.when(i == until - 1)(mosaic_cluster.arrive)

                def pair(i, carry, kept=False):
                    turn = turns + i - since
                    left = number - (2 * i + me) * TILE
                    if me == 0:
                        carry = own(scores(turn, left), carry, kept, ahead)
                        first_done(i)
                        return others(turn, carry, kept)
                    if config.early:
                        score = scores(turn, left)
                        carry = others(turn, carry, kept)
                        first_done(i)
                        return own(score, carry, kept, ahead)
                    carry = others(turn, carry, kept)
                    first_done(i)
                    return own(scores(turn, left), carry, kept, ahead)

                if clustered:
                    pl.when(until == since)(mosaic_cluster.arrive)
                nothing = (
                    plgpu.layout_cast(jnp.zeros((HEADS, half), jnp.float32), layout),
                    plgpu.layout_cast(jnp.full((HEADS,), _LOWEST, jnp.float32), a_head),
                    plgpu.layout_cast(jnp.zeros((HEADS,), jnp.float32), a_head),
                )
                if in_turn == 1:
                    values, highest, sum_ = lax.fori_loop(since, until, pair, nothing)
                else:  # the last pair apart: a loop is slower where it asks each time
                    last = jnp.maximum(until - 1, since)
                    carry = lax.fori_loop(since, last, pair, nothing)
                    values, highest, sum_ = lax.fori_loop(last, until, functools.partial(pair, kept=True), carry)
                if in_turn > 1:  # the other has read what it must of the part before
                    pl.when(item > begin)(lambda: plgpu.barrier_wait(seen.at[other]))
                stats[1 + me] = sum_
                plgpu.barrier_arrive(done.at[me])
                plgpu.barrier_wait(done.at[other])
                sum_ += plgpu.load(stats.at[1 + other], layout=a_head)
                if in_turn > 1:
                    plgpu.barrier_arrive(seen.at[me])
                safe = jnp.where(sum_ > 0, sum_, 1.0)
                if clustered:
                    lse = jnp.where(sum_ > 0, highest + jnp.log2(safe), -jnp.inf)
                    return together(token, split, until > since, values * _columns(1.0 / safe, values), lse)
                if me == 0:
                    if in_turn > 1:
                        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                    stats[3] = jnp.where(sum_ > 0, (highest + jnp.log2(safe)) * math.log(2.0), -jnp.inf)

                def write():
                    staged[me] = (values * _columns(1.0 / safe, values)).astype(dtype)
                    plgpu.commit_smem()
                    plgpu.copy_smem_to_gmem(staged.at[me, pl.ds(0, real)], out_ref.at[token, split, block_heads, mine])
                    if in_turn > 1:
                        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                        plgpu.barrier_arrive(free.at[1])

                def write_nothing():
                    # The slot may have the next part's rows, but nobody has weights.
                    weights[0] = plgpu.layout_cast(jnp.zeros((HEADS, TILE), dtype), layout)
                    plgpu.commit_smem()
                    for i in range(2 * half // TILE):
                        here = pl.ds(2 * lax.rem(block, jnp.int32(config.columns)) * half + i * TILE, TILE)
                        plgpu.copy_smem_to_gmem(
                            weights.at[0, pl.ds(0, real)], out_ref.at[token, split, block_heads, here]
                        )
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)

                if splits == 1 and in_turn == 1:
                    write()
                else:
                    pl.when(until > since)(write)
                if splits == 1 and in_turn > 1 and me == 0:
                    pl.when(until == since)(write_nothing)
                if me == 0:
                    plgpu.commit_smem()
                    plgpu.copy_smem_to_gmem(stats.at[3, pl.ds(0, real)], lse_ref.at[token, split, block_heads])
                if in_turn == 1:
                    plgpu.wait_smem_to_gmem(0)
                return turns + until - since

            if in_turn == 1:
                part(begin, 0)
            else:
                lax.fori_loop(begin, end, part, jnp.int32(0))
                plgpu.wait_smem_to_gmem(0)
                plgpu.barrier_wait(seen.at[other])

        pl.when(warpgroup == 0)(lambda: consumer(0))
        pl.when(warpgroup == 1)(lambda: consumer(1))

        @pl.when(warpgroup == 2)
        def _producer():
            plgpu.set_max_registers(tiles.registers[1], action="decrease")
            parts, total = [], jnp.int32(0)
            for i in range(in_turn):
                token, _, number, since, until = part_of(jnp.minimum(begin + i, end - 1)) if i else first_part
                parts.append((total, token, number, since))
                total += jnp.where(begin + i < end, until - since, 0)

            def source(turn):
                """Of the last part that has begun: it is no empty one."""
                begun, token, number, since = parts[0]
                for start, *more in parts[1:]:
                    later = turn >= start
                    begun, token, number, since = (
                        jnp.where(later, new, old)
                        for new, old in zip((start, *more), (begun, token, number, since), strict=True)
                    )
                return source_of(token, number, since + turn - begun)

            def when_free(slot, turn):
                pl.when(turn > 0)(lambda: plgpu.barrier_wait(free.at[slot]))

            tiles.bring(landed, source, total, keys, when_free)
            if clustered:
                mosaic_cluster.arrive()

            @pl.when(total > 0)
            def _():
                for slot in range(2):
                    plgpu.barrier_wait(free.at[slot])

            if clustered:
                mosaic_cluster.wait()

    tile = plgpu.SMEM((TILE, width), q.dtype, transforms=TRANSFORMS)
    out_transforms = plgpu.TilingTransform((8, 128 // dtype.itemsize)), plgpu.SwizzleTransform(128)
    out_tile = plgpu.SMEM((2, HEADS, half), dtype, transforms=out_transforms)
    parts = 1 if clustered else splits
    return plgpu.kernel(
        kernel,
        out_type=(
            jax.ShapeDtypeStruct((tokens, parts, heads, value), dtype),
            jax.ShapeDtypeStruct((tokens, parts, heads), jnp.float32),
        ),
        grid=grid,
        grid_names=grid_names,
        cluster=(splits,) if clustered else (),
        cluster_names=("split",) if clustered else (),
        num_threads=3,
        thread_name="warpgroup",
        interpret=plgpu.InterpretGPUParams() if config.interpret else None,
        scratch_types=[
            plgpu.SMEM((1, HEADS, width), q.dtype, transforms=TRANSFORMS),
            plgpu.RefUnion(
                plgpu.SMEM((2, TILE, width), q.dtype, transforms=TRANSFORMS),
                # Parts in turn leave through the second slot; the first has the next one's rows already.
                (tile, out_tile) if in_turn > 1 else (out_tile,),
            ),
            plgpu.SMEM((1, HEADS, TILE), q.dtype, transforms=TRANSFORMS),
            plgpu.SMEM((4, HEADS), jnp.float32),
            plgpu.Barrier(num_arrivals=HEADS // real),
            plgpu.Barrier(num_arrivals=2, num_barriers=2),
            plgpu.Barrier(num_barriers=2),
            plgpu.Barrier(num_barriers=2),
            plgpu.Barrier(num_barriers=2),
            tiles.scratch(),
        ],
        compiler_params=plgpu.CompilerParams(
            approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane, reduction_scratch_bytes=0
        ),
    )(q, pool.reshape(-1, pool.shape[2]), jnp.asarray(layer, jnp.int32).reshape(1), rows, count)


def _grid(runs, blocks):
    """Axes of the grid, and their names. Blocks of one token are neighbours, for they read the same rows, unless there are more
    runs than CUDA allows on any axis but the last one here."""
    return ((runs, blocks), ("run", "block")) if runs <= 65_535 else ((blocks, runs), ("block", "run"))


def _columns(x, like):
    """`x [heads]` along all columns of `like`."""
    return lax.broadcast_in_dim(x, like.shape, [0])


def _bounds(number, split, splits, config):
    """First and last pair of tiles of a split of a list of `number` rows."""
    pairs = lax.div(number + (PAIR - 1), jnp.int32(PAIR))
    if config.split_rows is None:
        share = lax.div(pairs + (splits - 1), jnp.int32(splits))
    else:
        share = jnp.int32(config.split_rows // PAIR)
    first = jnp.minimum(split * share, pairs)
    return first, jnp.minimum(first + share, pairs)
