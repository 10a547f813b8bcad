"""The merge of a cluster's parts: what its threads do, run by numpy. The kernel that it ends is in test_sparse_mla_mosaic.py."""

import types

import ml_dtypes
import numpy as np
import pytest

from dcpjax.pallas_kernels import mosaic_cluster
from dcpjax.pallas_kernels.mosaic_cluster import Shares
from tests.kernels.base import fresh
from tests.kernels.ptx import THREADS, Machine

SCORES, OUT, LSE = 1 << 16, 1 << 40, 1 << 41  # where they are


@pytest.fixture
def threads(monkeypatch):
    """Code within `inline_mgpu` computes with numbers of all threads, and `running(block, machine)` says who runs its PTX."""
    now = {}

    def running(block, machine):
        now.update(block=block, machine=machine)

    arith = types.SimpleNamespace(
        addi=np.add, muli=np.multiply, divui=np.floor_divide, remui=np.remainder, extui=lambda kind, x: x
    )
    for name, value in {
        "arith": arith,
        "vector": types.SimpleNamespace(extract=lambda x, *where: x),
        "ir": types.SimpleNamespace(IntegerType=types.SimpleNamespace(get_signless=lambda bits: None)),
        "constant32": np.int64,
        "constant64": np.int64,
        "thread_number": lambda: np.arange(THREADS),
        "address_of": lambda ref: ref.address,
        "shared_place": lambda ref: np.int64(ref),
        "_word": lambda pair: pair,
        "ptx": lambda code, constraints, *args: now["machine"].run(now["block"], code, *args),
    }.items():
        monkeypatch.setattr(mosaic_cluster, name, value)
    monkeypatch.setattr(
        mosaic_cluster.plgpu, "inline_mgpu", lambda **kinds: lambda code: lambda *args: code(None, *args)
    )
    return running


def registers(x):
    """An array as threads hold it of a product: `[boxes of 8 columns, 2]` of two columns each, or `[2]` of a number a row."""
    thread, half = np.arange(THREADS), np.arange(2)[:, None]
    row = thread // 32 * 16 + 8 * half + thread % 32 // 4
    if x.ndim == 1:
        return x.view(np.uint32)[row]
    pair = np.ascontiguousarray(x).view(np.uint32)[row]  # [2, 128, columns / 2]
    return np.stack(
        [np.take_along_axis(pair, (4 * box + thread % 4)[None, :, None], 2)[..., 0] for box in range(x.shape[1] // 8)]
    )


def held(array):
    """As code within `inline_mgpu` gets its arguments."""
    objects = np.empty(array.shape[:-1], object)
    for where in np.ndindex(*objects.shape):
        objects[where] = array[where]
    return types.SimpleNamespace(registers=objects)


@pytest.mark.parametrize(
    "blocks, heads, columns",
    [(16, 64, 1), (16, 16, 4), (8, 64, 2), (8, 8, 1), (4, 32, 1), (2, 64, 1)],
)
def test_shares_are_merged_where_they_are_sent(threads, blocks, heads, columns):
    """All parts of 512 columns, that of block 1 empty and not sent, and head 1 empty in all of them."""
    rng, half = fresh("cluster", blocks, heads, columns), 256 // columns
    parts = rng.normal(size=(blocks, 64, 512)).astype(ml_dtypes.bfloat16)
    lse = (3 * rng.normal(size=(blocks, 64))).astype(np.float32)
    lse[1], lse[:, 1] = -np.inf, -np.inf
    shares, number = Shares(blocks, heads, half), [held(np.full((1, 1), block)) for block in range(blocks)]
    written = {}
    for block in range(columns):
        machine = Machine(blocks, SCORES + 256)
        for rank in range(blocks):
            threads(rank, machine)
            shares.send_scores(SCORES, held(registers(lse[rank])), number[rank])
            for me in range(2):
                mine = slice((2 * block + me) * half, (2 * block + me + 1) * half)
                if rank != 1:
                    shares.send(0, held(registers(parts[rank, :, mine])), number[rank], me)
        for rank in range(blocks):
            threads(rank, machine)
            out = types.SimpleNamespace(address=OUT, shape=(2 * heads, 512))
            for me in range(2):
                first, column = (held(np.full((1, 1), x)) for x in (heads, (2 * block + me) * half))
                shares.merge(0, SCORES, out, types.SimpleNamespace(address=LSE), number[rank], first, column, me)
        written |= machine.written
    # Every head and column of the second half of twice as many heads, once.
    got = np.array([written.pop(OUT + 4 * i) for i in range(heads * 256, 2 * heads * 256)], np.uint32)
    got = got.view(ml_dtypes.bfloat16).reshape(heads, 512).astype(np.float32)
    got_lse = np.array([written.pop(LSE + 4 * i) for i in range(heads, 2 * heads)], np.uint32).view(np.float32)
    assert not written
    weight = np.exp2(lse - np.max(lse, 0, where=lse > -np.inf, initial=-1e3))[..., None]
    mass = weight.sum(0)
    want = (weight * parts.astype(np.float32)).sum(0) / np.where(mass > 0, mass, 1)
    np.testing.assert_allclose(got, want[:heads], rtol=2**-8, atol=1e-6)
    np.testing.assert_array_equal(got[1], 0)
    with np.errstate(divide="ignore"):
        want_lse = np.log(2) * np.log2(np.exp2(lse.astype(np.float64)).sum(0))
    np.testing.assert_allclose(got_lse, want_lse[:heads], rtol=1e-5, atol=1e-5)
