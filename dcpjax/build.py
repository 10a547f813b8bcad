"""From a checkpoint folder and a handful of sizes to a runner: every check that can fail does so before weights load."""

import dataclasses
import functools
import numbers
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from dcpjax import capacity
from dcpjax.attention import AttentionOptions
from dcpjax.buckets import Limits
from dcpjax.cache import PagedCache, Pool, make_pool
from dcpjax.capacity import CacheShape
from dcpjax.collectives import check_backend
from dcpjax.errors import ConfigError, MemoryLimitError
from dcpjax.kernels import Kernels
from dcpjax.layout import CacheLayout
from dcpjax.mesh import MeshPlan, make_plan
from dcpjax.runner import Runner
from dcpjax.spec import Speculation
from models import weights
from models.checkpoint import Checkpoint
from models.config import ModelConfig, read_config
from models.glm_moe_dsa import Network
from models.params import Params
from models.stored import FormOf, abstract, all_plain, bytes_per_device


@dataclasses.dataclass(frozen=True)
class EngineConfig:
    """What the user chose; None means the default described in `dcpjax.llm.LLM`."""

    tensor_parallel_size: int | None = None
    decode_context_parallel_size: int = 1
    expert_parallel: bool = False
    interleave: int = 1
    backend: str = "ag_rs"
    debug: bool = False
    index_shards: int | None = None
    draft_kv: str = "sharded"
    speculation: Speculation | None = None
    zero_new_pages: bool = False
    block_size: int = 64
    num_blocks: int | None = None
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    dtype: str = "auto"
    kv_cache_dtype: str = "auto"
    kv_cache_memory_bytes: int | None = None
    gpu_memory_utilization: float = 0.92
    kernels: str | dict[str, Any] | None = "auto"
    load_format: str = "auto"

    @classmethod
    def read(cls, arguments: Mapping[str, Any]) -> "EngineConfig":
        """From arguments of `LLM`; those that are not the engine's are passed over. Raises `ConfigError`."""
        speculation, draft_kv = Speculation.read(arguments.get("speculative_config"))
        names = {field.name: _NAMES.get(field.name, field.name) for field in dataclasses.fields(cls)}
        given = {field: arguments[name] for field, name in names.items() if name in arguments}
        return cls(**given | {"speculation": speculation, "draft_kv": draft_kv})

    def __post_init__(self):
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.type in (int, int | None) and value is not None:
                _check_whole(_NAMES.get(field.name, field.name), value, field.name in _AT_LEAST_ONE)
            if field.type is bool and not isinstance(value, bool):
                raise ConfigError(f"{_NAMES.get(field.name, field.name)} must be true or false, got {value!r}")
        if not isinstance(self.gpu_memory_utilization, numbers.Real) or not 0 < self.gpu_memory_utilization <= 1:
            raise ConfigError(
                "gpu_memory_utilization is the share of what JAX takes of a device, for weights and cache, above 0 and at most 1, "
                f"got {self.gpu_memory_utilization!r}"
            )
        if self.kv_cache_memory_bytes is not None and self.kv_cache_memory_bytes < 1:
            raise ConfigError(f"kv_cache_memory_bytes must be at least 1, got {self.kv_cache_memory_bytes}")
        for name in ("tensor_parallel_size", "decode_context_parallel_size"):
            if (getattr(self, name) or 1) > _MOST_DEVICES:
                raise ConfigError(f"{name} must be at most {_MOST_DEVICES:,}, got {getattr(self, name):,}")
        if self.load_format not in _LOAD_FORMATS:
            raise ConfigError(f"load_format must be one of {', '.join(_LOAD_FORMATS)}, got {self.load_format!r:.100}")


# Names of the user's options where ours are shorter.
_NAMES = {
    "interleave": "cp_kv_cache_interleave_size",
    "debug": "dcp_debug",
    "expert_parallel": "enable_expert_parallel",
    "backend": "dcp_comm_backend",
}
_LOAD_FORMATS = ("auto", "safetensors", "dummy")
# More than a network's widest axis could be dealt out to; an abstract mesh of millions takes minutes to make.
_MOST_DEVICES = 4096
# Sizes that other checks divide by.
_AT_LEAST_ONE = ("tensor_parallel_size", "decode_context_parallel_size", "interleave", "block_size")


def _check_whole(name: str, value: Any, at_least_one: bool) -> None:
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise ConfigError(f"{name} must be a whole number, got {value!r}")
    if at_least_one and value < 1:
        raise ConfigError(f"{name} must be at least 1, got {value}")
    if value >= 1 << 31 and not name.endswith("_bytes"):
        raise ConfigError(f"{name} must be below {1 << 31:,}, got {value:,}")


_DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}


