"""Pools: what lies where, who writes, what is refused, how large a token is."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dcpjax import capacity
from dcpjax.cache import (
    PagedCache,
    Pool,
    Record,
    index_record,
    latent_record,
    make_pool,
    pool_slots,
    pool_spec,
    zero_pages,
)
from dcpjax.errors import ConfigError, MemoryLimitError
from dcpjax.layout import CacheLayout
from dcpjax.mesh import abstract_plan, make_plan
from dcpjax.pallas_kernels.sparse_mla import sparse_mla
from models.config import read_config
from tests.attention.paged import (
    PAGE,
    Geometry,
    Queries,
    World,
    check,
    pool_of,
    rows_of,
    run,
    same_bits,
    shards,
)

pytestmark = pytest.mark.usefixtures("quick_compile")

WIDTH = 3
RECORD = Record(WIDTH, jnp.float32)
write = jax.jit(lambda pool, layer, values, slots, plan: pool.write(layer, values, slots, plan), static_argnames="plan")


def random_pool(layout, plan, seed=0):
    rows = np.random.default_rng(seed).normal(size=(2, layout.num_slots, WIDTH)).astype(np.float32)
    return pool_of(rows, layout, plan)


@pytest.mark.parametrize("interleave, owner", [(1, 1), (2, 2), (4, 1)])
def test_inv_4_only_the_owner_writes(interleave, owner):
    """Token 21 of a request on pages 7 and 2, page 16 over 4 ranks: row 9 of one rank and nothing else, bit for bit."""
    plan, layout = make_plan(4, 4), CacheLayout(8, 16, 4, interleave)
    before = random_pool(layout, plan)
    table = jnp.array([[7, 2]])
    slots = pool_slots(layout, table, jnp.array([0, 0]), jnp.array([21, -1]))
    np.testing.assert_array_equal(slots, [37, layout.nowhere])
    values = np.full((2, WIDTH), 9.0, np.float32)
    after = write(before, 1, values, slots, plan)
    for rank, (old, new) in enumerate(zip(shards(before), shards(after))):
        want = old.copy()
        if rank == owner:
            want[1, 9] = 9.0
        assert same_bits(new, want), rank


@pytest.mark.parametrize("geometry", [Geometry(4, num_pages=5), Geometry(4, latent_sharded=False, num_pages=5)])
def test_inv_4_nowhere_is_dropped(geometry):
    """No slot, on any rank: in particular the last row, where −1 would write."""
    plan, layout = geometry.plan, geometry.latent
    before = random_pool(layout, plan)
    after = write(before, 0, np.ones((3, WIDTH), np.float32), np.full(3, layout.nowhere, np.int32), plan)
    assert [x.tobytes() for x in shards(after)] == [x.tobytes() for x in shards(before)]
    last = write(before, 0, np.ones((1, WIDTH), np.float32), np.array([layout.num_slots - 1], np.int32), plan)
    assert (shards(last)[-1][0, -1] == 1).all()


@pytest.mark.parametrize(
    "geometry",
    [
        Geometry(1, num_pages=9),
        Geometry(2, 4, num_pages=9),
        Geometry(2, 2, tp=2, num_pages=9),
        Geometry(4, num_pages=9),
        Geometry(4, 2, latent_sharded=False, num_pages=9),
    ],
)
def test_writes_land_in_their_slots_on_every_copy(geometry):
    plan, layout = geometry.plan, geometry.latent
    rng = np.random.default_rng(5)
    slots = rng.permutation(layout.num_slots)[:20].astype(np.int32)
    slots[3] = layout.nowhere
    values = rng.normal(size=(20, WIDTH)).astype(np.float32)
    before = random_pool(layout, plan)
    after = write(before, 1, values, slots, plan)
    want = rows_of(before).copy()
    keep = slots != layout.nowhere
    want[1, slots[keep]] = values[keep]
    assert same_bits(rows_of(after), want)
    # Devices that hold the same rank's rows agree: copies are written alike.
    parts = shards(after)
    for device, part in enumerate(parts):
        same = device % layout.shards if layout.shards > 1 else 0
        assert same_bits(part, parts[same])
    assert after.data.sharding.is_equivalent_to(before.data.sharding, 4)


def test_table_entries_past_a_request_are_never_reached():
    """A lookup past the table's end would clamp to the last page; negative and too large slots go nowhere."""
    layout = CacheLayout(8, 4)
    pages = jnp.array([[3, 5]])
    got = pool_slots(layout, pages, jnp.zeros(5, jnp.int32), jnp.array([-1, 0, 7, 8, 2**30]))
    np.testing.assert_array_equal(got, [layout.nowhere, 12, 23, layout.nowhere, layout.nowhere])


