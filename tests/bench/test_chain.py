"""Chained calls are all made: a compiler that left some out would make every kernel look fast."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dcpjax.bench import kernels_mla
from dcpjax.bench.chain import READ_CEILING, chain_us, row


class Counted:
    """A function that the compiler may leave out when its result is not needed, and that knows how often it ran."""

    def __init__(self):
        self.calls = 0

    def run(self, x):
        self.calls += 1
        return x

    def __call__(self, x, *_):
        return jax.pure_callback(self.run, jax.ShapeDtypeStruct(x.shape, x.dtype), x)


def test_every_call_of_a_chain_is_made():
    counted = Counted()
    assert chain_us(counted, (jnp.ones(3),), calls=5, rounds=2) > 0
    assert counted.calls == 5 * 3  # one run is not counted


def test_every_layer_of_sparse_mla_is_computed(monkeypatch):
    counted = Counted()
    real = kernels_mla.sparse_mla

    def watched(q, *args, **choice):
        return counted(real(q, *args, **choice)[0])

    monkeypatch.setattr(kernels_mla, "sparse_mla", watched)
    rows = list(kernels_mla.measure((1,), (16,), (512,), ("xla",), layers=3, num_rows=64))
    assert counted.calls == 3 * 6
    (got,) = rows
    assert got["kernel"] == "sparse mla"
    assert (got["tokens"], got["heads"], got["count"], got["records"]) == (1, 16, 512, "bfloat16")
    # 512 rows of 1152 bytes at the ceiling, and two launches.
    assert got["predicted_us"] == pytest.approx(512 * 1152 / READ_CEILING * 1e6 + 6, abs=0.06)


def test_a_row_tells_bandwidth_and_share():
    got = row("name", "arm", 10.0, 21.2e6, 5.0, tokens=3)
    assert got == {
        "kernel": "name", "arm": "arm", "tokens": 3, "us": 10.0, "gb_per_s": 2120, "share": 0.5, "predicted_us": 5.0,
    }  # fmt: skip
    assert np.isclose(READ_CEILING, 4.24e12)