def start_devices(tensor_parallel_size: int | None, dcp: int) -> None:
    """Asks JAX for enough virtual CPU devices, unless a number was chosen or a backend runs already."""
    if jax.config.jax_num_cpu_devices != -1:
        return
    try:
        jax.config.update("jax_num_cpu_devices", max(tensor_parallel_size or dcp, 8))
    except RuntimeError:  # a backend runs: make_plan says what to do if its devices are too few
        return


def keep_compiled_programs() -> None:
    """Compiled programs are kept in the user's cache folder, unless JAX has been given another place."""
    if jax.config.jax_compilation_cache_dir is None:
        jax.config.update("jax_compilation_cache_dir", str(pathlib.Path.home() / ".cache" / "dcpjax" / "jax"))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)


@dataclasses.dataclass(frozen=True)
class Resolved:
    """A configuration that can run: every check has passed, no weight was read and no memory taken.

    dtype: of activations and plain weights. shape: of all pools. layout: of the target's latent pool, the real number
    of pages in it. limits: of a step. speculation: None without drafts.
    """

    net: Network
    dtype: Any
    shape: CacheShape
    layout: CacheLayout
    limits: Limits
    speculation: Speculation | None
    zero_new_pages: bool


def resolve(
    cfg: ModelConfig,
    config: EngineConfig,
    form_of: FormOf = all_plain,
    plan: MeshPlan | None = None,
    device_bytes: int | None = None,
) -> Resolved:
    """Checks a configuration against a model and the devices there are. Raises `ConfigError`, `MemoryLimitError` where
    what is asked for does not fit.

    `form_of` says in which format weights lie in memory. `plan`, `device_bytes`: mesh and memory of devices that are
    not there, see `abstract_plan`.
    """
    check_backend(config.backend)
    if plan is None:
        plan = make_plan(config.tensor_parallel_size, config.decode_context_parallel_size, config.expert_parallel)
    dtype = _choose_dtype(config.dtype, plan)
    shape = capacity.cache_shape(
        cfg, plan, _cache_kind(config.kv_cache_dtype, dtype), config.index_shards, config.draft_kv
    )
    # The geometry is checked with one page before the number of pages is known.
    layout = CacheLayout(1, config.block_size, plan.dcp, config.interleave)
    spec = config.speculation
    if spec is not None and not cfg.has_mtp:
        raise ConfigError("speculative_config: this checkpoint has no MTP layer to draft with; leave the option out")
    on_cpu = plan.platform == "cpu"
    seqs = _count("max_num_seqs", config.max_num_seqs, 16 if on_cpu else 128)
    needed = seqs * (1 if spec is None else spec.num_drafts + 1)
    most = seqs * cfg.max_position
    usual = min(512 if on_cpu else 2048, most)
    tokens = _count("max_num_batched_tokens", config.max_num_batched_tokens, max(usual, needed))
    if tokens < needed:
        raise ConfigError(
            f"max_num_batched_tokens {tokens} is too small: each of {seqs} rows (max_num_seqs) needs {needed // seqs} "
            "tokens a step, its newest and the drafts. Raise it, or lower max_num_seqs"
        )
    if tokens > most:
        raise ConfigError(
            f"max_num_batched_tokens {tokens:,} is more than {seqs} rows (max_num_seqs) of {cfg.max_position:,} tokens, the "
            "model's longest sequence, can have: lower it, or leave it out"
        )
    length = _wanted_length(config.max_model_len, cfg)
    # Asked for in any case: formats that cannot be dealt out to these devices are refused here.
    taken = bytes_per_device(abstract(cfg, plan, dtype, form_of))
    pages = config.num_blocks
    if pages is None:
        room = capacity.cache_bytes(
            plan, config.kv_cache_memory_bytes, taken, config.gpu_memory_utilization, device_bytes
        )
        if room <= 0:
            raise MemoryLimitError(
                f"the weights take {taken:,} bytes a device, of which gpu_memory_utilization {config.gpu_memory_utilization} "
                f"gives them and the cache {int(room) + taken:,}: use more devices or a quantised checkpoint"
            )
        pages = capacity.num_pages(shape, config.block_size, seqs * length, room)
    kernels = choose_kernels(config, cfg, plan, dtype, shape.latent.packed is not None)
    _check_interpreted(kernels, cfg, plan)
    return Resolved(
        net=Network(cfg, plan, AttentionOptions(backend=config.backend, debug=config.debug, kernels=kernels)),
        dtype=dtype,
        shape=shape,
        layout=dataclasses.replace(layout, num_pages=max(pages, 1)),
        limits=Limits(seqs, tokens, _fit_length(config.max_model_len, length, pages, config.block_size)),
        speculation=spec,
        zero_new_pages=config.zero_new_pages,
    )


