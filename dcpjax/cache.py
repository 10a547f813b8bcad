"""The paged cache: pools of rows, each with the layout its array truly has.

A `Pool` is checked against its array's sharding when it is made, and attention takes the geometry from it. No size is
passed beside it, so a cache that is read with another geometry than it was written with cannot be built.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from dcpjax import collectives
from dcpjax.errors import ConfigError
from dcpjax.layout import CacheLayout
from dcpjax.mesh import MeshPlan
from dcpjax.pallas_kernels.records import GROUP, has_record, pack_rows, packed_words, unpack_rows


@dataclasses.dataclass(frozen=True)
class Record:
    """What a pool stores for one token and layer: `num_values` numbers as they are in `dtype`, or packed in words.

    packed: None, or how many of the values, the first ones, are stored in 8 bits with a scale per 128; see
    `pallas_kernels/records.py`.
    """

    num_values: int
    dtype: Any
    packed: int | None = None

    @property
    def width(self) -> int:
        """Elements of `dtype`."""
        return self.num_values if self.packed is None else packed_words(self.packed, self.num_values - self.packed)

    @property
    def nbytes(self) -> int:
        """Bytes of one token in one layer."""
        return self.width * jnp.dtype(self.dtype).itemsize

    def pack(self, values: jax.Array) -> jax.Array:
        """`[…, num_values]` → `[…, width]`."""
        return values if self.packed is None else pack_rows(values, self.packed)

    def unpack(self, stored: jax.Array) -> jax.Array:
        """`[…, width]` → `[…, num_values]`, float32 if packed."""
        return stored if self.packed is None else unpack_rows(stored, self.packed, self.num_values - self.packed)


def latent_record(kv_rank: int, rope_dim: int, kind: str) -> Record:
    """Latent and rotated key. `fp8` is 1 byte a value, a float32 scale per 128 values and a bfloat16 rotated key."""
    return _record(kv_rank, rope_dim, kind)


def index_record(head_dim: int, kind: str) -> Record:
    """Index key. `fp8` is 1 byte a value and a float32 scale per 128 values."""
    return _record(head_dim, 0, kind)


def _record(value_width: int, rope: int, kind: str) -> Record:
    kinds = {"float32": jnp.float32, "bfloat16": jnp.bfloat16, "fp8": jnp.uint32}
    if kind not in kinds:
        raise ConfigError(f"kv cache dtype {kind!r} is not known; use 'auto', 'bfloat16', 'float32' or 'fp8'")
    if kind == "fp8" and not has_record(value_width, rope):
        raise ConfigError(
            f"kv cache dtype 'fp8' packs whole words and groups of {GROUP} values; this model's rows have {value_width} "
            f"values and a rotated key of {rope}: use 'bfloat16'"
        )
    return Record(value_width + rope, kinds[kind], value_width if kind == "fp8" else None)


@struct.dataclass
class Pool:
    """Rows of several layers in pages: `data [layers, pages, page_tokens, width]` of `record.dtype`, each as its record
    says.

    Axis 2 is ordered rank-major (owner, then page row) and sharded over dcp iff `layout.shards > 1`.
    Raises `ConfigError` when the array's real sharding is another one.
    """

    data: jax.Array
    layout: CacheLayout = struct.field(pytree_node=False)
    record: Record = struct.field(pytree_node=False)

    def __post_init__(self):
        # A pytree passes through here with tracers and placeholders too; only real arrays have a sharding to check.
        if not isinstance(self.data, jax.Array) or isinstance(self.data, jax.core.Tracer):
            return
        shape = self.data.shape
        if (shape[3], self.data.dtype) != (self.record.width, self.record.dtype):
            raise ConfigError(f"a pool of {self.data.dtype} {shape} does not hold rows of {self.record}")
        if shape[1:3] != (self.layout.num_pages, self.layout.page_tokens):
            raise ConfigError(f"a pool of shape {shape} does not have the pages of {self.layout}")
        sharding = self.data.sharding
        parts = shape[2] // sharding.shard_shape(shape)[2]
        if parts != self.layout.shards:
            raise ConfigError(
                f"the cache array is cut into {parts} shards but its layout says {self.layout.shards}: every rank "
                f"would read its shard as the whole context. Build the pool with make_pool, which sets both from one value"
            )
        if parts > 1 and sharding.spec[2] not in ("dcp", ("dcp",)):
            raise ConfigError(
                f"the cache array is cut over {sharding.spec[2]}, pools are cut over 'dcp'; use make_pool"
            )

    def write(self, layer: jax.Array | int, values: jax.Array, slots: jax.Array, plan: MeshPlan) -> "Pool":
        """Writes `values [T, num_values]` (any float dtype) to pool slots `slots [T]` int32 of one layer, each on its
        owner; `nowhere` is dropped."""
        layout, values = self.layout, self.record.pack(values)

        def body(data, values, slots):
            if len(slots) == 1:
                # XLA turns a scatter of one row into a slice update under a condition, and copies the pool for it.
                slots = jnp.concatenate([slots, jnp.full(1, layout.nowhere, slots.dtype)])
                values = jnp.concatenate([values, jnp.zeros_like(values)])
            mine = layout.owner(slots) == collectives.rank(layout)
            rows = jnp.where(mine, layout.row(slots), layout.num_rows)
            flat = data.reshape(data.shape[0], layout.num_rows, data.shape[3])
            return flat.at[layer, rows].set(values.astype(data.dtype), mode="drop").reshape(data.shape)

        spec = pool_spec(layout, plan)
        whole = plan.spec()
        return self.replace(data=plan.per_device(body, (spec, whole, whole), spec)(self.data, values, slots))


def pool_spec(layout: CacheLayout, plan: MeshPlan):
    """Partition of a pool's array: its rows over dcp where the layout has shards."""
    return plan.spec(None, None, "page_rows" if layout.shards > 1 else None, None)


