"""What an engine takes of a device's memory, from shapes alone: weights by group, the caches of every layout, activations."""

import dataclasses
import functools
from collections.abc import Iterator

import jax
import numpy as np

from dcpjax import build, capacity, liveness
from dcpjax import step as steps
from dcpjax.buckets import Buckets
from dcpjax.build import Resolved
from dcpjax.cache import PagedCache, Pool, Record, pool_spec
from dcpjax.layout import CacheLayout
from dcpjax.mesh import MeshPlan, abstract_plan
from dcpjax.runner import jit_step
from dcpjax.step import StepShape
from models.config import ModelConfig
from models.params import Params
from models.stored import FormOf, abstract, bytes_per_device

# Cache records that are compared.
KINDS = ("bfloat16", "fp8")


def weight_groups(params: Params) -> dict[str, int]:
    """Bytes on one device by what they are for. `params`: arrays, or their shapes with shardings."""
    layers, moe = params.layers, params.layers.moe
    parts = {
        "embeddings": (params.embed, params.head, params.norm),
        "attention": layers.attention,
        "indexers": layers.indexer,
        "dense": layers.dense,
        "experts": moe and (moe.gate, moe.up, moe.down),
        "shared experts": moe and (moe.shared_gate, moe.shared_up, moe.shared_down),
        "router": moe and (moe.router, moe.router_bias),
        "MTP": params.mtp,
    }
    return {name: bytes_per_device(part) for name, part in parts.items()}


@dataclasses.dataclass(frozen=True)
class CacheRow:
    """One layout of the caches. tokens: those it holds in the given memory, whole pages, the dummy page not counted."""

    dcp: int
    kind: str
    draft_kv: str
    index_shards: int
    bytes_per_token: float
    tokens: int

    @property
    def key(self) -> tuple[int, str, str, int]:
        """What tells this layout from others."""
        return self.dcp, self.kind, self.draft_kv, self.index_shards


def cache_rows(
    cfg: ModelConfig, size: int, page_tokens: int, room: float, kinds: tuple[str, ...]
) -> Iterator[CacheRow]:
    """Every layout on `size` devices that each have `room` bytes for the caches."""
    for dcp in (n for n in range(1, size + 1) if size % n == 0 and page_tokens % n == 0):
        for kind in kinds:
            for draft_kv in ("sharded", "replicated") if cfg.has_mtp and dcp > 1 else ("sharded",):
                for shards in (dcp, 1) if dcp > 1 else (1,):
                    shape = capacity.cache_shape(cfg, abstract_plan(size, dcp), kind, shards, draft_kv)
                    tokens = tokens_in(shape.bytes_per_token(), page_tokens, room)
                    yield CacheRow(dcp, kind, draft_kv, shards, shape.bytes_per_token(), tokens)


def tokens_in(bytes_per_token: float, page_tokens: int, room: float) -> int:
    """Tokens of the whole pages that `room` bytes of a device hold, the dummy page not counted."""
    return max(0, int(room // (bytes_per_token * page_tokens)) - 1) * page_tokens


def pools(ready: Resolved) -> tuple[PagedCache, PagedCache | None]:
    """Shapes of the caches."""
    return build.make_caches(ready.net.cfg, ready.shape, ready.layout, ready.net.plan, _abstract_pool)


def _abstract_pool(num_layers: int, layout: CacheLayout, record: Record, plan: MeshPlan) -> Pool:
    shape = (num_layers, layout.num_pages, layout.page_tokens, record.width)
    sharding = jax.sharding.NamedSharding(plan.mesh, pool_spec(layout, plan))
    return Pool(jax.ShapeDtypeStruct(shape, record.dtype, sharding=sharding), layout, record)


@dataclasses.dataclass(frozen=True)
class Activations:
    """The step that holds most at once, and how many bytes on a device: by its trace, and by the compiler if asked."""

    shape: StepShape
    traced: int
    compiled: int | None = None

    @property
    def most(self) -> int:
        """The larger of both, bytes."""
        return max(self.traced, self.compiled or 0)


def activations(ready: Resolved, form_of: FormOf, compiled: bool = False) -> Activations:
    """Of the largest steps that the engine can be asked for. `compiled`: by the compiler too, for devices that are there."""
    spec = ready.speculation
    buckets = Buckets(ready.limits, ready.layout.page_tokens, (0,) if spec is None else spec.levels)
    # One long chunk moves other things than a step of all rows; both grow with their tokens and pages.
    widest = [shape for shape in buckets.shapes if shape.pages == buckets.pages[-1]]
    shapes = [shape for shape in widest if shape.tokens == buckets.tokens[-1] and not shape.verified]
    shapes.append(max(widest, key=lambda shape: (shape.rows, shape.tokens)))
    peaks = [(liveness.peak_bytes(_trace(ready, form_of, shape)), shape) for shape in shapes]
    peak, shape = max(peaks)
    return Activations(shape, peak, _compile(ready, form_of, shape) if compiled else None)


def _arguments(ready: Resolved, form_of: FormOf, shape: StepShape) -> tuple:
    net, spec = ready.net, ready.speculation
    vocab = net.plan.pad(net.cfg.vocab_size)
    state = jax.eval_shape(lambda: steps.empty_state(ready.limits.max_num_seqs, vocab, spec))
    params = abstract(net.cfg, net.plan, ready.dtype, form_of)
    words = jax.ShapeDtypeStruct((shape.size,), np.int32)
    allowed = jax.ShapeDtypeStruct((shape.rows, shape.verified + 1, -(-vocab // 32)), np.uint32)
    return params, *pools(ready), state, words, allowed


def _trace(ready: Resolved, form_of: FormOf, shape: StepShape) -> jax.extend.core.ClosedJaxpr:
    # What kernels of stored weights hold is the same, and some take seconds to trace.
    options = ready.net.options
    options = dataclasses.replace(options, kernels=options.kernels.replaced({"experts": "xla", "projections": "xla"}))
    net = dataclasses.replace(ready.net, options=options)
    run = functools.partial(steps.step, shape=shape, net=net, spec=ready.speculation)
    return jax.make_jaxpr(run)(*_arguments(ready, form_of, shape))


def _compile(ready: Resolved, form_of: FormOf, shape: StepShape) -> int:
    params, cache, draft, state, *packed = _arguments(ready, form_of, shape)
    plan = ready.net.plan
    state = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=plan.sharding()), state)
    run = jit_step(cache, draft, plan)
    lowered = run.lower(params, cache, draft, state, *packed, shape=shape, net=ready.net, spec=ready.speculation)
    return lowered.compile().memory_analysis().temp_size_in_bytes