def choose_kernels(config: EngineConfig, cfg: ModelConfig, plan: MeshPlan, dtype: Any, packed: bool) -> Kernels:
    """Implementations on the mesh's platform, for plain or `packed` records. Raises `ConfigError`."""
    widths = cfg.kv_rank, cfg.rope_dim, cfg.indexer.head_dim
    return Kernels.chosen(config.kernels, plan.platform, dtype, *widths, packed, plan.hopper, plan.peers)


def _check_interpreted(kernels: Kernels, cfg: ModelConfig, plan: MeshPlan) -> None:
    """The interpreter runs the experts' kernel alone; on GPUs another one takes what it does not serve."""
    if kernels.experts != "interpret":
        return
    (inner,) = plan.sharding("expert_width").shard_shape((plan.pad(cfg.moe.width, "expert_width"),))
    if inner % 16 or cfg.hidden_size % 16:
        raise ConfigError(
            f"kernels: experts 'interpret' serves widths in multiples of 16; here a device has {inner} of an expert's values "
            f"and {cfg.hidden_size} between them: use 'xla'"
        )


def build_runner(
    folder: pathlib.Path,
    config: EngineConfig,
    overrides: dict[str, Any] | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Runner:
    """Checks everything, then loads the weights and makes the pools. Raises `ConfigError` or `CheckpointError`.

    `progress(done, total)` is called with bytes of weights while they load. Of a dummy only config.json is read: its
    weights are random and plain, whatever formats it announces.
    """
    cfg = read_config(folder, overrides)
    if config.load_format == "dummy":
        ready = resolve(cfg, config)
        return make_runner(ready, weights.dummy(cfg, ready.net.plan, ready.dtype))
    # Opened when their sizes are asked for: whatever can be refused without weights comes first.
    checkpoint = functools.cache(lambda: Checkpoint.open(folder, cfg))
    ready = resolve(cfg, config, lambda *where: checkpoint().form(*where))
    return make_runner(ready, weights.place(checkpoint(), cfg, ready.net.plan, ready.dtype, progress=progress))


def make_runner(ready: Resolved, params: Params) -> Runner:
    """Makes the pools, and the runner around them. `params` lie padded on the mesh."""
    net = ready.net
    target, draft = make_caches(net.cfg, ready.shape, ready.layout, net.plan)
    options = ready.speculation, ready.zero_new_pages
    return Runner(net, params, target, draft, ready.limits, net.cfg.eos_token_ids, *options)


def make_caches(
    cfg: ModelConfig, shape: CacheShape, layout: CacheLayout, plan: MeshPlan, make: Callable[..., Pool] = make_pool
) -> tuple[PagedCache, PagedCache | None]:
    """The target's and the draft's pools, each made by `make`."""

    def pools(num_layers: int, num_index: int, shards: int, first_slot: int) -> PagedCache:
        latent = dataclasses.replace(layout, shards=shards)
        index = dataclasses.replace(layout, shards=min(shards, shape.index_shards))
        return PagedCache(
            make(num_layers, latent, shape.latent, plan),
            make(num_index, index, shape.index, plan),
            first_slot,
        )

    target = pools(cfg.num_layers, cfg.num_full_layers, plan.dcp, 0)
    return target, pools(1, 1, shape.draft_shards, 1) if cfg.has_mtp else None


def _choose_dtype(name: str, plan: MeshPlan) -> Any:
    if name == "auto":
        return jnp.float32 if plan.platform == "cpu" else jnp.bfloat16
    if name not in _DTYPES:
        raise ConfigError(f"dtype {name!r} is not known; use 'auto', 'bfloat16' or 'float32'")
    return _DTYPES[name]


def _cache_kind(name: str, dtype: Any) -> str:
    if name == "auto":
        return jnp.dtype(dtype).name
    return "fp8" if name == "fp8_e4m3" else name


def _count(name: str, asked: int | None, default: int) -> int:
    if asked is None:
        return default
    if asked < 1:
        raise ConfigError(f"{name} {asked} must be at least 1; leave it out for the default {default}")
    return asked


def _wanted_length(asked: int | None, cfg: ModelConfig) -> int:
    if asked is None:
        return cfg.max_position
    if not 2 <= asked <= cfg.max_position:
        raise ConfigError(
            f"max_model_len {asked} must be between 2 (a token of prompt, a token of text) and the model's "
            f"{cfg.max_position} positions"
        )
    return asked


def _fit_length(asked: int | None, length: int, pages: int, block_size: int) -> int:
    """The longest sequence: what was asked for, or the smaller of the model's positions and the pool."""
    if pages < 2:
        raise ConfigError(f"num_blocks {pages} is too small: block 0 is never given out, so at least 2 are needed")
    pool = (pages - 1) * block_size
    if asked is None:
        return min(length, pool)
    if asked > pool:
        raise MemoryLimitError(
            f"max_model_len {asked} does not fit the cache of {pages - 1} blocks of {block_size} tokens = {pool}: "
            "lower max_model_len or give the cache more memory"
        )
    return asked
