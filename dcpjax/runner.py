"""The jit boundary: pools and row state on the device, one compiled step per shape, plans in and tokens out."""

import concurrent.futures
import dataclasses
import os
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from dcpjax import step as steps
from dcpjax.batch import StepOutput
from dcpjax.buckets import Buckets, Limits
from dcpjax.cache import PagedCache, pool_places, zero_pages
from dcpjax.errors import ConfigError, RequestError
from dcpjax.host.plan import RowLogprobs, StepPlan, StepResult
from dcpjax.host.request import Request
from dcpjax.mesh import MeshPlan
from dcpjax.sampling import logprobs
from dcpjax.spec import Speculation
from dcpjax.step import MAX_STOP_IDS, StepShape
from models.glm_moe_dsa import Network
from models.params import Params

# Requests that ask for at most this many share one program; more compiles the whole vocabulary.
FEW_LOGPROBS = 20
ZEROED_AT_ONCE = 64
SCORED_AT_ONCE = 64


@dataclasses.dataclass(frozen=True)
class _Scored:
    """Prompt tokens of a row that are being scored, so many of `count` at once."""

    row: int
    count: int
    parts: tuple[tuple[jax.Array, ...], ...]

    def fetch(self) -> RowLogprobs:
        joined = (np.concatenate([np.asarray(part[i]) for part in self.parts])[None, : self.count] for i in range(4))
        chosen, values, ids, rank = joined
        return RowLogprobs(chosen, ids, values, rank)


@dataclasses.dataclass(frozen=True)
class Pending:
    """A dispatched step. `fetch` waits for its tokens `[B, k + 1]` int32 and all else of a `StepResult`."""

    output: StepOutput
    scores: tuple[jax.Array, ...] | None
    shows_drafts: bool = False
    prompts: tuple["_Scored", ...] = ()

    def fetch(self) -> StepResult:
        tokens, accepted = np.asarray(self.output.tokens), np.asarray(self.output.accepted)
        drafts = np.asarray(self.output.drafts) if self.shows_drafts else None
        prompts = {scored.row: scored.fetch() for scored in self.prompts} or None
        if self.scores is None:
            return StepResult(tokens, accepted, drafts=drafts, prompts=prompts)
        chosen, values, ids, rank = (np.asarray(x) for x in self.scores)
        form = (*tokens.shape, -1)
        return StepResult(
            tokens,
            accepted,
            RowLogprobs(chosen.reshape(form[:2]), ids.reshape(form), values.reshape(form), rank.reshape(form[:2])),
            drafts,
            prompts,
        )


def _check_draft(cache: PagedCache, draft: PagedCache | None) -> None:
    """One page id names one page of target and draft, so both must have the same pages. Raises `ConfigError`."""
    if draft is None:
        return
    for name, pool in (("latent", draft.latent.layout), ("index", draft.index.layout)):
        pages = (pool.num_pages, pool.page_tokens, pool.interleave)
        target = cache.latent.layout
        if pages != (target.num_pages, target.page_tokens, target.interleave):
            raise ConfigError(f"the draft's {name} pool has other pages than the target: {pool}, {target}")
    if draft.index.layout.shards > draft.latent.layout.shards:
        raise ConfigError("the draft's index keys are cut into shards but its latent rows are not; replicate both")
    if (cache.first_slot, draft.first_slot) != (0, 1):
        raise ConfigError(
            f"target rows begin in slot 0 and draft rows in slot 1, got {cache.first_slot}, {draft.first_slot}"
        )


def jit_step(cache: PagedCache, draft_cache: PagedCache | None, plan: MeshPlan) -> Any:
    """The jitted step around caches of these shardings (arrays, or their shapes)."""
    # What goes round must come out as it went in, or the second call of a shape would compile again.
    pools = jax.tree.map(lambda x: x.sharding, (cache, draft_cache))
    return jax.jit(
        steps.step,
        static_argnames=("shape", "net", "spec"),
        donate_argnames=("cache", "draft_cache", "state"),
        out_shardings=(*pools, plan.sharding(), plan.sharding()),
    )


