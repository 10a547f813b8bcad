"""Instructions that no interpreter of kernels runs, by one of their own: the numbers of NVFP4 on the device."""

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from dcpjax.pallas_kernels import tiles
from dcpjax.quant import unpack_e2m1


def pairs(words):
    """The two bfloat16 numbers in each 32-bit register `[n]`: float64 `[n, 2]`."""
    return words.view(ml_dtypes.bfloat16).astype(np.float64).reshape(-1, 2)


def permuted(word, other, selector):
    eight = np.concatenate([word.view(np.uint8).reshape(-1, 4), np.full((len(word), 4), other, np.uint8)], axis=1)
    return eight[:, [selector >> 4 * i & 15 for i in range(4)]].copy().view(np.uint32)[:, 0]


OPERATIONS = {
    "prmt.b32": permuted,
    "shr.u32": lambda a, n: a >> np.uint32(n),
    "shl.b32": lambda a, n: a << np.uint32(n),
    "and.b32": lambda a, mask: a & np.uint32(mask),
    "mov.b32": lambda a: a,
    "mul.bf16x2": lambda a, b: (pairs(a) * pairs(b)).astype(ml_dtypes.bfloat16).view(np.uint32)[:, 0],
}


def run(text, registers):
    """Executes lines `operation to, from, …` on arrays of registers."""
    for line in text.splitlines():
        name, _, rest = line.rstrip(";").partition(" ")
        if name in ("", "{", "}", ".reg"):
            continue
        to, *args = (part.strip() for part in rest.split(","))
        args = [registers[a] if a in registers else int(a, 0) for a in args]
        if name == "lop3.b32":
            assert args.pop() == 0xF0 & 0xCC | 0xAA
            registers[to] = args[0] & np.uint32(args[1]) | args[2]
        else:
            registers[to] = OPERATIONS[name](*args)


@pytest.mark.parametrize("half", [0, 1], ids=["low", "high"])
def test_numbers_of_nvfp4(half):
    """All bytes, in all four places of a register, with scales from the least to the largest."""
    byte = np.arange(256, dtype=np.uint8)
    packed = np.stack([byte, byte[::-1], byte ^ 0x5A, byte * 7], axis=1).astype(np.uint8)
    scales = np.array([2.0**-9, 448, 1.75, 0.0]).astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
    scales = scales[np.arange(1024).reshape(256, 4) % 5 % 4]
    words = (scales * 2.0**tiles.UP).astype(ml_dtypes.bfloat16).view(np.uint32).reshape(256, 2)
    registers = {"$2": packed.copy().view(np.uint32)[:, 0], "$3": words[:, 0].copy(), "$4": words[:, 1].copy()}
    run((tiles.LOW, tiles.HIGH)[half], registers)
    got = np.concatenate([pairs(registers["$0"]), pairs(registers["$1"])], axis=1)
    want = np.asarray(unpack_e2m1(jnp.asarray(packed))[half], np.float64) * scales
    np.testing.assert_array_equal(got * 2.0 ** (tiles.DOWN - tiles.UP), want)
