"""What a configuration would take and how fast it could be, on devices that need not be there; and what would fit if it does not."""

import dataclasses
from collections.abc import Iterator

from dcpjax import build, capacity
from dcpjax.build import EngineConfig, Resolved
from dcpjax.errors import ConfigError, MemoryLimitError
from dcpjax.footprint import KINDS, Activations, CacheRow, activations, cache_rows, pools, tokens_in, weight_groups
from dcpjax.mesh import abstract_plan, make_plan
from dcpjax.roofline import H200, Chip, Floor, step_floor
from dcpjax.traffic import Crossing, crossings
from models.config import ModelConfig
from models.stored import FormOf, abstract, bytes_per_device, published

# Rows of decode steps that are told of.
ROWS = (1, 16, 64, 128)
_MOST_DEVICES = 64


@dataclasses.dataclass(frozen=True)
class Subject:
    """A model as its configuration describes it. quantisation: "fp8", "nvfp4" or None."""

    cfg: ModelConfig
    quantisation: str | None = None

    @property
    def form_of(self) -> FormOf:
        """In which format each weight lies in memory."""
        return published(self.quantisation, self.cfg)


@dataclasses.dataclass(frozen=True)
class Forecast:
    """Bytes are those of one device. groups: of weights, by what they are for. room: what the caches may take. chosen,
    layouts: the layout asked for, and all there are. refusal: why it does not fit, or None; changes: what would.

    kv_tokens: what the engine would hold. floors: by requests in a step, each of `context` tokens.
    """

    ready: Resolved
    groups: dict[str, int]
    room: float
    chosen: CacheRow
    kv_tokens: int
    layouts: tuple[CacheRow, ...]
    activations: Activations
    crossings: tuple[Crossing, ...]
    context: int
    floors: dict[int, Floor]
    refusal: str | None
    changes: tuple[str, ...]

    @property
    def weight_bytes(self) -> int:
        """Of all groups together."""
        return sum(self.groups.values())


def forecast(
    subject: Subject,
    config: EngineConfig,
    device_bytes: int,
    context: int | None = None,
    chip: Chip = H200,
    compiled: bool = False,
) -> Forecast:
    """Plans `config` for devices of `device_bytes`. Raises `ConfigError` for what is not supported at all.

    context: tokens of a request for the floors (default: 131,072, or the longest sequence). compiled: lets the compiler of
    the devices of this process say what a step needs, too.
    """
    cfg, form_of = subject.cfg, subject.form_of
    ready, refusal = _resolve(subject, config, device_bytes)
    plan, shape = ready.net.plan, ready.shape
    params = abstract(cfg, plan, ready.dtype, form_of)
    taken = bytes_per_device(params)
    room = capacity.cache_bytes(plan, config.kv_cache_memory_bytes, taken, config.gpu_memory_utilization, device_bytes)
    per_token, page = shape.bytes_per_token(), ready.layout.page_tokens
    kinds = tuple(kind for kind in dict.fromkeys((shape.kind, *KINDS)) if _has_kind(cfg, kind))
    draft_kv = "sharded" if shape.draft_shards == plan.dcp else "replicated"
    longest = cfg.max_position if config.max_model_len is None else config.max_model_len
    if context is not None and context > longest:
        raise ConfigError(f"--context {context:,} is more than the longest sequence, {longest:,} tokens: lower it")
    context = context or min(131_072, longest)
    rows = [n for n in ROWS if n <= ready.limits.max_num_seqs] or [ready.limits.max_num_seqs]
    here = _on_these_devices(ready, config) if compiled else ready
    needed = activations(here, form_of, compiled)
    changes = tuple(_changes(subject, config, device_bytes)) if refusal else ()
    kv_tokens = 0 if refusal else (ready.layout.num_pages - 1) * page
    rest = (1 - config.gpu_memory_utilization) * device_bytes
    if refusal is None and needed.most > rest:
        share = int(100 * (1 - needed.most / device_bytes)) / 100
        refusal = (
            f"a step takes about {needed.most:,} bytes beside weights and cache, and gpu_memory_utilization "
            f"{config.gpu_memory_utilization:g} leaves {int(rest):,}: lower it, or max_num_batched_tokens"
        )
        if share > 0 and _fits(subject, dataclasses.replace(config, gpu_memory_utilization=share), device_bytes):
            changes = (f"--gpu-memory-utilization {share:g}",)
    return Forecast(
        ready=ready,
        groups=weight_groups(params),
        room=room,
        chosen=CacheRow(
            plan.dcp, shape.kind, draft_kv, shape.index_shards, per_token, tokens_in(per_token, page, room)
        ),
        kv_tokens=kv_tokens,
        layouts=tuple(cache_rows(cfg, plan.num_devices, page, room, kinds)),
        activations=needed,
        crossings=crossings(ready, rows[0]),
        context=context,
        floors={n: step_floor(ready, params, n, context, chip) for n in rows},
        refusal=refusal,
        changes=changes,
    )


def _has_kind(cfg: ModelConfig, kind: str) -> bool:
    """Whether the model's rows can be stored so."""
    try:
        capacity.cache_shape(cfg, abstract_plan(1), kind)
    except ConfigError:
        return False
    return True


