"""`EngineCore`: requests in, tokens out. It owns the scheduler and hands steps to the runner.

The overlapped loop is one line deep: dispatch the next step, then read the one before, so that the host's work hides
behind the device's. The plain loop makes the same calls in the other order and gives the same tokens. No thread is
started here, and none but one may call in.
"""

import time
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple, Protocol

from dcpjax.errors import CacheFullError, RequestError
from dcpjax.host.events import Event, EventLog
from dcpjax.host.hits import PrefixStats
from dcpjax.host.keys import Hash, PageKeys, sha256
from dcpjax.host.plan import StepPlan, StepResult
from dcpjax.host.prefix import PrefixCache
from dcpjax.host.report import EngineStats
from dcpjax.host.request import FinishReason, Grammar, Request, SamplingParams, Text, Times
from dcpjax.host.seeds import draw, fold
from dcpjax.host.speculation import AdaptiveDrafts, acceptance
from dcpjax.scheduler import Scheduler


class Pending(Protocol):
    """A dispatched step."""

    def fetch(self) -> StepResult:
        """Waits for the step's output."""
        ...


class Runner(Protocol):
    """What runs a plan. Steps run in the order of dispatch."""

    num_pages: int  # the dummy page included
    page_tokens: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    num_drafts: int  # the most that a step verifies

    def check(self, request: Request) -> None:
        """Raises `RequestError` for what no step could hold, such as an id outside the vocabulary."""
        ...

    def dispatch(self, plan: StepPlan) -> Pending:
        """Starts a step and does not wait for it."""
        ...


class Delta(NamedTuple):
    """What a step brought to one request: new tokens, the final end-of-text or stop id included."""

    request: Request
    token_ids: list[int]
    finished: bool


