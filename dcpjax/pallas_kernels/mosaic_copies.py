"""Copies from global to shared memory of a Hopper program that one thread announces, and waiting for them.

For programs of one warpgroup. Mosaic's own have all threads announce their part; and the compiler puts their barriers'
beginning behind whatever the program loads first, so that no copy can be on its way before that is there.
"""

import jax
import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith

from dcpjax.pallas_kernels.mosaic_ptx import (
    SCALAR,
    TRANSFORMS,
    address_of,
    constant32,
    constant64,
    ptx,
    shared_place,
    thread_number,
)

WORDS = 2  # 32-bit words of a barrier


def begin_barriers(barriers: jax.Ref, count: int) -> None:
    """Makes `barriers [2 · count]` uint32, in shared memory, ready. All may wait for them once they have met."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
    def go(_, barriers):
        code = "".join(f"@p mbarrier.init.shared::cta.b64 [$0 + {8 * n}], 1;" for n in range(count))
        code = f"{{ .reg .pred p; setp.eq.u32 p, $1, 0; {code} @p fence.mbarrier_init.release.cluster;"
        # Whichever thread of this warp it is that announces the first.
        code += "bar.warp.sync 0xffffffff; }"
        ptx(code, "r,r", shared_place(barriers), thread_number())

    go(barriers)


def await_copies(barriers: jax.Ref, place: jax.Array | int, turn: jax.Array | int) -> None:
    """Waits for what was announced the `turn`-th time at barrier `place` of `barriers [2 · count]` uint32."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), SCALAR, SCALAR))
    def go(_, barriers, place, parity):
        code = "{ .reg .pred p; AGAIN: mbarrier.try_wait.parity.shared::cta.b64 p, [$0], $1; @!p bra AGAIN; }"
        ptx(code, "r,r", _barrier(barriers, place.registers.item()), parity.registers.item())

    go(barriers, _scalar(place), jax.lax.rem(_scalar(turn), 2))


def copy_bytes(
    source: jax.Ref,
    index: jax.Array,
    target: jax.Ref,
    size: int,
    barriers: jax.Ref,
    place: jax.Array | int,
    *,
    step: int | None = None,
    begin: jax.Array | int = 0,
    announce: int = 0,
    tiled: bool = False,
) -> None:
    """Copies `size` bytes of `source` as they are, from `begin` bytes after `index` times `step` (default: `size`) on.

    Any shapes and dtypes; multiples of 16 bytes. `announce`: the bytes of all copies that barrier `place` of
    `barriers [2 · count]` uint32 is about to see, given with the first of them. `tiled`: the target is one for tiles, and
    is not put in their order.
    """
    kind = plgpu.RefType(TRANSFORMS) if tiled else plgpu.RefType()

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), kind, plgpu.RefType(), SCALAR, SCALAR, SCALAR))
    def go(_, source, target, barriers, index, begin, place):
        i64 = ir.IntegerType.get_signless(64)
        index, begin, place = (x.registers.item() for x in (index, begin, place))
        one, at = utils.single_thread_predicate(utils.ThreadSubset.WARPGROUP), _barrier(barriers, place)
        offset = arith.addi(arith.muli(arith.extui(i64, index), constant64(step or size)), arith.extui(i64, begin))
        _announce(one, at, announce)
        copy = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
        to = shared_place(target)
        ptx(f"@$0 {copy} [$1], [$2], {size}, [$3];", "b,r,l,r", one, to, arith.addi(address_of(source), offset), at)

    go(source, target, barriers, *(_scalar(x) for x in (index, begin, place)))


def copy_tiles(
    source: jax.Ref,
    row: jax.Array,
    target: jax.Ref,
    barriers: jax.Ref,
    place: jax.Array | int,
    *,
    announce: int = 0,
) -> None:
    """Copies rows from `row` on of `source [R, C]` bfloat16 to `target [r, C]` bfloat16, which lies as products read it.

    `barriers`, `place` and `announce`: as in `copy_bytes`.
    """

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType(TRANSFORMS), plgpu.RefType(), SCALAR, SCALAR))
    def go(ctx, source, target, barriers, row, place):
        one = utils.single_thread_predicate(utils.ThreadSubset.WARPGROUP)
        place = place.registers.item()
        _announce(one, _barrier(barriers, place), announce)
        tiles, _, height, _ = ir.MemRefType(target.type).shape
        first = arith.index_cast(ir.IndexType.get(), row.registers.item())
        ctx.async_copy(
            src_ref=source,
            dst_ref=target,
            gmem_slice=(mgpu.ds(first, tiles * height), slice(None)),
            gmem_transform=mgpu.TileTransform((8, 64)),
            swizzle=128,
            barrier=mgpu.BarrierRef(utils.memref_ptr(barriers), place, None, 1),
            arrive=False,
            predicate=one,
        )

    go(source, target, barriers, _scalar(row), _scalar(place))


def _scalar(x) -> jax.Array:
    return jnp.asarray(x, jnp.int32)


def _barrier(barriers, place):
    return arith.addi(shared_place(barriers), arith.muli(place, constant32(8)))


def _announce(one, barrier, size: int) -> None:
    if size:
        ptx(f"@$0 mbarrier.arrive.expect_tx.shared::cta.b64 _, [$1], {size};", "b,r", one, barrier)
