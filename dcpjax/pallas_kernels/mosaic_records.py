"""Packed records brought as the bfloat16 tiles that Hopper's matrix instructions read.

The threads that bring a record take it apart. Of 32 bytes of latent, 8 words, byte i of each is of quarter i, so they are 8
neighbours in each of four blocks of columns, 16 bytes there in bfloat16. What e4m3 keeps fits into bfloat16, and scales are
powers of two: nothing is rounded. NaN is read as 480.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, nvvm, vector

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
from dcpjax.pallas_kernels.mosaic_rows import (
    HELD,
    TILE,
    Landing,
    Source,
    barrier_of,
    numbers_of,
    part_and_row,
    registers_in,
    row_place,
    swizzled,
    vector_of,
)

# Bytes of a record, and where its scales and its rotated key begin: `records.pack_rows` of 512 + 64 values.
_RECORD, _SCALES, _KEY = 656, 512, 528
_BLOCKS = 9  # of 64 columns
# Bytes of sixteen rows and of all.
_SIXTEEN, _TILE = 2 * _BLOCKS * BOX, TILE // 8 * _BLOCKS * BOX
# A thread reads, of each of its rows, twice 32 bytes of latent, all scales, and 16 bytes of key.
_READS = ((0, 0), (0, 16), (0, 256), (0, 272), (1, _SCALES), (2, _KEY))
_WORDS = 4 * len(_READS)
_ROW = plgpu.Layout.WG_STRIDED((_WORDS * THREADS,), vec_size=4)
# Eight threads of a row that each ask for a line so far apart ask for all of its lines of 128 bytes.
_APART = 92


@dataclasses.dataclass(frozen=True)
class RecordRows(Landing):
    """Tiles of bfloat16 rows of 512 + 64 from records `[rows, 164]` uint32. registers: as in `AsyncRows`.

    Everybody waits for the first tile: it is brought by those who compute, by `help`, and all others by the producer.
    """

    registers: tuple[int, int] = (208, 88)

    def bring(
        self, scratch, source: Callable[[jax.Array], Source], pairs: jax.Array, tiles: jax.Ref,
        when_free: Callable[[int, jax.Array], None],
    ) -> None:  # fmt: skip
        """As `AsyncRows.bring`, to `tiles [2, TILE, 576]` bfloat16, from the second tile on. A thread reads a row while it takes the
        one before apart, also from a tile to the next one, whose rows it has brought to the cache before."""
        first = source(jnp.int32(0))

        def numbers(number):
            # Past the last tile: its once more.
            number = jnp.minimum(number, 2 * pairs - 1)
            return numbers_of(source(lax.div(number, jnp.int32(2))), lax.rem(number, jnp.int32(2)))

        def tile(number, carry):
            held, words = carry
            turn, slot = lax.div(number, jnp.int32(2)), lax.rem(number, jnp.int32(2))
            next_held = numbers(number + 1)
            for i in range(4):
                ahead = _read(first, held, i + 1) if i < 3 else _read(first, next_held, 0)
                if i == 0:
                    when_free(slot, turn)
                if i == 2:
                    _prefetch(first, next_held)
                _store(tiles, slot, words, i)
                words = ahead
            _publish(scratch[0], slot)
            return next_held, words

        @pl.when(pairs > 0)
        def _():
            held = numbers(jnp.int32(1))
            lax.fori_loop(1, 2 * pairs, tile, (held, _read(first, held, 0)))

    def help(self, scratch, source: Source, tiles: jax.Ref, me: int) -> None:
        """Called by the two warpgroups that compute, `me` 0 and 1, if there are tiles: each brings half of the first one."""
        held = numbers_of(source, 0)
        _copy(source, tiles, held, 2 * me)
        for i in range(2):
            _take_apart(tiles, 2 * me + i, 1 - i)
        _publish_half(scratch[0])


def _prefetch(source, held):
    """Has the thread's four rows brought to the chip's cache."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), HELD, SCALAR))
    def prefetch(ctx, pool, held, base):
        for i in range(4):
            ptx("prefetch.global.L2 [$0];", "l", *_in_record(pool, held, base, i, _APART))

    prefetch(source.pool, held, source.base)


