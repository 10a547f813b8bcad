"""How many pages fit: bytes of one page over all pools, and the memory there is for them."""

import dataclasses

import jax

from dcpjax.cache import Record, index_record, latent_record
from dcpjax.errors import ConfigError
from dcpjax.mesh import MeshPlan
from models.config import ModelConfig

# What the cache may take on CPU, over all virtual devices.
CPU_BYTES = 1 << 30
# Of an accelerator's memory, what is left for activations and compile scratch.
_ACCELERATOR_SHARE = 0.9


@dataclasses.dataclass(frozen=True)
class CacheShape:
    """Pools of one model on one mesh: how many layers of which record, and over how many ranks each is dealt out."""

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
        num_layers=cfg.num_layers,
        num_index=cfg.num_full_layers,
        latent=latent_record(cfg.kv_rank, cfg.rope_dim, kind),
        index=index_record(cfg.indexer.head_dim, kind),
        index_shards=shards,
        draft_shards=plan.dcp if draft_kv == "sharded" else 1,
        has_draft=cfg.has_mtp,
        ranks=plan.dcp,
    )


def num_pages(
    shape: CacheShape, plan: MeshPlan, page_tokens: int, most_tokens: int, nbytes: int | None, taken: int
) -> int:
    """Pages to allocate, the dummy page included: what memory holds, at most what `most_tokens` need.

    `nbytes`: for the cache over all devices; None: 1 GiB on CPU, else 90 % of a device less the `taken` bytes of its
    weights.
    """
    per_page = shape.bytes_per_token() * page_tokens
    per_device = nbytes / plan.num_devices if nbytes is not None else _free_bytes(plan, taken)
    fit = int(per_device // per_page)
    if fit < 2:
        raise ConfigError(
            f"the cache may take {per_device:.0f} bytes a device, but one page takes {per_page:.0f}: raise "
            "kv_cache_memory_bytes or make block_size smaller"
        )
    return min(fit, 1 + -(-most_tokens // page_tokens))


def _free_bytes(plan: MeshPlan, taken: int) -> float:
    if plan.platform == "cpu":
        return CPU_BYTES / plan.num_devices
    devices: list[jax.Device] = list(plan.mesh.devices.flat)
    return min(_ACCELERATOR_SHARE * d.memory_stats()["bytes_limit"] for d in devices) - taken
