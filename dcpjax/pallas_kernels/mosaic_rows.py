"""Scattered rows of a pool, brought as tiles that Hopper's matrix instructions read where they land.

Pallas copies rows one by one to consecutive places, or boxes; neither is the swizzled layout of `wgmma`. So copies are
written out here: 16 bytes each, asynchronous, to swizzled places, and a barrier in shared memory counts those that landed,
so that nobody waits to send for the next tile. The interpreter knows none of this: `PlainRows` does it by Pallas' copies.

Packed records are unpacked by the threads that bring them. A thread reads 32 bytes of latent at a time, 8 words: byte i of
each is of quarter i, so they are 8 neighbours in each of four blocks of columns, 16 bytes there in bfloat16. What e4m3 keeps
fits into bfloat16, and scales are powers of two: nothing is rounded. NaN is read as 480.

A kernel makes one of `AsyncRows`, `RecordRows` and `PlainRows`, gives it `scratch` to keep, and calls `start` in all three
warpgroups, `bring` in the one that brings tiles, and `wait` and `index` in those that compute.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.experimental.mosaic.gpu as mgpu
import jax.numpy as jnp
import numpy as np
from jax import lax
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
    thread_number,
)

TILE = 64  # rows
# Each thread of the producer holds the numbers of the four rows that it copies a part of.
_HELD = plgpu.Layout.WG_STRIDED((4 * THREADS,), vec_size=4)

# Bytes of a record, and where its scales and its rotated key begin: `records.pack_rows` of 512 + 64 values.
_RECORD, _SCALES, _KEY = 656, 512, 528
_BLOCKS = 9  # of 64 columns
# A thread reads, of each of its rows, twice 32 bytes of latent, all scales, and 16 bytes of key.
_READS = ((0, 0), (0, 16), (0, 256), (0, 272), (1, _SCALES), (2, _KEY))
_WORDS = 4 * len(_READS)
_ROW = plgpu.Layout.WG_STRIDED((_WORDS * THREADS,), vec_size=4)
# Eight threads of a row that each ask for a line so far apart ask for all of its lines of 128 bytes.
_APART = 92


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
                nvvm.mbarrier_init(_barrier(landed, slot), constant32(THREADS), predicate=one)

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
                held = _numbers(here, slot)
                when_free(slot, turn)
                self._send(here.pool, tiles.at[slot], scratch[0], held, slot)

    def _send(self, pool, tile, landed, held, slot):
        blocks = self.width // 64

        @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType(TRANSFORMS), plgpu.RefType(), _HELD))
        def send(ctx, pool, tile, landed, held):
            kind = ir.IntegerType.get_signless(64)
            part, row = _part_and_row()
            source = arith.addi(address_of(pool), arith.extui(kind, arith.muli(part, constant32(16))))
            place = arith.addi(_row_place(tile, row, blocks), _swizzled(part, row))
            for i in range(4):
                number = arith.extsi(kind, vector.extract(held.registers.item(), [], [i]))
                first = arith.addi(source, arith.muli(number, arith.constant(kind, 2 * self.width)))
                # A row begins and ends with a line of 128 bytes: larger prefetches would bring parts of its neighbours.
                copies = (
                    f"cp.async.cg.shared.global.L2::128B [$0 + {block * BOX}], [$1 + {block * 128}], 16;"
                    for block in range(blocks)
                )
                ptx("\n".join(copies), "r,l", arith.addi(place, constant32(i * 2 * blocks * BOX)), first)
            ptx("cp.async.mbarrier.arrive.noinc.shared.b64 [$0];", "r", shared_address(_barrier(landed, slot)))

        send(pool, tile, landed, held)


@dataclasses.dataclass(frozen=True)
class RecordRows(Landing):
    """Tiles of bfloat16 rows of 512 + 64 from records `[rows, 164]` uint32. registers: as in `AsyncRows`."""

    registers: tuple[int, int] = (208, 88)

    def bring(
        self, scratch, source: Callable[[jax.Array], Source], pairs: jax.Array, tiles: jax.Ref,
        when_free: Callable[[int, jax.Array], None],
    ) -> None:  # fmt: skip
        """As `AsyncRows.bring`, to `tiles [2, TILE, 576]` bfloat16. A thread reads a row while it takes the one before apart, also
        from a tile to the next one, whose rows it has brought to the cache before."""

        first = source(jnp.int32(0))

        def tile(turn, slot, carry):
            held, words, *here = carry
            for i in range(4):
                if i < 3:
                    ahead = _read(first.pool, held, i + 1)
                if i == 2:
                    if slot == 1:
                        # Past the last tile: the last pair's once more.
                        found = source(jnp.minimum(turn + 1, pairs - 1))
                        here = found.token, found.place, found.count
                    token, place, count = here
                    held = _numbers(dataclasses.replace(first, token=token, place=place, count=count), 1 - slot)
                    _prefetch(first.pool, held)
                if i == 3:
                    ahead = _read(first.pool, held, 0)
                if i == 0:
                    when_free(slot, turn)
                _store(tiles.at[slot], words, i)
                words = ahead
            _publish(scratch[0], slot)
            return held, words, *here

        @pl.when(pairs > 0)
        def _():
            held = _numbers(first, 0)
            lax.fori_loop(
                0, pairs,
                lambda turn, carry: tile(turn, 1, tile(turn, 0, carry)),
                (held, _read(first.pool, held, 0), first.token, first.place, first.count),
            )  # fmt: skip


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


def _numbers(source: Source, slot: int) -> jax.Array:
    """The rows of each thread in the tile of a slot: those at `thread / 8 + 16 i`."""

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), SCALAR, SCALAR, SCALAR),
        return_type=plgpu.ShapeDtypeStruct((4 * THREADS,), jnp.int32, _HELD),
    )
    def _numbers(ctx, rows, place, count, base):
        place, count, base = (x.registers.item() for x in (place, count, base))
        _, row = _part_and_row()
        spare = memref.load(rows, [arith.constant(ir.IndexType.get(), 0)])
        held = []
        for i in range(4):
            at = arith.addi(place, arith.addi(row, constant32(16 * i)))
            listed = arith.cmpi(arith.CmpIPredicate.slt, at, count)
            number = memref.load(rows, [arith.index_cast(ir.IndexType.get(), at)])
            held.append(arith.addi(arith.select(listed, number, spare), base))
        return _registers_in([_vector_of(held)], _HELD)

    return _numbers(source.rows.at[source.token], source.place + slot * TILE, source.count, source.base)


def _prefetch(pool, held):
    """Has the thread's four rows brought to the chip's cache."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), _HELD))
    def prefetch(ctx, pool, held):
        for i in range(4):
            ptx("prefetch.global.L2 [$0];", "l", *_in_record(pool, held, i, _APART))

    prefetch(pool, held)


