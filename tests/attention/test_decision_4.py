"""The rules of slots and rows, each shown to matter: beside every check stands the fault it would catch.

Target row i: own slot i, sees slots 0 … i, written iff i ≥ matched. Draft row i: own slot i + 1, sees 1 … i + 1, always
written once token i + 1 is known. Keys come from the cache alone. Nothing at or past a request's limit exists.
"""

import functools

import jax
import numpy as np
import pytest

from dcpjax.attention import AttentionOptions
from dcpjax.batch import ForwardBatch
from dcpjax.cache import PagedCache
from dcpjax.host.plan import PlannedRow, StepPlan
from dcpjax.host.request import Request, SamplingParams
from dcpjax.pallas_kernels.topk import NO_SLOT
from dcpjax.trace import Tracer
from models import dense, glm_moe_dsa, mtp
from models.glm_moe_dsa import Network
from tests.attention import toy
from tests.attention.paged import (
    PAGE,
    Geometry,
    Queries,
    World,
    check,
    on_device,
    oracle_output,
    oracle_selection,
    pool_of,
    rows_of,
    run,
    same_bits,
)

pytestmark = pytest.mark.usefixtures("quick_compile")

CFG = toy.config("FS", "DM")
GEOMETRY = Geometry(4, 2, num_pages=16)
NET = Network(CFG, GEOMETRY.plan, on_device(AttentionOptions()))
NOWHERE = GEOMETRY.latent.nowhere
SIZE, WIDTH = 24, 3  # query tokens, padding included; pages of a table
PROMPT, HIT = 20, PAGE  # tokens of each prompt; tokens that A and B share
PAGES = {"A": (5, 9, 12), "B": (5, 3, 4)}  # after a hit, B has A's first page
CLOSE = {"atol": 1e-4, "rtol": 0}


def tokens_of(name: str) -> np.ndarray:
    """Two prompts that are equal up to token HIT, and one token more (what follows the prompt)."""
    drawn = {x: np.random.default_rng(seed).integers(0, CFG.vocab_size, PROMPT + 1) for x, seed in (("A", 1), ("B", 6))}
    drawn["B"][:HIT] = drawn["A"][:HIT]
    assert drawn["B"][HIT] != drawn["A"][HIT]
    return drawn[name].astype(np.int32)


@functools.cache
def truth(name: str):
    """The plain forward of a prompt and its draft, without pages. Selections are not close calls."""
    tokens = tokens_of(name)
    out = jax.jit(dense.forward, static_argnames="cfg")(toy.params(CFG), tokens[:-1], CFG)
    # Equal scores are relu's exact zeros, which the order by position decides.
    assert ((out.margins.selection == 0) | (out.margins.selection > 1e-3)).all()
    return out, jax.jit(dense.mtp, static_argnames="cfg")(toy.params(CFG), tokens[1:], out.final_hidden, CFG)