def test_pool_with_another_sharding_than_its_layout_is_refused():
    """The geometry a pool is read with is the one its array has: no way to build the two apart."""
    plan = make_plan(4, 4)
    sharded, alone = CacheLayout(4, PAGE, 4), CacheLayout(4, PAGE)
    zeros = np.zeros((1, 4, PAGE, WIDTH), np.float32)
    cut = jax.device_put(zeros, jax.NamedSharding(plan.mesh, pool_spec(sharded, plan)))
    whole = jax.device_put(zeros, jax.NamedSharding(plan.mesh, pool_spec(alone, plan)))
    Pool(cut, sharded, RECORD)
    Pool(whole, alone, RECORD)
    with pytest.raises(
        ConfigError, match="cut into 4 shards but its layout says 1: every rank would read its shard as"
    ):
        Pool(cut, alone, RECORD)
    with pytest.raises(ConfigError, match="cut into 1 shards but its layout says 4"):
        Pool(whole, sharded, RECORD)
    with pytest.raises(ConfigError, match="does not have the pages of"):
        Pool(cut, dataclasses.replace(sharded, num_pages=5), RECORD)
    with pytest.raises(ConfigError, match="does not hold rows of"):
        Pool(cut, sharded, latent_record(16, 8, "fp8"))
    # Also when a compiled step returns it laid out otherwise, and when a cache is built of such pools.
    with pytest.raises(ConfigError, match="cut into 1 shards"):
        jax.jit(lambda pool: pool, out_shardings=plan.sharding())(Pool(cut, sharded, RECORD))
    with pytest.raises(ConfigError, match="cut into 4 shards"):
        PagedCache(Pool(cut, sharded, RECORD).replace(layout=alone), Pool(whole, alone, RECORD), first_slot=1)


@pytest.mark.parametrize("shard_count", [2, 3, 8])
def test_make_pool_refuses_shards_that_are_not_the_mesh(shard_count):
    with pytest.raises(ConfigError, match="1 shard or one per dcp rank"):
        make_pool(1, CacheLayout(2, 24, shard_count), RECORD, make_plan(4, 4))