def _read(pool, held, i):
    """Words of the thread's `i`-th row."""

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), _HELD), return_type=plgpu.ShapeDtypeStruct((_WORDS * THREADS,), jnp.int32, _ROW)
    )
    def read(ctx, pool, held):
        kind = ir.IntegerType.get_signless(32)
        code = "\n".join(
            f"ld.global.nc.v4.u32 {{${4 * n}, ${4 * n + 1}, ${4 * n + 2}, ${4 * n + 3}}}, [${_WORDS + at} + {offset}];"
            for n, (at, offset) in enumerate(_READS)
        )
        struct = llvm.StructType.get_literal([kind] * _WORDS)
        outs = ",".join(["=r"] * _WORDS + ["l"] * 3)
        result = llvm.inline_asm(struct, _in_record(pool, held, i, 32, 0, 16), code, outs, has_side_effects=True)
        words = [llvm.extractvalue(kind, result, [n]) for n in range(_WORDS)]
        return _registers_in([_vector_of(words[n : n + 4]) for n in range(0, _WORDS, 4)], _ROW)

    return read(pool, held)


def _store(tile, words, i):
    """Values of these words to the thread's `i`-th row of a tile."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(TRANSFORMS), _ROW))
    def store(ctx, tile, words):
        part, row = _part_and_row()
        place = _row_place(tile, row, _BLOCKS)
        latent = arith.addi(place, _swizzled(part, row))
        # Four words of key are half of 16 bytes twice: of its first half and, four parts on, of its second.
        half = arith.muli(arith.remui(part, constant32(2)), constant32(8))
        quarter = arith.divui(part, constant32(2))
        low, high = (
            arith.addi(arith.addi(place, _swizzled(x, row)), half)
            for x in (quarter, arith.addi(quarter, constant32(4)))
        )
        args = *(vector.extract(x, [], [n]) for x in words.registers.flat for n in range(4)), latent, low, high
        ptx(_unpack(i * 2 * _BLOCKS * BOX), ",".join("r" * len(args)), *args)

    store(tile, words)


def _unpack(offset: int) -> str:
    """PTX that takes the 24 words $0 … $23 of a row apart and stores them `offset` after $24 (latent), $25 and $26 (key).

    Sign, exponent and fraction of e4m3 in their places in bfloat16 are 2⁻¹²⁰ times the value, for two values at a time; a
    scale is multiplied with 2¹²⁰ first: `records.pack_rows` makes none above 2⁷.
    """
    code = ["{ .reg .b32 both, low, scale<4>, out<4>; .reg .f32 one;"]
    for quarter in range(4):
        code.append(f"mov.b32 one, ${16 + quarter}; mul.f32 one, one, 0f7B800000; mov.b32 both, one;")
        code.append(f"prmt.b32 scale{quarter}, both, both, 0x3232;")
    for eight in range(2):
        for quarter in range(4):
            select = (4 + quarter) << 12 | (4 + quarter) << 8 | quarter << 4 | quarter
            for two in range(4):
                word = 8 * eight + 2 * two
                code.append(f"prmt.b32 both, ${word}, ${word + 1}, {select:#06x};")
                code.append("shr.b32 low, both, 4; and.b32 low, low, 0x07f007f0;")
                code.append("lop3.b32 both, both, 0x80008000, low, 0xEA;")  # (both & 0x80008000) | low
                code.append(f"mul.rn.bf16x2 out{two}, both, scale{quarter};")
            place = offset + (2 * quarter + eight) * BOX
            code.append(f"st.shared.v4.b32 [$24 + {place}], {{out0, out1, out2, out3}};")
    for out, (first, second, select) in enumerate(
        ((20, 21, "0x5410"), (22, 23, "0x5410"), (20, 21, "0x7632"), (22, 23, "0x7632"))
    ):
        code.append(f"prmt.b32 out{out}, ${first}, ${second}, {select};")
    for register, outs in ((25, "out0, out1"), (26, "out2, out3")):
        code.append(f"st.shared.v2.b32 [${register} + {offset + 8 * BOX}], {{{outs}}};")
    return "\n".join(code) + "}"


def _publish(landed, slot):
    """Counts this thread's parts of a tile as landed."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
    def publish(ctx, landed):
        nvvm.fence_proxy(nvvm.ProxyKind.async_shared, space=nvvm.SharedSpace.shared_cta)
        ptx("mbarrier.arrive.shared.b64 _, [$0];", "r", shared_address(_barrier(landed, slot)))

    publish(landed)


