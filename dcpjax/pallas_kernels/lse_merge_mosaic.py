"""LSE merge of ranks' parts in one kernel: each rank writes its parts into the others' boxes, and merges what is in its own.

Nothing but this kernel moves data, so that no collective is launched. It runs on GPUs of one process that reach each
other's memory (NVLink), where an address of one is an address for all. The handshake is in `boxes`.
"""

import functools
from typing import Any

import jax
import jax.experimental.mosaic.gpu as mgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from dcpjax.pallas_kernels.boxes import BoxConfig, Boxes, has_part
from dcpjax.pallas_kernels.mosaic_ptx import SCALAR, THREADS, address_of, constant32, constant64, ptx, thread_number

_CONFIG = BoxConfig()
_REF = plgpu.RefType()
_LANE = plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane)


def open_boxes(
    tokens: int, heads: int, width: int, dtype: Any, ranks: int, rank: jax.Array,
    config: BoxConfig = _CONFIG,
) -> Boxes:  # fmt: skip
    """Boxes of rank `rank []` int32 for merges of up to `tokens` tokens, with the rank's own addresses alone `[1, 3, 2]`.

    Raises `NotImplementedError` for heads that the ranks do not share evenly, and widths that the kernel has not.
    """
    cut = config.cut(tokens, heads, ranks)
    if not has_part(width):
        raise NotImplementedError(f"there are no boxes for parts of {width} values: use another merge")
    kept = cut.step * cut.trips
    shape = jax.ShapeDtypeStruct

    def body(parts, lse, flags, addresses):
        @plgpu.inline_mgpu(arg_types=(_REF,) * 4)
        def make(ctx, parts, lse, flags, addresses):
            _clear(address_of(flags), (ranks + 1) * config.blocks)
            for place, ref in enumerate((parts, lse, flags)):
                first = arith.cmpi(arith.CmpIPredicate.eq, thread_number(), constant32(0))
                to = arith.addi(address_of(addresses), constant64(8 * place))
                utils.inline_ptx("st.global.b64 [$0], $1;", to, address_of(ref), predicate=first, has_side_effects=True)

        make(parts, lse, flags, addresses)

    parts, lse, flags, addresses = plgpu.kernel(
        body,
        out_type=(
            shape((2 * ranks * config.blocks * kept, width), dtype),
            shape((2 * ranks * config.blocks * kept,), jnp.float32),
            shape(((ranks + 1) * config.blocks,), jnp.int32),
            shape((6,), jnp.int32),
        ),
        grid=(1,),
        grid_names=("block",),
        compiler_params=_LANE,
        kernel_name="open_boxes",
    )()
    where = 2, ranks, config.blocks, kept
    return Boxes(
        parts.reshape(*where, width), lse.reshape(where), flags.reshape(ranks + 1, config.blocks),
        jnp.asarray(rank, jnp.int32).reshape(1), addresses.reshape(1, 3, 2),
    )  # fmt: skip


