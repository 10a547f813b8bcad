"""Who runs with what: one plan at a time, looked at from outside."""

import pytest

from dcpjax.errors import ConfigError, RequestError
from dcpjax.host.prefix import PrefixCache
from dcpjax.host.request import Request, SamplingParams
from dcpjax.scheduler import Scheduler


def make(*, cache=False, **options):
    defaults = {"num_pages": 33, "page_tokens": 4, "max_model_len": 64, "max_num_seqs": 4, "max_num_batched_tokens": 16}
    options = defaults | options
    prefix = PrefixCache(num_pages=options["num_pages"], page_tokens=options["page_tokens"]) if cache else None
    return Scheduler(**options, prefix=prefix)


def add(scheduler, name, num_prompt, max_tokens=8, priority=0):
    limit = min(num_prompt + max_tokens, scheduler.max_model_len)
    params = SamplingParams(max_tokens=max_tokens)
    request = Request(name, list(range(1, num_prompt + 1)), params, limit, seed=0, priority=priority)
    scheduler.add(request)
    return request


def shape(plan):
    return [(row.request.id, row.start, row.num_tokens, row.emit) for row in plan.rows]


def read(scheduler, plan, accepted=1):
    """Absorbs a step whose emitting rows bring `accepted` tokens each (chunks bring one)."""
    scheduler.settle(plan.epoch)
    for row in plan.rows:
        count = (accepted if row.tokens is None else 1) if row.emit else 0
        scheduler.absorb(row, count)
        row.request.output += [9] * count
        if row.request.status == "running":
            scheduler.publish(row.request)
    scheduler.check()


def test_decode_rows_then_chunks_then_newcomers():
    scheduler = make()
    add(scheduler, "a", 10)
    add(scheduler, "b", 20)
    plan = scheduler.plan()
    assert shape(plan) == [("a", 0, 10, True), ("b", 0, 6, False)]
    assert [row.new for row in plan.rows] == [True, True]
    assert [row.next_token for row in plan.rows] == [-1, 7]
    assert plan.rows[1].tokens == (1, 2, 3, 4, 5, 6)
    read(scheduler, plan)
    add(scheduler, "c", 3)
    plan = scheduler.plan()
    assert shape(plan) == [("a", 10, 1, True), ("b", 6, 14, True), ("c", 0, 1, False)]
    assert [row.new for row in plan.rows] == [False, False, True]
    assert plan.rows[0].tokens is None and plan.rows[0].next_token == -1
    # The next step is planned before this one is read.
    plan = scheduler.plan()
    assert shape(plan) == [("a", 11, 1, True), ("b", 20, 1, True), ("c", 1, 2, True)]
    assert (plan.epoch, plan.num_tokens) == (3, 4)


def test_a_long_prompt_does_not_stall_those_who_decode():
    scheduler = make(max_num_batched_tokens=4)
    first = add(scheduler, "long", 40)
    read(scheduler, scheduler.plan())
    first.prefill = first.computed  # as if its prompt ended here: it decodes from now on, and is the oldest
    add(scheduler, "later", 40)
    for _ in range(3):
        plan = scheduler.plan()
        assert [(row.request.id, row.num_tokens) for row in plan.rows] == [("long", 1), ("later", 3)]


def test_row_slots_bound_the_batch():
    scheduler = make(max_num_seqs=2)
    requests = [add(scheduler, name, 2) for name in "abc"]
    plan = scheduler.plan()
    assert [(row.request.id, row.row) for row in plan.rows] == [("a", 0), ("b", 1)]
    scheduler.finish(requests[0])
    plan = scheduler.plan()
    assert [(row.request.id, row.row) for row in plan.rows] == [("b", 1), ("c", 0)]
    scheduler.check()


def test_the_last_possible_token_is_scheduled_once():
    scheduler = make()
    request = add(scheduler, "a", 3, max_tokens=2)
    plans = [scheduler.plan(), scheduler.plan()]
    assert [shape(plan) for plan in plans] == [[("a", 0, 3, True)], [("a", 3, 1, True)]]
    assert scheduler.plan() is None
    for plan in plans:
        read(scheduler, plan)
    assert request.num_tokens == request.limit and scheduler.plan() is None


def test_pages_stop_at_the_limit():
    """A draft looks ahead, but what is never written needs no page."""
    for k in (0, 1, 3, 5):
        scheduler = make(num_drafts=k, max_num_batched_tokens=32)
        request = add(scheduler, "a", 6, max_tokens=2)
        assert len(scheduler.plan().rows[0].pages) == 2
        scheduler.plan()
        assert len(request.pages) == 2
        scheduler.check()


