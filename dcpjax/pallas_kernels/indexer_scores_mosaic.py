"""Scores of the DSA indexer over paged keys: Mosaic kernel for Hopper.

Keys come by bulk copies, several tiles ahead, so that reading them is what bounds it, and stay where they land: packed
words go from there to registers, where each becomes four float16 values of the tensor cores' first operand. Which values
meet in a product does not matter, so long as queries are in the same order. All queries of a group use a tile while it
is there. The programs of a group take its tiles in turn, so that they share whatever is visible of it.
"""

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
from jaxlib.mlir.dialects import math as mlir_math

from dcpjax.pallas_kernels import mosaic_copies
from dcpjax.pallas_kernels.mosaic_config import DIM, KEYS, MosaicScoresConfig, has_keys
from dcpjax.pallas_kernels.mosaic_ptx import SCALAR, TRANSFORMS, address_of, constant32, shared_place, thread_number
from dcpjax.pallas_kernels.mosaic_queries import ROWS, bring_queries
from dcpjax.pallas_kernels.records import packed_words

_LAYOUT = plgpu.Layout.WGMMA
_LANES = 4  # threads that share a row of a product
_WIDEST = 128  # columns of a product: its sums take half as many registers of a thread


def scores_mosaic(
    q: jax.Array,
    weight: jax.Array,
    pool: jax.Array,
    layer: jax.Array | int,
    pages: jax.Array,
    row_of: jax.Array,
    visible: tuple[jax.Array | int, jax.Array] | None,
    queries: int,
    config: MosaicScoresConfig | None = None,
) -> jax.Array:
    """`indexer_scores` on the Mosaic backend, with its shapes and dtypes: `[T, P·G]` float32, `queries` tokens a group.

    Raises `NotImplementedError` for what `has_keys` has not.
    """
    tokens, heads, dim = q.shape
    group = pool.shape[2]
    packed = pool.dtype == jnp.uint32
    if not has_keys(dim, heads, group, pool.dtype) or q.dtype != jnp.bfloat16:
        raise NotImplementedError(
            f"queries {q.shape} {q.dtype} and pages of {group} keys {pool.dtype}: the kernel takes bfloat16, at most 64 "
            f"heads of {DIM}, and pages of 32 or a multiple of 64 keys, or 8 or 16 of bfloat16; use backend triton or xla"
        )
    columns = pages.shape[1] * group
    groups = pl.cdiv(tokens, queries)
    if config is None:
        config = MosaicScoresConfig.choose(groups, columns, packed, queries, heads)
    first, end = (0, jnp.full(tokens, columns, jnp.int32)) if visible is None else visible
    rows = queries * pl.cdiv(heads, ROWS) * ROWS
    # Whole pages of words are copied as they are; rows of bfloat16 as tiles that products read where they land.
    width = pool.shape[3]
    flat = pool.reshape(-1, group * width) if packed else pool.reshape(-1, width)
    keys = (
        plgpu.SMEM((config.ahead, KEYS * width), jnp.uint32)
        if packed
        else plgpu.SMEM((config.ahead, KEYS, width), jnp.bfloat16, transforms=TRANSFORMS)
    )
    # A single query is copied as it is, for which rows and weights must be whole pieces, or tiles where none is changed.
    copied = queries == 1 and heads % (4 if packed else ROWS) == 0
    if copied and not packed:
        q = q.reshape(-1, dim)
    body = functools.partial(
        _kernel,
        tokens=tokens,
        queries=queries,
        num_pages=pool.shape[1],
        num_rows=pages.shape[0],
        group=group,
        columns=columns,
        config=config,
        copied=copied,
    )
    score = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((tokens * columns,), jnp.float32),
        grid=(config.chunks, groups),
        grid_names=("chunk", "group"),
        scratch_types=[
            plgpu.SMEM((rows, dim), jnp.float16 if packed else q.dtype, transforms=TRANSFORMS),
            plgpu.SMEM((rows,), jnp.float32),
            keys,
            # Of each tile on its way, and of the query.
            plgpu.SMEM((mosaic_copies.WORDS * (config.ahead + 1),), jnp.uint32),
        ],
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane, reduction_scratch_bytes=512, unsafe_no_auto_barriers=True
        ),
    )(
        q,
        weight,
        flat,
        pages.reshape(-1),
        row_of,
        end,
        jnp.asarray(layer, jnp.int32).reshape(1),
        jnp.asarray(first, jnp.int32).reshape(1),
    )
    return score.reshape(tokens, columns)


