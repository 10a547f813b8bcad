"""What the tests of all kernels share: fresh inputs, memory that must not be read, lowering without a GPU.

A kernel is tested three ways: by Pallas' interpreter here, lowered for an H200 that is not there, and, marked `gpu`, the
same cases on the machine's own GPU.
"""

import jax
import numpy as np
import pytest
from jax._src.pallas.triton import lowering

# The same cases by the interpreter in every run, and by the compiler on a GPU.
BACKENDS = [pytest.param("interpret", id="interpret"), pytest.param("triton", id="gpu", marks=pytest.mark.gpu)]


def fresh(*names) -> np.random.Generator:
    """Random numbers of their own for each case."""
    return np.random.default_rng([hash_of(name) for name in names])


def hash_of(name) -> int:
    """The same in every run, which `hash` is not."""
    return int.from_bytes(str(name).encode(), "little") % 2**32


def poisoned(rng: np.random.Generator, num_rows: int, width: int, used: np.ndarray) -> np.ndarray:
    """A pool `[num_rows, width]` float32, random in the rows that are used and NaN in all others."""
    pool = np.full((num_rows, width), np.nan, np.float32)
    pool[used] = rng.normal(size=(len(used), width))
    return pool


def same_bits(first, second) -> None:
    """Every leaf of both, bit for bit; NaN equals itself."""
    for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True):
        assert a.dtype == b.dtype
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def lower_for_h200(function, *args) -> str:
    """The program of `function` for one H200, made without any: shapes, layouts and memory limits are checked.

    So are the types within Triton's modules, which JAX leaves to the compiler on the device.
    """
    real = lowering.lower_jaxpr_to_triton_module

    def verified(*args, **kwargs):
        result = real(*args, **kwargs)
        assert result.module.operation.verify()
        return result

    device = jax.sharding.AbstractDevice("NVIDIA H200", 132, "cuda")
    mesh = jax.sharding.AbstractMesh((), (), abstract_device=device)
    with jax.sharding.use_abstract_mesh(mesh), pytest.MonkeyPatch.context() as patch:
        patch.setattr(lowering, "lower_jaxpr_to_triton_module", verified)
        return jax.jit(function).trace(*args).lower(lowering_platforms=("cuda",)).as_text()