def merge_boxed(
    out: jax.Array, lse: jax.Array, boxes: Boxes, *, out_dtype: Any = jnp.float32,
    config: BoxConfig = _CONFIG,
) -> jax.Array:  # fmt: skip
    """Merges the ranks' `out [T, H, L]`, `lse [T, H]` (natural log, float32) → `[T, H/N, L]` out_dtype, this rank's heads.

    Parts are weighed as in `lse_merge.merge_parts` and summed in the order of ranks; all ranks must call it alike. Raises
    `NotImplementedError` where the parts do not fit into the boxes.
    """
    tokens, heads, width = out.shape
    _, ranks, most, _, _ = boxes.parts.shape
    cut = config.cut(tokens, heads, ranks)
    boxes.check(cut, width, out.dtype)
    step, blocks = cut.step, cut.blocks
    vector = min(4, width // THREADS)
    layout = plgpu.Layout.WG_STRIDED((width,), vec_size=vector)
    part_bytes = step * width * out.dtype.itemsize

    def body(out_ref, lse_ref, box_ref, box_lse_ref, flags_ref, rank_ref, where_ref, merged_ref):
        me, block = rank_ref[0], lax.axis_index("block")
        turn = flags_ref[ranks * most + block]

        def tiles(todo):
            """Calls todo(first row, first place in a block's part of a box) for every tile of the block."""

            def trip(number, _):
                tile = block + number * blocks
                pl.when(tile * step < cut.rows)(lambda: todo(tile * step, number * step))
                return ()

            # A loop of one would keep it from what comes before it.
            trip(0, ()) if cut.trips == 1 else lax.fori_loop(0, cut.trips, trip, ())

        @plgpu.inline_mgpu(arg_types=(_REF, _REF, _REF, SCALAR, SCALAR))
        def send(ctx, part, score, where, peer, at):
            peer, at = peer.registers.item(), arith.extui(_kind(64), at.registers.item())
            to = arith.addi(_listed(where, peer, 1), arith.muli(at, constant64(4)))
            _copy_words(address_of(score), to, step)
            row = arith.muli(at, constant64(width * out.dtype.itemsize))
            _copy_bytes(address_of(part), arith.addi(_listed(where, peer, 0), row), part_bytes)

        @plgpu.inline_mgpu(arg_types=(_REF, SCALAR, SCALAR, SCALAR))
        def tell(ctx, where, peer, at, turn):
            utils.warpgroup_barrier()
            offset = arith.extui(_kind(64), arith.muli(at.registers.item(), constant32(4)))
            flag = arith.addi(_listed(where, peer.registers.item(), 2), offset)
            first = arith.cmpi(arith.CmpIPredicate.eq, thread_number(), constant32(0))
            # Orders what all threads wrote before the barrier, for whoever acquires it on any device.
            code = "st.release.sys.global.b32 [$0], $1;"
            utils.inline_ptx(code, flag, turn.registers.item(), predicate=first, has_side_effects=True)

        @plgpu.inline_mgpu(arg_types=(_REF, SCALAR))
        def wait(ctx, flag, turn):
            code = (
                "{ .reg .b32 seen, left; .reg .pred other; setp.ne.u32 other, $2, 0; @other bra done; "
                f"mov.b32 left, {config.looks}; again: "
                "ld.acquire.sys.global.b32 seen, [$0]; sub.s32 seen, seen, $1; setp.ge.s32 other, seen, 0; "
                "@other bra done; sub.u32 left, left, 1; setp.ne.u32 other, left, 0; @other bra again; trap; done: }"
            )
            ptx(code, "l,r,r", address_of(flag), turn.registers.item(), thread_number())
            utils.warpgroup_barrier()

        @plgpu.inline_mgpu(arg_types=(_REF, _REF, _REF, _REF, SCALAR))
        def check(ctx, parts, scores, flags, where, me):
            for number, ref in enumerate((parts, scores, flags)):
                code = "{ .reg .pred moved; setp.ne.u64 moved, $0, $1; @moved trap; }"
                ptx(code, "l,l", address_of(ref), _listed(where, me.registers.item(), number))

        @plgpu.inline_mgpu(arg_types=(_REF, SCALAR))
        def count(ctx, ref, turn):
            first = arith.cmpi(arith.CmpIPredicate.eq, thread_number(), constant32(0))
            code = "st.global.b32 [$0], $1;"
            utils.inline_ptx(code, address_of(ref), turn.registers.item(), predicate=first, has_side_effects=True)

        @plgpu.inline_mgpu(
            arg_types=(_REF, _REF, SCALAR), return_type=plgpu.ShapeDtypeStruct((width,), out.dtype, layout)
        )
        def read(ctx, own, box, is_own):
            is_own = arith.cmpi(arith.CmpIPredicate.ne, is_own.registers.item(), constant32(0))
            pointer = arith.select(is_own, utils.memref_ptr(own), utils.memref_ptr(box))
            kind = ir.MemRefType.get((width,), ir.MemRefType(own.type).element_type)
            return mgpu.FragmentedArray.load_strided(utils.ptr_as_memref(pointer, kind), vec_size=vector)

        check(box_ref, box_lse_ref, flags_ref, where_ref, me)
        for ahead in range(1, ranks):
            peer = lax.rem(me + ahead, ranks)

            def send_tile(row, at, peer=peer):
                some = pl.ds(cut.source(row, peer), step)
                send(out_ref.at[some], lse_ref.at[some], where_ref, peer, boxes.place(turn, me, block, at))

            tiles(send_tile)
            tell(where_ref, peer, me * most + block, turn + 1)
        for ahead in range(1, ranks):
            wait(flags_ref.at[pl.ds(lax.rem(me + ahead, ranks) * most + block, 1)], turn + 1)
        # All threads have read it.
        count(flags_ref.at[pl.ds(ranks * most + block, 1)], turn + 1)

        def merge_tile(row, at):
            parts = []
            for i in range(step):
                here, own = cut.source(row, me) + i, [me == rank for rank in range(ranks)]
                there = [boxes.place(turn, rank, block, at + i) for rank in range(ranks)]
                scores = [jnp.where(own[n], lse_ref[here], box_lse_ref[there[n]]) for n in range(ranks)]
                found = [read(out_ref.at[here], box_ref.at[there[n]], own[n].astype(jnp.int32)) for n in range(ranks)]
                parts.append((scores, found))
            # All reads are on their way before the first sum.
            for i, (scores, found) in enumerate(parts):
                merged_ref[row + i] = _merged(scores, found).astype(out_dtype)

        tiles(merge_tile)

    merged = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((cut.rows, width), out_dtype),
        grid=(blocks,),
        grid_names=("block",),
        compiler_params=_LANE,
        kernel_name="merge_boxed",
    )(
        out.reshape(-1, width), lse.astype(jnp.float32).reshape(-1), boxes.parts.reshape(-1, width),
        boxes.lse.reshape(-1), boxes.flags.reshape(-1), boxes.rank, boxes.addresses.reshape(-1),
    )  # fmt: skip
    return merged.reshape(tokens, cut.mine, width)


