"""Merge of parts within a cluster of blocks: each block writes the others' shares of its part into their shared memory, straight
from registers, and merges what others wrote into its own.

A share is some of the heads. It lies as threads held it, 16 bytes of each together: where parts are merged it only matters
that all of them lie alike. A block writes once all have told, by `arrive`, that their memory is free, and merges once all
have told that they wrote. Nobody reads another's memory, so that a block may end when it has merged.
"""

import dataclasses

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, vector

from dcpjax.pallas_kernels.mosaic_config import MULTIPROCESSORS
from dcpjax.pallas_kernels.mosaic_ptx import (
    SCALAR,
    THREADS,
    TRANSFORMS,
    address_of,
    constant32,
    constant64,
    ptx,
    shared_place,
    thread_number,
)

_REF = plgpu.RefType()
_LAYOUT = plgpu.Layout.WGMMA
# Reads of 16 bytes that a thread has on their way, of four registers each.
_READS = 16
_LOWEST, _ZERO, _ONE, _LN_2 = "0fFF800000", "0f00000000", "0f3F800000", "0f3F317218"  # −∞ first


def has_room() -> bool:
    """Whether the GPU here has all multiprocessors that clusters are meant for. One that is not here is taken to have them."""
    device = jax.local_devices()[0]
    return device.platform not in ("gpu", "cuda") or device.core_count == MULTIPROCESSORS


def arrive() -> None:
    """Tells the cluster that this thread has done what came before. Every thread must, or end."""
    plgpu.inline_mgpu()(lambda ctx: ptx("barrier.cluster.arrive.release.aligned;", ""))()


def wait() -> None:
    """Until all of the cluster's threads have arrived, or ended."""
    plgpu.inline_mgpu()(lambda ctx: ptx("barrier.cluster.wait.acquire.aligned;", ""))()


