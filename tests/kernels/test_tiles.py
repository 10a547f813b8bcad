"""Instructions that no interpreter of kernels runs, by one of their own: the numbers of NVFP4 on the device."""

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from dcpjax.pallas_kernels import tiles
from dcpjax.quant import QArray, unpack_e2m1


def pairs(words):
    """The two float16 numbers in each 32-bit register `[n]`: float64 `[n, 2]`."""
    return words.view(np.float16).astype(np.float64).reshape(-1, 2)


def words(numbers):
    """Registers `[n]` of float16 numbers `[n, 2]`."""
    return np.ascontiguousarray(numbers, np.float16).view(np.uint32)[:, 0]


def prmt(a, b, selector):
    """Four of the bytes of `a` and of `b`, which may be 0."""
    source = np.stack([a, np.broadcast_to(np.uint32(b), a.shape)], axis=1).view(np.uint8)
    return np.ascontiguousarray(source[:, [selector >> shift & 7 for shift in (0, 4, 8, 12)]]).view(np.uint32)[:, 0]


def lop3(a, mask, b, table):
    assert table == 0xF0 & 0xCC | 0xAA
    return a & np.uint32(mask) | b


OPERATIONS = {
    "shr.u32": lambda a, n: a >> np.uint32(n),
    "shl.b32": lambda a, n: a << np.uint32(n),
    "and.b32": lambda a, mask: a & np.uint32(mask),
    "lop3.b32": lop3,
    "prmt.b32": prmt,
    "mov.b32": lambda a: a,
    "mul.f16x2": lambda a, b: words(pairs(a) * pairs(b)),
}


def run(text, registers):
    """Executes lines `operation to, from, …` on arrays of registers."""
    for line in text.splitlines():
        name, _, rest = line.rstrip(";").partition(" ")
        if name not in ("", "{", "}", ".reg"):
            to, *args = rest.split(", ")
            registers[to] = OPERATIONS[name](*(registers[a] if a in registers else int(a, 0) for a in args))


@pytest.mark.parametrize("half", [0, 1], ids=["low", "high"])
def test_numbers_of_nvfp4(half):
    """All bytes, in all four places of a register, with scales from the least to the largest."""
    byte = np.arange(256, dtype=np.uint8)
    packed = np.stack([byte, byte[::-1], byte ^ 0x5A, byte * 7], axis=1).astype(np.uint8)
    scales = np.array([2.0**-9, 448, 1.75, 0.0]).astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
    scales = scales[np.arange(1024).reshape(256, 4) % 5 % 4]
    packs = scales.reshape(-1, 2, 2)
    registers = {"$2": packed.copy().view(np.uint32)[:, 0], "$3": words(packs[:, 0]), "$4": words(packs[:, 1])}
    run((tiles.LOW, tiles.HIGH)[half], registers)
    got = np.concatenate([pairs(registers["$0"]), pairs(registers["$1"])], axis=1)
    want = np.asarray(unpack_e2m1(jnp.asarray(packed))[half], np.float64) * scales
    np.testing.assert_array_equal(got * 2.0**tiles.DOWN, want)


def test_tokens_in_float16():
    """Exact at any size, but for what is next to nothing beside the token's largest; other tokens as they are, split."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(4, 32)) * 10.0 ** np.array([[-30], [0], [4], [37]])
    x[1, :2] = 0, 2.0**-26
    x = jnp.asarray(np.vstack([x, np.zeros((1, 32)), np.full((1, 32), 1e-37)]), jnp.bfloat16)
    stack = QArray(jnp.zeros((8, 16), jnp.uint8), jnp.ones((8, 2), jnp.float8_e4m3fn), jnp.ones(()), (1, 16))
    got, factor = tiles.prepared(x, stack, interpret=True)
    assert got.dtype == jnp.float16 and np.isfinite(np.asarray(got)).all()
    split = np.asarray(x, np.float64).reshape(6, 16, 2).swapaxes(1, 2).reshape(6, 32)
    np.testing.assert_array_equal(np.asarray(got, np.float64) * np.asarray(factor, np.float64)[:, None], split)
    same, none = tiles.prepared(x.astype(jnp.float32), stack)
    assert none is None
    np.testing.assert_array_equal(same, split.astype(np.float32))
    assert tiles.prepared(x, jnp.zeros((8, 32)))[0] is x
