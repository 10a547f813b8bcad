"""Selection and attention over pages, in every geometry, against a float64 loop over tokens."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from dcpjax.attention import AttentionOptions
from dcpjax.kernels import Kernels
from tests.attention.paged import (
    INTERPRETED,
    NEEDS_RANKS,
    PAGE,
    Geometry,
    Queries,
    World,
    batch_of,
    check,
    layer,
    oracle_output,
    oracle_selection,
    rows_of,
    run,
    same_bits,
    slots_of,
)  # fmt: skip

pytestmark = pytest.mark.usefixtures("quick_compile")

TOKENS, TABLE = 32, 5
QUERIES = AttentionOptions(movement="queries")
ROWS = AttentionOptions(movement="rows", tile_tokens=2 * PAGE)

# Every dcp with every interleave that divides a rank's rows of a page; the comm backends take turns.
GEOMETRIES = [
    (Geometry(1), QUERIES),
    (Geometry(2), QUERIES),
    (Geometry(2, 2), AttentionOptions("a2a", "queries")),
    (Geometry(2, 4), AttentionOptions("psum", "queries")),
    (Geometry(4), AttentionOptions("a2a", "queries")),
    (Geometry(4, 2), QUERIES),
    (Geometry(8), AttentionOptions("psum", "queries")),
    (Geometry(2, 1, tp=2), AttentionOptions("a2a", "queries")),
    (Geometry(1, 8, tp=4), QUERIES),
    (Geometry(4, 1, index_sharded=False), QUERIES),
    (Geometry(4, 2, latent_sharded=False, index_sharded=False), QUERIES),
    (Geometry(4), ROWS),
    (Geometry(2, 4), ROWS),
    (Geometry(4, 1, index_sharded=False), ROWS),
    (Geometry(1), AttentionOptions(kernels=INTERPRETED)),
    (Geometry(2), AttentionOptions("a2a", "queries", kernels=INTERPRETED)),
    (Geometry(4, 2), AttentionOptions(movement="queries", kernels=INTERPRETED)),
    (Geometry(2, 4), AttentionOptions("psum", "queries", kernels=dataclasses.replace(INTERPRETED, invariant=True))),
    (Geometry(2, 4), AttentionOptions(movement="rows", tile_tokens=2 * PAGE, kernels=INTERPRETED)),
]
FULL = [
    (Geometry(dcp, interleave, tp, index_sharded=index), AttentionOptions(backend, movement, 2 * PAGE))
    for dcp in (1, 2, 4, 8)
    for interleave in sorted({1, 2, PAGE // dcp})
    if PAGE // dcp % interleave == 0
    for tp in (1, 2)
    if tp * dcp <= 8
    for index in (True, False)
    for backend in ("ag_rs", "a2a", "psum")
    for movement in ("queries", "rows")
]


def _name(case):
    g, o = case
    where = ("" if g.latent_sharded else "-replicated") + ("" if g.index_sharded else "-index1")
    kernels = "" if o.kernels == Kernels() else "-kernels"
    return f"tp{g.tp}dcp{g.dcp}i{g.interleave}{where}-{o.backend}-{o.movement}{kernels}"


@functools.cache
def lengths_world():
    """Requests of 1 … 3 pages + 1 tokens."""
    return World.make(range(1, 3 * PAGE + 2), TABLE)


@functools.cache
def mixed_world():
    """Room for 37 tokens (4 pages and most of a fifth) in request 0, and three more requests."""
    return World.make([37, 10, 1, 3 * PAGE], TABLE, seed=3)


def decode_every_length(geometry, options):
    """One decode row of each length in one batch."""
    world = lengths_world()
    tokens = [(b, b) for b in range(3 * PAGE + 1)]
    before = world.written.copy()
    before[[world.place(r, s) for r, s in tokens]] = False
    queries = Queries.make(tokens, TOKENS)
    pools, chosen, out = run(world, world.pools(geometry, before), queries, geometry, options=options)
    check(world, queries, chosen, out)
    assert same_bits(rows_of(pools[0]), rows_of(world.pools(geometry)[0]))
    assert same_bits(rows_of(pools[1]), rows_of(world.pools(geometry)[1]))


def chunks_and_verify_rows(geometry, options):
    """A prompt in four chunks over an empty pool, beside verify rows, a first token and a decode row."""
    world = mixed_world()
    others = np.zeros_like(world.written)
    for request, length in ((1, 6), (3, 3 * PAGE - 1)):
        others[[world.place(request, s) for s in range(length)]] = True
    beside = [[(1, s) for s in range(6, 10)], [(2, 0)], [(3, 3 * PAGE - 1)], []]
    pools, start = world.pools(geometry, others), 0
    for size, rows in zip((9, 7, PAGE, 13), beside):
        queries = Queries.make([*rows, *((0, start + i) for i in range(size))], TOKENS)
        pools, chosen, out = run(world, pools, queries, geometry, options=options)
        check(world, queries, chosen, out)
        start += size
    assert same_bits(rows_of(pools[0]), rows_of(world.pools(geometry)[0]))


@pytest.mark.parametrize("case", GEOMETRIES, ids=_name)
def test_inv_13_every_geometry_equals_the_oracle(case):
    decode_every_length(*case)
    chunks_and_verify_rows(*case)


@pytest.mark.matrix
@pytest.mark.parametrize("case", FULL, ids=_name)
def test_inv_13_full_product(case):
    decode_every_length(*case)
    chunks_and_verify_rows(*case)


@pytest.mark.parametrize("geometry", [Geometry(1), Geometry(4)], ids=["dcp1", "dcp4"])
def test_inv_5_br_05_rows_that_are_not_written_change_nothing_else(geometry):
    """ "Not my slot" is about the cache write alone: queries, selections and outputs are as usual."""
    world = lengths_world()
    queries = Queries.make([(b, b) for b in range(3 * PAGE + 1)], TOKENS)
    before = world.pools(geometry)
    bits = [np.asarray(pool.data).tobytes() for pool in before]
    pools, chosen, out = run(world, before, queries, geometry, write=False)
    check(world, queries, chosen, out)
    assert [np.asarray(pool.data).tobytes() for pool in pools] == bits
    # The selection is this step's own: another query finds other slots in the same batch shape.
    other = Queries.make([(b, b) for b in range(3 * PAGE + 1)], TOKENS, seed=2)
    _, second, out = run(world, pools, other, geometry, write=False)
    check(world, other, second, out)
    assert slots_of(second) != slots_of(chosen)


@pytest.mark.parametrize("geometry", [Geometry(1), Geometry(4)], ids=["dcp1", "dcp4"])
def test_inv_12_verify_rows_equal_single_row_calls(geometry):
    world = mixed_world()
    rows = [(1, s) for s in range(6, 10)]
    before = np.zeros_like(world.written)
    before[[world.place(1, s) for s in range(6)]] = True
    together = Queries.make(rows, TOKENS)
    _, chosen, out = run(world, world.pools(geometry, before), together, geometry)
    check(world, together, chosen, out)
    pools = world.pools(geometry, before)
    for j, row in enumerate(rows):
        single = Queries.make([row], TOKENS)
        pools, one, alone = run(world, pools, single, geometry)
        assert slots_of(one)[0] == slots_of(chosen)[j]
        np.testing.assert_allclose(alone[0], out[j], atol=2e-6, rtol=0)
    # A row that saw the request's newest tokens instead of its own prefix would differ.
    late = Queries.make([(1, 9)] * 4, TOKENS)
    late.q[:4], late.index_q[:4], late.weight[:4] = together.q[:4], together.index_q[:4], together.weight[:4]
    wrong = oracle_output(world, late, oracle_selection(world, late))
    assert np.abs(wrong[:3] - out[:3]).max() > 0.1


@pytest.mark.parametrize("rows", [1, 2, 3, 8])
def test_inv_12_br_04_verify_rows_in_batches(rows):
    """Two rows each (K = 1) of 1, 2, 3, 8 requests, each batch in its own compiled shape, against the plain loop."""
    geometry, world = Geometry(4), World.make([5 + 3 * b for b in range(8)], 4, seed=7)
    tokens = [(b, 3 + 3 * b + j) for b in range(rows) for j in range(2)]
    before = world.written.copy()
    before[[world.place(r, s) for r, s in tokens]] = False
    queries = Queries.make(tokens, 2 * rows)
    _, chosen, out = run(world, world.pools(geometry, before), queries, geometry)
    check(world, queries, chosen, out)


@NEEDS_RANKS
@pytest.mark.parametrize("interleave", [1, 2])
def test_br_07_rows_movement_with_unequal_last_tiles(interleave):
    """A context of 37 tokens on 5 pages in tiles of 2: three tiles, the last one page wide with unequal shares."""
    geometry, world = Geometry(4, interleave), World.make([37, 10, 1, 3 * PAGE], TABLE, seed=3)
    # Keys of the last page stand out, so that many of its tokens are selected.
    world.index[[world.place(0, s) for s in range(4 * PAGE, 37)]] *= 3
    queries = Queries.make([(0, s) for s in range(5, 37)], TOKENS)
    _, chosen, by_rows = run(world, world.pools(geometry), queries, geometry, options=ROWS)
    _, _, by_queries = run(world, world.pools(geometry), queries, geometry)
    check(world, queries, chosen, by_rows)
    np.testing.assert_allclose(by_rows, by_queries, atol=2e-6, rtol=0)
    assert len({geometry.latent.local_len(37 - 4 * PAGE, rank) for rank in range(geometry.dcp)}) > 1
    # Attention over the first two tiles alone is something else: the last tile matters in this test.
    cut = [[s for s in slots if s < 4 * PAGE] for slots in slots_of(chosen)]
    assert cut != slots_of(chosen)
    assert np.abs(oracle_output(world, queries, cut) - by_rows).max() > 0.1


@NEEDS_RANKS
def test_movement_follows_the_byte_count():
    """A decode step moves queries, a long prefill moves rows; both are really taken."""
    geometry, automatic = Geometry(4, num_pages=16), AttentionOptions(tile_tokens=2 * PAGE)
    world = World.make([3 * PAGE], 3, num_pages=16)
    texts = []
    for tokens in ([(0, 23)], [(0, s) for s in range(24)]):
        queries = Queries.make(tokens, len(tokens))
        _, chosen, out = run(world, world.pools(geometry), queries, geometry, options=automatic)
        check(world, queries, chosen, out)
        places = [world.place(r, s) for r, s in tokens]
        batch = batch_of(world, queries, geometry)
        q = jax.device_put(queries.q, geometry.plan.sharding(None, "heads", None))
        args = (*world.pools(geometry), world.latent[places], world.index[places], q, queries.index_q, queries.weight)
        texts.append(layer.lower(*args, batch, 0, automatic, geometry.plan).as_text())
    assert ["reduce_scatter" in text for text in texts] == [True, False]


@NEEDS_RANKS
def test_replicated_pools_equal_sharded_ones():
    world = lengths_world()
    queries = Queries.make([(b, b) for b in range(3 * PAGE + 1)], TOKENS)
    outs, chosens = [], []
    for sharded in (True, False):
        geometry = Geometry(4, 2, latent_sharded=sharded, index_sharded=sharded)
        pools = world.pools(geometry)
        assert pools[0].data.sharding.is_fully_replicated != sharded
        _, chosen, out = run(world, pools, queries, geometry)
        outs.append(out)
        chosens.append(slots_of(chosen))
    assert chosens[0] == chosens[1]
    np.testing.assert_allclose(outs[0], outs[1], atol=2e-6, rtol=0)
