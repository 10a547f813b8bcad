"""One engine step as one pure function, and the int32 buffer that carries a plan to it.

The host decides which rows run and on which pages; the device knows lengths and tokens. A decode row's token comes from
`RowState`, so the host can plan the next step before it has read this one. k drafts a row have their place in the shapes
(`tokens [B, k + 1]`); with k = 0 a decode row is one token.
"""

import dataclasses
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from dcpjax.batch import ForwardBatch, RowState, StepOutput
from dcpjax.cache import PagedCache, pool_slots
from dcpjax.host.plan import StepPlan
from dcpjax.host.request import Request
from dcpjax.sampling import SamplingRows, VocabState, adjust, sample
from models import glm_moe_dsa
from models.glm_moe_dsa import Network
from models.params import Params

# End-of-text and stop ids a row can mask before min_tokens.
MAX_STOP_IDS = 32

_MOST = 2**31 - 1


@dataclasses.dataclass(frozen=True, order=True)
class StepShape:
    """Static shape of a step: T query tokens, B rows, P pages a row."""

    tokens: int
    rows: int
    pages: int

    @property
    def size(self) -> int:
        """Length of the packed buffer, int32 words."""
        return self.rows * (len(_FIELDS) + MAX_STOP_IDS) + self.tokens + self.rows * self.pages


# One int32 word per row each; the floats and the seed as their bits.
_FLOATS = ("temperature", "top_p", "min_p", "presence", "frequency", "repetition")
_FIELDS = (
    *("row", "num_tokens", "start", "matched", "decode", "emit", "new", "keep_vocab", "limit"),
    *("choice", "seed", "top_k", "min_len", "biased"),
    *_FLOATS,
)


def pack(plan: StepPlan, shape: StepShape, num_rows: int, eos_ids: tuple[int, ...]) -> np.ndarray:
    """The plan as one int32 array `[shape.size]`. Padding rows name row `num_rows`, which does not exist."""
    fields = np.zeros((len(_FIELDS), shape.rows), np.int32)
    at = {name: fields[i] for i, name in enumerate(_FIELDS)}
    at["row"][:] = num_rows
    stops = np.full((shape.rows, MAX_STOP_IDS), -1, np.int32)
    tokens = np.zeros(shape.tokens, np.int32)
    pages = np.zeros((shape.rows, shape.pages), np.int32)
    first = 0
    for b, planned in enumerate(plan.rows):
        request, chunk = planned.request, planned.tokens
        at["row"][b], at["num_tokens"][b], at["start"][b] = planned.row, planned.num_tokens, planned.start
        at["matched"][b], at["limit"][b] = request.matched, request.limit
        at["decode"][b], at["emit"][b], at["new"][b] = chunk is None, planned.emit, planned.new
        if chunk is not None:
            tokens[first : first + planned.num_tokens] = chunk
        first += planned.num_tokens
        pages[b, : len(planned.pages)] = planned.pages
        if planned.new:
            _pack_sampling(at, stops, b, request, eos_ids)
    return np.concatenate([fields.ravel(), stops.ravel(), tokens, pages.ravel()])


def _pack_sampling(at: dict, stops: np.ndarray, b: int, request: Request, eos_ids: tuple[int, ...]) -> None:
    p = request.params
    # Wishes beyond any vocabulary or length mean the same as the largest number.
    at["choice"][b], at["top_k"][b] = request.choice, min(max(p.top_k, 0), _MOST)
    at["seed"][b] = np.uint32(request.seed).view(np.int32)
    at["min_len"][b] = min(len(request.prompt) + p.min_tokens, _MOST) if p.min_tokens else 0
    at["biased"][b], at["keep_vocab"][b] = bool(p.logit_bias), uses_vocab(request)
    floats = (0.0 if p.greedy else p.temperature, p.top_p, p.min_p)
    floats += (p.presence_penalty, p.frequency_penalty, p.repetition_penalty)
    for name, value in zip(_FLOATS, floats, strict=True):
        at[name][b] = np.float32(value).view(np.int32)
    ids = stop_ids(request, eos_ids)
    stops[b, : len(ids)] = ids


def stop_ids(request: Request, eos_ids: tuple[int, ...]) -> list[int]:
    """Ids that end this request's text."""
    return sorted({*(() if request.params.ignore_eos else eos_ids), *request.params.stop_token_ids})


def uses_vocab(request: Request) -> bool:
    """Whether the request needs per-token state on the device."""
    p = request.params
    return bool(p.logit_bias) or p.presence_penalty != 0 or p.frequency_penalty != 0 or p.repetition_penalty != 1


def _unpack(packed: jax.Array, shape: StepShape) -> Iterator[jax.Array]:
    n = len(_FIELDS) * shape.rows
    for size, form in (
        (n, (len(_FIELDS), shape.rows)),
        (shape.rows * MAX_STOP_IDS, (shape.rows, MAX_STOP_IDS)),
        (shape.tokens, (shape.tokens,)),
        (shape.rows * shape.pages, (shape.rows, shape.pages)),
    ):
        yield packed[:size].reshape(form)
        packed = packed[size:]


def empty_state(num_rows: int, vocab: int) -> RowState:
    """State of rows that no request has."""
    return RowState(
        kv_len=jnp.zeros(num_rows, jnp.int32),
        last_token=jnp.zeros(num_rows, jnp.int32),
        limit=jnp.zeros(num_rows, jnp.int32),
        sampling=SamplingRows.neutral(num_rows, MAX_STOP_IDS),
        vocab=VocabState.empty(num_rows, vocab),
    )


