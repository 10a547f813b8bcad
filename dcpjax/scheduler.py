"""Who runs this step, with how many tokens and which pages.

Requests stand in order of priority, those of one priority in order of arrival, and running ones before waiting ones. Among
them nobody overtakes: not for pages, not for a row, not at admission. So the first always gets on, and every request
becomes the first, unless more urgent ones never end. "Younger" below means later in that order.
"""

import bisect
import heapq
import itertools
from collections import deque
from collections.abc import Callable

from dcpjax.errors import ConfigError, NeverFitsError, RequestError
from dcpjax.host.hits import HitCounter
from dcpjax.host.keys import PageKeys
from dcpjax.host.pages import PagePool
from dcpjax.host.plan import PlannedRow, StepPlan
from dcpjax.host.prefix import PrefixCache
from dcpjax.host.request import Request


class Scheduler:
    """Continuous batching with chunked prefill, a prefix cache and pre-emption by recompute.

    num_pages: the pool, dummy page included. page_tokens: tokens of a logical page. max_num_seqs: row slots.
    max_num_batched_tokens: query tokens of a step at most. num_drafts: k, the most drafts; a decode row has up to k + 1
    tokens. choose_drafts: number of decode rows → drafts of this step, 0 … k; None: always k. prefix: finds pages that
    hold a request's first tokens, to be shared with it on admission; None: none are.
    Raises `ConfigError` if the token budget cannot serve all row slots at once.
    """

    def __init__(
        self,
        *,
        num_pages: int,
        page_tokens: int,
        max_model_len: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        num_drafts: int = 0,
        choose_drafts: Callable[[int], int] | None = None,
        prefix: PrefixCache | None = None,
    ):
        # With this, all rows can decode at once, and the chunk of a running prompt always finds room for a token, since
        # it has a row that does not decode: nobody starves for the budget.
        if max_num_batched_tokens < max_num_seqs * (num_drafts + 1):
            raise ConfigError(
                f"max_num_batched_tokens: got {max_num_batched_tokens}, but {max_num_seqs} rows (max_num_seqs) of "
                f"{num_drafts + 1} tokens (1 + drafts) need {max_num_seqs * (num_drafts + 1)}: raise it, or lower "
                "max_num_seqs"
            )
        if prefix is not None and prefix.scheme.page_tokens != page_tokens:
            raise ConfigError(
                f"prefix: of pages of {prefix.scheme.page_tokens} tokens, but page_tokens is {page_tokens}"
            )
        self.pool = PagePool(num_pages, prefix)
        self.prefix = prefix
        self.hits = HitCounter()
        self.page_tokens = page_tokens
        self.max_model_len = max_model_len
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.num_drafts = num_drafts
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.num_preemptions = 0
        self._num_added = 0
        self.epoch = 0  # the newest step planned; every plan is dispatched before the next one is made
        self._choose_drafts = choose_drafts
        self._taken: list[int] = []  # pages of the plan that is being made
        # The lowest row first, so that few rows stay close together.
        self._rows = list(range(max_num_seqs))
        # Draft rows run ahead of the target's: the row of the last known token has the slot after the query, and with
        # k drafts k − 1 provisional ones follow it.
        self._look_ahead = max(1, num_drafts)

    def add(self, request: Request) -> None:
        """Queues a request. Raises `RequestError` if it could not run even alone, `NeverFitsError` for want of
        pages."""
        num_prompt, most = len(request.prompt), self.max_model_len
        if num_prompt == 0:
            raise RequestError("prompt: got no tokens, at least 1 is needed")
        if num_prompt >= most:
            wanted = request.params.max_tokens or 1
            raise RequestError(
                f"prompt: This model's maximum context length is {most} tokens. However, you requested "
                f"{num_prompt + wanted} tokens ({num_prompt} in the messages, {wanted} in the completion). "
                "Shorten the prompt."
            )
        pages = self._pages(request.limit)
        if pages > self.pool.capacity:
            raise NeverFitsError(
                f"max_tokens: the prompt's {num_prompt} tokens and up to {request.limit - num_prompt} new ones need "
                f"{pages} pages of {self.page_tokens} tokens, but the KV cache has {self.pool.capacity}: shorten the "
                "prompt or lower max_tokens"
            )
        request.number = self._num_added
        self._num_added += 1
        bisect.insort(self.waiting, request, key=_rank)

    def plan(self) -> StepPlan | None:
        """Plans the next step and counts it as dispatched; None if no row can run before a step in flight is read."""
        plan: list[PlannedRow] = []
        budget = self.max_num_batched_tokens
        drafts = self._drafts()
        width = drafts + 1  # tokens of a decode row
        short = False  # somebody waits for a page: nobody younger may take one
        running = tuple(self.running)
        # In order, so that whoever is pre-empted, always the youngest, is not planned yet.
        for i, request in enumerate(running):
            if request.status != "running" or request.complete:
                continue
            decoding = request.decoding
            if decoding and request.grammar is not None and request.inflight:
                continue  # what is allowed next hangs on the tokens of that step
            n = width
            if not decoding:
                # A prompt that is not finished has used up its step's budget, so nobody was admitted after it: only
                # the less urgent can stand behind it, and those that decode go on.
                n = min(request.prefill - request.computed, budget - width * sum(map(_decodes, running[i + 1 :])))
                if n < 1:
                    continue  # the budget is a more urgent prompt's
            # With fewer drafts now, a decode row still takes the pages of the most: nothing then hangs on the choice.
            most = self.num_drafts + 1 if decoding else n
            if not self._grow(request, request.computed + most, may_preempt=not short):
                short = True
                continue
            budget -= n
            plan.append(self._row(request, n, chunk=not decoding))
        while budget > 0 and not short and (request := self._admit()) is not None:
            n = min(request.prefill - request.computed, budget)
            budget -= n
            plan.append(self._row(request, n, chunk=True, new=True))
        plan.sort(key=lambda row: row.tokens is not None)  # decode rows first
        taken, self._taken = tuple(self._taken), []
        if not plan:
            assert not taken, "pages taken for nobody"
            return None
        self.epoch += 1
        return StepPlan(tuple(plan), self.epoch, drafts, taken)

    def absorb(self, row: PlannedRow, accepted: int) -> None:
        """A step's output was read: drafts that were not accepted come off what the plans had assumed.

        To be called before the row's tokens are appended. A request that was pre-empted or finished meanwhile only
        loses the step: it has no positions, and cannot have new ones before all its steps are read.
        """
        request = row.request
        request.inflight -= 1
        request.promised -= row.emit
        if row.tokens is None and request.status == "running":
            request.computed -= row.num_tokens - accepted

    def publish(self, request: Request) -> None:
        """Lets others hit the request's whole pages. To be called when its tokens were appended.

        Prompt pages are published when their chunk is planned, before the device has written them: steps run in order,
        and within a step rows are written before any are read.
        """
        stop = request.written // self.page_tokens
        if stop <= request.published or request.no_store or request.outdated or self.prefix is None:
            return
        request.published = self.prefix.publish(self._keys(request), request.pages, request.published, stop)

    def reset_prefix_cache(self, running: bool = False) -> bool:
        """Forgets all cached content: nobody who is admitted from now on takes over a row written before. Pages in use
        stay with their requests, which go on and publish no more; once pre-empted, they compute everything anew.

        running: pre-empt all running requests before. Returns whether no page is used now: those of steps in flight are.
        """
        while running and self.running:
            self.preempt(self.running[-1])
        if self.prefix is not None:
            self.prefix.clear()
        for request in self.running:
            request.outdated = True
        self.hits.forget()
        return self.pool.num_used == 0

    def settle(self, epoch: int) -> None:
        """All outputs of the steps up to `epoch` were read."""
        self.pool.settle(epoch)

    def finish(self, request: Request) -> None:
        """Takes a request out, wherever it is; its pages come back when the newest step planned is settled."""
        if request.status == "running":
            self._release(request)
        else:
            self.waiting.remove(request)
        request.status = "finished"
        request.keys = None  # as long as the tokens, and nobody asks for them again

    def preempt(self, request: Request) -> None:
        """Sends the youngest running request back to its place in the queue; it will compute its tokens anew."""
        self._release(request)
        request.status = "waiting"
        bisect.insort(self.waiting, request, key=_rank)
        self.num_preemptions += 1

    def check(self) -> None:
        """Asserts every host invariant; for tests and for when the engine is idle."""
        self.pool.check(request.pages for request in self.running)
        for requests in (self.running, self.waiting):
            assert all(a.rank < b.rank for a, b in itertools.pairwise(requests)), "somebody has overtaken"
        rows = [request.row for request in self.running]
        assert sorted([*rows, *self._rows]) == list(range(self.max_num_seqs)), "row slots are not conserved"
        for request in (*self.running, *self.waiting):
            request.check(self.num_drafts)
            assert len(request.pages) <= self._pages(request.limit), request
        if self.prefix is not None:
            self.prefix.check()

    def _drafts(self) -> int:
        """Drafts of the next step."""
        if self._choose_drafts is None:
            return self.num_drafts
        drafts = self._choose_drafts(sum(map(_decodes, self.running)))
        if not 0 <= drafts <= self.num_drafts:
            raise ValueError(f"choose_drafts: gave {drafts}, it must give 0 … {self.num_drafts}")
        return drafts

    def _keys(self, request: Request) -> PageKeys:
        """The request's page keys, up to its last known token."""
        if request.keys is None:
            request.keys = self.prefix.scheme.start(request.adapter, request.cache_salt)
        keys = request.keys
        if keys.num_tokens < request.num_tokens:
            keys.extend(request.known(keys.num_tokens, request.num_tokens))
        return keys

    def _pages(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_tokens)

    def _reach(self, request: Request, end: int) -> int:
        """Pages needed once tokens up to position `end` are in the query; the limit caps what can be written."""
        return self._pages(min(end + self._look_ahead, request.limit))

    def _row(self, request: Request, n: int, chunk: bool, new: bool = False) -> PlannedRow:
        start, end = request.computed, request.computed + n
        emit = end >= request.prefill
        tokens = request.known(start, end) if chunk else None
        next_token = request.known(end, end + 1)[0] if chunk and not emit else -1
        # By place: by name it takes twice as long, and there is one for each token of each request.
        row = PlannedRow(request, request.row, n, start, tokens, next_token, emit, new, request.table)
        request.computed = end
        request.inflight += 1
        request.promised += emit
        if chunk:
            self.publish(request)
        return row

    def _grow(self, request: Request, end: int, may_preempt: bool) -> bool:
        """Gives `request` the pages to reach `end`; False if it must wait for one."""
        need = self._reach(request, end) - len(request.pages)
        if need <= 0:
            return True
        if not may_preempt:
            return False
        # Pages already on their way back count: pre-empting more for them would only cost recomputation.
        while self.pool.num_free + self.pool.num_retiring < need and self.running[-1] is not request:
            self.preempt(self.running[-1])
        taken = self.pool.take(need)
        if taken is None:
            return False
        request.hold(taken)
        self._taken += taken
        return True

    def _admit(self) -> Request | None:
        """Moves the first waiting request to a row, with pages for all its known tokens; None if it must wait."""
        # A pre-empted request waits for its steps in flight: their tokens are still its own, and must be known first.
        if not self.waiting or not self._rows or self.waiting[0].inflight:
            return None
        request = self.waiting[0]
        # A free page for each running row that still grows, or the newcomer would soon be pre-empted for it. Nobody
        # runs: nothing is kept back, so a request that fits the pool is always admitted alone.
        growing = sum(len(other.pages) < self._pages(other.limit) for other in self.running)
        if self.pool.num_free <= growing:
            return None  # it needs a new page whatever it hits; said early, since the lookup would be for nothing
        known = request.num_tokens
        share = self.prefix.lookup(self._keys(request)) if self.prefix is not None else []
        if request.params.prompt_logprobs is not None:
            share = []  # what is not computed is not scored
        matched = len(share) * self.page_tokens
        # The first draft row of a hit has slot `matched`, so that slot's page is never a shared one.
        new = self._reach(request, known) - len(share)
        assert matched <= known and new >= 1, request.id
        taken = self.pool.take(new, share=share, leave=growing)
        if taken is None:
            return None
        self._taken += taken
        self.waiting.popleft()
        bisect.insort(self.running, request, key=_rank)
        request.status = "running"
        # A row slot given back while a step in flight still runs it may be used again at once: that step was dispatched
        # earlier, the device runs steps in order, and the newcomer's first chunk resets the row's state. Outputs are
        # matched to requests by their own plan, never by row slot.
        request.row = heapq.heappop(self._rows)
        request.hold((*share, *taken))
        request.matched = matched
        request.published = len(share)
        request.prefill = known
        request.computed = max(matched - 1, 0)
        if self.prefix is not None:
            lost = self.prefix.common(request.keys, share)
            self.hits.admit(known, matched, lost, again=request.cached_tokens is not None)
        if request.cached_tokens is None:
            request.cached_tokens = min(matched, known - 1)
        return request

    def _release(self, request: Request) -> None:
        self.publish(request)
        self.running.remove(request)
        heapq.heappush(self._rows, request.row)
        self.pool.retire(request.drop_pages(), self.epoch)
        request.row = None
        request.matched = request.prefill = request.computed = request.published = 0
        request.outdated = False


def _rank(request: Request) -> tuple[int, int]:
    return request.rank


def _decodes(request: Request) -> bool:
    """Whether it has a decode row to come."""
    return request.decoding and not request.complete
