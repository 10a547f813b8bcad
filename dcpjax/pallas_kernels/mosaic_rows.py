"""Scattered rows of a pool, brought as tiles that Hopper's matrix instructions read where they land.

Pallas copies rows one by one to consecutive places, or boxes; neither is the swizzled layout of `wgmma`. So the copies are
written out here: 16 bytes each, asynchronous, to swizzled places, and a barrier in shared memory counts those that landed,
so that nobody waits to send the next tile. The interpreter knows none of this: `PlainRows` does the same by Pallas' copies.
"""

import dataclasses

import jax
import jax.experimental.mosaic.gpu as mgpu
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, memref, nvvm, vector

# Rows of a tile, and what a shared tile of 2-byte numbers looks like: boxes of 8 rows of 128 bytes, swizzled.
TILE = 64
TRANSFORMS = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
THREADS = 128  # of a warpgroup

_SCALAR = plgpu.Layout.WG_SPLAT(())
# Each thread of the producer holds the numbers of the four rows that it copies a part of.
_HELD = plgpu.Layout.WG_STRIDED((4 * THREADS,), vec_size=4)


@dataclasses.dataclass(frozen=True)
class Source:
    """Where tiles come from: `pool [rows, width]` and one of the lists `rows [T, K]` in global memory; places from `count` on
    are read as its first row. base: added to every row of the list."""

    pool: jax.Ref
    rows: jax.Ref
    token: jax.Array
    count: jax.Array
    base: jax.Array


@dataclasses.dataclass(frozen=True)
class AsyncRows:
    """Tiles of `width` 2-byte numbers a row in two slots. `scratch` is what a kernel keeps for it."""

    width: int

    def scratch(self):
        return plgpu.SMEM((4,), jnp.int32), plgpu.Barrier(num_arrivals=3)

    def index(self, value: int) -> jax.Array:
        """`value`, of which the compiler knows nothing. Addresses of a product's operands that it knows not to change in a
        loop are computed before it, a hundred of them, and kept: registers spill."""

        @plgpu.inline_mgpu(return_type=plgpu.ShapeDtypeStruct((), jnp.int32, _SCALAR))
        def index(ctx):
            i32 = ir.IntegerType.get_signless(32)
            number = llvm.inline_asm(i32, [], f"mov.u32 $0, {value};", "=r", has_side_effects=True)
            return mgpu.FragmentedArray.splat(number, (), is_signed=True)

        return index()

    def start(self, scratch) -> None:
        """Called by all three warpgroups before anything else."""
        landed, ready = scratch

        @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
        def initialise(ctx, landed):
            one = utils.single_thread_predicate(scope=utils.ThreadSubset.BLOCK)
            for slot in range(2):
                nvvm.mbarrier_init(_barrier(landed, slot), _i32(THREADS), predicate=one)

        initialise(landed)
        plgpu.barrier_arrive(ready)
        plgpu.barrier_wait(ready)

    def wait(self, scratch, slot: int, turn: jax.Array) -> None:
        """Until the `turn`-th tile (from 0) of a slot is there for matrix instructions of the calling warpgroup."""

        @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), _SCALAR))
        def wait(ctx, landed, parity):
            odd = arith.trunci(ir.IntegerType.get_signless(1), parity.registers.item())
            utils.BarrierRef(utils.memref_ptr(landed), _i32(slot), None, 1).wait_parity(odd)
            # What was written as ordinary memory is read by the tensor cores' own path.
            nvvm.fence_proxy(nvvm.ProxyKind.async_shared, space=nvvm.SharedSpace.shared_cta)

        wait(scratch[0], jax.lax.rem(turn, jnp.int32(2)))

    def fetch(self, scratch, source: Source, place: jax.Array, tile: jax.Ref, slot: int, when_free) -> None:
        """Sends for the rows at `place` … `place + TILE` of the list, to `tile`, once `when_free()` returns."""
        held = _numbers(source, place)  # read while the slot is still in use
        when_free()
        self._copy(source.pool, tile, scratch[0], held, slot)

    def _copy(self, pool, tile, landed, held, slot):
        blocks = self.width // 64

        @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType(TRANSFORMS), plgpu.RefType(), _HELD))
        def copy(ctx, pool, tile, landed, held):
            i32, i64 = ir.IntegerType.get_signless(32), ir.IntegerType.get_signless(64)
            part, row = _part_and_row()
            within, box = arith.remui(row, _i32(8)), arith.divui(row, _i32(8))
            source = arith.addi(
                llvm.ptrtoint(i64, utils.memref_ptr(pool)), arith.extui(i64, arith.muli(part, _i32(16)))
            )
            place = arith.addi(arith.muli(box, _i32(blocks * 1024)), arith.muli(within, _i32(128)))
            place = arith.addi(place, arith.muli(arith.xori(part, within), _i32(16)))
            place = arith.addi(place, llvm.ptrtoint(i32, utils.memref_ptr(tile)))
            for i in range(4):
                number = arith.extsi(i64, vector.extract(held.registers.item(), [], [i]))
                first = arith.addi(source, arith.muli(number, arith.constant(i64, 2 * self.width)))
                to = arith.addi(place, _i32(i * 2 * blocks * 1024))
                # A row begins and ends with a line of 128 bytes: larger prefetches would bring parts of its neighbours.
                ptx = (
                    f"cp.async.cg.shared.global.L2::128B [$0 + {block * 1024}], [$1 + {block * 128}], 16;"
                    for block in range(blocks)
                )
                _asm("\n".join(ptx), "r,l", to, first)
            barrier = llvm.ptrtoint(i32, _barrier(landed, slot))
            _asm("cp.async.mbarrier.arrive.noinc.shared.b64 [$0];", "r", barrier)

        copy(pool, tile, landed, held)


