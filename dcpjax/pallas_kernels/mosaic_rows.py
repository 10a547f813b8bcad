"""Scattered rows of a pool, brought as tiles that Hopper's matrix instructions read where they land.

Pallas copies rows one by one to consecutive places, or boxes; neither is the swizzled layout of `wgmma`. So copies are
written out here: 16 bytes each, asynchronous, to swizzled places, and a barrier in shared memory counts those that landed,
so that nobody waits to send for the next tile. The interpreter knows none of this: `PlainRows` does it by Pallas' copies.

A kernel makes one of `AsyncRows`, `PlainRows` and, for packed records, `mosaic_records.RecordRows`, gives it `scratch` to
keep, and calls `start` in all three warpgroups, `bring` in the one that brings tiles, and `wait` and `index` in those that
compute.
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

from dcpjax.pallas_kernels.mosaic_ptx import (
    BOX,
    SCALAR,
    THREADS,
    TRANSFORMS,
    address_of,
    constant32,
    ptx,
    shared_address,
    shared_place,
    thread_number,
)

TILE = 64  # rows
# Each thread of the producer holds the numbers of the four rows that it copies a part of.
HELD = plgpu.Layout.WG_STRIDED((4 * THREADS,), vec_size=4)


@dataclasses.dataclass(frozen=True)
class Source:
    """Where a pair of tiles comes from: rows of `pool [rows, …]`, bfloat16 or uint32, that are listed in `rows [T, K]` int32 for
    a token, from a place in the list on. Places from `count` on are read as the list's first. base: added to every row of the
    list.
    """

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
                nvvm.mbarrier_init(barrier_of(landed, slot), constant32(THREADS), predicate=one)

        initialise(landed)
        plgpu.barrier_arrive(ready)
        plgpu.barrier_wait(ready)

    def wait(self, scratch, slot: int, turn: jax.Array) -> None:
        """Until tile number `turn []` int32 of a slot, from 0, is there for matrix instructions of the calling warpgroup."""

        @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), SCALAR))
        def wait(ctx, landed, parity):
            odd = arith.trunci(ir.IntegerType.get_signless(1), parity.registers.item())
            utils.BarrierRef(utils.memref_ptr(landed), constant32(slot), None, 1).wait_parity(odd)
            # What was written as ordinary memory is read by the tensor cores' own path.
            nvvm.fence_proxy(nvvm.ProxyKind.async_shared, space=nvvm.SharedSpace.shared_cta)

        wait(scratch[0], jax.lax.rem(turn, jnp.int32(2)))

    def index(self, value: int) -> jax.Array:
        """`value` as `[]` int32, of which the compiler knows nothing. Addresses of a product's operands that it knows not to change in a
        loop are computed before it, a hundred of them, and kept: registers spill."""

        @plgpu.inline_mgpu(return_type=plgpu.ShapeDtypeStruct((), jnp.int32, SCALAR))
        def index(ctx):
            kind = ir.IntegerType.get_signless(32)
            number = llvm.inline_asm(kind, [], f"mov.u32 $0, {value};", "=r", has_side_effects=True)
            return mgpu.FragmentedArray.splat(number, (), is_signed=True)

        return index()


@dataclasses.dataclass(frozen=True)
class AsyncRows(Landing):
    """Tiles of rows of `width` 2-byte numbers. registers: of a thread that computes and of one that brings tiles."""

    width: int
    registers: tuple[int, int] = (216, 72)

    def bring(
        self, scratch, source: Callable[[jax.Array], Source], pairs: jax.Array, tiles: jax.Ref,
        when_free: Callable[[int, jax.Array], None],
    ) -> None:  # fmt: skip
        """The producer's work: `pairs []` int32 times a tile for each slot of `tiles [2, TILE, width]` bfloat16, those of
        `source(turn)`, sent for once `when_free(slot, turn)` returns."""

        @pl.loop(0, pairs)
        def _(turn):
            here = source(turn)
            for slot in range(2):
                # Numbers are read while the slot is still in use.
                held = numbers_of(here, slot)
                when_free(slot, turn)
                self._send(here, tiles.at[slot], scratch[0], held, slot)

    def _send(self, source, tile, landed, held, slot):
        blocks = self.width // 64

        @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType(TRANSFORMS), plgpu.RefType(), HELD, SCALAR))
        def send(ctx, pool, tile, landed, held, base):
            kind = ir.IntegerType.get_signless(64)
            part, row = part_and_row()
            source = arith.addi(address_of(pool), arith.extui(kind, arith.muli(part, constant32(16))))
            place = arith.addi(row_place(tile, row, blocks), swizzled(part, row))
            for i in range(4):
                number = arith.addi(vector.extract(held.registers.item(), [], [i]), base.registers.item())
                number = arith.extsi(kind, number)
                first = arith.addi(source, arith.muli(number, arith.constant(kind, 2 * self.width)))
                # A row begins and ends with a line of 128 bytes: larger prefetches would bring parts of its neighbours.
                copies = (
                    f"cp.async.cg.shared.global.L2::128B [$0 + {block * BOX}], [$1 + {block * 128}], 16;"
                    for block in range(blocks)
                )
                ptx("\n".join(copies), "r,l", arith.addi(place, constant32(i * 2 * blocks * BOX)), first)
            ptx("cp.async.mbarrier.arrive.noinc.shared.b64 [$0];", "r", shared_address(barrier_of(landed, slot)))

        send(source.pool, tile, landed, held, source.base)


@dataclasses.dataclass(frozen=True)
class PlainRows:
    """`AsyncRows` for the interpreter: row by row, with Pallas' copies and barriers."""

    width: int
    registers: tuple[int, int] = (216, 72)

    def scratch(self):
        return (plgpu.Barrier(num_arrivals=TILE, num_barriers=2),)

    def start(self, scratch) -> None:
        del scratch

    def wait(self, scratch, slot: int, turn: jax.Array) -> None:
        """As `Landing.wait`, `turn []` int32."""
        del turn
        plgpu.barrier_wait(scratch[0].at[slot])

    def index(self, value: int) -> int:
        return value

    def bring(
        self, scratch, source: Callable[[jax.Array], Source], pairs: jax.Array, tiles: jax.Ref,
        when_free: Callable[[int, jax.Array], None],
    ) -> None:  # fmt: skip
        """As `AsyncRows.bring`, `pairs []` int32, `tiles [2, TILE, width]` in any dtype."""

        @pl.loop(0, pairs)
        def _(turn):
            here = source(turn)
            for slot in range(2):
                when_free(slot, turn)

                @pl.loop(0, TILE)
                def _(i, slot=slot):
                    place = here.place + slot * TILE + i
                    spare = here.rows[here.token, 0]
                    row = jnp.where(place < here.count, here.rows[here.token, place], spare)
                    plgpu.copy_gmem_to_smem(here.pool.at[here.base + row], tiles.at[slot, i], scratch[0].at[slot])


