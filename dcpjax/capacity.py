"""How many pages fit: bytes of one page over all pools, and the memory there is for them."""

import dataclasses

import jax

from dcpjax.cache import Record, index_record, latent_record
from dcpjax.errors import ConfigError, MemoryLimitError
from dcpjax.mesh import MeshPlan
from models.config import ModelConfig

# What the cache may take on CPU, over all virtual devices.
CPU_BYTES = 1 << 30


@dataclasses.dataclass(frozen=True)
class CacheShape:
    """Pools of one model on one mesh: how many layers of which record, and over how many ranks each is dealt out.

    kind: "float32", "bfloat16" or "fp8". num_layers, num_index: of latent rows and of index keys, the draft's not
    counted. index_shards, draft_shards: over how many ranks they lie, 1 or `ranks`, the dcp size.
    """

    kind: str
    num_layers: int
    num_index: int
    latent: Record
    index: Record
    index_shards: int
    draft_shards: int
    has_draft: bool
    ranks: int

    def bytes_per_token(self) -> float:
        """Bytes of one token on one device, all pools: `N·m/d + X·i/s + (m + i)/d_draft`."""
        m, i = self.latent.nbytes, self.index.nbytes
        draft = (m / self.draft_shards + i / min(self.draft_shards, self.index_shards)) if self.has_draft else 0.0
        return self.num_layers * m / self.ranks + self.num_index * i / self.index_shards + draft


def cache_shape(
    cfg: ModelConfig, plan: MeshPlan, kind: str, index_shards: int | None = None, draft_kv: str = "sharded"
) -> CacheShape:
    """Sizes of the pools. `kind` is "float32", "bfloat16" or "fp8". Raises `ConfigError`."""
    shards = plan.dcp if index_shards is None else index_shards
    if shards not in (1, plan.dcp):
        raise ConfigError(f"index_shards must be 1 or the dcp size {plan.dcp}, got {shards}")
    if draft_kv not in ("sharded", "replicated"):
        raise ConfigError(f"speculative_config: draft_kv must be 'sharded' or 'replicated', got {draft_kv!r}")
    return CacheShape(
        kind=kind,
        num_layers=cfg.num_layers,
        num_index=cfg.num_full_layers,
        latent=latent_record(cfg.kv_rank, cfg.rope_dim, kind),
        index=index_record(cfg.indexer.head_dim, kind),
        index_shards=shards,
        draft_shards=plan.dcp if draft_kv == "sharded" else 1,
        has_draft=cfg.has_mtp,
        ranks=plan.dcp,
    )


def num_pages(shape: CacheShape, page_tokens: int, most_tokens: int, per_device: float) -> int:
    """Pages to allocate, the dummy page included: what `per_device` bytes hold, at most what `most_tokens` need.

    Raises `MemoryLimitError` when that is no page but the dummy.
    """
    per_page = shape.bytes_per_token() * page_tokens
    fit = int(per_device // per_page)
    if fit < 2:
        raise MemoryLimitError(
            f"the cache may take {max(0, int(per_device)):,} bytes a device, but one page takes {per_page:,.0f} and two are "
            "needed: raise kv_cache_memory_bytes or gpu_memory_utilization, make block_size smaller, or use more devices"
        )
    return min(fit, 1 + -(-most_tokens // page_tokens))


def cache_bytes(plan: MeshPlan, total: int | None, taken: int, share: float, device_bytes: int | None = None) -> float:
    """Bytes that the cache may take on a device: of `total` over all devices, its part.

    None: 1 GiB over all devices on CPU, elsewhere `share` of what JAX takes of a device, less the `taken` bytes of its
    weights; the rest is for activations and what the compiler needs. `device_bytes`: what JAX takes (default: as it says).
    """
    if total is not None:
        return total / plan.num_devices
    if device_bytes is None and plan.platform == "cpu":
        return CPU_BYTES / plan.num_devices
    if device_bytes is None:
        devices: list[jax.Device] = list(plan.mesh.devices.flat)
        device_bytes = min(d.memory_stats()["bytes_limit"] for d in devices)
    return share * device_bytes - taken