@dataclasses.dataclass(frozen=True)
class Shares:
    """How `blocks` blocks share `heads` heads, at most 64 and a multiple of blocks. Each of two warpgroups has `half` columns of
    a block's part, a multiple of 32, with warps as a matrix instruction leaves them."""

    blocks: int
    heads: int
    half: int

    @property
    def each(self) -> int:
        """Heads of a share."""
        return self.heads // self.blocks

    @property
    def nbytes(self) -> int:
        """Of a warpgroup's part of a share, in 2-byte numbers."""
        return 2 * self.each * self.half

    @property
    def rows(self) -> int:
        """Heads of a share that lie beside each other: a warp writes of 8 at once."""
        return min(self.each, 8)

    @property
    def groups(self) -> int:
        """How often a thread has 16 bytes of a head: two columns beside each other of each of four boxes of 8."""
        return self.half // 32

    def send(self, slot: jax.Ref, values: jax.Array, rank: jax.Array, me: int) -> None:
        """Writes `values [64, half]` bfloat16 of warpgroup `me` of block `rank []` int32 into all blocks' memory at `slot`."""

        @plgpu.inline_mgpu(arg_types=(plgpu.RefType(TRANSFORMS), _LAYOUT, SCALAR))
        def send(ctx, slot, values, rank):
            of_block = arith.muli(rank.registers.item(), constant32(2 * self.nbytes))
            begin = arith.addi(arith.addi(shared_place(slot), constant32(me * self.nbytes)), of_block)
            held = values.registers.reshape(-1, 2)
            for half in range(2):
                row, peer, local = self._row(half)
                eight, within = _parted(local, 8)
                _, pair = _parted(thread_number(), 4)
                number = arith.addi(arith.muli(within, constant32(4)), pair)
                number = arith.addi(number, arith.muli(eight, constant32(4 * self.rows * self.groups)))
                to = arith.addi(begin, arith.muli(number, constant32(16)))
                code = [_to_peer(self.heads)]
                for group in range(self.groups):
                    words = ", ".join(f"${3 + 4 * group + i}" for i in range(4))
                    code.append(f"@some st.shared::cluster.v4.b32 [at + {64 * self.rows * group}], {{{words}}};")
                words = [_word(x) for x in held[:, half]]
                ptx("\n".join(code) + "}", "r,r,r" + ",r" * len(words), to, peer, row, *words)

        send(slot, values, rank)

    def send_scores(self, scores: jax.Ref, lse: jax.Array, rank: jax.Array) -> None:
        """Writes `lse [64]` float32, to base 2 and −∞ or finite, of block `rank` into all blocks' memory at `scores [64]`."""

        @plgpu.inline_mgpu(arg_types=(_REF, _LAYOUT.reduce(1), SCALAR))
        def send(ctx, scores, lse, rank):
            for half in range(2):
                row, peer, local = self._row(half)
                number = arith.addi(arith.muli(rank.registers.item(), constant32(self.each)), local)
                to = arith.addi(shared_place(scores), arith.muli(number, constant32(4)))
                value = vector.extract(lse.registers.reshape(-1)[half], [], [0])
                ptx(_to_peer(self.heads) + "@some st.shared::cluster.f32 [at], $3; }", "r,r,r,f", to, peer, row, value)

        send(scores, lse, rank)

    def _row(self, half: int):
        """One of the two heads that a thread holds, the block that merges it, and its place in that share."""
        warp, lane = _parted(thread_number(), 32)
        row = arith.addi(arith.muli(warp, constant32(16)), arith.divui(lane, constant32(4)))
        row = arith.addi(row, constant32(8 * half))
        return row, *_parted(row, self.each)

    def merge(
        self, slot: jax.Ref, scores: jax.Ref, out: jax.Ref, lse: jax.Ref,
        rank: jax.Array, head: jax.Array, column: jax.Array, me: int,
    ) -> None:  # fmt: skip
        """Merges warpgroup `me`'s columns of this block's share, in the order of blocks, as `lse_merge` does.

        It goes to `out [H, L]` bfloat16, where heads begin at `head` and the warpgroup's columns at `column`, and its LSE to
        `lse [H]` float32, natural log, if these are the first columns.
        """
        count, width = self.nbytes // 16, out.shape[1]
        turns = pl.cdiv(count, THREADS)
        together = max(1, min(turns, _READS // self.blocks))

        @plgpu.inline_mgpu(arg_types=(plgpu.RefType(TRANSFORMS), _REF, _REF, _REF, SCALAR, SCALAR, SCALAR))
        def merge(ctx, slot, scores, out, lse, rank, head, column):
            rank, head, column = (x.registers.item() for x in (rank, head, column))
            first = arith.addi(head, arith.muli(rank, constant32(self.each)))
            begin = arith.addi(shared_place(slot), constant32(me * self.nbytes))
            for turn in range(0, turns, together):
                args = []
                for i in range(turn, turn + together):
                    number = arith.addi(thread_number(), constant32(i * THREADS))
                    local, right = self._held(number)
                    head, right = arith.addi(first, local), arith.addi(column, right)
                    args += [
                        arith.addi(begin, arith.muli(number, constant32(16))),
                        arith.addi(shared_place(scores), arith.muli(local, constant32(4))),
                        _at(out, arith.addi(arith.muli(head, constant32(width)), right), 2),
                        _at(lse, head, 4), number, right,
                    ]  # fmt: skip
                ptx(self._code(together, count), ",".join(["r,r,l,l,r,r"] * together), *args)

        merge(slot, scores, out, lse, rank, head, column)

    def _held(self, number):
        """Of which head of a share, and from which column on, the 16 bytes `number` are."""
        outer, inner = _parted(number, 4 * self.rows)
        eight, group = _parted(outer, self.groups)
        within, pair = _parted(inner, 4)
        local = arith.addi(arith.muli(eight, constant32(8)), within)
        return local, arith.addi(arith.muli(group, constant32(32)), arith.muli(pair, constant32(2)))

    def _code(self, turns: int, count: int) -> str:
        """PTX of `turns` times 16 bytes of a thread: all reads, then all sums. Arguments of each: where the first block's part and
        its LSE lie, where the merged ones go, the number of these 16 bytes, of which `count` exist, and their first column."""
        reads = self.blocks * turns
        code = [f"{{ .reg .b32 word<{4 * reads}>, low, high; .reg .f32 lse<{reads}>, sum<8>, top, mass, value;"]
        code.append(f".reg .pred some<{turns}>, none, has, first;")
        for turn in range(turns):
            part, score, _, _, number, _ = (f"${6 * turn + i}" for i in range(6))
            code.append(f"setp.lt.u32 some{turn}, {number}, {count};")
            for i in range(self.blocks):
                n = turn * self.blocks + i
                words = ", ".join(f"word{4 * n + m}" for m in range(4))
                code.append(f"@some{turn} ld.shared.f32 lse{n}, [{score} + {4 * self.each * i}];")
                code.append(f"@some{turn} ld.shared.v4.b32 {{{words}}}, [{part} + {2 * self.nbytes * i}];")
        for turn in range(turns):
            _, _, out, lse, _, column = (f"${6 * turn + i}" for i in range(6))
            parts = range(turn * self.blocks, (turn + 1) * self.blocks)
            code.append(f"mov.f32 top, {_LOWEST}; mov.f32 mass, {_ZERO};")
            code += [f"mov.f32 sum{m}, {_ZERO};" for m in range(8)]
            code += [f"max.f32 top, top, lse{n};" for n in parts]
            code.append(f"setp.eq.f32 none, top, {_LOWEST}; selp.f32 top, {_ZERO}, top, none;")
            for n in parts:
                code.append(f"sub.f32 value, lse{n}, top; ex2.approx.ftz.f32 value, value; add.f32 mass, mass, value;")
                # What an empty part left in memory may be NaN.
                code.append(f"setp.gt.f32 has, value, {_ZERO};")
                for m in range(4):
                    code.append(f"shl.b32 low, word{4 * n + m}, 16; and.b32 high, word{4 * n + m}, 0xffff0000;")
                    code.append(f"@has fma.rn.f32 sum{2 * m}, low, value, sum{2 * m};")
                    code.append(f"@has fma.rn.f32 sum{2 * m + 1}, high, value, sum{2 * m + 1};")
            code.append(f"selp.f32 value, {_ONE}, mass, none; rcp.approx.ftz.f32 value, value;")
            for m in range(4):
                code.append(f"mul.f32 sum{2 * m}, sum{2 * m}, value; mul.f32 sum{2 * m + 1}, sum{2 * m + 1}, value;")
                code.append(f"cvt.rn.bf16x2.f32 low, sum{2 * m + 1}, sum{2 * m};")
                code.append(f"@some{turn} st.global.b32 [{out} + {16 * m}], low;")
            code.append(f"lg2.approx.ftz.f32 value, mass; add.f32 value, value, top; mul.f32 value, value, {_LN_2};")
            code.append(f"setp.eq.and.u32 first, {column}, 0, some{turn}; @first st.global.f32 [{lse}], value;")
        return "\n".join(code) + "}"


# What follows is for code inside of `inline_mgpu`.


def _to_peer(heads: int) -> str:
    """PTX that begins with `at`, address $0 in block $1. Of rows, $2, those beyond the heads are copies, and go nowhere."""
    return (
        f"{{ .reg .b32 at; .reg .pred some; setp.lt.u32 some, $2, {heads}; @some mapa.shared::cluster.u32 at, $0, $1;\n"
    )


def _parted(value, by: int):
    """Quotient and rest of an unsigned number."""
    return arith.divui(value, constant32(by)), arith.remui(value, constant32(by))


def _at(ref, number, size: int):
    """Address of the entry `number` of global memory, `size` bytes each."""
    number = arith.extui(ir.IntegerType.get_signless(64), number)
    return arith.addi(address_of(ref), arith.muli(number, constant64(size)))


def _word(pair):
    """Two 2-byte numbers as 32 bits."""
    word = vector.bitcast(ir.VectorType.get((1,), ir.IntegerType.get_signless(32)), pair)
    return vector.extract(word, [], [0])
