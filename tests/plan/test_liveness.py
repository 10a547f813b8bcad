"""Bytes that small programs hold at once, counted by hand. An array of 64 × 64 float32 is 16 KiB."""

import jax
import jax.numpy as jnp
import pytest

from dcpjax.liveness import peak_bytes
from dcpjax.mesh import make_plan

N, ARRAY = 64, 64 * 64 * 4
X = jax.ShapeDtypeStruct((N, N), jnp.float32)


def one_product(x):
    return x @ x


def a_chain_of_products(x):
    """At each, the result before is read and its own is made; the place of the one before that is free."""
    a = x @ x
    b = a @ x
    return b @ x


def two_that_wait(x):
    a, b = x @ x, x @ x.T
    return a @ b


def element_by_element(x):
    """Made where it is read: nothing is stored before the product."""
    return (jnp.exp(x) * 2 + x.reshape(-1)[None, :N]) @ x


def a_reason_to_keep(x):
    """Both sides of the second product are the first one, changed where they are read."""
    a = x @ x
    return (a + 1) @ (a * 2)


def written_in_place(x):
    return x.at[3].set(0.0)


def a_copy(x):
    """The argument is read again, so its place is not free."""
    y = x.at[3].set(0.0)
    return y @ x


def a_loop(x):
    """Two products inside, of which one is read; what is carried is the other."""
    return jax.lax.scan(lambda c, _: ((c @ c) @ x, None), x, None, length=5)[0]


def unused(x):
    x @ x
    return x * 2


@pytest.mark.parametrize(
    "program, arrays",
    [
        (one_product, 1),
        (a_chain_of_products, 2),
        (two_that_wait, 3),
        (element_by_element, 1),
        (a_reason_to_keep, 2),
        (written_in_place, 0),
        (a_copy, 2),
        (a_loop, 2),
        (unused, 1),
    ],
    ids=lambda x: getattr(x, "__name__", None),
)
def test_counted_by_hand(program, arrays):
    assert peak_bytes(jax.make_jaxpr(program)(X)) == arrays * ARRAY


def test_what_lies_on_a_device():
    """Four devices: of a result that is dealt out each has a quarter, and so it is inside already."""
    plan = make_plan(4, 2)
    spec = plan.spec("heads", None)

    def program(x):
        return plan.per_device(lambda part: part.T @ part, (spec,), spec)(x)

    assert peak_bytes(jax.make_jaxpr(program)(jax.ShapeDtypeStruct((4 * N, N), jnp.float32))) == ARRAY


def test_a_kernel_is_one_operation():
    from dcpjax.pallas_kernels.experts import experts_ffn

    shape = jax.ShapeDtypeStruct
    stacks = [shape((4, 32, 64), jnp.float32), shape((4, 32, 64), jnp.float32), shape((4, 64, 32), jnp.float32)]
    chosen = shape((8, 2), jnp.int32), shape((8, 2), jnp.float32)
    trace = jax.make_jaxpr(lambda *a: experts_ffn(*a, backend="triton"))(shape((8, 64), jnp.float32), *chosen, *stacks)
    # Hidden values and results of 16 pairs and 16 spare rows; nothing of what a program of the grid loads.
    assert 32 * (32 + 64) * 4 <= peak_bytes(trace) < 2 * 32 * (32 + 64) * 4
