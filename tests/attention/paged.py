"""Paged attention in float64 with loops, and pools built from plain arrays: what the attention tests compare with.

Nothing here uses the layout's arithmetic: owners and rows are dealt out token by token.
"""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from dcpjax.attention import AttentionOptions, Selection, attend, select
from dcpjax.batch import ForwardBatch
from dcpjax.cache import Pool, Record, pool_spec
from dcpjax.kernels import Kernels
from dcpjax.layout import CacheLayout
from dcpjax.mesh import MeshPlan, make_plan
from dcpjax.pallas_kernels.topk import NO_SLOT

PAGE = 8
TOPK = 4
VALUE = 16  # values of a latent row; the rest are the rotated key; the least widths that kernels have
WIDTH = 32
HEADS = 8
INDEX_HEADS, INDEX_DIM = 2, 16  # the first four of a key's values are not zero
SCALE = 0.3
LAYERS = 2  # the tests use layer 1; layer 0 holds NaN
BY_QUERIES = AttentionOptions(movement="queries")
# Kernels as the interpreter runs them: slowly, and anywhere.
INTERPRETED = Kernels(sparse_mla="interpret", merge="interpret")
NUM_DEVICES = jax.device_count()
ON_GPU = jax.default_backend() == "gpu"
NEEDS_RANKS = pytest.mark.skipif(NUM_DEVICES < 2, reason="one device has nothing to exchange")
COMPILED = Kernels(sparse_mla="triton", merge="triton", indexer="triton", topk="triton", experts="triton")


def on_device(options: AttentionOptions) -> AttentionOptions:
    """The options as they are; on a GPU (`make test-gpu`) with every kernel in XLA's and the interpreter's place."""
    if not ON_GPU:
        return options
    return dataclasses.replace(options, kernels=dataclasses.replace(COMPILED, invariant=options.kernels.invariant))