def place(pages, slot):
    return pages[slot // PAGE] * PAGE + slot % PAGE


def batch(tokens, rows, slots, written, pages) -> ForwardBatch:
    """Rows at RoPE positions `rows`; `slots` are their own ones, `written` where they are written (−1: nowhere)."""
    fill = [-1] * (SIZE - len(rows))

    def pad(x):
        return np.array([*x, *fill], np.int32)

    return ForwardBatch(
        tokens=np.maximum(pad(tokens), 0),
        positions=np.maximum(pad(rows), 0),
        slots=pad(slots),
        write_slots=np.array([NOWHERE if s < 0 else place(pages, s) for s in pad(written)], np.int32),
        row_of=np.zeros(SIZE, np.int32),
        pages=np.array([pages], np.int32),
    )


@functools.partial(jax.jit, static_argnames="net")
def _target(params, cache, batch, net):
    return glm_moe_dsa.forward(params, cache, batch, net)[:2]


@functools.partial(jax.jit, static_argnames="net")
def _draft(params, cache, batch, hidden, net):
    out, _, cache, chosen = mtp.draft(params, cache, batch, hidden, net)
    return out, cache, chosen.slots


def target(cache, name, rows, see=0, own=0, write=None):
    """Target rows of a prompt. The rule is `see = own = 0`; `write` picks the rows that are written (default all)."""
    written = [i + own if write is None or write(i) else -1 for i in rows]
    made = batch(tokens_of(name)[list(rows)], rows, [i + see for i in rows], written, PAGES[name])
    hidden, cache = _target(toy.sharded_params(CFG, GEOMETRY.tp, GEOMETRY.dcp), cache, made, NET)
    return np.asarray(hidden)[: len(rows)], cache


def draft(cache, name, rows, shift=1, write=None):
    """Draft rows of a prompt, joined with the true hidden states. The rule is `shift = 1` and all rows written."""
    written = [i + shift if write is None or write(i) else -1 for i in rows]
    made = batch(tokens_of(name)[[i + 1 for i in rows]], rows, [i + shift for i in rows], written, PAGES[name])
    hidden = np.zeros((SIZE, CFG.hidden_size), np.float32)
    hidden[: len(rows)] = np.asarray(truth(name)[0].final_hidden)[list(rows)]
    out, cache, slots = _draft(toy.sharded_params(CFG, GEOMETRY.tp, GEOMETRY.dcp), cache, made, hidden, NET)
    return np.asarray(out)[: len(rows)], cache, np.asarray(slots)[: len(rows)]


def target_cache(fill=0.0):
    return toy.cache(CFG, GEOMETRY, fill=fill)


def draft_cache(fill=0.0):
    return toy.cache(CFG, GEOMETRY, draft=True, fill=fill)


def edit(cache: PagedCache, slots, change) -> PagedCache:
    """The cache with `change` made to the latent and index rows of some slots of the pool."""

    def pool(old):
        rows = rows_of(old).copy()
        rows[:, slots] = change(rows[:, slots])
        return pool_of(rows, old.layout, GEOMETRY.plan)

    return cache.replace(latent=pool(cache.latent), index=pool(cache.index))


def bits(cache: PagedCache) -> tuple[bytes, bytes]:
    return rows_of(cache.latent).tobytes(), rows_of(cache.index).tobytes()


# Target rows


def test_target_row_i_has_slot_i_and_sees_0_to_i():
    """In one chunk or in two, over pools that hold NaN where nothing was written."""
    want = np.asarray(truth("A")[0].final_hidden)
    got, _ = target(target_cache(np.nan), "A", range(PROMPT))
    np.testing.assert_allclose(got, want, **CLOSE)
    first, cache = target(target_cache(np.nan), "A", range(11))
    second, _ = target(cache, "A", range(11, PROMPT))
    np.testing.assert_allclose(np.concatenate([first, second]), want, **CLOSE)


@pytest.mark.parametrize("see, own", [(-1, 0), (1, 0), (1, 1)], ids=["not itself", "the next one", "slot i + 1"])
def test_target_with_other_slots_is_noticed(see, own):
    got, _ = target(target_cache(), "A", range(PROMPT), see=see, own=own)
    assert np.abs(got - np.asarray(truth("A")[0].final_hidden)).max() > 0.01


def test_own_row_not_written_is_noticed():
    """Each layer writes, then reads from the cache alone: a new row that is not written misses itself."""
    got, _ = target(target_cache(), "A", range(PROMPT), write=lambda i: i != 13)
    assert np.abs(got - np.asarray(truth("A")[0].final_hidden)).max() > 0.01


def test_read_only_row_leaves_its_page_alone_and_equals_the_cold_row():
    """A hit of 8 tokens: row 7 is run again over the pages that are there, rows 8 … follow on B's own pages."""
    _, cache = target(target_cache(), "A", range(PROMPT))
    before = rows_of(cache.latent)
    got, after = target(cache, "B", range(HIT - 1, PROMPT), write=lambda i: i >= HIT)
    np.testing.assert_allclose(got, np.asarray(truth("B")[0].final_hidden)[HIT - 1 :], **CLOSE)
    own = [place(PAGES["B"], s) for s in range(HIT, PROMPT)]
    np.testing.assert_allclose(rows_of(after.latent)[:, own], np.asarray(truth("B")[0].latent)[:, HIT:], **CLOSE)
    others = np.setdiff1d(np.arange(NOWHERE), own)
    assert same_bits(rows_of(after.latent)[:, others], before[:, others])


def test_read_only_row_takes_its_own_key_from_the_cache():
    """Its key counts once, and it is the cached one: moving that moves the output."""
    own = CFG.indexer.topk - 1  # the last row that surely selects itself
    _, cache = target(target_cache(), "A", range(PROMPT))
    moved = edit(cache, [place(PAGES["A"], own)], lambda rows: rows + 0.5)
    same, _ = target(cache, "A", [own], write=lambda i: False)
    other, after = target(moved, "A", [own], write=lambda i: False)
    np.testing.assert_allclose(same[0], np.asarray(truth("A")[0].final_hidden)[own], **CLOSE)
    assert np.abs(other - same).max() > 0.01
    assert bits(after) == bits(moved)


def test_a_key_beside_the_cache_would_count_twice():
    world, geometry = World.make([12], 2, num_pages=16), Geometry(4, num_pages=16)
    # Fewer slots than k, so that the row's own is among them.
    queries = Queries.make([(0, 3)], 1)
    _, chosen, out = run(world, world.pools(geometry), queries, geometry, write=False)
    check(world, queries, chosen, out)
    twice = [[*slots, 3] for slots in oracle_selection(world, queries)]
    assert np.abs(oracle_output(world, queries, twice) - out).max() > 0.01


# Draft rows


def test_draft_row_i_has_slot_i_plus_1_and_sees_1_to_i_plus_1():
    want = truth("A")[1]
    got, _, slots = draft(draft_cache(np.nan), "A", range(PROMPT))
    np.testing.assert_allclose(got, want.hidden, **CLOSE)
    # Slot − 1 is the position that is reported.
    np.testing.assert_array_equal(np.where(slots == NO_SLOT, -1, slots - 1), want.topk)
    assert (slots != NO_SLOT).sum() > 0 and slots.min() == 1


@pytest.mark.parametrize("value", [np.nan, np.inf, 1e30, -1e30])
def test_draft_slot_0_changes_nothing(value):
    """Bit for bit, whatever lies there."""
    slot = [place(PAGES["A"], 0)]
    clean = draft(draft_cache(), "A", range(PROMPT))
    filled = draft(edit(draft_cache(), slot, lambda rows: np.full_like(rows, value)), "A", range(PROMPT))
    assert same_bits(filled[0], clean[0]) and same_bits(filled[2], clean[2])


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_draft_slot_0_unmasked_is_noticed(value):
    """Silently so where it holds zeros, as a new pool does: a key of zeros takes weight exp(0)."""
    cache = edit(draft_cache(), [place(PAGES["A"], 0)], lambda rows: np.full_like(rows, value))
    got, _, slots = draft(cache.replace(first_slot=0), "A", range(PROMPT))
    assert np.isfinite(got).all() and slots.min() == 0
    assert np.abs(got - np.asarray(truth("A")[1].hidden)).max() > 0.01


def hit(cache, shift=1, write=None):
    """A's draft rows, then B's after a hit: from row HIT − 1 on. Returns B's rows HIT … and the cache."""
    _, cache, _ = draft(cache, "A", range(PROMPT), shift)
    got, cache, _ = draft(cache, "B", range(HIT - 1, PROMPT), shift, write)
    return got[1:], cache


def test_draft_after_a_hit_equals_the_cold_draft():
    """The page that A and B share holds rows of tokens they share alone; row HIT − 1, which B's own next token enters,
    lies in slot HIT on B's page and is always written. A's rows stay as they were."""
    _, cold, _ = draft(draft_cache(np.nan), "A", range(PROMPT))
    got, after = hit(draft_cache(np.nan))
    np.testing.assert_allclose(got, np.asarray(truth("B")[1].hidden)[HIT:], **CLOSE)
    mine = [place(PAGES["B"], s) for s in range(HIT, PROMPT + 1)]
    assert np.isfinite(rows_of(after.latent)[:, mine]).all()
    others = np.setdiff1d(np.arange(NOWHERE), mine)
    assert same_bits(rows_of(after.latent)[:, others], rows_of(cold.latent)[:, others])


def test_draft_rows_in_their_own_slot_are_noticed():
    """Row i in slot i: without a hit nothing is wrong with it, after one the shared page ends in A's row HIT − 1."""
    cache = draft_cache().replace(first_slot=0)
    cold, _, _ = draft(cache, "B", range(PROMPT), shift=0)
    want = np.asarray(truth("B")[1].hidden)
    np.testing.assert_allclose(cold, want, **CLOSE)
    got, _ = hit(cache, shift=0, write=lambda i: i >= HIT)
    assert np.abs(got - want[HIT:]).max() > 0.01


def test_first_draft_row_of_a_hit_not_written_is_noticed():
    """Read-only for the target is not read-only for the draft."""
    got, _ = hit(draft_cache(), write=lambda i: i >= HIT)
    assert np.abs(got - np.asarray(truth("B")[1].hidden)[HIT:]).max() > 0.01


# Iterations of the draft, and what a trace reports


SENTINEL = 7.0


@functools.cache
def tracer(shared: bool) -> Tracer:
    cfg = toy.config("FS", "DM", index_share_for_mtp_iteration=shared)
    return Tracer(toy.runner(cfg, GEOMETRY, AttentionOptions(), tokens=16))


@pytest.mark.parametrize("frozen", [True, False], ids=["frozen", "not frozen"])
def test_frozen_iterations_write_nothing_and_others_write_provisional_rows(frozen):
    """Ten tokens: rows 0 … 9 lie in slots 1 … 10. Drafts 2 and 3 would lie in slots 11 and 12."""
    look, cfg = tracer(frozen), tracer(frozen).runner.net.cfg
    look.runner.draft_cache = draft_cache(SENTINEL)
    tokens, pages = tokens_of("A")[:10], (5, 9)
    found = look.draft(tokens.tolist(), 3, list(pages))
    untouched = (rows_of(look.runner.draft_cache.latent)[0] == SENTINEL).all(1)
    written = [slot for slot in range(2 * PAGE) if not untouched[place(pages, slot)]]
    assert written == list(range(1, 11 if frozen else 13))
    assert untouched.sum() == NOWHERE - len(written)
    same = (rows_of(look.runner.draft_cache.index)[0] == SENTINEL).all(1)
    np.testing.assert_array_equal(same, untouched)
    want = jax.jit(dense.draft, static_argnames=("cfg", "k"))(toy.params(CFG), tokens, cfg, 3)
    np.testing.assert_array_equal(found.tokens, want[0])
    np.testing.assert_allclose(found.hidden, want[2], **CLOSE)


def test_freezing_matters():
    """The two kinds of iteration are not the same thing in this network."""
    tokens = tokens_of("A")[:10]
    run_draft = jax.jit(dense.draft, static_argnames=("cfg", "k"))
    both = [run_draft(toy.params(CFG), tokens, tracer(x).runner.net.cfg, 3)[2] for x in (True, False)]
    assert np.abs(both[0] - both[1]).max() > 0.01


def test_selections_are_reported_as_positions():
    look = tracer(True)
    tokens = tokens_of("A")
    found = look.trace(tokens[:-1].tolist(), int(tokens[-1]), [5, 9, 12])
    plain, drafted = truth("A")
    np.testing.assert_array_equal(found.topk[0], plain.topk[0])
    np.testing.assert_array_equal(found.mtp_topk, drafted.topk)
    assert (found.mtp_topk.max(1) <= np.arange(PROMPT)).all() and found.mtp_topk[0].max() == 0
    # As slots they would be one too high.
    assert not np.array_equal(np.where(found.mtp_topk < 0, -1, found.mtp_topk + 1), drafted.topk)


# The same rules where a step takes them from: matched and limit of a request


@functools.cache
def runner():
    return toy.runner(CFG, GEOMETRY, AttentionOptions(), seqs=1, tokens=16, length=WIDTH * PAGE)


def step(tokens, start, pages, matched=0, limit=WIDTH * PAGE, decode=False, new=True):
    """One request's step: what it samples, its accepted count, the last row's logits, and the target's cache."""
    request = Request("r", [int(t) for t in tokens], SamplingParams(temperature=0), limit=limit, seed=0)
    request.matched = matched
    chunk = None if decode else tuple(request.prompt[start:])
    size = 1 if decode else len(chunk)
    row = PlannedRow(request, 0, size, start, chunk, -1, emit=True, new=new, pages=tuple(pages))
    pending = runner().dispatch(StepPlan((row,), 1))
    result = pending.fetch()
    logits = np.asarray(pending.output.logits)[0, : CFG.vocab_size]
    return int(result.tokens[0, 0]), int(result.accepted[0]), logits, runner().cache


def test_step_writes_rows_from_matched_on():
    """A whole prompt that is in the cache: its last token runs again, changes no bit, and its logits are the cold
    ones. A request that did not say so would write over a page that others read."""
    tokens = tokens_of("A")[: 2 * PAGE]
    runner().cache = target_cache()
    _, _, cold, cache = step(tokens, 0, (5, 9))
    np.testing.assert_allclose(cold, truth("A")[0].logits[2 * PAGE - 1], **CLOSE)
    before = bits(cache)
    _, accepted, warm, after = step(tokens, 2 * PAGE - 1, (5, 9), matched=2 * PAGE)
    assert accepted == 1
    np.testing.assert_allclose(warm, cold, atol=1e-5, rtol=0)
    assert bits(after) == before
    # A page whose bits tell whether it was written again.
    nudge = [place((5, 9), s) for s in range(2 * PAGE)]
    runner().cache = edit(after, nudge, lambda rows: rows + 1e-3)
    before = bits(runner().cache)
    assert bits(step(tokens, 2 * PAGE - 1, (5, 9), matched=2 * PAGE)[3]) == before
    assert bits(step(tokens, 2 * PAGE - 1, (5, 9), matched=0)[3]) != before


def test_step_after_a_hit_writes_the_rest():
    tokens = tokens_of("A")[: 2 * PAGE]
    runner().cache = target_cache()
    _, _, cold, cache = step(tokens, 0, (5, 9))
    before = rows_of(cache.latent)
    _, _, warm, cache = step(tokens, PAGE - 1, (5, 3), matched=PAGE)
    after = rows_of(cache.latent)
    np.testing.assert_allclose(warm, cold, **CLOSE)
    mine = np.arange(3 * PAGE, 4 * PAGE)
    np.testing.assert_allclose(after[:, mine], before[:, 9 * PAGE : 10 * PAGE], **CLOSE)
    others = np.setdiff1d(np.arange(NOWHERE), mine)
    assert same_bits(after[:, others], before[:, others])


@pytest.mark.parametrize("limit", [10, 2 * PAGE])
def test_no_slot_at_or_past_the_limit_is_written(limit):
    """A chunk of 12 tokens that may have 10, and the same with room for all: rows 10 and 11 tell the two apart."""
    runner().cache = target_cache(SENTINEL)
    _, accepted, logits, cache = step(tokens_of("A")[:12], 0, (5, 9), limit=limit)
    untouched = (rows_of(cache.latent) == SENTINEL).all((0, 2))
    written = np.flatnonzero(~untouched).tolist()
    assert written == sorted(place((5, 9), s) for s in range(min(limit, 12)))
    assert accepted == (limit > 12)
    assert int(runner().state.kv_len[0]) == min(limit, 12)
    if limit > 12:
        np.testing.assert_allclose(logits, truth("A")[0].logits[11], **CLOSE)


@pytest.mark.parametrize("limit", [10, 11, 12])
def test_decode_row_at_the_limit_does_nothing(limit):
    """Ten tokens, then a decode row: at limit 10 there was nothing left to sample, at 11 the row has no slot for a
    successor, at 12 it is written and samples."""
    runner().cache = target_cache(SENTINEL)
    _, first, _, cache = step(tokens_of("A")[:10], 0, (5, 9), limit=limit)
    before = rows_of(cache.latent)
    _, second, _, cache = step(tokens_of("A")[:10], 10, (5, 9), limit=limit, decode=True, new=False)
    after = rows_of(cache.latent)
    changed = np.flatnonzero((after != before).any((0, 2))).tolist()
    assert (first, second) == (limit > 10, limit > 11)
    assert changed == ([place((5, 9), 10)] if limit > 10 else [])
    assert int(runner().state.kv_len[0]) == min(limit, 11)


def test_rows_past_the_limit_are_not_visible_to_others():
    """What a chunk's surplus rows hold is padding: it changes nothing that is kept."""
    caches = []
    for surplus in (tokens_of("A")[10:12], tokens_of("B")[10:12]):
        runner().cache = target_cache(SENTINEL)
        caches.append(bits(step([*tokens_of("A")[:10], *surplus], 0, (5, 9), limit=10)[3]))
    assert caches[0] == caches[1]
