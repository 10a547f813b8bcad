"""Scattered rows of a pool, brought as tiles that Hopper's matrix instructions read where they land.

Pallas copies rows one by one to consecutive places, or boxes; neither is the swizzled layout of `wgmma`. So the copies are
written out here: 16 bytes each, asynchronous, to swizzled places, and a barrier in shared memory counts those that landed,
so that nobody waits to send for the next tile. The interpreter knows none of this: `PlainRows` does it by Pallas' copies.
"""

import dataclasses
from collections.abc import Callable

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
BOX = 1024
TRANSFORMS = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
THREADS = 128  # of a warpgroup

_SCALAR = plgpu.Layout.WG_SPLAT(())
# Each thread of the producer holds the numbers of the four rows that it copies a part of.
HELD = plgpu.Layout.WG_STRIDED((4 * THREADS,), vec_size=4)


@dataclasses.dataclass(frozen=True)
class Source:
    """Where tiles come from: rows of `pool [rows, …]` that are listed in `rows [T, K]` for a token, from a place in the list
    on. Places from `count` on are read as the list's first. base: added to every row of the list."""

    pool: jax.Ref
    rows: jax.Ref
    token: jax.Array
    place: jax.Array
    count: jax.Array
    base: jax.Array


class Landing:
    """A barrier for each of two slots, for tiles that all threads of the producer bring: their parts land one by one."""

    def scratch(self):
        """What a kernel keeps for it."""
        return plgpu.SMEM((4,), jnp.int32), plgpu.Barrier(num_arrivals=3)

    def start(self, scratch) -> None:
        """Called by all three warpgroups before anything else."""
        landed, ready = scratch

        @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
        def initialise(ctx, landed):
            one = utils.single_thread_predicate(scope=utils.ThreadSubset.BLOCK)
            for slot in range(2):
                nvvm.mbarrier_init(barrier(landed, slot), i32(THREADS), predicate=one)

        initialise(landed)
        plgpu.barrier_arrive(ready)
        plgpu.barrier_wait(ready)

    def wait(self, scratch, slot: int, turn: jax.Array) -> None:
        """Until the `turn`-th tile (from 0) of a slot is there for matrix instructions of the calling warpgroup."""

        @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), _SCALAR))
        def wait(ctx, landed, parity):
            odd = arith.trunci(ir.IntegerType.get_signless(1), parity.registers.item())
            utils.BarrierRef(utils.memref_ptr(landed), i32(slot), None, 1).wait_parity(odd)
            # What was written as ordinary memory is read by the tensor cores' own path.
            nvvm.fence_proxy(nvvm.ProxyKind.async_shared, space=nvvm.SharedSpace.shared_cta)

        wait(scratch[0], jax.lax.rem(turn, jnp.int32(2)))

    def index(self, value: int) -> jax.Array:
        """`value`, of which the compiler knows nothing. Addresses of a product's operands that it knows not to change in a
        loop are computed before it, a hundred of them, and kept: registers spill."""

        @plgpu.inline_mgpu(return_type=plgpu.ShapeDtypeStruct((), jnp.int32, _SCALAR))
        def index(ctx):
            kind = ir.IntegerType.get_signless(32)
            number = llvm.inline_asm(kind, [], f"mov.u32 $0, {value};", "=r", has_side_effects=True)
            return mgpu.FragmentedArray.splat(number, (), is_signed=True)

        return index()


@dataclasses.dataclass(frozen=True)
class AsyncRows(Landing):
    """Tiles of rows of `width` 2-byte numbers."""

    width: int

    def bring(
        self, scratch, source: Source, pairs: jax.Array, tiles: jax.Ref, when_free: Callable[[int, jax.Array], None]
    ) -> None:
        """The producer's work: `pairs` times a tile for each slot of `tiles [2, TILE, width]`, sent for once
        `when_free(slot, turn)` returns."""

        @pl.loop(0, pairs)
        def _(turn):
            for slot in range(2):
                # Numbers are read while the slot is still in use.
                held = numbers(source, (2 * turn + slot) * TILE)
                when_free(slot, turn)
                self._send(source.pool, tiles.at[slot], scratch[0], held, slot)

    def _send(self, pool, tile, landed, held, slot):
        blocks = self.width // 64

        @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType(TRANSFORMS), plgpu.RefType(), HELD))
        def send(ctx, pool, tile, landed, held):
            kind = ir.IntegerType.get_signless(64)
            part, row = part_and_row()
            source = arith.addi(address(pool), arith.extui(kind, arith.muli(part, i32(16))))
            place = arith.addi(row_place(tile, row, blocks), swizzled(part, row))
            for i in range(4):
                number = arith.extsi(kind, vector.extract(held.registers.item(), [], [i]))
                first = arith.addi(source, arith.muli(number, arith.constant(kind, 2 * self.width)))
                # A row begins and ends with a line of 128 bytes: larger prefetches would bring parts of its neighbours.
                copies = (
                    f"cp.async.cg.shared.global.L2::128B [$0 + {block * BOX}], [$1 + {block * 128}], 16;"
                    for block in range(blocks)
                )
                asm("\n".join(copies), "r,l", arith.addi(place, i32(i * 2 * blocks * BOX)), first)
            asm("cp.async.mbarrier.arrive.noinc.shared.b64 [$0];", "r", shared(barrier(landed, slot)))

        send(pool, tile, landed, held)


