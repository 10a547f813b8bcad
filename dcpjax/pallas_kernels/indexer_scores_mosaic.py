"""Scores of the DSA indexer over paged keys: Mosaic kernel for Hopper.

Keys come by bulk copies, several tiles ahead, so that reading them is what bounds it, and stay where they land: packed
words go from there to registers, where each becomes four float16 values of the tensor cores' first operand. Which values
meet in a product does not matter, so long as queries are in the same order: they are brought into it once. All queries
of a group use a tile while it is there.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from dcpjax.pallas_kernels.records import packed_words

TILE = 64  # keys that one product takes
DIM = 128
_OPERAND = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
_LAYOUT = plgpu.Layout.WGMMA
_SCALAR = plgpu.Layout.WG_SPLAT(())


@dataclasses.dataclass(frozen=True)
class MosaicConfig:
    """tiles: of a program. ahead: tiles that are read ahead."""

    tiles: int = 32
    ahead: int = 4

    @classmethod
    def choose(cls, groups: int, columns: int, packed: bool) -> "MosaicConfig":
        """For `groups` groups of tokens over `columns` keys: enough programs for every multiprocessor several times."""
        tiles = 32
        while tiles > 4 and groups * columns < TILE * tiles * 132 * 12:
            tiles //= 2
        return cls(tiles, 4 if packed else 3)


def serves(dim: int, heads: int, page: int, dtype: jnp.dtype) -> bool:
    """Whether the kernel has keys of `dim` values in `dtype`, uint32 for packed ones, in pages of `page` rows."""
    step = {jnp.dtype(jnp.uint32): 32, jnp.dtype(jnp.bfloat16): 8}.get(jnp.dtype(dtype))
    if step is None or dim != DIM or heads > 64:
        return False
    return page % step == 0 and (TILE % page == 0 or page % TILE == 0)


def scores_mosaic(
    q: jax.Array,
    weight: jax.Array,
    pool: jax.Array,
    layer: jax.Array | int,
    pages: jax.Array,
    row_of: jax.Array,
    visible: tuple[jax.Array | int, jax.Array] | None,
    queries: int,
    config: MosaicConfig | None = None,
) -> jax.Array:
    """`indexer_scores` on the Mosaic backend, with its shapes and dtypes: `[T, P·G]` float32, `queries` tokens a group.

    Raises `NotImplementedError` for what `serves` has not.
    """
    tokens, heads, dim = q.shape
    group = pool.shape[2]
    packed = pool.dtype == jnp.uint32
    if not serves(dim, heads, group, pool.dtype) or q.dtype != jnp.bfloat16:
        raise NotImplementedError(
            f"queries {q.shape} {q.dtype} and pages of {group} keys {pool.dtype}: the kernel takes bfloat16, at most 64 "
            f"heads of {DIM}, and pages of 32 or a multiple of 64 keys, or 8 or 16 of bfloat16; use backend triton or xla"
        )
    columns = pages.shape[1] * group
    groups = pl.cdiv(tokens, queries)
    if config is None:
        config = MosaicConfig.choose(groups, columns, packed)
    if packed:
        q, weight = halved(q, weight)
    # Copies are of whole 128 bytes; a surplus head weighs nothing.
    surplus = -heads % 32
    if surplus:
        q, weight = (jnp.pad(x, ((0, 0), (0, surplus), *((0, 0),) * (x.ndim - 2))) for x in (q, weight))
        heads += surplus
    first, end = (0, jnp.full(tokens, columns, jnp.int32)) if visible is None else visible
    scalars = jnp.stack([jnp.asarray(layer, jnp.int32) * pool.shape[1], jnp.asarray(first, jnp.int32)])
    # Whole pages of words are copied as they are; rows of bfloat16 as tiles that products read where they land.
    width = pool.shape[3]
    flat = pool.reshape(-1, group * width) if packed else pool.reshape(-1, width)
    keys = (
        plgpu.SMEM((config.ahead, TILE * width), jnp.uint32)
        if packed
        else plgpu.SMEM((config.ahead, TILE, width), jnp.bfloat16, transforms=_OPERAND)
    )
    copies = pl.cdiv(TILE, group)
    body = functools.partial(
        _kernel, tokens=tokens, queries=queries, heads=heads, group=group, columns=columns, config=config
    )
    score = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((tokens * columns,), jnp.float32),
        grid=(pl.cdiv(columns, TILE * config.tiles), groups),
        grid_names=("chunk", "group"),
        scratch_types=[
            plgpu.SMEM((queries * heads, dim), q.dtype, transforms=_OPERAND),
            plgpu.SMEM((queries * heads,), jnp.float32),
            keys,
            plgpu.Barrier(num_arrivals=2 * queries),
            plgpu.Barrier(num_arrivals=copies, num_barriers=config.ahead),
        ],
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane, reduction_scratch_bytes=512
        ),
    )(
        q,
        weight,
        flat,
        pages.reshape(-1),
        row_of,
        end,
        scalars,
    )
    return score.reshape(tokens, columns)


def halved(q, weight):
    """Queries in float16 in the order of the packed values, and weights that make good what keeps them in its range."""
    largest = jnp.max(jnp.abs(q.astype(jnp.float32)), axis=-1)
    _, exponent = jnp.frexp(jnp.where(largest > 0, largest, 1.0))
    q = (q.astype(jnp.float32) * jnp.ldexp(jnp.float32(1), -exponent)[..., None]).astype(jnp.float16)
    return in_word_order(q), weight * jnp.ldexp(jnp.float32(1), exponent)


def in_word_order(q: jax.Array) -> jax.Array:
    """Values `[…, 128]` in the order in which the kernel takes those of a packed key.

    Of the four threads that share a row, thread t has words 8t to 8t + 7; its word i gives two pairs, of the halves of
    the word, and byte b of word w is value 32b + w.
    """
    *lead, dim = q.shape
    parts = q.reshape(*lead, 2, 2, 4, 8)  # half, byte of it, thread, word
    n = len(lead)
    return jnp.transpose(parts, (*range(n), n + 3, n, n + 2, n + 1)).reshape(*lead, dim)


def _kernel(
    q_ref,
    w_ref,
    k_ref,
    pages_ref,
    row_ref,
    end_ref,
    scalar_ref,
    out_ref,
    q_smem,
    w_smem,
    k_smem,
    q_barrier,
    k_barrier,
    *,
    tokens,
    queries,
    heads,
    group,
    columns,
    config,
):
    """Program (chunk, group): columns of one chunk, tokens `group · queries …`."""
    packed = k_smem.dtype == jnp.uint32
    places, copies = columns // group, pl.cdiv(TILE, group)  # pages of a row, and of a tile
    chunk, mine = jax.lax.axis_index("chunk"), jax.lax.axis_index("group")
    start, base = mine * queries, chunk * (TILE * config.tiles)
    tiles = jnp.minimum(config.tiles, jax.lax.div(columns - base + (TILE - 1), TILE))
    # Past the last token the last one stands in; it computes the same and stores nothing.
    at = [jnp.minimum(start + j, tokens - 1) for j in range(queries)]
    for j, token in enumerate(at):
        part = pl.ds(j * heads, heads)
        plgpu.copy_gmem_to_smem(q_ref.at[token], q_smem.at[part], q_barrier)
        plgpu.copy_gmem_to_smem(w_ref.at[token], w_smem.at[part], q_barrier)
    rows = [row_ref[t] for t in at]
    ends = [jnp.minimum(end_ref[t], columns) for t in at]
    page0, first = scalar_ref[0], scalar_ref[1]
    plgpu.barrier_wait(q_barrier)

    def pages_of(row, i):
        """Pages of a tile, the last one of the row for places past it."""
        place = jax.lax.div(base + i * TILE, group)
        last = places - 1
        return [page0 + pages_ref[row * places + jnp.minimum(place + part, last)] for part in range(copies)]

    def fetch(found, i, slot):
        begin = 0 if group <= TILE else jax.lax.rem(base + i * TILE, group)
        size = min(TILE, group)
        for part, page in enumerate(found):
            if packed:
                words = size * packed_words(DIM)
                source = k_ref.at[page, pl.ds(begin * packed_words(DIM), words)]
                target = k_smem.at[slot, pl.ds(part * words, words)]
                options = {"oob_mode": plgpu.OOBFillMode.PROMISE_IN_BOUNDS}
            else:
                source = k_ref.at[pl.ds(page * group + begin, size)]
                target = k_smem.at[slot, pl.ds(part * size, size)]
                options = {}
            plgpu.copy_gmem_to_smem(source, target, k_barrier.at[slot], **options)

    def pass_of(turn, _):
        """The queries whose row is first met at token `turn` of the group."""
        row = row_ref[jnp.minimum(start + turn, tokens - 1)]
        same = [r == row for r in rows]
        count, last = tiles, jnp.int32(0)
        for j in range(queries):
            count = jnp.where(same[j] & (j < turn), 0, count)
            last = jnp.maximum(last, jnp.where(same[j], ends[j], 0))
        live = jnp.clip(jax.lax.div(last - base + (TILE - 1), TILE), 0, count)

        def store(j, i, value, low, high):
            column = base + i * TILE
            size = jnp.where(same[j] & (start + j < tokens), columns - column, 0)
            _put(out_ref, value, at[j], columns, column, size, low - column, high - column)

        def tile(i, following):
            slot = jax.lax.rem(i, config.ahead)
            plgpu.barrier_wait(k_barrier.at[slot])
            scale = None
            if packed:
                operand, scale = _unpack(k_smem.at[slot])
                pl.when(i + config.ahead < live)(lambda: fetch(following, i + config.ahead, slot))
            else:
                operand = k_smem.at[slot]
            for j in range(queries):
                part = pl.ds(j * heads, heads)

                def product(acc, part=part):
                    plgpu.wgmma(acc, operand, q_smem.at[part].transpose((1, 0)))
                    return acc[...]

                dot = pl.run_scoped(product, plgpu.ACC((TILE, heads), jnp.float32))
                weights = plgpu.load(w_smem.at[part], layout=_LAYOUT.reduce(0))
                score = jnp.maximum(dot, 0.0) * jax.lax.broadcast_in_dim(weights, (TILE, heads), [1])
                score = jnp.sum(score, axis=1)
                store(j, i, score if scale is None else score * scale, first, ends[j])
            if not packed:
                _meet()
                pl.when(i + config.ahead < live)(lambda: fetch(following, i + config.ahead, slot))
            # Looked up a tile before they are needed.
            return pages_of(row, i + config.ahead + 1)

        def blank(i, _):
            nothing = plgpu.layout_cast(jnp.zeros((TILE,), jnp.float32), _LAYOUT.reduce(1))
            for j in range(queries):
                store(j, i, nothing, columns, 0)
            return ()

        for slot in range(config.ahead):
            pl.when(slot < live)(lambda slot=slot: fetch(pages_of(row, slot), slot, slot))
        jax.lax.fori_loop(0, live, tile, pages_of(row, config.ahead))
        jax.lax.fori_loop(live, count, blank, ())
        return ()

    if queries == 1:
        pass_of(0, ())
    else:
        jax.lax.fori_loop(0, queries, pass_of, ())


def _meet():
    """All threads have read before any goes on."""

    @plgpu.inline_mgpu()
    def go(_):
        utils.warpgroup_barrier()

    go()


def _constant(value):
    return arith.constant(ir.IntegerType.get_signless(32), value)


def _place():
    """Of this thread: its first row of a tile, the other being 8 further, and its number among the four of the row."""
    thread = arith.remui(utils.thread_idx(), _constant(128))
    lane, warp = arith.remui(thread, _constant(32)), arith.divui(thread, _constant(32))
    row = arith.addi(arith.muli(warp, _constant(16)), arith.divui(lane, _constant(4)))
    return row, arith.remui(lane, _constant(4))


def _unpack(words_ref):
    """Keys `[64, 128]` float16 in registers, in the order of `in_word_order`, and their scales, from a tile's words.

    Rows are 33 words apart, so that the threads of a warp read from different banks. All have read when it returns.
    """
    bytes_ = 4 * packed_words(DIM)

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(),),
        return_type=(
            plgpu.ShapeDtypeStruct((TILE, DIM), jnp.float16, layout=_LAYOUT),
            plgpu.ShapeDtypeStruct((TILE,), jnp.float32, layout=_LAYOUT.reduce(1)),
        ),
    )
    def go(_, words):
        i32, f32 = ir.IntegerType.get_signless(32), ir.F32Type.get()
        row, thread = _place()
        begin = arith.addi(llvm.ptrtoint(i32, utils.memref_ptr(words)), arith.muli(row, _constant(bytes_)))
        mine = arith.addi(begin, arith.muli(thread, _constant(32)))

        def load(kind, letter, base, offset):
            code = f"ld.shared.b32 $0, [$1 + {offset}];"
            return llvm.inline_asm(kind, [base], code, f"={letter},r", has_side_effects=True)

        halves = (0, 8 * bytes_)
        word = [[load(i32, "r", mine, half + 4 * i) for i in range(8)] for half in halves]
        scale = [load(f32, "f", begin, half + DIM) for half in halves]
        utils.warpgroup_barrier()
        pair = ir.Type.parse("!llvm.struct<(i32, i32)>")
        code = "{ .reg .b16 a, b; mov.b32 {a, b}, $2; cvt.rn.f16x2.e4m3x2 $0, a; cvt.rn.f16x2.e4m3x2 $1, b; }"
        keys = np.empty(mgpu.WGMMA_LAYOUT.registers_shape((TILE, DIM)), dtype=object)
        of = keys.reshape(DIM // 8, 2)
        for half in range(2):
            for i in range(8):
                both = llvm.inline_asm(pair, [word[half][i]], code, "=r,=r,r")
                for x in range(2):
                    value = llvm.extractvalue(i32, both, [x])
                    of[2 * i + x, half] = llvm.bitcast(ir.VectorType.get((2,), ir.F16Type.get()), value)
        scales = np.empty(mgpu.WGMMA_ROW_LAYOUT.registers_shape((TILE,)), dtype=object)
        for half in range(2):
            scales.reshape(2)[half] = vector.broadcast(ir.VectorType.get((1,), f32), scale[half])
        return tuple(
            mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)
            for registers, layout in ((keys, mgpu.WGMMA_LAYOUT), (scales, mgpu.WGMMA_ROW_LAYOUT))
        )

    return go(words_ref)


def _put(out_ref, value, token, columns, column, size, low, high):
    """Stores the first `size` of `value [64]` to a token's columns, −inf for those that are not in `low … high`."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), _LAYOUT.reduce(1), *(_SCALAR,) * 5))
    def go(_, out, value, token, column, size, low, high):
        i64, f32 = ir.IntegerType.get_signless(64), ir.F32Type.get()
        token, column, size, low, high = (x.registers.flat[0] for x in (token, column, size, low, high))
        row, thread = _place()
        place = arith.addi(arith.extsi(i64, column), arith.extsi(i64, row))
        place = arith.addi(place, arith.muli(arith.extsi(i64, token), arith.constant(i64, columns)))
        address = arith.addi(llvm.ptrtoint(i64, utils.memref_ptr(out)), arith.muli(place, arith.constant(i64, 4)))
        one = arith.cmpi(arith.CmpIPredicate.eq, thread, _constant(0))
        for half, x in enumerate(value.registers.reshape(2)):
            if isinstance(x.type, ir.VectorType):
                x = vector.extract(x, dynamic_position=[], static_position=[0])
            mine = arith.addi(row, _constant(8 * half))
            less = arith.CmpIPredicate.slt
            seen = arith.andi(arith.cmpi(arith.CmpIPredicate.sge, mine, low), arith.cmpi(less, mine, high))
            stored = arith.extui(ir.IntegerType.get_signless(32), arith.andi(one, arith.cmpi(less, mine, size)))
            code = f"{{ .reg .pred p; setp.ne.u32 p, $2, 0; @p st.global.f32 [$0 + {32 * half}], $1; }}"
            args = [address, arith.select(seen, x, arith.constant(f32, float("-inf"))), stored]
            llvm.inline_asm(ir.Type.parse("!llvm.void"), args, code, "l,f,r", has_side_effects=True)

    scalars = (jnp.asarray(x, jnp.int32) for x in (token, column, size, low, high))
    go(out_ref, value, *scalars)