def step(
    params: Params, cache: PagedCache, state: RowState, packed: jax.Array, shape: StepShape, net: Network
) -> tuple[PagedCache, RowState, StepOutput]:
    """Reset new rows, run the target on all query tokens, sample one token a row, advance the rows.

    `cache` and `state` are donated by the runner.
    """
    fields, stops, tokens, pages = _unpack(packed, shape)
    at = dict(zip(_FIELDS, fields, strict=True))
    state = _reset(state, at, stops)
    row = at["row"]
    kv_len, last_token, limit, sampling = _take(state, row)
    start = jnp.where(at["decode"] > 0, kv_len, at["start"])
    batch = _batch(tokens, pages, start, limit, last_token, at, cache, shape)
    hidden, cache, _ = glm_moe_dsa.forward(params, cache, batch, net)
    last = jnp.clip(jnp.cumsum(at["num_tokens"]) - 1, 0)
    logits = glm_moe_dsa.logits(params, hidden[last], net)

    position = start + at["num_tokens"]
    with jax.named_scope("sample"):
        adjusted = adjust(logits, sampling, state.vocab, position, net.cfg.vocab_size, vocab_row=row)
        token = sample(adjusted, sampling, position)
    emit = (at["emit"] > 0) & (position < limit)
    known = jnp.where(emit, row, len(state.kv_len))
    counts = state.vocab.counts.at[known, token].add(1, mode="drop")
    state = state.replace(
        kv_len=state.kv_len.at[row].set(jnp.minimum(position, limit), mode="drop"),
        last_token=state.last_token.at[known].set(token, mode="drop"),
        vocab=state.vocab.replace(counts=counts),
    )
    return cache, state, StepOutput(token[:, None], emit.astype(jnp.int32), logits)


def _reset(state: RowState, at: dict[str, jax.Array], stops: jax.Array) -> RowState:
    """Gives new requests their row. Rows seeded with counts or a bias beforehand keep them."""
    num_rows = len(state.kv_len)
    row = jnp.where(at["new"] > 0, at["row"], num_rows)

    def put(old, new):
        return old.at[row].set(new.astype(old.dtype), mode="drop")

    rows = {name: at[name] for name in ("choice", "top_k", "min_len")}
    rows |= {name: jax.lax.bitcast_convert_type(at[name], jnp.float32) for name in _FLOATS}
    rows |= {"seed": jax.lax.bitcast_convert_type(at["seed"], jnp.uint32), "biased": at["biased"] > 0}
    sampling = SamplingRows(**rows, stop_ids=stops)
    fresh = jnp.where((at["new"] > 0) & (at["keep_vocab"] == 0), at["row"], num_rows)
    counts = jax.lax.cond(
        jnp.any(fresh < num_rows), lambda c: c.at[fresh].set(0, mode="drop"), lambda c: c, state.vocab.counts
    )
    return state.replace(
        limit=put(state.limit, at["limit"]),
        sampling=jax.tree.map(put, state.sampling, sampling),
        vocab=state.vocab.replace(counts=counts),
    )


def _take(state: RowState, row: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array, SamplingRows]:
    """Lengths, newest tokens, limits and sampling of the step's rows; padding rows ask for nothing."""
    padding = row >= len(state.kv_len)

    def pick(x, empty):
        return jnp.where(padding.reshape(-1, *(1,) * (x.ndim - 1)), empty, x[row])

    neutral = SamplingRows.neutral(len(row), MAX_STOP_IDS)
    lengths = (pick(x, 0) for x in (state.kv_len, state.last_token, state.limit))
    return *lengths, jax.tree.map(pick, state.sampling, neutral)


def _batch(tokens, pages, start, limit, last_token, at, cache: PagedCache, shape: StepShape) -> ForwardBatch:
    """Positions and slots of the step's tokens, from the rows' lengths.

    A token's row is the last whose query starts at or before it; tokens after all queries, and those at or past their
    request's limit, are padding.
    """
    ends = jnp.cumsum(at["num_tokens"])
    t = jnp.arange(shape.tokens)
    row_of = jnp.minimum(jnp.searchsorted(ends, t, side="right"), shape.rows - 1).astype(jnp.int32)
    position = start[row_of] + t - (ends - at["num_tokens"])[row_of]
    real = (t < ends[-1]) & (position < limit[row_of])
    slots = jnp.where(real, position, -1).astype(jnp.int32)
    # Rows of a matched prefix are in the cache already: the first row of a hit reads and is not written.
    written = jnp.where(position >= at["matched"][row_of], slots, -1)
    return ForwardBatch(
        tokens=jnp.where(at["decode"][row_of] > 0, last_token[row_of], tokens),
        positions=jnp.maximum(slots, 0),
        slots=slots,
        write_slots=pool_slots(cache.latent.layout, pages, row_of, written),
        row_of=row_of,
        pages=pages,
    )


def seed_vocab(state: RowState, row: jax.Array, counts: jax.Array, seen: jax.Array, bias: jax.Array) -> RowState:
    """Sets the per-token state of one row before its first step: `counts`, `seen`, `bias`, each `[V]`."""
    v = state.vocab
    return state.replace(
        vocab=VocabState(v.counts.at[row].set(counts), v.prompt_seen.at[row].set(seen), v.bias.at[row].set(bias))
    )
