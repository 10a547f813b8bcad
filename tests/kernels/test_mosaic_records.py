"""Packed records taken apart for Hopper: what its threads do, run by numpy, both ways. The kernel is in test_sparse_mla_mosaic.py."""

import types

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from dcpjax.pallas_kernels import mosaic_records, mosaic_rows
from dcpjax.pallas_kernels.records import unpack_rows
from tests.kernels.base import fresh
from tests.kernels.ptx import THREADS, Machine

ROWS, BASE = 100, 7
TILE_BYTES = 64 * 576 * 2


@pytest.fixture
def machine(monkeypatch):
    """Code within `inline_mgpu` computes with numbers of all threads; its PTX is run over two tiles and a pool of records."""
    rng = fresh("records")
    records = rng.integers(0, 1 << 32, (ROWS, 164), dtype=np.uint32)  # every byte there is, NaN among them
    records[:, 128:132] = (2.0 ** rng.integers(-40, 8, (ROWS, 4))).astype(np.float32).view(np.uint32)
    machine = Machine(1, 2 * TILE_BYTES, records.view(np.uint8).reshape(-1))
    arith = types.SimpleNamespace(
        addi=np.add, muli=np.multiply, divui=np.floor_divide, remui=np.remainder, xori=np.bitwise_xor,
        extui=lambda kind, x: x, extsi=lambda kind, x: x, constant=lambda kind, x: x,
    )  # fmt: skip
    for module in (mosaic_records, mosaic_rows):
        for name, value in {
            "arith": arith,
            "vector": types.SimpleNamespace(extract=lambda x, _, where: x[where[0]]),
            "ir": types.SimpleNamespace(IntegerType=types.SimpleNamespace(get_signless=lambda bits: None)),
            "constant32": np.int64,
            "thread_number": lambda: np.arange(THREADS),
            "address_of": lambda ref: np.int64(ref.registers.item()),
            "shared_place": lambda ref: np.int64(ref.registers.item()),
            "ptx": lambda code, constraints, *args: machine.run(0, code, *args),
        }.items():
            monkeypatch.setattr(module, name, value, raising=module is mosaic_rows)
    monkeypatch.setattr(
        mosaic_records.plgpu, "inline_mgpu", lambda **kinds: lambda code: lambda *args: code(None, *map(held, args))
    )
    return machine


def held(x):
    """An argument as code within `inline_mgpu` gets it."""
    if isinstance(x, Words):
        return types.SimpleNamespace(registers=types.SimpleNamespace(flat=x.words))
    return types.SimpleNamespace(registers=types.SimpleNamespace(item=lambda: x))


def tile_of(machine, slot):
    """`[64, 576]` bfloat16 as products read it: boxes of 8 rows of 128 bytes, 16 bytes of a row at their number XOR the row's."""
    boxes = machine.shared[0, slot * TILE_BYTES :][:TILE_BYTES].reshape(8, 9, 8, 8, 16)
    row, part = np.arange(8)[:, None], np.arange(8)
    return boxes[:, :, row, part ^ row].transpose(0, 2, 1, 3, 4).reshape(64, -1).copy().view(ml_dtypes.bfloat16)


def want(records):
    """Bits of their values in bfloat16; what is not a number in the latent is read as 480, and a key is what it is."""
    latent = np.ascontiguousarray(records[:, :128]).view(np.uint8)
    lost = latent & 127 == 127
    finite = np.where(lost, latent & 128 | 124, latent).astype(np.uint8)  # 384, of which 480 is five fourths
    plain = np.concatenate([finite.view(np.uint32), records[:, 128:132]], 1)
    values = np.asarray(unpack_rows(jnp.asarray(plain), 512))
    more = np.where(lost, np.float32(1.25), np.float32(1)).reshape(-1, 128, 4).transpose(0, 2, 1).reshape(-1, 512)
    bits = (values * more).astype(ml_dtypes.bfloat16).view(np.uint16)
    key = records[:, 132:]
    return np.concatenate([bits, key & 0xFFFF, key >> 16], 1).astype(np.uint16)


def rows_of(rng):
    """Numbers of 64 rows, as listed and as threads hold them: those at `thread / 8 + 16 i`."""
    listed = rng.integers(0, ROWS - BASE, 64)
    return listed, listed.reshape(4, 16)[:, np.arange(THREADS) // 8]


def equals(tile, records):
    np.testing.assert_array_equal(tile.view(np.uint16), want(records))


def test_records_that_are_copied_whole_become_rows_in_their_place(machine):
    listed, numbers = rows_of(fresh("copied"))
    source = types.SimpleNamespace(pool=0, base=BASE)
    for me in range(2):
        mosaic_records._copy(source, 0, numbers, 2 * me)
    for me in range(2):
        for i in range(2):
            mosaic_records._take_apart(0, 2 * me + i, 1 - i)
    equals(tile_of(machine, 0), machine.memory.view(np.uint32).reshape(ROWS, -1)[listed + BASE])


@pytest.mark.parametrize("slot", [0, 1])
def test_records_that_are_read_become_rows(machine, slot):
    listed, _ = rows_of(fresh("read", slot))
    records = machine.memory.view(np.uint32).reshape(ROWS, -1)[listed]
    thread = np.arange(THREADS)
    for i in range(4):
        mine = records[16 * i + thread // 8]
        part = thread % 8
        at = [(8 * part + n, 64 + 8 * part + n) for n in range(8)]
        columns = [x for x, _ in at] + [y for _, y in at] + [128 + n + 0 * part for n in range(4)]
        columns += [132 + 4 * part + n for n in range(4)]
        words = np.stack([mine[thread, column] for column in columns]).reshape(6, 4, THREADS)
        mosaic_records._store(0, slot, Words(words), i)
    equals(tile_of(machine, slot), records)


class Words:
    """Six registers of four words."""

    def __init__(self, words):
        self.words = words