def columns(layout: CacheLayout) -> np.ndarray:
    """Column of each token of a page in a pool's array: ranks take turns of `interleave` tokens, each in its order."""
    held: list[list[int]] = [[] for _ in range(layout.shards)]
    for token in range(layout.page_tokens):
        held[token // layout.interleave % layout.shards].append(token)
    order = [token for tokens in held for token in tokens]
    return np.argsort(order)


def pool_of(rows: np.ndarray, layout: CacheLayout, plan: MeshPlan, record: Record | None = None) -> Pool:
    """A pool holding `rows [layers, slots, width]`, dealt out to the ranks; as they are, if no record says otherwise."""
    record = Record(rows.shape[-1], rows.dtype) if record is None else record
    rows = np.asarray(record.pack(rows))
    paged = rows.reshape(rows.shape[0], layout.num_pages, layout.page_tokens, -1)
    data = np.empty_like(paged)
    data[:, :, columns(layout)] = paged
    return Pool(jax.device_put(data, jax.NamedSharding(plan.mesh, pool_spec(layout, plan))), layout, record)


def rows_of(pool: Pool) -> np.ndarray:
    """The inverse: `[layers, slots, width]`."""
    data = np.asarray(pool.record.unpack(pool.data))[:, :, columns(pool.layout)]
    return data.reshape(data.shape[0], -1, data.shape[-1])


@dataclasses.dataclass(frozen=True)
class Geometry:
    """A mesh and how target or draft pools lie on it. The default index lies as the latent rows do.

    On a GPU machine a mesh is as large as it can be there: dcp 1 on one device, 2 on two.
    """

    dcp: int = 1
    interleave: int = 1
    tp: int = 1
    latent_sharded: bool = True
    index_sharded: bool = True
    num_pages: int = 128

    def __post_init__(self):
        if ON_GPU:
            object.__setattr__(self, "dcp", min(self.dcp, NUM_DEVICES))
            object.__setattr__(self, "tp", min(self.tp, NUM_DEVICES // self.dcp))

    @property
    def plan(self) -> MeshPlan:
        return make_plan(self.tp * self.dcp, self.dcp)

    @property
    def latent(self) -> CacheLayout:
        return CacheLayout(self.num_pages, PAGE, self.dcp if self.latent_sharded else 1, self.interleave)

    @property
    def index(self) -> CacheLayout:
        return CacheLayout(self.num_pages, PAGE, self.dcp if self.index_sharded else 1, self.interleave)


@dataclasses.dataclass
class World:
    """Requests with known rows. Scores of the indexer are sums of small integers times quarters, so they are exact in
    float32 and often equal: the order among equals is tested too."""

    latent: np.ndarray  # [slots, WIDTH], by slot of the pool
    index: np.ndarray  # [slots, INDEX_DIM]
    pages: np.ndarray  # [B, P]
    written: np.ndarray  # [slots] bool: rows that belong to a request

    @classmethod
    def make(cls, lengths, width: int, num_pages: int = 128, seed: int = 0) -> "World":
        """Requests of these lengths on random pages; tables are `width` pages wide, 0 past a request's pages."""
        rng = np.random.default_rng(seed)
        free = list(rng.permutation(np.arange(1, num_pages)))
        slots = num_pages * PAGE
        pages, written = np.zeros((len(lengths), width), np.int32), np.zeros(slots, bool)
        for b, length in enumerate(lengths):
            for p in range(-(-length // PAGE)):
                pages[b, p] = free.pop()
                first = pages[b, p] * PAGE
                written[first : first + min(PAGE, length - p * PAGE)] = True
        latent = rng.normal(size=(slots, WIDTH)).astype(np.float32)
        index = np.zeros((slots, INDEX_DIM), np.float32)
        index[:, :4] = rng.integers(-2, 3, (slots, 4))
        return cls(latent, index, pages, written)

    def place(self, request: int, slot: int) -> int:
        return int(self.pages[request, slot // PAGE] * PAGE + slot % PAGE)

    def pools(self, geometry: Geometry, known: np.ndarray | None = None) -> tuple[Pool, Pool]:
        """Latent and index pools with the rows in `known [slots]` (default: all written ones) and NaN elsewhere."""
        known = self.written if known is None else known

        def fill(rows, layout):
            layers = np.full((LAYERS, *rows.shape), np.nan, np.float32)
            layers[1, known] = rows[known]
            return pool_of(layers, layout, geometry.plan)

        return fill(self.latent, geometry.latent), fill(self.index, geometry.index)


@dataclasses.dataclass
class Queries:
    """Query tokens `(request, slot)`, padded with tokens that see nothing, and their vectors."""

    request: np.ndarray
    slot: np.ndarray
    q: np.ndarray
    index_q: np.ndarray
    weight: np.ndarray

    @classmethod
    def make(cls, tokens: list[tuple[int, int]], size: int, seed: int = 1) -> "Queries":
        """The vectors of a token depend on (request, slot) alone, so it has the same ones in every batch."""
        assert len(tokens) <= size
        padded = tokens + [(0, -1)] * (size - len(tokens))
        drawn = [np.random.default_rng((seed, r, s + 1)) for r, s in padded]
        return cls(
            request=np.array([r for r, _ in padded], np.int32),
            slot=np.array([s for _, s in padded], np.int32),
            q=np.stack([g.normal(size=(HEADS, WIDTH)) for g in drawn]).astype(np.float32),
            index_q=np.pad(
                np.stack([g.integers(-2, 3, (INDEX_HEADS, 4)) for g in drawn]).astype(np.float32),
                ((0, 0), (0, 0), (0, INDEX_DIM - 4)),
            ),
            weight=np.stack([g.integers(-4, 5, INDEX_HEADS) / 4 for g in drawn]).astype(np.float32),
        )


def oracle_selection(world: World, queries: Queries, first_slot: int = 0, topk: int = TOPK) -> list[list[int]]:
    """Slots each query attends to, ascending."""
    chosen = []
    for t, (request, own) in enumerate(zip(queries.request, queries.slot)):
        scored = []
        for slot in range(first_slot, own + 1):
            key = world.index[world.place(request, slot)].astype(np.float64)
            score = float(queries.weight[t].astype(np.float64) @ np.maximum(queries.index_q[t] @ key, 0))
            scored.append((-score, slot))
        chosen.append(sorted(slot for _, slot in sorted(scored)[:topk]))
    return chosen


def oracle_output(world: World, queries: Queries, chosen: list[list[int]]) -> np.ndarray:
    """Softmax attention `[T, HEADS, VALUE]` over the chosen slots, zeros where there are none."""
    out = np.zeros((len(queries.slot), HEADS, VALUE))
    for t, slots in enumerate(chosen):
        if slots:
            keys = world.latent[[world.place(queries.request[t], s) for s in slots]].astype(np.float64)
            score = queries.q[t].astype(np.float64) @ keys.T * SCALE
            weight = np.exp(score - score.max(1, keepdims=True))
            out[t] = weight / weight.sum(1, keepdims=True) @ keys[:, :VALUE]
    return out


def batch_of(world: World, queries: Queries, geometry: Geometry, write: np.ndarray | bool = True) -> ForwardBatch:
    """`write [T]`: which tokens' rows are written; padding never is."""
    nowhere = geometry.num_pages * PAGE
    place = [
        world.place(r, s) if s >= 0 and w else nowhere
        for r, s, w in zip(queries.request, queries.slot, np.broadcast_to(write, queries.slot.shape))
    ]
    zero = np.zeros_like(queries.slot)
    return ForwardBatch(
        tokens=zero, positions=np.maximum(queries.slot, 0), slots=queries.slot,
        write_slots=np.array(place, np.int32), row_of=queries.request, pages=world.pages,
    )  # fmt: skip


def _layer(latent, index, rows, keys, q, index_q, weight, batch, first_slot, options, plan):
    latent = latent.write(1, rows, batch.write_slots, plan)
    index = index.write(1, keys, batch.write_slots, plan)
    chosen = select(index_q, weight, index, 1, latent, batch, TOPK, first_slot, plan, options.kernels)
    return latent, index, chosen, attend(q, latent, 1, chosen, batch, VALUE, SCALE, options, plan)


layer = jax.jit(_layer, static_argnames=("first_slot", "options", "plan"))


def run(
    world: World, pools: tuple[Pool, Pool], queries: Queries, geometry: Geometry, write: np.ndarray | bool = True,
    first_slot: int = 0, options: AttentionOptions = BY_QUERIES, function=layer,
) -> tuple[tuple[Pool, Pool], Selection, np.ndarray]:  # fmt: skip
    """Writes the queries' rows, selects and attends: pools, selection, output `[T, HEADS, VALUE]`."""
    options = on_device(options)
    plan, batch = geometry.plan, batch_of(world, queries, geometry, write)
    places = [world.place(r, max(s, 0)) for r, s in zip(queries.request, queries.slot)]
    q = jax.device_put(queries.q, plan.sharding(None, "heads", None))
    latent, index, chosen, out = function(
        *pools, world.latent[places], world.index[places], q, queries.index_q, queries.weight, batch, first_slot,
        options, plan,
    )  # fmt: skip
    return (latent, index), chosen, np.asarray(out)


def fresh_layer():
    """The same function, compiled anew: for tests that put something else in the place of a kernel."""
    return jax.jit(functools.partial(_layer), static_argnames=("first_slot", "options", "plan"))


def slots_of(chosen: Selection) -> list[list[int]]:
    return [[int(s) for s in row if s != NO_SLOT] for row in np.asarray(chosen.slots)]


def check(world: World, queries: Queries, chosen: Selection, out: np.ndarray, first_slot: int = 0) -> None:
    """Selections equal the oracle's, outputs are within float32 of it. NaN fails."""
    want = oracle_selection(world, queries, first_slot)
    assert slots_of(chosen) == want
    np.testing.assert_allclose(out, oracle_output(world, queries, want), atol=2e-6, rtol=0)


def same_bits(a, b) -> bool:
    """Equality that also holds for equal NaN, and tells −0.0 from +0.0."""
    return np.asarray(a).tobytes() == np.asarray(b).tobytes()


def shards(pool: Pool) -> list[np.ndarray]:
    """`[layers, rows, width]` of each device."""
    parts = sorted(pool.data.addressable_shards, key=lambda s: s.device.id)
    return [np.asarray(s.data).reshape(pool.data.shape[0], -1, pool.data.shape[3]) for s in parts]