class EngineCore:
    """The loop over a runner.

    eos_token_ids: ids that end a text unless the request ignores them. overlap: whether `step` dispatches before it
    reads. seed: what the seeds of requests without one are drawn from. clock: seconds, for `Request.metrics`.
    prefix_caching: whether requests share pages of equal tokens. model, key_seed, hash: what page keys depend on, see
    `KeyScheme`. kv_events: whether `drain_events` has something to tell; then it must be called now and then.
    drafts: chooses how many drafts a step has, and is told what became of them; None: always the most.
    """

    def __init__(
        self,
        runner: Runner,
        *,
        eos_token_ids: Collection[int],
        overlap: bool = True,
        seed: int = 0,
        clock: Callable[[], float] = time.monotonic,
        prefix_caching: bool = True,
        model: str = "",
        key_seed: str = "",
        hash: Hash = sha256,
        kv_events: bool = False,
        drafts: AdaptiveDrafts | None = None,
    ):
        self._events = EventLog()
        prefix = None
        if prefix_caching:
            prefix = PrefixCache(
                num_pages=runner.num_pages,
                page_tokens=runner.page_tokens,
                model=model,
                seed=key_seed,
                hash=hash,
                events=self._events if kv_events else None,
            )
        self.scheduler = Scheduler(
            num_pages=runner.num_pages,
            page_tokens=runner.page_tokens,
            max_model_len=runner.max_model_len,
            max_num_seqs=runner.max_num_seqs,
            max_num_batched_tokens=runner.max_num_batched_tokens,
            num_drafts=runner.num_drafts,
            choose_drafts=None if drafts is None else drafts.choose,
            prefix=prefix,
        )
        self.eos_token_ids = frozenset(eos_token_ids)
        self.overlap = overlap
        self._runner = runner
        self._seed = seed
        self._clock = clock
        self._requests: dict[str, Request] = {}
        self._inflight: tuple[StepPlan, Pending] | None = None
        self._early: list[Delta] = []  # read before the next step asked for them
        self._num_added = 0
        self._num_prompts = 0  # prompts added; the choices of one share its number
        self.step_tokens = (0, 0)  # query tokens of the newest step: of prompts, of decode rows
        self._prompt_tokens = 0
        self._generated_tokens = 0
        self._finished: dict[FinishReason, int] = {"stop": 0, "length": 0, "abort": 0}
        self._drafts = drafts
        self._acceptance = acceptance(runner.num_drafts, (), ())
        self._seconds = dict.fromkeys(("plan", "dispatch", "wait", "absorb"), 0.0)

    def add(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        request_id: str | None = None,
        choice: int = 0,
        text: Text | None = None,
        cache_salt: str | None = None,
        no_store: bool = False,
        grammar: Grammar | None = None,
        priority: int = 0,
        keys: PageKeys | None = None,
    ) -> Request:
        """Queues one choice of a prompt of token ids. Raises `RequestError` if it can never run.

        request_id: must not be that of a live request; None makes one. choice: 0 … n − 1. The caller adds the choices
        of one prompt one after the other, from 0 on: those of a prompt without a seed then share the one drawn for it.
        text: is shown every token of the text, and may end it at a stop string. cache_salt: pages are shared only with
        requests of the same one. no_store: its pages are not for others. grammar: of this choice alone. priority: the
        smaller, the earlier. keys: from `page_keys` of this prompt and salt; None: they are made when they are needed.
        """
        prompt = list(map(int, prompt))
        if not 0 <= choice < params.n:
            raise RequestError(f"choice: got {choice}, it must be at least 0 and below n = {params.n}")
        if request_id is not None and request_id in self._requests:
            raise RequestError(f"request_id: {request_id!r:.200} belongs to a request that is not finished")
        if cache_salt is not None and not (isinstance(cache_salt, str) and cache_salt):
            raise RequestError(f"cache_salt: got {cache_salt!r:.200}, it must be a text that is not empty, or None")
        if not isinstance(no_store, bool):
            raise RequestError(f"no_store: got {no_store!r:.200}, it must be true or false")
        most = self._runner.max_model_len
        limit = most if params.max_tokens is None else min(len(prompt) + params.max_tokens, most)
        first = self._num_prompts + (choice == 0)
        request = Request(
            id=f"request-{self._num_added}" if request_id is None else request_id,
            prompt=prompt,
            params=params,
            limit=limit,
            seed=draw(self._seed, first) if params.seed is None else fold(params.seed),
            choice=choice,
            text=text,
            cache_salt=cache_salt,
            no_store=no_store,
            grammar=grammar,
            priority=priority,
            keys=keys,
            metrics=Times(arrival=self._clock()),
        )
        self._runner.check(request)
        self.scheduler.add(request)
        self._num_prompts = first
        self._num_added += 1
        self._requests[request.id] = request
        return request

    def page_keys(self, prompt: Sequence[int], cache_salt: str | None = None) -> PageKeys | None:
        """Keys of a prompt's pages, for `add`; None without a prefix cache. From any thread: those of a long prompt take as
        long as many a step."""
        prefix = self.scheduler.prefix
        if prefix is None:
            return None
        keys = prefix.scheme.start(salt=cache_salt)
        keys.extend(prompt)
        return keys

    def abort(self, request_id: str) -> Delta | None:
        """Ends a request now, waiting or running; what steps in flight bring it is dropped. None: it is not live."""
        request = self._requests.get(request_id)
        if request is None:
            return None
        self._finish(request, "abort", None)
        return Delta(request, [], True)

    def abort_all(self) -> list[Delta]:
        """Ends every live request. A step in flight is still to be read: call `step` until `has_work` is false."""
        return [self.abort(request_id) for request_id in tuple(self._requests)]

    def drain(self) -> list[Delta]:
        """Steps until nothing is left to do."""
        deltas = []
        while self.has_work:
            deltas += self.step()
        return deltas

    @property
    def has_work(self) -> bool:
        """Whether a request is live, a step in flight or a token to hand out: whether `step` has something to do."""
        return bool(self._requests or self._early) or self._inflight is not None

    def step(self) -> list[Delta]:
        """Dispatches the next step, then reads the one before. Without `overlap`: `step_sync`."""
        if not self.overlap:
            return self.step_sync()
        previous, self._inflight = self._inflight, self._dispatch()
        if previous is None and self._inflight is None:
            self._assert_idle()
        return self._take_early() + self._absorb(previous)

    def step_sync(self) -> list[Delta]:
        """Reads a step in flight, if there is one, then dispatches the next and waits for it. The same tokens."""
        previous, self._inflight = self._inflight, None
        deltas = self._take_early() + self._absorb(previous)
        now = self._dispatch()
        if now is None:
            self._assert_idle()
        return deltas + self._absorb(now)

    def reset_prefix_cache(self, running: bool = False) -> bool:
        """Forgets all cached content: no prompt takes over a row written before. Running requests go on with their own.

        running: they go back to the queue, as after a change of weights. Returns whether no page is used now.
        """
        if self._inflight is not None and (running or not self.scheduler.running):
            # Pages are used as long as a step that may write them is in flight.
            step, self._inflight = self._inflight, None
            self._early += self._absorb(step)
        return self.scheduler.reset_prefix_cache(running)

    def drain_events(self) -> list[Event]:
        """What happened to the prefix cache since the last call. Empty without `kv_events`."""
        return self._events.drain()

    @property
    def stats(self) -> EngineStats:
        """The counters, and how things stand now."""
        pool, prefix, hits = self.scheduler.pool, self.scheduler.prefix, self.scheduler.hits
        return EngineStats(
            running=len(self.scheduler.running),
            waiting=len(self.scheduler.waiting),
            page_usage=pool.num_used / pool.capacity,
            steps=self.scheduler.epoch,
            step_prompt_tokens=self.step_tokens[0],
            step_decode_tokens=self.step_tokens[1],
            preemptions=self.scheduler.num_preemptions,
            prompt_tokens=self._prompt_tokens,
            generated_tokens=self._generated_tokens,
            finished=dict(self._finished),
            acceptance=self._acceptance,
            prefix=PrefixStats(
                counts=hits.counts,
                preempted=hits.preempted,
                hit_rate=hits.hit_rate,
                cached_pages=0 if prefix is None else prefix.num_cached,
            ),
            seconds=dict(self._seconds),
        )

    def _dispatch(self) -> tuple[StepPlan, Pending] | None:
        start = time.perf_counter()
        plan = self.scheduler.plan()
        planned = self._spent("plan", start)
        if plan is None:
            return None
        now = self._clock()
        for row in plan.rows:
            if row.request.metrics.first_scheduled is None:
                row.request.metrics.first_scheduled = now
                self._prompt_tokens += len(row.request.prompt)
        decode = sum(row.num_tokens for row in plan.rows if row.tokens is None)
        self.step_tokens = (plan.num_tokens - decode, decode)
        pending = self._runner.dispatch(plan)
        self._spent("dispatch", planned)
        return plan, pending

    def _spent(self, part: str, since: float) -> float:
        now = time.perf_counter()
        self._seconds[part] += now - since
        return now

    def _take_early(self) -> list[Delta]:
        early, self._early = self._early, []
        return early

    def _assert_idle(self) -> None:
        """Nothing is in flight and nothing could be planned: then nobody may be waiting, or they would for ever."""
        if self._requests:
            pool = self.scheduler.pool
            raise CacheFullError(
                f"{len(self._requests)} requests can not go on: {pool.num_free} of {pool.capacity} pages are free and no "
                "step is in flight. This is a fault of the scheduler; please report it."
            )

    def _absorb(self, step: tuple[StepPlan, Pending] | None) -> list[Delta]:
        if step is None:
            return []
        plan, pending = step
        start = time.perf_counter()
        result = pending.fetch()
        fetched = self._spent("wait", start)
        self.scheduler.settle(plan.epoch)
        now = self._clock()
        deltas = []
        verified, kept = [], []  # drafts by decode row
        # As lists: an element of an array costs ten times as much.
        all_tokens, all_accepted = result.tokens.tolist(), result.accepted.tolist()
        for i, row in enumerate(plan.rows):
            accepted = all_accepted[i]
            self.scheduler.absorb(row, accepted)
            request = row.request
            if result.prompts is not None and i in result.prompts:
                request.score_prompt(row.start, result.prompts[i])
            if not row.emit or request.status == "finished":
                continue
            if accepted < 1:
                raise RuntimeError(f"step {plan.epoch} brought no token to {request.id}, which is not finished")
            before = len(request.output)
            if row.tokens is None and self._runner.num_drafts:
                # Those it truly had: made in its step before, and before the limit.
                verified.append(min(plan.num_drafts, request.drafted, request.limit - request.num_tokens - 1))
                kept.append(accepted - 1)
                request.verified_drafts += verified[-1]
            request.drafted = plan.num_drafts
            if result.drafts is not None:
                request.drafts = tuple(result.drafts[i].tolist())
            for j, token in enumerate(all_tokens[i][:accepted]):
                if request.params.logprobs is not None:
                    request.logprobs.append(result.logprobs.token(i, j, request.params.logprobs))
                self._append(request, token)
                if request.status == "finished":
                    break  # what was sampled after the end is nobody's
            if row.tokens is None and accepted > 1:
                request.accepted_drafts += len(request.output) - before - 1
            self.scheduler.publish(request)
            if request.metrics.first_token is None:
                request.metrics.first_token = now
            deltas.append(Delta(request, request.output[before:], request.status == "finished"))
        if kept:
            self._acceptance += acceptance(self._runner.num_drafts, verified, kept)
        if self._drafts is not None and kept:
            self._drafts.observe(verified, kept)
        self._spent("absorb", fetched)
        return deltas

    def _append(self, request: Request, token: int) -> None:
        """Takes a sampled token, and finishes the request if it is the last."""
        params = request.params
        request.output.append(token)
        self._generated_tokens += 1
        if request.grammar is not None:
            request.grammar.accept(token)
        # The device samples no end before min_tokens; one that comes all the same is a token like others.
        if len(request.output) > params.min_tokens:
            if token in self.eos_token_ids and not params.ignore_eos:
                return self._finish(request, "stop", None)
            if token in params.stop_token_ids:
                return self._finish(request, "stop", token)
        text = request.text
        if text is not None:
            text.push(token)
            if text.stop_hit is not None:
                return self._finish(request, "stop", text.stop_hit)
        if request.num_tokens >= request.limit:
            return self._finish(request, "length", None)
        return None

    def _finish(self, request: Request, reason: FinishReason, stop: int | str | None) -> None:
        self.scheduler.finish(request)
        request.finish_reason, request.stop_reason = reason, stop
        request.metrics.finished = self._clock()
        if request.text is not None:
            request.text.finish()  # shows what was held back
        self._finished[reason] += 1
        del self._requests[request.id]