def _read(source, held, i):
    """Words of the thread's `i`-th row."""

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), HELD, SCALAR),
        return_type=plgpu.ShapeDtypeStruct((_WORDS * THREADS,), jnp.int32, _ROW),
    )
    def read(ctx, pool, held, base):
        kind = ir.IntegerType.get_signless(32)
        code = "\n".join(
            f"ld.global.nc.v4.u32 {{{_four('$', 4 * n)}}}, [${_WORDS + at} + {offset}];"
            for n, (at, offset) in enumerate(_READS)
        )
        struct = llvm.StructType.get_literal([kind] * _WORDS)
        outs = ",".join(["=r"] * _WORDS + ["l"] * 3)
        result = llvm.inline_asm(struct, _in_record(pool, held, base, i, 32, 0, 16), code, outs, has_side_effects=True)
        words = [llvm.extractvalue(kind, result, [n]) for n in range(_WORDS)]
        return registers_in([vector_of(words[n : n + 4]) for n in range(0, _WORDS, 4)], _ROW)

    return read(source.pool, held, source.base)


def _store(tiles, slot, words, i):
    """Values of these words to the thread's `i`-th row of the tile in a slot."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(TRANSFORMS), SCALAR, _ROW))
    def store(ctx, tiles, slot, words):
        place = arith.addi(
            row_place(tiles, part_and_row()[1], _BLOCKS), arith.muli(slot.registers.item(), constant32(_TILE))
        )
        args = *(vector.extract(x, [], [n]) for x in words.registers.flat for n in range(4)), *_stores(place)
        code = ["{", _REGISTERS, *_unpack("$", i * _SIXTEEN, "$24", "$25", "$26"), "}"]
        ptx("\n".join(code), ",".join("r" * len(args)), *args)

    store(tiles, slot, words)


def _copy(source, tiles, held, begin: int):
    """Sends for two of the thread's records from the `begin`-th on, each a group of copies: of latent four blocks of 128 bytes,
    then scales, then key, where the first six blocks of its row in the first tile will be."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType(TRANSFORMS), HELD, SCALAR))
    def copy(ctx, pool, tiles, held, base):
        part, row = part_and_row()
        place = arith.addi(row_place(tiles, row, _BLOCKS), arith.muli(part, constant32(16)))
        # Neighbours swapped in every other block: eight threads that read 32 bytes each, from two blocks, read all banks.
        places = place, arith.xori(place, constant32(16))
        for i in range(begin, begin + 2):
            row = i * _SIXTEEN
            code = [
                "{ .reg .pred p; setp.eq.s32 p, $4, 0;",
                *(
                    f"cp.async.cg.shared.global.L2::128B [${n % 2} + {row + n * BOX}], [$3 + {128 * n}], 16;"
                    for n in range(4)
                ),
                f"@p cp.async.cg.shared.global.L2::128B [$0 + {row + 4 * BOX}], [$2 + {_SCALES}], 16;",
                f"cp.async.cg.shared.global.L2::128B [$0 + {row + 5 * BOX}], [$3 + {_KEY}], 16;",
                "cp.async.commit_group; }",
            ]
            ptx("\n".join(code), "r,r,l,l,r", *places, *_in_record(pool, held, base, i, 0, 16), part)

    copy(source.pool, tiles, held, source.base)