def _merged(scores, parts):
    """A row of parts `[L]` with LSE `[]` each, in their order, as `lse_merge.merge_parts` says."""
    scores = [jnp.where(x < jnp.inf, x, -jnp.inf) for x in scores]
    top = functools.reduce(jnp.maximum, scores)
    top = jnp.where(top == -jnp.inf, 0.0, top)
    weights = [jnp.exp(x - top) for x in scores]
    mass = functools.reduce(jnp.add, weights)
    # By select: what an empty part left in memory may be NaN.
    weighed = [p.astype(jnp.float32) * w for w, p in zip(weights, parts, strict=True)]
    weighed = [jnp.where(w > 0, x, jnp.zeros_like(x)) for w, x in zip(weights, weighed, strict=True)]
    return functools.reduce(jnp.add, weighed) / jnp.where(mass > 0, mass, 1.0)


# What follows is for code inside of `inline_mgpu`.


def _copy_bytes(source, to, count: int) -> None:
    """`count` bytes, a multiple of 16, between addresses, by all threads: all reads, then all writes."""
    thread = thread_number()
    offset = arith.extui(_kind(64), arith.muli(thread, constant32(16)))
    whole, rest = divmod(count, 16 * THREADS)
    code = [f"{{ .reg .b32 word<{4 * whole + 4}>; .reg .pred some; setp.lt.u32 some, $2, {rest // 16};"]
    for form in ("ld.global.v4.b32 {1}, [$0 + {0}];", "st.global.v4.b32 [$1 + {0}], {1};"):
        for n in range(whole + bool(rest)):
            words = "{" + ", ".join(f"word{4 * n + i}" for i in range(4)) + "}"
            code.append(("@some " if n == whole else "") + form.format(16 * THREADS * n, words))
    ptx(" ".join(code) + "}", "l,l,r", arith.addi(source, offset), arith.addi(to, offset), thread)


def _copy_words(source, to, count: int) -> None:
    """`count` words of 4 bytes, at most one a thread, between addresses."""
    thread = thread_number()
    offset = arith.extui(_kind(64), arith.muli(thread, constant32(4)))
    code = (
        f"{{ .reg .b32 word; .reg .pred some; setp.lt.u32 some, $2, {count}; "
        "@some ld.global.b32 word, [$0]; @some st.global.b32 [$1], word; }"
    )
    ptx(code, "l,l,r", arith.addi(source, offset), arith.addi(to, offset), thread)


def _clear(to, count: int) -> None:
    """Sets `count` words of 4 bytes to 0."""
    thread = thread_number()
    first = arith.addi(to, arith.extui(_kind(64), arith.muli(thread, constant32(4))))
    whole, rest = divmod(count, THREADS)
    code = [f"{{ .reg .pred some; setp.lt.u32 some, $1, {rest};"]
    code += [f"st.global.b32 [$0 + {4 * THREADS * n}], 0;" for n in range(whole)]
    ptx(" ".join(code) + f" @some st.global.b32 [$0 + {4 * THREADS * whole}], 0; }}", "l,r", first, thread)


def _listed(where, rank, which: int):
    """Address number `which` of a rank, of the list at `where`."""
    row = arith.addi(address_of(where), arith.extui(_kind(64), arith.muli(rank, constant32(24))))
    code = f"ld.global.b64 $0, [$1 + {8 * which}];"
    return llvm.inline_asm(_kind(64), [row], code, "=l,l", has_side_effects=True)


def _kind(bits: int):
    return ir.IntegerType.get_signless(bits)