def _kernel(
    q_ref,
    w_ref,
    k_ref,
    pages_ref,
    row_ref,
    end_ref,
    layer_ref,
    first_ref,
    out_ref,
    q_smem,
    w_smem,
    k_smem,
    barriers,
    *,
    tokens,
    queries,
    num_pages,
    num_rows,
    group,
    columns,
    config,
    copied,
):
    """Program (chunk, group): every `chunks`-th tile of columns, tokens `group · queries …`."""
    packed = k_smem.dtype == jnp.uint32
    heads = q_smem.shape[0] // queries
    places, copies = columns // group, pl.cdiv(KEYS, group)  # pages of a row, and of a tile
    chunk, mine = jax.lax.axis_index("chunk"), jax.lax.axis_index("group")
    start, stride, ahead = mine * queries, config.chunks, config.ahead

    def tiles_of(end):
        """Tiles of this program that begin before column `end`."""
        return jax.lax.div(jax.lax.div(jnp.int32(end) + (KEYS - 1), KEYS) - chunk + (stride - 1), stride)

    def column_of(i):
        return (chunk + i * stride) * KEYS

    # Past the last token the last one stands in; it computes the same and stores nothing.
    at = [jnp.minimum(start + j, tokens - 1) for j in range(queries)]
    # Of a single query all at once, before anything else; several wait for their queries first, which these would delay.
    read = _read if queries == 1 else lambda ref, place: ref[place]
    layer, first = read(layer_ref, 0), read(first_ref, 0)
    rows = [read(row_ref, t) for t in at]
    ends = [jnp.minimum(read(end_ref, t), columns) for t in at]
    page0 = layer * num_pages
    each = max(1, min(_LANES, _WIDEST // heads))
    pieces = [range(j, min(j + each, queries)) for j in range(0, queries, each)]

    def bring():
        if copied:
            mosaic_copies.await_copies(barriers, ahead, 0)
        if packed or not copied:
            bring_queries(q_ref, w_ref, q_smem, w_smem, at, heads, copied)

    def pages_of(row, i, early=True):
        """Pages of a tile, the last one of the row for places past it."""
        place = jax.lax.div(column_of(i), group)
        last = places - 1
        places_of_row = [row * places + jnp.minimum(place + part, last) for part in range(copies)]
        return [page0 + _read(pages_ref, place, early) for place in places_of_row]

    def fetch(found, i, slot):
        begin = 0 if group <= KEYS else jax.lax.rem(column_of(i), group)
        size, row = min(KEYS, group), 4 * packed_words(DIM) if packed else 2 * DIM
        for part, page in enumerate(found):
            announce = KEYS * row if part == 0 else 0
            if packed:
                words = size * packed_words(DIM)
                target = k_smem.at[slot, pl.ds(part * words, words)]
                options = {"step": group * row, "begin": begin * row, "announce": announce}
                mosaic_copies.copy_bytes(k_ref, page, target, size * row, barriers, slot, **options)
            else:
                target = k_smem.at[slot, pl.ds(part * size, size)]
                mosaic_copies.copy_tiles(k_ref, page * group + begin, target, barriers, slot, announce=announce)

    # In a step of one token a request the group's number is that of its row: looked up while that is still on its way.
    if queries == 1:
        guess = jnp.minimum(mine, num_rows - 1)
        guessed = [pages_of(guess, slot) for slot in range(ahead)]
        mosaic_copies.begin_barriers(barriers, ahead + 1)
    if copied:
        size = w_ref.shape[1] * 2 * DIM
        total = size + w_ref.shape[1] * 4
        if packed:
            mosaic_copies.copy_bytes(q_ref, at[0], q_smem, size, barriers, ahead, announce=total, tiled=True)
        else:
            mosaic_copies.copy_tiles(q_ref, at[0] * heads, q_smem, barriers, ahead, announce=total)
        mosaic_copies.copy_bytes(w_ref, at[0], w_smem, total - size, barriers, ahead)
        _meet()  # the barriers are there for all, and nothing was waited for yet

    def look_up(row):
        def now():
            return [pages_of(row, slot, queries > 1) for slot in range(ahead)]

        if queries > 1:
            return now()
        # With the layer, which is not negative: it is asked for later if the comparison can do without.
        return jax.lax.cond(row + jax.lax.shift_right_arithmetic(layer, 31) == guess, lambda: guessed, now)

    def pass_of(turn, done):
        """The queries whose row is first met at token `turn` of the group, after `done` tiles; how many it then is."""
        row = rows[0] if queries == 1 else row_ref[jnp.minimum(start + turn, tokens - 1)]
        same = [r == row for r in rows]
        count, last = tiles_of(columns), jnp.int32(0)
        for j in range(queries):
            count = jnp.where(same[j] & (j < turn), 0, count)
            last = jnp.maximum(last, jnp.where(same[j], ends[j], 0))
        live = jnp.minimum(tiles_of(last), count)

        def store(piece, i, *scores):
            column = column_of(i)
            places = [
                (at[j], jnp.where(same[j] & (start + j < tokens), columns - column, 0), ends[j] - column) for j in piece
            ]
            _put(out_ref, columns, column, first - column, places, *scores)

        def tile(i, following):
            slot = jax.lax.rem(done + i, ahead)
            mosaic_copies.await_copies(barriers, slot, jax.lax.div(done + i, ahead))
            scale = ()
            if packed:
                operand, *scale = _unpack(k_smem.at[slot])
                pl.when(i + ahead < live)(lambda: fetch(following, i + ahead, slot))
            else:
                operand = k_smem.at[slot]
            for piece in pieces:
                part = pl.ds(piece[0] * heads, len(piece) * heads)

                def product(acc, part=part):
                    plgpu.wgmma(acc, operand, q_smem.at[part].transpose((1, 0)))
                    return acc[...]

                dot = pl.run_scoped(product, plgpu.ACC((KEYS, len(piece) * heads), jnp.float32))
                if not packed and piece is pieces[-1]:
                    _meet()
                    pl.when(i + ahead < live)(lambda: fetch(following, i + ahead, slot))
                weights = plgpu.load(w_smem.at[part], layout=_LAYOUT.reduce(0))
                store(piece, i, dot, weights, *scale)
            # Looked up a tile before they are needed.
            return pages_of(row, i + ahead + 1)

        def blank(i, _):
            for piece in pieces:
                store(piece, i)
            return ()

        # All of them looked up before the first copy, so that it is one wait.
        found = look_up(row)
        for i, pages in enumerate(found):
            pl.when(i < live)(lambda i=i, pages=pages: fetch(pages, i, jax.lax.rem(done + i, ahead)))
        if queries == 1:
            bring()  # while the first keys are on their way
        jax.lax.fori_loop(0, live, tile, pages_of(row, ahead))
        jax.lax.fori_loop(live, count, blank, ())
        return done + live

    if queries == 1:
        pass_of(0, jnp.int32(0))
    else:
        # Not within the loop, where what it computes addresses from would be kept in registers.
        bring()
        mosaic_copies.begin_barriers(barriers, ahead)
        _meet()
        jax.lax.fori_loop(0, queries, pass_of, jnp.int32(0))


def _read(ref, place, early=True):
    """`ref[place]` int32, read here: the compiler moves ordinary reads to where they are used, one wait behind another.

    Not `early`: not before what comes before, either.
    """
    code = f"ld.{'global.nc' if early else 'volatile.global'}.b32 $0, [$1];"

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), SCALAR), return_type=plgpu.ShapeDtypeStruct((), jnp.int32, SCALAR))
    def go(_, ref, place):
        i32, i64 = ir.IntegerType.get_signless(32), ir.IntegerType.get_signless(64)
        offset = arith.muli(arith.extsi(i64, place.registers.item()), arith.constant(i64, 4))
        address = arith.addi(address_of(ref), offset)
        value = llvm.inline_asm(i32, [address], code, "=r,l", has_side_effects=True)
        return mgpu.FragmentedArray.splat(value, (), is_signed=True)

    return go(ref, jnp.asarray(place, jnp.int32))


