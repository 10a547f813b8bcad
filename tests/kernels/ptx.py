"""PTX of all threads of a warpgroup, run by numpy: as much of it as kernels here are written in.

A shared address has the number of its block above 24 bits of place. Registers hold 32 bits, as uint32 `[128]`, or addresses.
"""

import re

import ml_dtypes
import numpy as np

THREADS = 128
PEER = 1 << 24


class Machine:
    """shared `[blocks, bytes]` uint8, global memory that was there before, by byte, and what was written there, by address."""

    def __init__(self, blocks: int, nbytes: int, memory: np.ndarray | None = None):
        self.memory = memory
        rng = np.random.default_rng(0)
        self.shared = rng.integers(0, 256, (blocks, nbytes), np.uint8)  # junk, NaN among it
        self.written = {}  # global memory: bits by address

    def run(self, block: int, code: str, *args) -> None:
        """What block `block` does for `code`, where $0 and so on stand for `args`."""
        held = {f"${i}": np.broadcast_to(arg, (THREADS,)) for i, arg in enumerate(args)}
        for statement in code.strip("{}").split(";"):
            words = statement.split(None, 1)
            if not words or words[0].startswith((".", "cp.async.commit", "cp.async.wait", "bar.warp")):
                continue  # nothing is late here, and all threads are together
            active = np.ones(THREADS, bool)
            if words[0].startswith("@"):
                active = held[words[0][1:]]
                words = words[1].split(None, 1)
            self._step(held, block, active, words[0], *re.findall(r"\{.*?\}|\[.*?\]|[^,\s]+", words[1]))

    def _step(self, held, block, active, name, to, *operands):
        if name.startswith("ld.shared"):
            names, at = re.findall(r"\w+", to), _address(held, operands[0])
            for i, each in enumerate(names):
                held[each] = self._read(np.where(active, at, 0) + 4 * i, np.full(THREADS, block))
        elif name.startswith("cp.async"):
            assert operands[1] == "16"
            source = _address(held, operands[0])
            for i in range(4):
                at, each = _address(held, to)[active] + 4 * i, source[active] // 4 + i
                self._write("st.shared", at, self.memory.view(np.uint32)[each], block)
        elif name.startswith("st."):
            at, names = _address(held, to), re.findall(r"[\w$]+", operands[0])
            for i, each in enumerate(names):
                self._write(name, at[active] + 4 * i, held[each][active], block)
        else:
            new = _value(name, *(_operand(held, x) for x in operands))
            held[to] = np.where(active, new, held.get(to, np.zeros(THREADS, new.dtype)))

    def _read(self, at, block):
        memory = self.shared.view(np.uint32)
        return memory[block, at // 4]

    def _write(self, name, at, bits, block):
        if name.startswith("st.global"):
            assert not self.written.keys() & set(at.tolist()), "written twice"
            self.written.update(zip(at.tolist(), bits.tolist(), strict=True))
        elif not name.startswith("st.shared::cluster"):
            assert name.startswith("st.shared")
            self.shared.view(np.uint32)[block, at // 4] = bits
        else:
            self.shared.view(np.uint32)[at // PEER, at % PEER // 4] = bits


def _address(held, text):
    base, *offset = text.strip("[]").split(" + ")
    return held[base] + (int(offset[0]) if offset else 0)


def _operand(held, text):
    """A register, or a constant, which PTX writes as bits where it is a float."""
    return held[text] if text in held else np.full(THREADS, int(text.replace("0f", "0x", 1), 0), np.uint32)


def _value(name, *of):
    """Of an instruction that stays in registers."""
    kind = name.split(".")[-1]
    bits = [x.astype(np.uint32) if x.dtype != bool and name != "mapa.shared::cluster.u32" else x for x in of]
    if kind == "f32" and not name.startswith("cvt"):
        bits = [x if x.dtype == bool else x.view(np.float32) for x in bits]
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        match name:
            case "mapa.shared::cluster.u32":
                return bits[0] + PEER * bits[1].astype(np.int64)
            case "setp.lt.u32":
                return bits[0] < bits[1]
            case "setp.eq.s32":
                return bits[0] == bits[1]
            case "mov.b32":
                return bits[0]
            case "xor.b32":
                return bits[0] ^ bits[1]
            case "prmt.b32":
                both = bits[0].astype(np.uint64) | bits[1].astype(np.uint64) << 32
                parts = [
                    (both >> np.uint64(8 * (int(bits[2][0]) >> 4 * i & 7)) & 255).astype(np.uint32) for i in range(4)
                ]
                # The fourth bit of a number asks for eight times the byte's own highest.
                signs = [int(bits[2][0]) >> 4 * i & 8 for i in range(4)]
                parts = [np.where(x >> 7, 255, 0) if sign else x for x, sign in zip(parts, signs, strict=True)]
                return sum(x.astype(np.uint32) << 8 * i for i, x in enumerate(parts))
            case "mul.rn.bf16x2":
                halves = (np.ascontiguousarray(x).view(ml_dtypes.bfloat16) for x in bits)
                x, y = (half.astype(np.float32) for half in halves)
                return (x * y).astype(ml_dtypes.bfloat16).view(np.uint32)
            case "setp.eq.and.u32":
                return (bits[0] == bits[1]) & bits[2]
            case "setp.eq.f32":
                return bits[0] == bits[1]
            case "setp.gt.f32":
                return bits[0] > bits[1]
            case "shl.b32":
                return bits[0] << bits[1]
            case "and.b32":
                return bits[0] & bits[1]
            case "cvt.rn.bf16x2.f32":
                high, low = (
                    x.view(np.float32).astype(ml_dtypes.bfloat16).view(np.uint16).astype(np.uint32) for x in bits
                )
                return high << 16 | low
        result = {
            "mov.f32": lambda x: x,
            "max.f32": np.fmax,
            "sub.f32": np.subtract,
            "add.f32": np.add,
            "mul.f32": np.multiply,
            "fma.rn.f32": lambda x, y, z: x * y + z,
            "selp.f32": lambda x, y, p: np.where(p, x, y),
            "ex2.approx.ftz.f32": np.exp2,
            "lg2.approx.ftz.f32": np.log2,
            "rcp.approx.ftz.f32": np.reciprocal,
        }[name](*bits)
    return result.astype(np.float32).view(np.uint32)