@dataclasses.dataclass(frozen=True)
class PlainRows:
    """`AsyncRows` for the interpreter: row by row, with Pallas' copies and barriers."""

    width: int

    def scratch(self):
        return (plgpu.Barrier(num_arrivals=TILE, num_barriers=2),)

    def start(self, scratch) -> None:
        del scratch

    def wait(self, scratch, slot: int, turn: jax.Array) -> None:
        del turn
        plgpu.barrier_wait(scratch[0].at[slot])

    def index(self, value: int) -> int:
        return value

    def bring(
        self, scratch, source: Source, pairs: jax.Array, tiles: jax.Ref, when_free: Callable[[int, jax.Array], None]
    ) -> None:
        @pl.loop(0, pairs)
        def _(turn):
            for slot in range(2):
                when_free(slot, turn)

                @pl.loop(0, TILE)
                def _(i, slot=slot):
                    place = source.place + (2 * turn + slot) * TILE + i
                    spare = source.rows[source.token, 0]
                    row = jnp.where(place < source.count, source.rows[source.token, place], spare)
                    plgpu.copy_gmem_to_smem(source.pool.at[source.base + row], tiles.at[slot, i], scratch[0].at[slot])


def numbers(source: Source, place: jax.Array) -> jax.Array:
    """The rows of each thread in the tile that begins `place` after the source's: those at `thread / 8 + 16 i`."""

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), _SCALAR, _SCALAR, _SCALAR),
        return_type=plgpu.ShapeDtypeStruct((4 * THREADS,), jnp.int32, HELD),
    )
    def numbers(ctx, rows, place, count, base):
        place, count, base = (x.registers.item() for x in (place, count, base))
        _, row = part_and_row()
        spare = memref.load(rows, [arith.constant(ir.IndexType.get(), 0)])
        held = []
        for i in range(4):
            at = arith.addi(place, arith.addi(row, i32(16 * i)))
            listed = arith.cmpi(arith.CmpIPredicate.slt, at, count)
            number = memref.load(rows, [arith.index_cast(ir.IndexType.get(), at)])
            held.append(arith.addi(arith.select(listed, number, spare), base))
        return registers([vector_of(held)], HELD)

    return numbers(source.rows.at[source.token], source.place + place, source.count, source.base)


# What follows is for code inside of `inline_mgpu`.


def part_and_row():
    """Which 16 bytes of 128 a thread of the producer copies, and of which of 16 rows."""
    thread = arith.remui(utils.thread_idx(), i32(THREADS))
    return arith.remui(thread, i32(8)), arith.divui(thread, i32(8))


def row_place(tile, row, blocks: int):
    """Address in shared memory of `row` in its box of the first of `blocks` columns of boxes."""
    box, within = arith.divui(row, i32(8)), arith.remui(row, i32(8))
    place = arith.addi(arith.muli(box, i32(blocks * BOX)), arith.muli(within, i32(128)))
    return arith.addi(shared(utils.memref_ptr(tile)), place)


def swizzled(part, row):
    """Where the `part`-th 16 bytes of a row lie in its box."""
    return arith.muli(arith.xori(part, arith.remui(row, i32(8))), i32(16))


def barrier(landed, slot: int):
    return utils.getelementptr(utils.memref_ptr(landed), [slot], ir.IntegerType.get_signless(64))


def address(ref):
    return llvm.ptrtoint(ir.IntegerType.get_signless(64), utils.memref_ptr(ref))


def shared(pointer):
    return llvm.ptrtoint(ir.IntegerType.get_signless(32), pointer)


def i32(value: int):
    return arith.constant(ir.IntegerType.get_signless(32), value)


def vector_of(values):
    """Four 32-bit values as one register of an array."""
    held = llvm.mlir_undef(ir.VectorType.get((4,), ir.IntegerType.get_signless(32)))
    for i, value in enumerate(values):
        held = vector.insert(value, held, dynamic_position=[], static_position=[i])
    return held


def registers(held, layout):
    """Vectors of 32-bit values as an array in `layout`."""
    return mgpu.FragmentedArray(
        _registers=np.array(held, dtype=object), _layout=layout.to_mgpu(), _is_signed=True
    )  # fmt: skip


def asm(code: str, constraints: str, *args) -> None:
    """PTX without a result."""
    llvm.inline_asm(ir.Type.parse("!llvm.void"), list(args), code, constraints, has_side_effects=True)