def _meet():
    """All threads have read before any goes on."""

    @plgpu.inline_mgpu()
    def go(_):
        utils.warpgroup_barrier()

    go()


def _place():
    """Of this thread: its first row of a tile, the other being 8 further, and its number among the four of the row."""
    thread = thread_number()
    lane, warp = arith.remui(thread, constant32(32)), arith.divui(thread, constant32(32))
    row = arith.addi(arith.muli(warp, constant32(16)), arith.divui(lane, constant32(4)))
    return row, arith.remui(lane, constant32(4))


def _unpack(words_ref):
    """Keys `[64, 128]` float16 in registers, in the order of `place_of`, and their scales, from a tile's words.

    Rows are 33 words apart, so that the threads of a warp read from different banks. All have read when it returns.
    """
    bytes_ = 4 * packed_words(DIM)

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(),),
        return_type=(
            plgpu.ShapeDtypeStruct((KEYS, DIM), jnp.float16, layout=_LAYOUT),
            plgpu.ShapeDtypeStruct((KEYS,), jnp.float32, layout=_LAYOUT.reduce(1)),
        ),
    )
    def go(_, words):
        i32, f32 = ir.IntegerType.get_signless(32), ir.F32Type.get()
        row, thread = _place()
        begin = arith.addi(shared_place(words), arith.muli(row, constant32(bytes_)))
        mine = arith.addi(begin, arith.muli(thread, constant32(32)))

        def load(kind, letter, base, offset):
            code = f"ld.shared.b32 $0, [$1 + {offset}];"
            return llvm.inline_asm(kind, [base], code, f"={letter},r", has_side_effects=True)

        halves = (0, 8 * bytes_)
        word = [[load(i32, "r", mine, half + 4 * i) for i in range(8)] for half in halves]
        scale = [load(f32, "f", begin, half + DIM) for half in halves]
        utils.warpgroup_barrier()
        pair = ir.Type.parse("!llvm.struct<(i32, i32)>")
        code = "{ .reg .b16 a, b; mov.b32 {a, b}, $2; cvt.rn.f16x2.e4m3x2 $0, a; cvt.rn.f16x2.e4m3x2 $1, b; }"
        keys = np.empty(mgpu.WGMMA_LAYOUT.registers_shape((KEYS, DIM)), dtype=object)
        of = keys.reshape(DIM // 8, 2)
        for half in range(2):
            for i in range(8):
                both = llvm.inline_asm(pair, [word[half][i]], code, "=r,=r,r")
                for x in range(2):
                    value = llvm.extractvalue(i32, both, [x])
                    of[2 * i + x, half] = llvm.bitcast(ir.VectorType.get((2,), ir.F16Type.get()), value)
        scales = np.empty(mgpu.WGMMA_ROW_LAYOUT.registers_shape((KEYS,)), dtype=object)
        for half in range(2):
            scales.reshape(2)[half] = vector.broadcast(ir.VectorType.get((1,), f32), scale[half])
        return tuple(
            mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)
            for registers, layout in ((keys, mgpu.WGMMA_LAYOUT), (scales, mgpu.WGMMA_ROW_LAYOUT))
        )

    return go(words_ref)