def numbers_of(source: Source, slot: int | jax.Array) -> jax.Array:
    """`[4 · 128]` int32 in the layout `HELD`: the rows of each thread in the tile of a slot, those at `thread / 8 + 16 i`. They are
    as they are read, so that nobody waits for them before they are used."""

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), SCALAR, SCALAR),
        return_type=plgpu.ShapeDtypeStruct((4 * THREADS,), jnp.int32, HELD),
    )
    def numbers(ctx, rows, place, count):
        place, count = (x.registers.item() for x in (place, count))
        _, row = part_and_row()
        held = []
        for i in range(4):
            at = arith.addi(place, arith.addi(row, constant32(16 * i)))
            at = arith.select(arith.cmpi(arith.CmpIPredicate.slt, at, count), at, constant32(0))
            held.append(memref.load(rows, [arith.index_cast(ir.IndexType.get(), at)]))
        return registers_in([vector_of(held)], HELD)

    return numbers(source.rows.at[source.token], source.place + slot * TILE, source.count)


# What follows is for code inside of `inline_mgpu`.


def part_and_row():
    """Which 16 bytes of 128 a thread of the producer copies, and of which of 16 rows."""
    thread = thread_number()
    return arith.remui(thread, constant32(8)), arith.divui(thread, constant32(8))


def row_place(tile, row, blocks: int):
    """Address in shared memory of `row` in its box of the first of `blocks` columns of boxes."""
    box, within = arith.divui(row, constant32(8)), arith.remui(row, constant32(8))
    place = arith.addi(arith.muli(box, constant32(blocks * BOX)), arith.muli(within, constant32(128)))
    return arith.addi(shared_place(tile), place)


def swizzled(part, row):
    """Where the `part`-th 16 bytes of a row lie in its box."""
    return arith.muli(arith.xori(part, arith.remui(row, constant32(8))), constant32(16))


def barrier_of(landed, slot: int):
    """Pointer to the barrier of a slot, 64 bits in what `Landing.scratch` keeps."""
    return utils.getelementptr(utils.memref_ptr(landed), [slot], ir.IntegerType.get_signless(64))


def vector_of(values):
    """Four 32-bit values as one register of an array."""
    held = llvm.mlir_undef(ir.VectorType.get((4,), ir.IntegerType.get_signless(32)))
    for i, value in enumerate(values):
        held = vector.insert(value, held, dynamic_position=[], static_position=[i])
    return held


def registers_in(held, layout):
    """Vectors of 32-bit values as an array in `layout`."""
    return mgpu.FragmentedArray(
        _registers=np.array(held, dtype=object), _layout=layout.to_mgpu(), _is_signed=True
    )  # fmt: skip