def test_what_that_refusal_prevents():
    """A draft that thinks it is alone on a cache that is dealt out to 4 ranks: each rank takes its shard as the whole
    context and nobody merges. No exception, no NaN, plausible sizes, and an answer that has nothing to do with the
    right one."""
    ranks, pages, page, heads, width, topk = 4, 32, 16, 16, 32, 8
    rng = np.random.default_rng(0)
    dealt = CacheLayout(pages, page, ranks)
    tokens = 200
    table = rng.permutation(np.arange(1, pages))[: -(-tokens // page)]
    slots = table[np.arange(tokens) // page] * page + np.arange(tokens) % page
    # The whole pool is in use by other requests too.
    rows = rng.normal(size=(pages * page, width)).astype(np.float32)
    shard = np.stack([[rows[dealt.slot(row, rank)] for row in range(dealt.num_rows)] for rank in range(ranks)])
    q = (2 * rng.normal(size=(1, heads, width))).astype(np.float32)
    chosen = np.sort(rng.permutation(tokens)[:topk])

    def kernel(q, rows, ids):
        return sparse_mla(q, rows[None], 0, ids[None], np.array([len(ids)]), value_width=width, scale=width**-0.5)[0][0]

    truth = np.asarray(kernel(q, rows, slots[chosen]))
    # Alone, a rank believes that page p starts at row p · (rows of a page it has), all of it one sequence.
    local_page = dealt.page_rows
    believed = table[np.minimum(chosen // local_page, len(table) - 1)] * local_page + chosen % local_page
    share = heads // ranks
    fault = np.concatenate([kernel(q[:, r * share : (r + 1) * share], shard[r], believed) for r in range(ranks)])
    right = np.concatenate([kernel(q[:, r * share : (r + 1) * share], rows, slots[chosen]) for r in range(ranks)])
    assert np.isfinite(fault).all() and fault.shape == truth.shape
    assert 0.5 < np.std(fault) / np.std(truth) < 2
    assert abs(np.corrcoef(fault.ravel(), truth.ravel())[0, 1]) < 0.2
    assert np.corrcoef(right.ravel(), truth.ravel())[0, 1] > 0.9999


@pytest.mark.parametrize(
    "geometry", [Geometry(1), Geometry(4, 2), Geometry(4, latent_sharded=False, index_sharded=False)]
)
def test_nan_in_the_dummy_page_and_in_free_pages_changes_nothing(geometry):
    """Bit for bit the same as with zeros there: unused rows are never weighed, not even by 0."""
    world = World.make(range(1, 26), 5)
    queries = Queries.make([(b, b) for b in range(25)], 32)
    pools = world.pools(geometry)
    assert all(np.isnan(rows_of(pool)[1, :PAGE]).all() for pool in pools)
    clean = tuple(
        pool_of(np.nan_to_num(rows_of(pool), nan=0.0), pool.layout, geometry.plan) for pool in world.pools(geometry)
    )
    _, chosen, out = run(world, pools, queries, geometry)
    _, same, reference = run(world, clean, queries, geometry)
    assert same_bits(out, reference) and same_bits(chosen.slots, same.slots)
    check(world, queries, chosen, out)


def test_draft_pools_may_be_replicated_beside_a_sharded_target():
    """One page id, one slot: a draft that is not dealt out has the same slots and `nowhere` as the target."""
    plan = make_plan(4, 4)
    target = CacheLayout(6, PAGE, 4, 2)
    draft = dataclasses.replace(target, shards=1)
    assert (draft.nowhere, draft.num_slots) == (target.nowhere, target.num_slots)
    pool = make_pool(1, draft, RECORD, plan)
    assert pool.data.sharding.is_fully_replicated
    assert not make_pool(1, target, RECORD, plan).data.sharding.is_fully_replicated
    values = np.arange(3 * WIDTH, dtype=np.float32).reshape(3, WIDTH)
    slots = pool_slots(target, jnp.array([[4, 2]]), jnp.zeros(3, jnp.int32), jnp.array([1, 9, -1]))
    pool = write(pool, 0, values, slots, plan)
    want = np.zeros((1, draft.num_slots, WIDTH), np.float32)
    want[0, [33, 17]] = values[:2]
    assert same_bits(rows_of(pool), want)


@pytest.mark.parametrize("kind, latent, index", [("fp8", 656, 132), ("bfloat16", 1152, 256), ("float32", 2304, 512)])
def test_br_20_record_sizes(kind, latent, index):
    assert latent_record(512, 64, kind).nbytes == latent
    assert index_record(128, kind).nbytes == index


def test_unknown_kinds_and_widths_without_a_record_are_refused():
    with pytest.raises(ConfigError, match="'int4' is not known; use 'auto'"):
        latent_record(512, 64, "int4")
    with pytest.raises(ConfigError, match="192 values and a rotated key of 64: use 'bfloat16'"):
        latent_record(192, 64, "fp8")


def real_shape(data, dcp, **more):
    return capacity.cache_shape(read_config(data / "glm-5.2"), make_plan(dcp, dcp), "fp8", **more)


@pytest.mark.parametrize(
    "dcp, more, want",
    [
        (1, {}, 54_728),
        (4, {}, 13_682),
        (4, {"draft_kv": "replicated"}, 14_273),
        (4, {"index_shards": 1}, 54_728 / 4 + 22 * 132 * 3 / 4),
        (8, {}, 54_728 / 8),
        (1, {"draft_kv": "replicated"}, 54_728),
    ],
)
def test_inv_20_br_20_bytes_per_token_of_the_real_model(data, dcp, more, want):
    """78 latent rows, 21 index keys, and the draft's one of each."""
    shape = real_shape(data, dcp, **more)
    assert (shape.num_layers, shape.num_index, shape.has_draft) == (78, 21, True)
    assert shape.bytes_per_token() == want


def test_inv_20_replicated_index_costs_what_was_reported(data):
    assert round(real_shape(data, 4, index_shards=1).bytes_per_token()) == 15_860
    sharded, replicated = (real_shape(data, 4, draft_kv=kind).bytes_per_token() for kind in ("sharded", "replicated"))
    assert round(100 * (replicated / sharded - 1), 1) == 4.3


@pytest.mark.parametrize("latent, want", [(656, 54_728), (432, 37_032), (368, 31_976)])
def test_br_20_capacity_follows_the_record(data, latent, want):
    """Half a gibibyte over all devices, in pages of 64 tokens."""
    shape = real_shape(data, 1)
    shape = dataclasses.replace(shape, latent=Record(latent // 2, jnp.bfloat16))
    assert shape.bytes_per_token() == want
    assert capacity.num_pages(shape, 64, 10**9, 1 << 29) == (1 << 29) // (64 * want)
    assert capacity.num_pages(shape, 64, 640, 1 << 29) == 11
    dealt = real_shape(data, 4)
    part = capacity.cache_bytes(make_plan(4, 4), 1 << 29, taken=0, share=0.9)
    assert part == 1 << 27 and capacity.num_pages(dealt, 64, 10**9, part) == (1 << 27) // (64 * 13_682)


def test_cache_takes_what_weights_leave():
    """Of an accelerator's memory; on a CPU a gibibyte over all devices, whatever share is asked for."""
    assert capacity.cache_bytes(abstract_plan(8, 4), None, taken=90, share=0.75, device_bytes=200) == 60
    assert capacity.cache_bytes(make_plan(4, 2), None, taken=90, share=0.1) == 1 << 28


def test_capacity_refuses_what_cannot_be(data):
    with pytest.raises(ConfigError, match="index_shards must be 1 or the dcp size 4, got 2"):
        real_shape(data, 4, index_shards=2)
    with pytest.raises(ConfigError, match="draft_kv must be 'sharded' or 'replicated', got 'both'"):
        real_shape(data, 4, draft_kv="both")
    with pytest.raises(MemoryLimitError, match="raise kv_cache_memory_bytes or gpu_memory_utilization"):
        capacity.num_pages(real_shape(data, 1), 64, 10**9, 64 * 54_728)


def test_real_pools_take_the_bytes_that_were_planned():
    """The formula against arrays on devices: one device's share of target and draft pools."""
    plan, layout = make_plan(4, 4), CacheLayout(4, PAGE, 4)
    latent, index = latent_record(16, 8, "bfloat16"), index_record(16, "bfloat16")
    shape = capacity.CacheShape("bfloat16", 3, 2, latent, index, 4, 1, True, 4)
    alone = dataclasses.replace(layout, shards=1)
    pools = [
        make_pool(3, layout, latent, plan),
        make_pool(2, layout, index, plan),
        make_pool(1, alone, latent, plan),
        make_pool(1, alone, index, plan),
    ]
    share = sum(pool.data.addressable_shards[0].data.nbytes for pool in pools)
    assert share == shape.bytes_per_token() * layout.num_slots


zero = jax.jit(zero_pages, donate_argnums=0)


@pytest.mark.parametrize("tp, dcp, sharded", [(1, 1, True), (1, 4, True), (2, 2, True), (1, 4, False)])
def test_inv_36_br_10_only_the_named_pages_are_zeroed(tp, dcp, sharded):
    """Latent and index pages have different sizes; pages 3 and 5 go, in both networks, and nothing beside them."""
    plan = make_plan(tp * dcp, dcp)
    target = CacheLayout(8, 16, dcp)
    draft = target if sharded else dataclasses.replace(target, shards=1)

    def random_cache(layers, layout, seed):
        rng = np.random.default_rng(seed)
        rows = [rng.normal(size=(n, layout.num_slots, width)).astype(np.float32) + 9 for n, width in layers]
        return PagedCache(*(pool_of(x, layout, plan) for x in rows), first_slot=seed)

    def pools():
        return (random_cache([(3, 20), (2, 4)], target, 0), random_cache([(1, 20), (1, 4)], draft, 1))

    for ids, gone in (([3, 5, 8, 8], [3, 5]), ([4], [4]), ([8], []), ([7, 7, 1], [1, 7])):
        after = zero(pools(), np.array(ids, np.int32))
        assert after[1].first_slot == 1
        for old, new in zip(jax.tree.leaves(pools()), jax.tree.leaves(after), strict=True):
            want = np.asarray(old).copy()
            want[:, gone] = 0
            assert same_bits(new, want) and new.sharding.is_equivalent_to(old.sharding, 4)
            assert all(same_bits(x.data, want[x.index]) for x in new.addressable_shards), "every copy"


def test_zeroing_happens_in_place_and_moves_nothing():
    plan, layout = make_plan(4, 4), CacheLayout(8, 16, 4)
    cache = PagedCache(make_pool(3, layout, RECORD, plan), make_pool(2, layout, Record(2, jnp.float32), plan))
    for count in (1, 4):
        compiled = zero.lower((cache, None), np.zeros(count, np.int32)).compile()
        share = sum(x.nbytes for x in jax.tree.leaves(cache)) // 4
        assert compiled.memory_analysis().alias_size_in_bytes == share
        assert not re.search("all-(gather|reduce|to-all)|collective", compiled.as_text())
        assert compiled.memory_analysis().temp_size_in_bytes < share