class Runner:
    """Owns what lives on the device and is changed by steps: the target's cache, the draft's, and the row state.

    num_pages, page_tokens: of the pools. max_model_len, max_num_seqs, max_num_batched_tokens: see `Limits`. num_drafts:
    the most of a step. zeroes_new_pages: whether pages are cleared before use."""

    def __init__(
        self, net: Network, params: Params, cache: PagedCache, draft_cache: PagedCache | None, limits: Limits,
        eos_ids: tuple[int, ...], spec: Speculation | None = None, zero_new_pages: bool = False,
    ):  # fmt: skip
        _check_draft(cache, draft_cache)
        self.net, self.params = net, params
        self.cache, self.draft_cache = cache, draft_cache
        self.limits, self.eos_ids, self.spec = limits, eos_ids, spec
        self.buckets = Buckets(limits, self.page_tokens, (0,) if spec is None else spec.levels)
        whole = net.plan.sharding()
        vocab = net.plan.pad(net.cfg.vocab_size)
        self.state = jax.jit(lambda: steps.empty_state(limits.max_num_seqs, vocab, spec), out_shardings=whole)()
        pools = jax.tree.map(lambda x: x.sharding, (cache, draft_cache))
        self._step = jit_step(cache, draft_cache, net.plan)
        self._whole = whole
        self._all_allowed: dict[tuple[int, int], jax.Array] = {}  # by rows and places of a step
        self._zero_pages = (
            jax.jit(zero_pages, donate_argnames=("caches",), out_shardings=pools) if zero_new_pages else None
        )
        self._seed_vocab = jax.jit(steps.seed_vocab, donate_argnames=("state",), out_shardings=whole)
        self._logprobs = jax.jit(logprobs, static_argnames=("vocab_size", "num"))
        self._prompt_scores = jax.jit(steps.prompt_scores, static_argnames=("net", "num"))

    @property
    def num_pages(self) -> int:
        return self.cache.latent.layout.num_pages

    @property
    def page_tokens(self) -> int:
        return self.cache.latent.layout.page_tokens

    @property
    def max_model_len(self) -> int:
        return self.limits.max_model_len

    @property
    def max_num_seqs(self) -> int:
        return self.limits.max_num_seqs

    @property
    def max_num_batched_tokens(self) -> int:
        return self.limits.max_num_batched_tokens

    @property
    def zeroes_new_pages(self) -> bool:
        return self._zero_pages is not None

    @property
    def num_drafts(self) -> int:
        return 0 if self.spec is None else self.spec.num_drafts

    @property
    def num_compiled(self) -> int:
        """Step programs compiled so far; constant after `warm_up`."""
        return self._step._cache_size()

    def check(self, request: Request) -> None:
        """Refuses what a step cannot hold, before the request is queued. Raises `RequestError`."""
        size = self.net.cfg.vocab_size
        ids = steps.stop_ids(request, self.eos_ids)
        if len(ids) > MAX_STOP_IDS:
            raise RequestError(f"stop_token_ids: {len(ids)} ids with the model's own, at most {MAX_STOP_IDS} fit")
        for name, given in (
            ("prompt", request.prompt),
            ("stop_token_ids", request.params.stop_token_ids),
            ("logit_bias", request.params.logit_bias or ()),
            ("allowed_token_ids", request.params.allowed_token_ids or ()),
        ):
            bad = [i for i in (min(given, default=0), max(given, default=0)) if not 0 <= i < size]
            if bad:
                raise RequestError(f"{name}: token id {bad[0]} is not in the vocabulary of {size} ids")
        room = request.limit - len(request.prompt)
        if request.params.min_tokens > max(room, 0):
            raise RequestError(
                f"min_tokens: got {request.params.min_tokens}, but at most {room} tokens can follow this prompt within "
                f"max_tokens and max_model_len {self.max_model_len}"
            )
        if request.grammar is not None and self.spec is not None and self.spec.pin is not None:
            raise RequestError("structured_outputs: not possible while the acceptance length is forced (pin)")
        for name in ("logprobs", "prompt_logprobs"):
            wanted = getattr(request.params, name)
            if wanted is not None and wanted > size:
                raise RequestError(f"{name}: got {wanted}, the vocabulary has {size} ids; use -1 for all")

    def dispatch(self, plan: StepPlan) -> Pending:
        """Starts one step and returns at once."""
        if self._zero_pages is not None and plan.taken:
            self._zero(plan.taken)
        for planned in plan.rows:
            if planned.new and steps.uses_vocab(planned.request):
                self._seed(planned.row, planned.request)
        output = self._run(plan, self.buckets.fit(plan))
        scores = None
        wanted = [row.request.params.logprobs for row in plan.rows if row.emit]
        if any(n is not None for n in wanted):
            size = self.net.cfg.vocab_size
            most = max(size if n == -1 else n or 0 for n in wanted)
            num = min(FEW_LOGPROBS, size) if most <= FEW_LOGPROBS else size
            scores = self._logprobs(output.logits, output.tokens.reshape(-1), size, num)
        bound = any(row.request.grammar is not None for row in plan.rows)
        for array in (output.tokens, output.accepted, *(scores or ()), *((output.drafts,) if bound else ())):
            array.copy_to_host_async()
        return Pending(output, scores, bound, self._score_prompts(plan, output))

    def _score_prompts(self, plan: StepPlan, output: StepOutput) -> tuple[_Scored, ...]:
        """Scores the prompts that are to be; the program is compiled when one first is."""
        scored, first = [], 0
        for b, row in enumerate(plan.rows):
            wanted = row.request.params.prompt_logprobs
            if wanted is not None and row.tokens is not None:
                after = [*row.tokens[1:], row.next_token][: max(len(row.request.prompt) - 1 - row.start, 0)]
                if after:
                    num = min(FEW_LOGPROBS, self.net.cfg.vocab_size)
                    num = num if 0 <= wanted <= num else self.net.cfg.vocab_size
                    scored.append(_Scored(b, len(after), tuple(self._score(output, first, after, num))))
            first += row.num_tokens
        return tuple(scored)

    def _score(self, output: StepOutput, first: int, after: list[int], num: int) -> Iterator[tuple[jax.Array, ...]]:
        for start in range(0, len(after), SCORED_AT_ONCE):
            part = after[start : start + SCORED_AT_ONCE]
            places, tokens = np.zeros((2, SCORED_AT_ONCE), np.int32)
            places[: len(part)], tokens[: len(part)] = first + start + np.arange(len(part)), part
            yield self._prompt_scores(self.params, output.hidden, places, tokens, net=self.net, num=num)

    def _run(self, plan: StepPlan, shape: StepShape) -> StepOutput:
        args, static = self._arguments(plan, shape)
        self.cache, self.draft_cache, self.state, output = self._step(*args, **static)
        return output

    def _compile(self, shape: StepShape) -> None:
        """What the first run of a shape would do; the run then finds the program."""
        args, static = self._arguments(StepPlan(rows=(), epoch=0), shape)
        self._step.lower(*args, **static).compile()

    def _run_padding(self, shape: StepShape) -> None:
        output = self._run(StepPlan(rows=(), epoch=0), shape)
        size = self.net.cfg.vocab_size
        self._logprobs(output.logits, output.tokens.reshape(-1), size, min(FEW_LOGPROBS, size))
        jax.block_until_ready(output)

    def _arguments(self, plan: StepPlan, shape: StepShape) -> tuple[tuple, dict[str, Any]]:
        packed = steps.pack(plan, shape, self.limits.max_num_seqs, self.eos_ids)
        args = (self.params, self.cache, self.draft_cache, self.state, packed, self._allowed(plan, shape))
        return args, {"shape": shape, "net": self.net, "spec": self.spec}

    def _allowed(self, plan: StepPlan, shape: StepShape) -> jax.Array:
        """What grammars allow. A step without one gets an array that is on the device already, so that both kinds of
        steps are one program."""
        form = (shape.rows, shape.verified + 1)
        if form not in self._all_allowed:
            self._all_allowed[form] = self._put_allowed(form)
        bound = [(b, row) for b, row in enumerate(plan.rows) if row.emit and row.request.grammar is not None]
        if not bound:
            return self._all_allowed[form]
        allowed = self._host_allowed(form)
        for b, row in bound:
            drafts = row.request.drafts[: shape.verified] if row.tokens is None else ()
            row.request.grammar.masks(drafts, allowed[b])
        return jax.device_put(allowed, self._whole)

    def _put_allowed(self, form: tuple[int, int]) -> jax.Array:
        return jax.device_put(self._host_allowed(form), self._whole)

    def _host_allowed(self, form: tuple[int, int]) -> np.ndarray:
        words = -(-self.net.plan.pad(self.net.cfg.vocab_size) // 32)
        return np.full((*form, words), 2**32 - 1, np.uint32)

    def _zero(self, pages: tuple[int, ...]) -> None:
        """Clears pages before anything is written to them, so many at a time that one program serves all."""
        for first in range(0, len(pages), ZEROED_AT_ONCE):
            part = pages[first : first + ZEROED_AT_ONCE]
            ids = np.full(ZEROED_AT_ONCE, self.num_pages, np.int32)
            ids[: len(part)] = part
            self.cache, self.draft_cache = self._zero_pages((self.cache, self.draft_cache), ids)

    def _seed(self, row: int, request: Request) -> None:
        """Counts and biases of a request with penalties; again after pre-emption, from all it has generated."""
        vocab = self.net.plan.pad(self.net.cfg.vocab_size)
        counts = np.bincount(request.output, minlength=vocab).astype(np.int32)
        seen = np.zeros(vocab, bool)
        seen[request.prompt] = True
        bias = np.zeros(vocab, np.float32)
        for token, value in (request.params.logit_bias or {}).items():
            bias[token] = value
        if request.params.allowed_token_ids is not None:
            bias[np.isin(np.arange(vocab), request.params.allowed_token_ids, invert=True)] = -np.inf
        self.state = self._seed_vocab(self.state, np.int32(row), counts, seen, bias)

    def warm_up(self, progress: Callable[[int, int], None] = lambda done, total: None) -> None:
        """Compiles every shape, several at a time, and the side programs, and runs each with nothing but padding.

        `progress` hears how many shapes are done, and of how many.
        """
        shapes = self.buckets.shapes
        progress(0, len(shapes))
        workers = concurrent.futures.ThreadPoolExecutor(os.cpu_count())
        try:
            compiling = {workers.submit(self._compile, shape): shape for shape in shapes}
            for done, program in enumerate(concurrent.futures.as_completed(compiling), 1):
                program.result()
                self._run_padding(compiling[program])  # while others are traced: that is Python, this is not
                progress(done, len(shapes))
        finally:
            workers.shutdown(cancel_futures=True)
        if self._zero_pages is not None:
            self._zero((self.num_pages,))
        zero = np.zeros(self.net.plan.pad(self.net.cfg.vocab_size), np.int32)
        self.state = self._seed_vocab(self.state, np.int32(0), zero, zero > 0, zero.astype(np.float32))

    def decode_costs(self, repeats: int = 5) -> dict[int, dict[int, float]]:
        """Seconds of a decode step by number of drafts and rows, each the median of `repeats` runs of padding alone.

        What a choice of drafts weighs against their acceptance. Compiles those shapes; no request may run.
        """
        costs: dict[int, dict[int, float]] = {}
        for k in self.buckets.levels:
            for rows in self.buckets.rows:
                shape, times = StepShape(rows * (k + 1), rows, self.buckets.pages[-1], k, k), []
                for _ in range(repeats + 1):
                    start = time.perf_counter()
                    jax.block_until_ready(self._run(StepPlan(rows=(), epoch=0), shape))
                    times.append(time.perf_counter() - start)
                costs.setdefault(k, {})[rows] = statistics.median(times[1:])  # the first one compiles
        return costs

    def places(self, pages: list[int], slots: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Page and column `[S]` int64 each of a request's slots in the target pools' arrays, for reading rows out."""
        return pool_places(self.cache.latent.layout, pages, slots)
