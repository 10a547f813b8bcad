"""The exact global top-k: the same set in every geometry, in a total order, each slot kept by one rank."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dcpjax import attention
from dcpjax.attention import AttentionOptions
from dcpjax.batch import ForwardBatch
from dcpjax.pallas_kernels.topk import NO_SLOT, topk_candidates
from tests.attention.paged import PAGE, Geometry, columns, on_device, pool_of, slots_of

pytestmark = pytest.mark.usefixtures("quick_compile")

REQUESTS, TABLE, TOPK = 12, 3, 5
SIZE = TABLE * PAGE
# The scores are the tests' own.
KERNELS = dataclasses.replace(on_device(AttentionOptions()).kernels, indexer="xla")
GEOMETRIES = {
    "dcp1": Geometry(1, num_pages=64),
    "dcp2": Geometry(2, num_pages=64),
    "dcp2 interleave 4": Geometry(2, 4, num_pages=64),
    "dcp4 interleave 2": Geometry(4, 2, num_pages=64),
    "dcp8": Geometry(8, num_pages=64),
    "dcp4, index 1": Geometry(4, index_sharded=False, num_pages=64),
    "dcp4, all replicated": Geometry(4, latent_sharded=False, index_sharded=False, num_pages=64),
}


@pytest.fixture(scope="module", autouse=True)
def _scores_are_the_keys():
    """The indexer's score of a slot is the key stored there, so that a test may choose scores, −0.0 included."""

    def scores(q, weight, pool, layer, pages, row_of):
        return pool[layer, pages[row_of]].reshape(len(row_of), -1)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "indexer_scores", scores)
        yield


@functools.cache
def compiled(topk):
    """Made under the fixture, hence not shared with tests of the real indexer."""

    def call(index, latent, batch, first_slot, plan):
        zero = jnp.zeros((len(batch.slots), 1, 1))
        return attention.select(zero, zero[..., 0], index, 0, latent, batch, topk, first_slot, plan, KERNELS)

    return jax.jit(call, static_argnames=("first_slot", "plan"))


def select(scores, lengths, geometry, topk=TOPK, first_slot=0, seed=0):
    """Requests whose slots have `scores [REQUESTS, SIZE]`; one query each, its own slot being `lengths − 1`."""
    rng = np.random.default_rng(seed)
    pages = rng.permutation(np.arange(1, geometry.num_pages))[: REQUESTS * TABLE].reshape(REQUESTS, TABLE)
    rows = np.full((1, geometry.num_pages * PAGE, 1), np.nan, np.float32)
    place = np.repeat(pages * PAGE, PAGE, 1) + np.tile(np.arange(PAGE), TABLE)
    rows[0, place, 0] = scores
    slots = np.asarray(lengths, np.int32) - 1
    batch = ForwardBatch(
        tokens=slots, positions=slots, slots=slots, write_slots=slots,
        row_of=np.arange(REQUESTS, dtype=np.int32), pages=pages.astype(np.int32),
    )  # fmt: skip
    index = pool_of(rows, geometry.index, geometry.plan)
    latent = pool_of(np.zeros_like(rows), geometry.latent, geometry.plan)
    return compiled(topk)(index, latent, batch, first_slot, geometry.plan), pages


def best(scores, length, topk=TOPK, first_slot=0):
    """Score descending, then slot ascending; Python's comparison takes −0.0 and +0.0 for equal."""
    order = sorted(range(first_slot, length), key=lambda s: (-float(scores[s]), s))
    return sorted(order[:topk])


def filled(*rows):
    """Rows of scores, repeated to `[REQUESTS, SIZE]`, NaN past their ends."""
    scores = np.full((REQUESTS, SIZE), np.nan, np.float32)
    for b in range(REQUESTS):
        row = rows[b % len(rows)]
        scores[b, : len(row)] = row
    return scores


@pytest.mark.parametrize("geometry", GEOMETRIES.values(), ids=GEOMETRIES)
def test_inv_14_same_set_in_every_geometry(geometry):
    """Lengths below, at and above k; few distinct scores, hence ties across ranks; all winners on one rank."""
    rng = np.random.default_rng(14)
    for trial in range(6):
        scores = rng.integers(-2, 3, (REQUESTS, SIZE)).astype(np.float32)
        scores *= rng.choice([-1.0, 1.0], scores.shape)  # zeros of both signs
        lengths = rng.integers(1, SIZE + 1, REQUESTS)
        lengths[:4] = [1, TOPK - 1, TOPK, TOPK + 1]
        # All winners on one rank: equal and highest at every (dcp · interleave)-th slot.
        scores[4, :: geometry.dcp * geometry.interleave], lengths[4] = 9, SIZE
        chosen, _ = select(scores, lengths, geometry, seed=trial)
        assert slots_of(chosen) == [best(scores[b], lengths[b]) for b in range(REQUESTS)]