def test_drafts_rejected_come_off_the_plan():
    scheduler = make(num_drafts=3)
    request = add(scheduler, "a", 5, max_tokens=40)
    read(scheduler, scheduler.plan())
    assert request.computed == 5
    first = scheduler.plan()
    second = scheduler.plan()
    assert shape(first) == [("a", 5, 4, True)] and shape(second) == [("a", 9, 4, True)]
    # Full acceptance of both ends at 13; the draft's rows reach 3 slots further.
    assert len(second.rows[0].pages) == 4 == -(-(13 + 3) // 4)
    read(scheduler, first, accepted=2)
    assert request.computed == 11
    read(scheduler, second, accepted=4)
    assert request.computed == 11 == request.num_tokens - 1


def test_the_youngest_is_preempted_and_comes_back_first():
    """5 pages of 4: two requests of 2 pages grow; the younger gives way and returns when there is room."""
    scheduler = make(num_pages=6)
    old, young = add(scheduler, "old", 7, max_tokens=12), add(scheduler, "young", 6, max_tokens=12)
    add(scheduler, "next", 2)
    read(scheduler, scheduler.plan())
    assert [r.id for r in scheduler.running] == ["old", "young"], "the third waits: the two still grow"
    while not scheduler.num_preemptions:
        read(scheduler, scheduler.plan())
    assert [r.id for r in scheduler.running] == ["old"]
    assert [r.id for r in scheduler.waiting] == ["young", "next"], "nobody overtakes"
    assert (young.status, young.row, young.pages, young.computed) == ("waiting", None, [], 0)
    known = young.num_tokens
    assert known > 6
    while old.num_tokens < old.limit:
        read(scheduler, scheduler.plan())
    scheduler.finish(old)
    plan = scheduler.plan()
    assert shape(plan) == [("young", 0, known, True), ("next", 0, 2, True)]
    assert plan.rows[0].tokens == tuple(young.tokens) and plan.rows[0].new


def test_a_preempted_request_waits_for_its_steps_in_flight():
    scheduler = make()
    request = add(scheduler, "a", 5)
    plan = scheduler.plan()
    scheduler.preempt(request)
    assert scheduler.plan() is None
    assert scheduler.pool.num_retiring == len(plan.rows[0].pages)
    read(scheduler, plan)
    assert shape(scheduler.plan()) == [("a", 0, 6, True)], "the token that was in flight is known"


def test_the_urgent_are_admitted_first_and_then_who_came_first():
    scheduler = make(max_num_seqs=1)
    for name, priority in (("a", 1), ("b", 0), ("c", -2), ("d", 0), ("e", 1)):
        add(scheduler, name, 2, max_tokens=1, priority=priority)
    order = []
    while (plan := scheduler.plan()) is not None:
        order += [row.request.id for row in plan.rows]
        read(scheduler, plan)
        scheduler.finish(scheduler.running[0])
    assert order == ["c", "b", "d", "a", "e"]


def test_the_least_urgent_is_preempted_whoever_came_last():
    """6 pages of 4 for two that grow. Who gives way waits at its place."""
    scheduler = make(num_pages=7)
    add(scheduler, "later", 7, max_tokens=12, priority=1)
    read(scheduler, scheduler.plan())
    add(scheduler, "soon", 6, max_tokens=12)
    read(scheduler, scheduler.plan())
    assert [r.id for r in scheduler.running] == ["soon", "later"]
    for name, priority in (("last", 2), ("first", 0), ("too", 1)):
        add(scheduler, name, 16, priority=priority)
    while not scheduler.num_preemptions:
        read(scheduler, scheduler.plan())
    assert [r.id for r in scheduler.running] == ["soon"]
    assert [r.id for r in scheduler.waiting] == ["first", "later", "too", "last"]


def test_a_long_urgent_prompt_leaves_those_who_decode_their_tokens():
    scheduler = make(num_drafts=1, max_num_batched_tokens=8)
    add(scheduler, "decodes", 2, max_tokens=20, priority=2)
    read(scheduler, scheduler.plan())
    add(scheduler, "half", 9, priority=1)
    plan = scheduler.plan()
    assert shape(plan) == [("decodes", 2, 2, True), ("half", 0, 6, False)]
    read(scheduler, plan)
    add(scheduler, "urgent", 17)
    add(scheduler, "late", 5)
    want = [
        [("decodes", 3, 2, True), ("half", 6, 3, True), ("urgent", 0, 3, False)],
        [("half", 9, 2, True), ("decodes", 4, 2, True), ("urgent", 3, 4, False)],
    ]
    for step in want:
        plan = scheduler.plan()
        assert shape(plan) == step
        read(scheduler, plan)


def test_pages_on_their_way_back_are_waited_for():
    """Two give way at most to one that needs a page: what the first gives back comes with the next read step."""
    scheduler = make(num_pages=13, max_num_batched_tokens=32)
    requests = [add(scheduler, name, 7, max_tokens=24) for name in "abc"]
    last = scheduler.plan()
    assert [len(r.pages) for r in requests] == [2, 2, 2]
    while not scheduler.num_preemptions:
        previous, last = last, scheduler.plan()
        read(scheduler, previous)
    # 12 pages are held, 4 each; `a` needs a fifth, `c` gives its pages up, and they are still being written.
    assert [len(r.pages) for r in requests] == [4, 4, 0] and last is None
    assert scheduler.pool.num_free == 4, "read by now"
    plan = scheduler.plan()
    assert [row.request.id for row in plan.rows] == ["a", "b"]
    assert [len(r.pages) for r in requests] == [5, 5, 0] and scheduler.num_preemptions == 1


def test_nobody_younger_takes_the_pages_somebody_waits_for():
    """Pages of one token, 5 drafts: `old` needs 6 more, 4 are free, 2 come back with the step in flight."""
    scheduler = make(num_pages=19, page_tokens=1, max_num_batched_tokens=32, num_drafts=5)
    old = add(scheduler, "old", 1, max_tokens=17)
    young = add(scheduler, "young", 1, max_tokens=6)
    gone = add(scheduler, "gone", 1, max_tokens=1)
    assert [len(scheduler.plan().rows), len(old.pages), len(young.pages), len(gone.pages)] == [3, 6, 6, 2]
    scheduler.finish(gone)
    add(scheduler, "next", 1, max_tokens=1)
    plan = scheduler.plan()
    assert plan is None and (len(old.pages), len(young.pages)) == (6, 6), "one more page is all `young` needs"
    assert (scheduler.pool.num_free, scheduler.pool.num_retiring, scheduler.num_preemptions) == (4, 2, 0)
    scheduler.settle(1)
    assert shape(scheduler.plan()) == [("old", 1, 6, True)]


def test_a_row_that_is_complete_takes_no_tokens():
    scheduler = make(max_num_batched_tokens=4)
    add(scheduler, "a", 3, max_tokens=1)
    scheduler.plan()
    add(scheduler, "b", 9)
    assert shape(scheduler.plan()) == [("b", 0, 4, False)]


def test_what_can_never_run_is_refused_and_what_cannot_run_now_waits():
    scheduler = make(num_pages=9, max_model_len=64)
    with pytest.raises(RequestError, match="prompt: got no tokens"):
        add(scheduler, "a", 0)
    with pytest.raises(
        RequestError, match=r"maximum context length is 64 tokens.*69 tokens \(64 in the messages, 5 in"
    ):
        add(scheduler, "a", 64, max_tokens=5)
    with pytest.raises(RequestError, match="need 9 pages of 4 tokens, but the KV cache has 8"):
        add(scheduler, "a", 30, max_tokens=3)
    assert not scheduler.waiting
    add(scheduler, "a", 15, max_tokens=1)
    add(scheduler, "b", 31, max_tokens=1)
    assert shape(scheduler.plan()) == [("a", 0, 15, True)]
    assert [r.id for r in scheduler.waiting] == ["b"], "8 pages fit the pool, not what is left of it"


def test_a_prompt_of_the_whole_context_but_one_token_runs():
    scheduler = make(max_num_batched_tokens=64)
    add(scheduler, "a", 63, max_tokens=8)
    plan = scheduler.plan()
    assert shape(plan) == [("a", 0, 63, True)] and len(plan.rows[0].pages) == 16
    assert scheduler.plan() is None


def test_a_token_budget_below_the_rows_is_refused():
    make(max_num_seqs=4, num_drafts=3, max_num_batched_tokens=16)
    with pytest.raises(ConfigError, match=r"max_num_batched_tokens: got 15, but 4 rows .* need 16"):
        make(max_num_seqs=4, num_drafts=3, max_num_batched_tokens=15)


def test_the_only_request_is_always_readmitted():
    """10 pages with the dummy, 16 tokens each, a prompt of 130: 9 pages, all there are."""
    for k in (0, 1, 3, 5):
        scheduler = make(num_pages=10, page_tokens=16, max_model_len=144, max_num_batched_tokens=64, num_drafts=k)
        request = add(scheduler, "a", 130, max_tokens=14)
        for _ in range(4):
            plan = scheduler.plan()
            read(scheduler, plan)
            scheduler.preempt(request)
            scheduler.check()
        assert scheduler.plan().rows[0].request is request and len(request.pages) == 9


def test_pages_that_match_are_shared():
    """A hit of the whole prompt starts at its last token, which is read and not written."""
    scheduler = make(cache=True)
    donor = add(scheduler, "a", 9)
    read(scheduler, scheduler.plan())
    whole, part = add(scheduler, "b", 8), add(scheduler, "c", 11)
    plan = scheduler.plan()
    assert shape(plan)[1:] == [("b", 7, 1, True), ("c", 7, 4, True)]
    assert (whole.matched, whole.cached_tokens) == (8, 7) and (part.matched, part.cached_tokens) == (8, 8)
    assert whole.pages[:2] == part.pages[:2] == donor.pages[:2]
    assert len({*whole.pages, *part.pages, *donor.pages}) == 2 + 1 + 1 + 1
    read(scheduler, plan)
    for request in (donor, whole, part):
        scheduler.finish(request)
        scheduler.check()
    assert scheduler.pool.num_used == 0


def test_a_hit_that_does_not_fit_changes_nothing():
    """Pages of a hit that are free stop being free: they count against what is left."""
    scheduler = make(num_pages=6, cache=True, max_num_batched_tokens=32)
    donor = add(scheduler, "donor", 9, max_tokens=1)
    read(scheduler, scheduler.plan())
    scheduler.finish(donor)
    held = scheduler.pool.take(1)
    request = add(scheduler, "a", 17, max_tokens=1)
    before = list(scheduler.pool._free)
    assert scheduler.plan() is None and request.status == "waiting"
    assert list(scheduler.pool._free) == before and len(before) == 4 and scheduler.hits.counts.queries == 9
    scheduler.pool.retire(held, 0)
    assert scheduler.plan().rows[0].pages[:2] == (1, 2)
    assert (scheduler.hits.counts.queries, scheduler.hits.counts.hits) == (26, 8)
    scheduler.check()


def test_the_number_of_drafts_is_chosen_step_by_step():
    """Pages are those of the most drafts, whatever is chosen; so are the bounds on what is assumed."""
    seen, choice = [], [3]

    def choose(rows):
        seen.append(rows)
        return choice[0]

    scheduler = make(num_drafts=3, choose_drafts=choose)
    request, other = add(scheduler, "a", 6, max_tokens=40), add(scheduler, "b", 2, max_tokens=40)
    plan = scheduler.plan()
    assert (plan.num_drafts, seen) == (3, [0])
    read(scheduler, plan)
    start = {}
    for drafts in (0, 3, 1, 2):
        choice[0] = drafts
        plan = scheduler.plan()
        assert plan.num_drafts == drafts
        assert [row.num_tokens for row in plan.rows] == [drafts + 1] * 2
        start = {row.request.id: row.start for row in plan.rows}
        assert len(request.pages) == -(-(start["a"] + 3 + 1 + 3) // 4)
        read(scheduler, plan, accepted=1)
        assert request.computed == start["a"] + 1 == request.num_tokens - 1
    assert seen == [0, 2, 2, 2, 2]
    scheduler.finish(other)
    scheduler.plan()
    assert seen[-1] == 1
    for wrong in (-1, 4):
        choice[0] = wrong
        with pytest.raises(ValueError, match=f"choose_drafts: gave {wrong}, it must give 0 … 3"):
            scheduler.plan()


def test_a_plan_says_which_pages_it_took():
    scheduler = make(cache=True, num_drafts=1)
    first = add(scheduler, "a", 8)
    plan = scheduler.plan()
    assert plan.taken == tuple(first.pages) == (1, 2, 3)
    read(scheduler, plan)
    second = add(scheduler, "b", 8)
    plan = scheduler.plan()
    assert second.pages[:2] == [1, 2] and plan.taken == tuple(second.pages[2:]), "not those of a hit"
    read(scheduler, plan)
    assert scheduler.plan().taken == () and len(first.pages) == 3