def _put(out_ref, columns, column, low, places, dot=None, weights=None, scale=None):
    """Stores a tile's scores of a few queries from `column` on: `Σ relu(dot) · weights`, the scale's part, or −inf.

    `places`: for each query its token, how many keys of the tile are stored, and before which the visible ones end; they
    start at `low`. `dot [64, queries · heads]`, `weights [queries · heads]`, `scale [64]`; −inf alone without them.
    """
    given = [x for x in (dot, weights, scale) if x is not None]
    layouts = [_LAYOUT, _LAYOUT.reduce(0), _LAYOUT.reduce(1)][: len(given)]
    scalars = [jnp.asarray(x, jnp.int32) for x in (column, low, *(x for place in places for x in place))]

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), *layouts, *(SCALAR,) * len(scalars)))
    def go(_, out, *args):
        i32, i64, f32 = ir.IntegerType.get_signless(32), ir.IntegerType.get_signless(64), ir.F32Type.get()
        arrays, scalars = args[: len(given)], [x.registers.flat[0] for x in args[len(given) :]]
        column, low, *rest = scalars
        row, thread = _place()
        if arrays:
            scores = _of_lane(_sums(*arrays[:2], len(places)), thread)
        # Thread t of a row has query t.
        token, size, high = rest[:3]
        mine = arith.cmpi(arith.CmpIPredicate.slt, thread, constant32(len(places)))
        for j in range(1, len(places)):
            here = arith.cmpi(arith.CmpIPredicate.eq, thread, constant32(j))
            values = zip((token, size, high), rest[3 * j : 3 * j + 3], strict=True)
            token, size, high = (arith.select(here, new, old) for old, new in values)
        place = arith.addi(arith.extsi(i64, column), arith.extsi(i64, row))
        place = arith.addi(place, arith.muli(arith.extsi(i64, token), arith.constant(i64, columns)))
        address = arith.addi(address_of(out), arith.muli(place, arith.constant(i64, 4)))
        less = arith.CmpIPredicate.slt
        for half in range(2):
            key = arith.addi(row, constant32(8 * half))
            value = arith.constant(f32, float("-inf"))
            if arrays:
                score = scores[half]
                if len(arrays) == 3:
                    score = arith.mulf(score, _element(arrays[2].registers.reshape(2)[half], 0))
                seen = arith.andi(arith.cmpi(arith.CmpIPredicate.sge, key, low), arith.cmpi(less, key, high))
                value = arith.select(seen, score, value)
            stored = arith.extui(i32, arith.andi(mine, arith.cmpi(less, key, size)))
            code = f"{{ .reg .pred p; setp.ne.u32 p, $2, 0; @p st.global.f32 [$0 + {32 * half}], $1; }}"
            void = ir.Type.parse("!llvm.void")
            llvm.inline_asm(void, [address, value, stored], code, "l,f,r", has_side_effects=True)

    go(out_ref, *given, *scalars)


