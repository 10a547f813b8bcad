"""Queries of the indexer in the shared memory of a Hopper program, as products read them.

Each program brings its own: there is little of it beside its keys, and it arrives while they are on their way, where a
kernel that prepares all queries first would cost a launch. Those that meet packed keys become float16, in the order in
which the bytes of words come; powers of two keep them in its range and go into the weights, so that digits are lost only
of values below 2⁻¹⁷ of a head's largest.
"""

import jax
import jax.numpy as jnp
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from dcpjax.pallas_kernels.mosaic_config import DIM
from dcpjax.pallas_kernels.mosaic_ptx import (
    BOX,
    SCALAR,
    TRANSFORMS,
    address_of,
    constant32,
    ptx,
    shared_place,
    thread_number,
)

_BLOCKS = DIM // 64  # boxes side by side
# Rows that a warpgroup brings at once, four threads a row, and how often at most before the first is looked at.
ROWS, _AHEAD = 32, 4
# A thread t of the four reads 8 values at each of these, and 8t further.
FIRST = tuple(64 * half + 32 * byte for half in range(2) for byte in range(2))


def place_of(word: int, half: int) -> int:
    """Column of the tensor cores' operand at which thread 0 has the pair `half` of word `word` of its row; thread t has its
    own 2t further.

    Of the four threads that share a row, thread t has words 8t to 8t + 7 of a packed key; a word gives two pairs, of its
    halves, and byte b of word w is value 32b + w of the key.
    """
    return 16 * word + 8 * half


