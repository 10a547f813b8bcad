"""Packed records of a pool, unpacked on their way to tiles that Hopper's matrix instructions read.

A producer's thread reads 32 bytes of latent at a time, 8 words: byte i of each is of quarter i, so they are 8 neighbours in
each of four blocks of columns, 16 bytes there in bfloat16. What e4m3 keeps fits into bfloat16, and scales are powers of
two: nothing is rounded. NaN is read as 480.
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

from dcpjax.pallas_kernels.mosaic_rows import (
    BOX,
    HELD,
    THREADS,
    TILE,
    TRANSFORMS,
    Landing,
    Source,
    address,
    asm,
    barrier,
    i32,
    numbers,
    part_and_row,
    registers,
    row_place,
    shared,
    swizzled,
    vector_of,
)

# Bytes of a record and where its scales and its rotated key begin: `records.pack_rows` of 512 + 64 values.
RECORD, _SCALES, _KEY = 656, 512, 528
_BLOCKS = 9  # of 64 columns
# A thread reads, of each of its rows, twice 32 bytes of latent, all scales, and 16 bytes of key.
_READS = ((0, 0), (0, 16), (0, 256), (0, 272), (1, _SCALES), (2, _KEY))
_WORDS = 4 * len(_READS)
_PAIR = plgpu.Layout.WG_STRIDED((2 * _WORDS * THREADS,), vec_size=4)


@dataclasses.dataclass(frozen=True)
class RecordRows(Landing):
    """Tiles of bfloat16 rows of 512 + 64 from records `[rows, 164]` uint32."""

    def bring(
        self, scratch, source: Source, pairs: jax.Array, tiles: jax.Ref, when_free: Callable[[int, jax.Array], None]
    ) -> None:
        """As `AsyncRows.bring`. Two rows a thread are read at once, and the numbers of the next tile behind the first two."""

        def tile(turn, slot, held):
            first = _read(source.pool, held, (0, 1))
            # Past the last tile: the last one's once more.
            after = numbers(source, jnp.minimum(2 * turn + slot + 1, 2 * pairs - 1) * TILE)
            when_free(slot, turn)
            _store(tiles.at[slot], first, (0, 1))
            _store(tiles.at[slot], _read(source.pool, held, (2, 3)), (2, 3))
            _publish(scratch[0], slot)
            return after

        @pl.when(pairs > 0)
        def _():
            lax.fori_loop(
                0, pairs, lambda turn, held: tile(turn, 1, tile(turn, 0, held)), numbers(source, jnp.int32(0))
            )


def _read(pool, held, which):
    """Words of two of the thread's four rows."""

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), HELD),
        return_type=plgpu.ShapeDtypeStruct((2 * _WORDS * THREADS,), jnp.int32, _PAIR),
    )
    def read(ctx, pool, held):
        kind, wide = ir.IntegerType.get_signless(32), ir.IntegerType.get_signless(64)
        part, _ = part_and_row()
        words = []
        for i in which:
            number = arith.extsi(wide, vector.extract(held.registers.item(), [], [i]))
            row = arith.addi(address(pool), arith.muli(number, arith.constant(wide, RECORD)))
            latent, key = (arith.addi(row, arith.extui(wide, arith.muli(part, i32(size)))) for size in (32, 16))
            code = "\n".join(
                f"ld.global.nc.v4.u32 {{${4 * n}, ${4 * n + 1}, ${4 * n + 2}, ${4 * n + 3}}}, [${_WORDS + at} + {offset}];"
                for n, (at, offset) in enumerate(_READS)
            )
            struct = llvm.StructType.get_literal([kind] * _WORDS)
            outs = ",".join(["=r"] * _WORDS + ["l"] * 3)
            result = llvm.inline_asm(struct, [latent, row, key], code, outs, has_side_effects=True)
            words += [llvm.extractvalue(kind, result, [n]) for n in range(_WORDS)]
        return registers([vector_of(words[n : n + 4]) for n in range(0, len(words), 4)], _PAIR)

    return read(pool, held)


def _store(tile, words, which):
    """Values of these words to their places in a tile."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(TRANSFORMS), _PAIR))
    def store(ctx, tile, words):
        part, row = part_and_row()
        place = row_place(tile, row, _BLOCKS)
        latent = arith.addi(place, swizzled(part, row))
        # Four words of key are half of 16 bytes twice: of its first half and, four parts on, of its second.
        half = arith.muli(arith.remui(part, i32(2)), i32(8))
        quarter = arith.divui(part, i32(2))
        low, high = (
            arith.addi(arith.addi(place, swizzled(x, row)), half) for x in (quarter, arith.addi(quarter, i32(4)))
        )
        flat = [vector.extract(x, [], [n]) for x in words.registers.flat for n in range(4)]
        for n, i in enumerate(which):
            args = *flat[n * _WORDS : (n + 1) * _WORDS], latent, low, high
            asm(_unpack(i * 2 * _BLOCKS * BOX), ",".join("r" * len(args)), *args)

    store(tile, words)


def _unpack(offset: int) -> str:
    """PTX that takes the 24 words $0 … $23 of a row apart and stores them `offset` after $24 (latent), $25 and $26 (key).

    Sign, exponent and fraction of e4m3 in their places in bfloat16 are 2⁻¹²⁰ times the value, for two values at a time; a
    scale is multiplied with 2¹²⁰ first, so it may be 2⁷ at most: of rows with values beyond 57,344.
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
        asm("mbarrier.arrive.shared.b64 _, [$0];", "r", shared(barrier(landed, slot)))

    publish(landed)