def _resolve(subject: Subject, config: EngineConfig, device_bytes: int) -> tuple[Resolved, str | None]:
    """Checked sizes; where they do not fit, those of one sequence of the wanted length, and what the engine would say."""
    cfg, form_of = subject.cfg, subject.form_of
    plan = abstract_plan(config.tensor_parallel_size, config.decode_context_parallel_size, config.expert_parallel)
    try:
        ready = build.resolve(cfg, config, form_of, plan, device_bytes)
    except MemoryLimitError as error:
        length = config.max_model_len or cfg.max_position
        pages = 1 + -(-length // config.block_size)
        return build.resolve(cfg, dataclasses.replace(config, num_blocks=pages), form_of, plan), str(error)
    asked = [name for name in ("num_blocks", "kv_cache_memory_bytes") if getattr(config, name) is not None]
    weights = bytes_per_device(abstract(cfg, plan, ready.dtype, form_of))
    caches, most = bytes_per_device(pools(ready)), config.gpu_memory_utilization * device_bytes
    if not asked or weights + caches <= most:
        return ready, None
    return ready, (
        f"{asked[0]} {getattr(config, asked[0])} is {caches:,} bytes a device, which with {weights:,} of weights is more "
        f"than gpu_memory_utilization gives, {int(most):,}: lower {asked[0]}, or leave it out"
    )


def _on_these_devices(ready: Resolved, config: EngineConfig) -> Resolved:
    """The same sizes on devices of this process. Raises `ConfigError` when there are too few."""
    plan = make_plan(config.tensor_parallel_size, config.decode_context_parallel_size, config.expert_parallel)
    options = dataclasses.replace(
        ready.net.options,
        kernels=build.choose_kernels(config, ready.net.cfg, plan, ready.dtype, ready.shape.latent.packed is not None),
    )
    return dataclasses.replace(ready, net=dataclasses.replace(ready.net, plan=plan, options=options))


def _changes(subject: Subject, config: EngineConfig, device_bytes: int) -> Iterator[str]:
    """Single changes with which it fits; where there is none, the fewest devices with which one of them does."""
    found = False
    for words, changed, other in _single(subject, config, device_bytes):
        if _fits(other, changed, device_bytes):
            found = True
            yield words
    if found:
        return
    for size, *rest in _devices(config):
        for words, changed, other in _single(subject, rest[0], device_bytes):
            if _fits(other, changed, device_bytes):
                yield f"--tensor-parallel-size {size} and {words}"
                return


def _single(subject: Subject, config: EngineConfig, device_bytes: int) -> Iterator[tuple[str, EngineConfig, Subject]]:
    change = dataclasses.replace
    if subject.quantisation is None:
        for name in ("fp8", "nvfp4"):
            yield f"a checkpoint in {name.upper()}", config, Subject(subject.cfg, name)
    elif subject.quantisation == "fp8":
        yield "a checkpoint in NVFP4", config, Subject(subject.cfg, "nvfp4")
    if config.kv_cache_dtype in ("auto", "bfloat16", "float32"):
        yield "--kv-cache-dtype fp8", change(config, kv_cache_dtype="fp8"), subject
    size, dcp = config.tensor_parallel_size or config.decode_context_parallel_size, config.decode_context_parallel_size
    if config.draft_kv == "replicated":
        yield "--speculative-config.draft_kv sharded", change(config, draft_kv="sharded"), subject
    if config.index_shards == 1 and dcp > 1:
        yield f"--dcp-index-shards {dcp}", change(config, index_shards=None), subject
    for more in (n for n in range(dcp + 1, size + 1) if size % n == 0):
        wider = change(config, tensor_parallel_size=size, decode_context_parallel_size=more, index_shards=None)
        yield f"--decode-context-parallel-size {more}", wider, subject
    if config.gpu_memory_utilization < 0.95 and config.kv_cache_memory_bytes is None:
        yield "--gpu-memory-utilization 0.95", change(config, gpu_memory_utilization=0.95), subject
    if config.max_model_len is not None and config.num_blocks is None:
        try:
            free = change(config, max_model_len=None)
            plan = abstract_plan(size, dcp, config.expert_parallel)
            longest = build.resolve(subject.cfg, free, subject.form_of, plan, device_bytes).limits.max_model_len
            yield f"--max-model-len {longest}", change(config, max_model_len=longest), subject
        except ConfigError:
            pass
    if config.num_blocks is not None:
        yield "no --num-gpu-blocks-override", change(config, num_blocks=None), subject
    if config.kv_cache_memory_bytes is not None:
        yield "no --kv-cache-memory-bytes", change(config, kv_cache_memory_bytes=None), subject
    for more, changed in _devices(config):
        if _fits(subject, changed, device_bytes):
            yield f"--tensor-parallel-size {more}", changed, subject
            return


def _devices(config: EngineConfig) -> Iterator[tuple[int, EngineConfig]]:
    size = config.tensor_parallel_size or config.decode_context_parallel_size
    while (size := 2 * size) <= _MOST_DEVICES:
        yield size, dataclasses.replace(config, tensor_parallel_size=size)


def _fits(subject: Subject, config: EngineConfig, device_bytes: int) -> bool:
    try:
        return _resolve(subject, config, device_bytes)[1] is None
    except ConfigError:
        return False