@dataclasses.dataclass(frozen=True)
class PlainRows:
    """`AsyncRows` for the interpreter: row by row, with Pallas' copies and barriers."""

    width: int

    def scratch(self):
        return (plgpu.Barrier(num_arrivals=TILE, num_barriers=2),)

    def index(self, value: int) -> int:
        return value

    def start(self, scratch) -> None:
        del scratch

    def wait(self, scratch, slot: int, turn: jax.Array) -> None:
        del turn
        plgpu.barrier_wait(scratch[0].at[slot])

    def fetch(self, scratch, source: Source, place: jax.Array, tile: jax.Ref, slot: int, when_free) -> None:
        when_free()

        @pl.loop(0, TILE)
        def _(i):
            row = jnp.where(
                place + i < source.count, source.rows[source.token, place + i], source.rows[source.token, 0]
            )
            plgpu.copy_gmem_to_smem(source.pool.at[source.base + row], tile.at[i], scratch[0].at[slot])


def _numbers(source, place):
    """Rows of this thread: those of the list at `place + thread / 8 + 16 i`."""

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), _SCALAR, _SCALAR, _SCALAR),
        return_type=plgpu.ShapeDtypeStruct((4 * THREADS,), jnp.int32, _HELD),
    )
    def numbers(ctx, rows, place, count, base):
        index = ir.IndexType.get()
        place, count, base = (x.registers.item() for x in (place, count, base))
        _, row = _part_and_row()
        spare = memref.load(rows, [arith.constant(index, 0)])
        held = llvm.mlir_undef(ir.VectorType.get((4,), ir.IntegerType.get_signless(32)))
        for i in range(4):
            at = arith.addi(place, arith.addi(row, _i32(16 * i)))
            listed = arith.cmpi(arith.CmpIPredicate.slt, at, count)
            number = arith.select(listed, memref.load(rows, [arith.index_cast(index, at)]), spare)
            held = vector.insert(arith.addi(number, base), held, dynamic_position=[], static_position=[i])
        return mgpu.FragmentedArray(_registers=np.array([held], dtype=object), _layout=_HELD.to_mgpu(), _is_signed=True)

    return numbers(source.rows.at[source.token], place, source.count, source.base)


def _part_and_row():
    """Which 16 bytes of 128 a thread copies, and of which of 16 rows."""
    thread = arith.remui(utils.thread_idx(), _i32(THREADS))
    return arith.remui(thread, _i32(8)), arith.divui(thread, _i32(8))


def _barrier(landed, slot):
    return utils.getelementptr(utils.memref_ptr(landed), [slot], ir.IntegerType.get_signless(64))


def _i32(value):
    return arith.constant(ir.IntegerType.get_signless(32), value)


def _asm(code, constraints, *args):
    llvm.inline_asm(ir.Type.parse("!llvm.void"), list(args), code, constraints, has_side_effects=True)