def _element(register, i):
    if not isinstance(register.type, ir.VectorType):
        return register
    return vector.extract(register, dynamic_position=[], static_position=[i])


def _sums(dot, weights, queries):
    """This thread's part of `Σ relu(dot) · weights` for each query and both its rows: `[queries][2]`."""
    tiles = dot.registers.reshape(queries, -1, 2)
    weights = weights.registers.reshape(queries, -1)
    zero = arith.constant(ir.F32Type.get(), 0.0)
    sums = []
    for query, weight in zip(tiles, weights, strict=True):
        both = [zero, zero]
        for tile, w in zip(query, weight, strict=True):
            for half in range(2):
                for i in range(2):
                    value = arith.maximumf(_element(tile[half], i), zero)
                    both[half] = mlir_math.fma(value, _element(w, i), both[half])
        sums.append(both)
    return sums


def _of_lane(sums, thread):
    """The sums over the four threads of a row, of both its rows: thread t gets query t, and each a single one."""
    if len(sums) == 1:
        both = sums[0]
        for distance in (1, 2):
            both = [arith.addf(x, utils.shfl_bfly(x, distance)) for x in both]
        return both
    zero = arith.constant(ir.F32Type.get(), 0.0)
    sums = [*sums, *([[zero, zero]] * (_LANES - len(sums)))]
    for bit in (1, 2):
        odd = arith.cmpi(arith.CmpIPredicate.ne, arith.andi(thread, constant32(bit)), constant32(0))
        joined = []
        # A thread keeps the half of the queries that its bit says and gives the other half away.
        for first, second in zip(sums[::2], sums[1::2], strict=True):
            joined.append(
                [
                    arith.addf(arith.select(odd, b, a), utils.shfl_bfly(arith.select(odd, a, b), bit))
                    for a, b in zip(first, second, strict=True)
                ]
            )
        sums = joined
    return sums[0]