def make_pool(num_layers: int, layout: CacheLayout, record: Record, plan: MeshPlan, fill: float = 0.0) -> Pool:
    """A new pool on the mesh. `fill` is for tests (NaN must change nothing). Raises `ConfigError`."""
    if layout.shards not in (1, plan.dcp):
        raise ConfigError(f"a pool has 1 shard or one per dcp rank ({plan.dcp}); {layout.shards} are not supported")
    shape = (num_layers, layout.num_pages, layout.page_tokens, record.width)
    sharding = jax.sharding.NamedSharding(plan.mesh, pool_spec(layout, plan))

    def full():
        row = record.pack(jnp.full(record.num_values, fill, None if record.packed else record.dtype))
        return jnp.broadcast_to(row, shape)

    return Pool(jax.jit(full, out_shardings=sharding)(), layout, record)


@struct.dataclass
class PagedCache:
    """The pools of one network: `latent` rows of every layer, `index` keys of the full layers only.

    Both are addressed by the same page ids. `first_slot` is 0 for the target and 1 for the draft, whose row i lies in
    slot i + 1, so that a page depends only on tokens its own hash covers; draft slot 0 stays empty for ever.
    """

    latent: Pool
    index: Pool
    first_slot: int = struct.field(pytree_node=False, default=0)


def zero_pages[T](caches: T, ids: jax.Array) -> T:
    """Caches with the pages `ids [n]` (int32, padded with `num_pages`, which is dropped; none negative) all zero.

    `caches`: pools, caches, or a tree of them; None is kept. Every pool gets one pass with the same ids, whatever its
    page size. For newly taken pages, before any write of the step; reads are right without it.
    """
    if len(ids) == 1:
        # As in `Pool.write`: a scatter of one page would copy the pool. An id twice does no harm.
        ids = jnp.concatenate([ids, ids])
    return jax.tree.map(lambda data: data.at[:, ids].set(0, mode="drop"), caches)


def pool_places(layout: CacheLayout, pages: Sequence[int], slots: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Page and column `[S]` each, in a pool's array, of a sequence's slots `[S]` on its `pages`: for reading rows out.
    All int64, on the host."""
    place = np.asarray(pages)[slots // layout.page_tokens] * layout.page_tokens + slots % layout.page_tokens
    column = layout.owner(place) * layout.page_rows + layout.row(place) % layout.page_rows
    return place // layout.page_tokens, column


def pool_slots(layout: CacheLayout, pages: jax.Array, row_of: jax.Array, slots: jax.Array) -> jax.Array:
    """Sequence slots `[T]` (token numbers in a request) → slots of the pool `[T]`; negative ones → nowhere. All int32:
    `pages [B, P]` block tables, `row_of [T]` rows of them."""
    page = jnp.clip(slots // layout.page_tokens, 0, pages.shape[1] - 1)
    place = pages[row_of, page] * layout.page_tokens + slots % layout.page_tokens
    inside = (slots >= 0) & (slots < pages.shape[1] * layout.page_tokens)
    return jnp.where(inside, place, layout.nowhere)