# What follows is for code inside of `inline_mgpu`.


def _part_and_row():
    """Which 16 bytes of 128 a thread of the producer copies, and of which of 16 rows."""
    thread = thread_number()
    return arith.remui(thread, constant32(8)), arith.divui(thread, constant32(8))


def _in_record(pool, held, i: int, *sizes: int):
    """Addresses in the thread's `i`-th row: for each size, those of its eight threads are so far apart."""
    wide = ir.IntegerType.get_signless(64)
    number = arith.extsi(wide, vector.extract(held.registers.item(), [], [i]))
    row = arith.addi(address_of(pool), arith.muli(number, arith.constant(wide, _RECORD)))
    part, _ = _part_and_row()
    return [arith.addi(row, arith.extui(wide, arith.muli(part, constant32(size)))) for size in sizes]


def _row_place(tile, row, blocks: int):
    """Address in shared memory of `row` in its box of the first of `blocks` columns of boxes."""
    box, within = arith.divui(row, constant32(8)), arith.remui(row, constant32(8))
    place = arith.addi(arith.muli(box, constant32(blocks * BOX)), arith.muli(within, constant32(128)))
    return arith.addi(shared_address(utils.memref_ptr(tile)), place)


def _swizzled(part, row):
    """Where the `part`-th 16 bytes of a row lie in its box."""
    return arith.muli(arith.xori(part, arith.remui(row, constant32(8))), constant32(16))


def _barrier(landed, slot: int):
    return utils.getelementptr(utils.memref_ptr(landed), [slot], ir.IntegerType.get_signless(64))


def _vector_of(values):
    """Four 32-bit values as one register of an array."""
    held = llvm.mlir_undef(ir.VectorType.get((4,), ir.IntegerType.get_signless(32)))
    for i, value in enumerate(values):
        held = vector.insert(value, held, dynamic_position=[], static_position=[i])
    return held


def _registers_in(held, layout):
    """Vectors of 32-bit values as an array in `layout`."""
    return mgpu.FragmentedArray(
        _registers=np.array(held, dtype=object), _layout=layout.to_mgpu(), _is_signed=True
    )  # fmt: skip