def _take_apart(tiles, i: int, pending: int):
    """The thread's `i`-th record in the first tile, where it was copied: bfloat16 in its place, once no more than so many groups
    of copies are pending. A row's eight threads are of one warp: all read before any writes."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(TRANSFORMS),))
    def take_apart(ctx, tiles):
        part, row = part_and_row()
        place = row_place(tiles, row, _BLOCKS)
        # Words of a thread: its 32 bytes of each half of the latent, scales, and its 16 bytes of key.
        block, within = arith.divui(part, constant32(4)), arith.muli(arith.remui(part, constant32(4)), constant32(32))
        words = arith.addi(place, arith.muli(block, constant32(BOX)))
        words = arith.addi(words, arith.xori(within, arith.muli(block, constant32(16))))
        rest = arith.addi(place, arith.muli(part, constant32(16)))
        reads = ("$0", 0), ("odd", 0), ("$0", 2), ("odd", 2), ("$1", 4), ("$2", 5)
        code = [
            f"{{ .reg .b32 word<24>, odd; {_REGISTERS} xor.b32 odd, $0, 16;",
            f"cp.async.wait_group {pending}; bar.warp.sync 0xffffffff;",
            *(
                f"ld.shared.v4.b32 {{{_four('word', 4 * n)}}}, [{at} + {i * _SIXTEEN + block * BOX}];"
                for n, (at, block) in enumerate(reads)
            ),
            "bar.warp.sync 0xffffffff;",
            *_unpack("word", i * _SIXTEEN, "$3", "$4", "$5"),
            "}",
        ]
        ptx("\n".join(code), "r,r,r,r,r,r", words, place, rest, *_stores(place))

    take_apart(tiles)


_REGISTERS = ".reg .b32 both, scale<4>, out<4>; .reg .f32 one;"


def _unpack(word: str, offset: int, latent: str, low: str, high: str) -> list[str]:
    """PTX that takes 24 words of a row apart and stores them `offset` after three addresses.

    Sign, exponent and fraction of e4m3 in their places in bfloat16 are 2⁻¹²⁰ times the value, for two values at a time; a
    scale is multiplied with 2¹²⁰ first: `records.pack_rows` makes none above 2⁷. Two bytes come together with their signs
    repeated in the bytes above them, so that what is shifted left and masked has all bits where they belong.
    """
    code = []
    for quarter in range(4):
        code.append(f"mov.b32 one, {word}{16 + quarter}; mul.f32 one, one, 0f7B800000; mov.b32 both, one;")
        code.append(f"prmt.b32 scale{quarter}, both, both, 0x3232;")
    for eight in range(2):
        for quarter in range(4):
            select = (12 + quarter) << 12 | (4 + quarter) << 8 | (8 + quarter) << 4 | quarter
            for two in range(4):
                n = 8 * eight + 2 * two
                code.append(f"prmt.b32 both, {word}{n}, {word}{n + 1}, {select:#06x};")
                code.append("shl.b32 both, both, 4; and.b32 both, both, 0x87f087f0;")
                code.append(f"mul.rn.bf16x2 out{two}, both, scale{quarter};")
            code.append(f"st.shared.v4.b32 [{latent} + {offset + (2 * quarter + eight) * BOX}], {{{_four('out', 0)}}};")
    for out, (first, second, select) in enumerate(
        ((20, 21, "0x5410"), (22, 23, "0x5410"), (20, 21, "0x7632"), (22, 23, "0x7632"))
    ):
        code.append(f"prmt.b32 out{out}, {word}{first}, {word}{second}, {select};")
    for place, outs in ((low, "out0, out1"), (high, "out2, out3")):
        code.append(f"st.shared.v2.b32 [{place} + {offset + 8 * BOX}], {{{outs}}};")
    return code


def _four(name: str, first: int) -> str:
    return ", ".join(f"{name}{first + n}" for n in range(4))


def _publish(landed, slot):
    """Counts this thread's parts of a tile as landed."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), SCALAR))
    def publish(ctx, landed, slot):
        nvvm.fence_proxy(nvvm.ProxyKind.async_shared, space=nvvm.SharedSpace.shared_cta)
        place = arith.muli(slot.registers.item(), constant32(8))
        ptx("mbarrier.arrive.shared.b64 _, [$0];", "r", arith.addi(shared_address(barrier_of(landed, 0)), place))

    publish(landed, slot)


def _publish_half(landed):
    """Counts half a tile of a warpgroup's as landed in the first slot."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
    def publish(ctx, landed):
        nvvm.fence_proxy(nvvm.ProxyKind.async_shared, space=nvvm.SharedSpace.shared_cta)
        # Every other thread, for its neighbour, too: the barrier counts as many as there are in one warpgroup.
        odd = arith.remui(thread_number(), constant32(2))
        code = (
            "{ .reg .pred p; setp.eq.s32 p, $1, 0; bar.warp.sync 0xffffffff; @p mbarrier.arrive.shared.b64 _, [$0]; }"
        )
        ptx(code, "r,r", shared_address(barrier_of(landed, 0)), odd)

    publish(landed)


# What follows is for code inside of `inline_mgpu`.


def _in_record(pool, held, base, i: int, *sizes: int):
    """Addresses in the thread's `i`-th row: for each size, those of its eight threads are so far apart."""
    wide = ir.IntegerType.get_signless(64)
    number = arith.addi(vector.extract(held.registers.item(), [], [i]), base.registers.item())
    number = arith.extsi(wide, number)
    row = arith.addi(address_of(pool), arith.muli(number, arith.constant(wide, _RECORD)))
    part, _ = part_and_row()
    return [arith.addi(row, arith.extui(wide, arith.muli(part, constant32(size)))) for size in sizes]


def _stores(place):
    """Where a thread's parts of a row go that begins at `place`: of latent, and of the key's halves."""
    part, row = part_and_row()
    # Four words of key are half of 16 bytes twice: of its first half and, four parts on, of its second.
    half = arith.muli(arith.remui(part, constant32(2)), constant32(8))
    quarter = arith.divui(part, constant32(2))
    return arith.addi(place, swizzled(part, row)), *(
        arith.addi(arith.addi(place, swizzled(x, row)), half) for x in (quarter, arith.addi(quarter, constant32(4)))
    )