def bring_queries(
    q: jax.Ref,
    weight: jax.Ref,
    q_smem: jax.Ref,
    w_smem: jax.Ref,
    tokens: list[jax.Array],
    heads: int,
    copied: bool = False,
) -> None:
    """Brings `q [T, H, 128]` bfloat16 and `weight [T, H]` float32 of some tokens to shared memory, for products.

    `q_smem [tokens · heads, 128]` is bfloat16, as they are, or float16 in the order of packed keys; `w_smem` float32 has a
    weight for each of its rows. `heads`, a multiple of 32, is H or more: a surplus one weighs nothing. `copied`: those of a
    single token are in `q_smem` and `w_smem` already, row after row, and become float16 there.
    """
    real = weight.shape[1]
    packed = q_smem.dtype == jnp.float16
    passes = [(j, block) for j in range(len(tokens)) for block in range(heads // ROWS)]

    @plgpu.inline_mgpu(
        arg_types=(
            plgpu.RefType(),
            plgpu.RefType(),
            plgpu.RefType(TRANSFORMS),
            plgpu.RefType(),
            *(SCALAR,) * len(tokens),
        )
    )
    def go(_, q, weight, q_smem, w_smem, *tokens):
        i64, f32 = ir.IntegerType.get_signless(64), ir.F32Type.get()
        thread = thread_number()
        row, part = arith.divui(thread, constant32(4)), arith.remui(thread, constant32(4))
        tokens = [arith.extsi(i64, token.registers.flat[0]) for token in tokens]

        def read(j, block):
            head = arith.addi(row, constant32(ROWS * block))
            there = arith.cmpi(arith.CmpIPredicate.ult, head, constant32(real))
            head = arith.minui(head, constant32(real - 1))
            if copied:
                base = arith.addi(shared_place(q_smem), arith.muli(head, constant32(2 * DIM)))
                base = arith.addi(base, arith.muli(part, constant32(16)))
                parts = [_read_four(base, 2 * first, "shared", "r") for first in FIRST]
                weigh = arith.addi(shared_place(w_smem), arith.muli(head, constant32(4)))
                value = llvm.inline_asm(f32, [weigh], "ld.shared.f32 $0, [$1];", "=f,r", has_side_effects=True)
                return parts, arith.select(there, value, arith.constant(f32, 0.0))
            place = arith.extui(i64, head)
            place = arith.addi(arith.muli(tokens[j], arith.constant(i64, real)), place)
            base = arith.addi(address_of(q), arith.muli(place, arith.constant(i64, 2 * DIM)))
            base = arith.addi(base, arith.extui(i64, arith.muli(part, constant32(16))))
            parts = [_read_four(base, 2 * first) for first in FIRST]
            weigh = arith.addi(address_of(weight), arith.muli(place, arith.constant(i64, 4)))
            value = llvm.inline_asm(f32, [weigh], "ld.global.nc.f32 $0, [$1];", "=f,l")
            return parts, arith.select(there, value, arith.constant(f32, 0.0))

        def write(j, block, parts, weight):
            at = arith.addi(row, constant32(j * heads + ROWS * block))
            within = arith.remui(at, constant32(8))
            box = arith.muli(arith.divui(at, constant32(8)), constant32(_BLOCKS * BOX))
            begin = arith.addi(arith.addi(shared_place(q_smem), box), arith.muli(within, constant32(128)))
            if packed:
                weight = arith.mulf(
                    weight, _write_halves(begin, within, part, [word for four in parts for word in four])
                )
            else:
                for first, four in zip(FIRST, parts, strict=True):
                    chunk = arith.xori(arith.addi(part, constant32(first % 64 // 8)), within)
                    to = arith.addi(begin, arith.muli(chunk, constant32(16)))
                    ptx(f"st.shared.v4.b32 [$0 + {first // 64 * BOX}], {{$1, $2, $3, $4}};", "r,r,r,r,r", to, *four)
            # All four threads of a row store the same.
            ptx(
                "st.shared.f32 [$0], $1;",
                "r,f",
                arith.addi(shared_place(w_smem), arith.muli(at, constant32(4))),
                weight,
            )

        for n in range(0, len(passes), _AHEAD):
            some = passes[n : n + _AHEAD]
            found = [read(*x) for x in some]
            if copied:
                utils.warpgroup_barrier()  # all have read what is written over
            for where, what in zip(some, found, strict=True):
                write(*where, *what)

    go(q, weight, q_smem, w_smem, *(jnp.asarray(token, jnp.int32) for token in tokens))
    plgpu.commit_smem()


def _read_four(base, offset: int, memory: str = "global.nc", letter: str = "l"):
    """16 bytes from memory as four words."""
    i32 = ir.IntegerType.get_signless(32)
    code, four = f"ld.{memory}.v4.b32 {{$0, $1, $2, $3}}, [$4 + {offset}];", llvm.StructType.get_literal([i32] * 4)
    both = llvm.inline_asm(four, [base], code, f"=r,=r,=r,=r,{letter}", has_side_effects=memory == "shared")
    return [llvm.extractvalue(i32, both, [n]) for n in range(4)]


def _write_halves(begin, within, part, words):
    """Stores a thread's 32 values of a row, 16 words of bfloat16, as float16; returns what they were divided by."""
    i32, f32 = ir.IntegerType.get_signless(32), ir.F32Type.get()
    code = ["{ .reg .b32 m, a; .reg .b16 low, high; abs.bf16x2 m, $1;"]
    code += [f"abs.bf16x2 a, ${n}; max.bf16x2 m, m, a;" for n in range(2, 17)]
    code.append("mov.b32 {low, high}, m; max.u16 low, low, high; cvt.u32.u16 $0, low; }")
    largest = llvm.inline_asm(i32, words, "\n".join(code), "=r" + ",r" * 16)
    for distance in (1, 2):
        largest = arith.maxui(largest, utils.shfl_bfly(largest, distance))
    # The largest value becomes one below 1; the last few exponents have no power of two that does it, and need none.
    exponent = arith.shrui(largest, constant32(7))
    exponent = arith.minui(arith.maxui(exponent, constant32(1)), constant32(252))
    scale, factor = (
        arith.bitcast(f32, arith.shli(x, constant32(23)))
        for x in (arith.subi(constant32(253), exponent), arith.addi(exponent, constant32(1)))
    )
    place = arith.addi(begin, arith.addi(arith.muli(within, constant32(16)), arith.muli(part, constant32(4))))
    code = ["{ .reg .b32 x, y; .reg .f32 a, b;"]
    for half in range(2):
        for word in range(8):
            # One value of each half of a packed word: bytes 2 half and 2 half + 1.
            for value, byte in ("x", 0), ("y", 1):
                source = 8 * half + 4 * byte + word // 2
                code.append(
                    f"and.b32 {value}, ${source}, 0xffff0000;" if word % 2 else f"shl.b32 {value}, ${source}, 16;"
                )
            code.append("mov.b32 a, x; mov.b32 b, y; mul.f32 a, a, $16; mul.f32 b, b, $16; cvt.rn.f16x2.f32 x, b, a;")
            box, byte = divmod(2 * place_of(word, half), 128)
            code.append(f"xor.b32 y, $17, {byte}; st.shared.b32 [y + {box * BOX}], x;")
    ptx("\n".join([*code, "}"]), "r," * 16 + "f,r", *words, scale, place)
    return factor