@pytest.mark.parametrize("geometry", GEOMETRIES.values(), ids=GEOMETRIES)
def test_inv_15_each_selected_slot_is_kept_by_one_rank(geometry):
    rng = np.random.default_rng(15)
    scores, lengths = rng.normal(size=(REQUESTS, SIZE)).astype(np.float32), rng.integers(1, SIZE + 1, REQUESTS)
    lengths[0] = 2  # some ranks keep nothing
    chosen, pages = select(scores, lengths, geometry)
    layout, column = geometry.latent, columns(geometry.latent)
    rows, count = np.asarray(chosen.rows), np.asarray(chosen.count)
    assert rows.shape[0] == count.shape[0] == layout.shards
    for b, slots in enumerate(slots_of(chosen)):
        kept = [[int(r) for r in rows[rank, b, : count[rank, b]]] for rank in range(layout.shards)]
        want = [[] for _ in range(layout.shards)]
        for slot in slots:
            rank, offset = divmod(int(column[slot % PAGE]), layout.page_rows)
            want[rank].append(int(pages[b, slot // PAGE]) * layout.page_rows + offset)
        assert [sorted(rows) for rows in kept] == [sorted(rows) for rows in want]
        assert sum(map(len, kept)) == len(slots)
        # What is not kept can not be read by mistake either.
        assert all((rows[rank, b, count[rank, b] :] == layout.num_rows).all() for rank in range(layout.shards))


def test_br_12_worked_example_twenty_runs():
    """Ties go to the lowest position on both ranks, each time; a second top-k over the candidates in rank order would
    take {0, 2}."""
    scores, geometry = filled([5, 4, 4, 4, 4, 1]), GEOMETRIES["dcp2"]
    for seed in range(20):
        chosen, _ = select(scores, [6] * REQUESTS, geometry, topk=2, seed=seed)
        assert slots_of(chosen) == [[0, 1]] * REQUESTS
        # Each device holds the same answer.
        assert len({np.asarray(s.data).tobytes() for s in chosen.slots.addressable_shards}) == 1
    candidates = [slot for rank in range(2) for slot in [s for s in range(6) if s % 2 == rank][:2]]
    _, at = jax.lax.top_k(jnp.array([scores[0, s] for s in candidates]), 2)
    assert sorted(candidates[i] for i in at) == [0, 2]


def test_union_of_local_selections_is_something_else():
    """Per rank top-k attends to up to N·k slots; the exact one is k of them."""
    scores = filled([9, 8, 7, 1, 6, 2, 5, 3])
    chosen, _ = select(scores, [8] * REQUESTS, GEOMETRIES["dcp2"], topk=3)
    assert slots_of(chosen)[0] == [0, 1, 2]
    local = [best(scores[0][rank:8:2], 4, 3) for rank in range(2)]
    assert sorted(2 * s + rank for rank in range(2) for s in local[rank]) == [0, 1, 2, 4, 5, 7]


@pytest.mark.parametrize("name", ["dcp1", "dcp2", "dcp8"])
def test_br_12_minus_zero_equals_plus_zero(name):
    """The signs of zeros do not decide: the lowest positions win."""
    scores = filled([-0.0, 0.0, -0.0, 0.0, 0.0, -0.0, 0.0, 0.0, -1.0], [0.0, 0.0] * 4, [-1.0] + [-0.0, 0.0] * 4)
    chosen, _ = select(scores, [8] * REQUESTS, GEOMETRIES[name], topk=3)
    assert slots_of(chosen)[:3] == [[0, 1, 2], [0, 1, 2], [1, 2, 3]]


def test_br_12_zeros_of_either_sign_in_the_kernel_reference():
    """`top_k` orders −0.0 below +0.0, so the sign has to go before it."""
    score = jnp.array([[-0.0, 0.0, -0.0, 0.0]])
    assert np.asarray(jax.lax.top_k(score, 2)[1])[0].tolist() == [1, 3]
    assert np.asarray(jax.jit(topk_candidates, static_argnums=2)(score, jnp.arange(4), 2)[1])[0].tolist() == [0, 1]


def test_index_shards_one_equals_dcp():
    rng = np.random.default_rng(1)
    scores, lengths = rng.integers(0, 3, (REQUESTS, SIZE)).astype(np.float32), rng.integers(1, SIZE + 1, REQUESTS)
    sharded, replicated = Geometry(4, num_pages=64), GEOMETRIES["dcp4, index 1"]
    assert (sharded.index.shards, replicated.index.shards, replicated.latent.shards) == (sharded.dcp, 1, sharded.dcp)
    first, second = (select(scores, lengths, g)[0] for g in (sharded, replicated))
    for name in ("slots", "rows", "count"):
        np.testing.assert_array_equal(getattr(first, name), getattr(second, name))


@pytest.mark.parametrize("name", ["dcp1", "dcp2", "dcp8", "dcp4, all replicated"])
@pytest.mark.parametrize("first", [np.inf, 1e30, np.nan, 0.0])
def test_draft_slot_0_is_never_selected(name, first):
    """Whatever lies in slot 0. A draft row's own slot is at least 1."""
    rng = np.random.default_rng(2)
    scores = -1 - rng.random((REQUESTS, SIZE)).astype(np.float32)
    scores[:, 0] = first
    lengths = rng.integers(2, SIZE + 1, REQUESTS)
    lengths[:3] = [2, TOPK, TOPK + 1]
    chosen, _ = select(scores, lengths, GEOMETRIES[name], first_slot=1)
    assert slots_of(chosen) == [best(scores[b], lengths[b], first_slot=1) for b in range(REQUESTS)]
    if first == 1e30:  # without the rule it is
        chosen, _ = select(scores, lengths, GEOMETRIES[name], first_slot=0)
        assert all(0 in slots for slots in slots_of(chosen))


@pytest.mark.parametrize("name", ["dcp1", "dcp4 interleave 2"])
def test_padding_sees_nothing(name):
    scores = filled(np.ones(SIZE))
    chosen, _ = select(scores, [0] * REQUESTS, GEOMETRIES[name])
    assert (np.asarray(chosen.slots) == NO_SLOT).all() and (np.asarray(chosen.count) == 0).all()


def test_k_above_the_whole_table():
    """k may exceed the slots a rank, or all ranks, have."""
    scores = np.random.default_rng(4).normal(size=(REQUESTS, SIZE)).astype(np.float32)
    lengths = list(range(1, SIZE + 1, 2))[:REQUESTS]
    for name in ("dcp1", "dcp8"):
        chosen, _ = select(scores, lengths, GEOMETRIES[name], topk=SIZE + 9)
        assert slots_of(chosen) == [list(range(length)) for length in lengths]
