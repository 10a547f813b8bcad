"""Which rank and row hold a slot: every token once, in order, the same for ints, numpy and traced arrays."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcpjax.cache import Record, make_pool
from dcpjax.errors import ConfigError
from dcpjax.layout import CacheLayout
from dcpjax.mesh import make_plan

# The worked example of the invariants: 4 rows of a page on each of 4 ranks.
SMALL = {interleave: CacheLayout(8, 16, 4, interleave) for interleave in (1, 2, 4)}


@st.composite
def layouts(draw):
    shards = draw(st.sampled_from([1, 2, 3, 4, 8]))
    page_rows = draw(st.integers(1, 12))
    interleave = draw(st.sampled_from([i for i in range(1, page_rows + 1) if page_rows % i == 0]))
    return CacheLayout(draw(st.integers(1, 9)), page_rows * shards, shards, interleave)


@pytest.mark.parametrize(
    "length, interleave, want",
    [(10, 1, [3, 3, 2, 2]), (10, 2, [4, 2, 2, 2]), (21, 4, [8, 5, 4, 4]), (2, 1, [1, 1, 0, 0]), (0, 2, [0, 0, 0, 0])],
)
def test_local_lengths_of_the_worked_example(length, interleave, want):
    assert [SMALL[interleave].local_len(length, rank) for rank in range(4)] == want


@pytest.mark.parametrize("interleave, owner", [(1, 1), (2, 2), (4, 1)])
def test_inv_2_token_21_on_pages_7_and_2(interleave, owner):
    layout = SMALL[interleave]
    page, offset = (7, 2)[21 // 16], 21 % 16
    slot = page * 16 + offset
    assert (layout.owner(slot), layout.row(slot)) == (owner, 9)


@given(layouts(), st.integers(0, 500))
def test_inv_1_partition(layout, length):
    held = [layout.local_len(length, rank) for rank in range(layout.shards)]
    assert sum(held) == length
    owners = [layout.owner(slot) for slot in range(length)]
    assert held == [owners.count(rank) for rank in range(layout.shards)]
    turn = layout.shards * layout.interleave
    assert max(held) <= -(-length // turn) * layout.interleave


@given(layouts())
def test_inv_2_single_owner_no_aliasing(layout):
    places = set()
    for slot in range(layout.num_slots):
        owner, row = layout.owner(slot), layout.row(slot)
        assert 0 <= owner < layout.shards and 0 <= row < layout.num_rows
        # A page keeps its number on every rank.
        assert row // layout.page_rows == slot // layout.page_tokens
        places.add((owner, row))
    assert len(places) == layout.num_slots == layout.shards * layout.num_rows


@given(layouts(), st.integers(0, 500))
def test_inv_3_inverse_is_ascending_and_owned(layout, length):
    for rank in range(layout.shards):
        slots = [layout.slot(row, rank) for row in range(layout.local_len(length, rank))]
        assert slots == [s for s in range(length) if layout.owner(s) == rank]
        assert [layout.row(s) for s in slots] == list(range(len(slots)))


def test_inv_3_worked_example():
    layout = SMALL[2]
    assert [layout.slot(row, 1) for row in range(layout.local_len(10, 1))] == [2, 3]


@given(layouts())
def test_nowhere_is_no_ones_row(layout):
    assert layout.nowhere == layout.num_slots
    assert layout.row(layout.nowhere) == layout.num_rows
    # One past the end: dropped by a scatter. Not −1, which is the last row of the last page.
    rows = np.zeros(layout.num_rows)
    kept = jnp.asarray(rows).at[layout.row(layout.nowhere)].set(1.0, mode="drop")
    np.testing.assert_array_equal(kept, rows)


def test_minus_one_would_wrap():
    """Why `nowhere` is what it is: the usual "no slot" writes into somebody's page."""
    assert jnp.zeros(12).at[-1].set(1.0, mode="drop")[-1] == 1.0


@pytest.mark.parametrize("layout", [*SMALL.values(), CacheLayout(3, 24, 1, 4), CacheLayout(5, 48, 8, 3)])
def test_host_and_device_agree(layout):
    slots = np.arange(layout.num_slots + 1, dtype=np.int32)
    for name, args in (("owner", ()), ("row", ()), ("slot", (layout.shards - 1,)), ("local_len", (layout.shards - 1,))):
        function = getattr(layout, name)
        ints = [function(int(slot), *args) for slot in slots]
        np.testing.assert_array_equal(function(slots, *args), ints)
        device = jax.jit(lambda x, function=function, args=args: function(x, *args))(slots)
        assert device.dtype == jnp.int32
        np.testing.assert_array_equal(device, ints)


def test_br_11_row_lengths_come_from_global_lengths():
    """Verify rows: each row's global length is localised; adding 1 a row to a local length hides newest keys."""
    layout, length, queries = SMALL[1], 10, 4
    want = [[2, 2, 3, 3], [2, 2, 2, 3], [2, 2, 2, 2], [1, 2, 2, 2]]
    rows_local = [[layout.local_len(length - queries + 1 + j, rank) for j in range(queries)] for rank in range(4)]
    assert rows_local == want
    wrong = [[layout.local_len(length, rank) - queries + 1 + j for j in range(queries)] for rank in range(4)]
    assert wrong == [[0, 1, 2, 3], [0, 1, 2, 3], [-1, 0, 1, 2], [-1, 0, 1, 2]]
    # What the device does instead of a table: own slots compared with the row's own slot.
    for rank in range(4):
        slots = np.array([layout.slot(row, rank) for row in range(layout.num_rows)])
        assert [int((slots <= length - queries + j).sum()) for j in range(queries)] == want[rank]


@pytest.mark.parametrize("interleave", [1, 2])
def test_br_25_latent_and_index_rows_lie_at_the_same_place(interleave):
    plan = make_plan(4, 4)
    layout = CacheLayout(9, 8, 4, interleave)
    latent, index = (make_pool(1, layout, Record(width, jnp.float32), plan) for width in (3, 2))
    rng = np.random.default_rng(interleave)
    table = rng.permutation(np.arange(1, 9))[:3]
    tokens = np.arange(1, 23)
    slots = (table[tokens // 8] * 8 + tokens % 8).astype(np.int32)
    write = jax.jit(lambda pool, values: pool.write(0, values, slots, plan))
    pools = [
        write(pool, np.repeat(tokens[:, None], pool.data.shape[3], 1).astype(np.float32)) for pool in (latent, index)
    ]
    for token, slot in zip(tokens, slots):
        places = []
        for pool in pools:
            shards = [np.asarray(s.data).reshape(layout.num_rows, -1) for s in pool.data.addressable_shards]
            found = [
                (rank, int(row)) for rank, rows in enumerate(shards) for row in np.flatnonzero(rows[:, 0] == token)
            ]
            assert len(found) == 1
            places += found
        assert places[0] == places[1] == (layout.owner(int(slot)), layout.row(int(slot)))


@pytest.mark.parametrize("sizes", [(4, 10, 4, 1), (4, 8, 4, 4), (0, 8, 2, 1), (4, 8, 2, 0), (4, 8, 0, 1)])
def test_geometry_that_cannot_be_is_refused(sizes):
    with pytest.raises(ConfigError):
        CacheLayout(*sizes)


def test_refusal_says_what_to_change():
    with pytest.raises(ConfigError, match="block size 8 must be a multiple of .* 4 × 4 = 16; use a larger block size"):
        CacheLayout(4, 8, 4, 4)
