"""One engine step as one pure function, and the int32 buffer that carries a plan to it.

The host decides which rows run and on which pages; the device knows lengths and tokens. A decode row's tokens come from
`RowState`, its newest token and the drafts after it, so the host can plan the next step before it has read this one.
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
from dcpjax.sampling import SamplingRows, VocabState, logprobs
from dcpjax.spec import Rows, Speculation, propose, verify
from models import glm_moe_dsa
from models.glm_moe_dsa import Network
from models.params import Params

# End-of-text and stop ids a row can mask before min_tokens.
MAX_STOP_IDS = 32

_MOST = 2**31 - 1


@dataclasses.dataclass(frozen=True, order=True)
class StepShape:
    """Static shape of a step: T query tokens, B rows, P pages a row; drafts that a decode row verifies (0 where no row
    decodes) and that each row gets for the next step.
    """

    tokens: int
    rows: int
    pages: int
    verified: int = 0
    drafted: int = 0

    @property
    def size(self) -> int:
        """Length of the packed buffer, int32 words."""
        return self.rows * (len(_FIELDS) + MAX_STOP_IDS) + self.tokens + self.rows * self.pages


# One int32 word per row each; the floats and the seed as their bits.
_FLOATS = ("temperature", "top_p", "min_p", "presence", "frequency", "repetition")
_FIELDS = (
    *("row", "num_tokens", "start", "matched", "decode", "emit", "new", "keep_vocab", "limit", "following", "masked"),
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
        at["following"][b] = planned.next_token
        at["masked"][b] = planned.emit and request.grammar is not None
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
    at["biased"][b], at["keep_vocab"][b] = biased(request), uses_vocab(request)
    floats = (0.0 if p.greedy else p.temperature, p.top_p, p.min_p)
    floats += (p.presence_penalty, p.frequency_penalty, p.repetition_penalty)
    for name, value in zip(_FLOATS, floats, strict=True):
        at[name][b] = np.float32(value).view(np.int32)
    ids = stop_ids(request, eos_ids)
    stops[b, : len(ids)] = ids


def stop_ids(request: Request, eos_ids: tuple[int, ...]) -> list[int]:
    """Ids that end this request's text."""
    return sorted({*(() if request.params.ignore_eos else eos_ids), *request.params.stop_token_ids})


def biased(request: Request) -> bool:
    """Whether some tokens are favoured, or are not allowed at all."""
    return bool(request.params.logit_bias) or request.params.allowed_token_ids is not None


def uses_vocab(request: Request) -> bool:
    """Whether the request needs per-token state on the device."""
    p = request.params
    return biased(request) or p.presence_penalty != 0 or p.frequency_penalty != 0 or p.repetition_penalty != 1


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


def empty_state(num_rows: int, vocab: int, spec: Speculation | None = None) -> RowState:
    """State of rows that no request has."""
    most = 0 if spec is None else spec.num_drafts
    kept = most if spec is not None and spec.keeps_weights else 0
    return RowState(
        kv_len=jnp.zeros(num_rows, jnp.int32),
        last_token=jnp.zeros(num_rows, jnp.int32),
        limit=jnp.zeros(num_rows, jnp.int32),
        sampling=SamplingRows.neutral(num_rows, MAX_STOP_IDS),
        vocab=VocabState.empty(num_rows, vocab),
        drafts=jnp.zeros((num_rows, most), jnp.int32),
        num_drafts=jnp.zeros(num_rows, jnp.int32),
        draft_weights=jnp.zeros((num_rows, kept, vocab), jnp.float32),
        credit=jnp.zeros(num_rows, jnp.float32),
    )


def step(
    params: Params, cache: PagedCache, draft_cache: PagedCache | None, state: RowState, packed: jax.Array,
    allowed: jax.Array, shape: StepShape, net: Network, spec: Speculation | None,
) -> tuple[PagedCache, PagedCache | None, RowState, StepOutput]:  # fmt: skip
    """Reset new rows, run the target on all query tokens, verify drafts or sample a token, advance the rows, draft.

    `allowed [B, verified + 1, ceil(V / 32)]` uint32: see `verify`; read only if the plan has rows with a grammar.
    The caches and `state` are donated by the runner. Without a `spec` the draft's cache is left as it is.
    """
    fields, stops, tokens, pages = _unpack(packed, shape)
    at = dict(zip(_FIELDS, fields, strict=True))
    state = _reset(state, at, stops)
    rows, last_token = _take(state, at)
    batch = _batch(tokens, pages, last_token, rows, at["matched"], cache, shape)
    batch = glm_moe_dsa.with_boxes(batch, params, cache, net)
    hidden, cache, _ = glm_moe_dsa.forward(params, cache, batch, net)

    width = shape.verified + 1
    scored = jnp.where(rows.decode[:, None], rows.first[:, None] + jnp.arange(width), rows.last[:, None])
    logits = glm_moe_dsa.logits(params, hidden[jnp.clip(scored, 0, shape.tokens - 1).reshape(-1)], net)
    with jax.named_scope("sample"):
        new, accepted, credit = verify(
            logits.reshape(shape.rows, width, -1), rows, state, spec, net.cfg.vocab_size, allowed
        )
    state = _advance(state, rows, new, accepted, credit)
    drafts = jnp.zeros((shape.rows, 0), jnp.int32)
    if spec is not None:
        with jax.named_scope("draft"):
            following = _following(batch, rows, new, accepted, at["following"])
            draft_cache, drafts, weights = propose(
                params, draft_cache, state, batch, following, hidden, rows, accepted, shape.drafted, net, spec
            )
        state = _keep_drafts(state, rows, accepted, drafts, weights)
    return cache, draft_cache, state, StepOutput(new, accepted, drafts, logits, hidden)


def _advance(state: RowState, rows: Rows, new: jax.Array, accepted: jax.Array, credit: jax.Array) -> RowState:
    """The rows after their new tokens `[B, k + 1]`, of which `accepted [B]` count."""
    num_rows = len(state.kv_len)
    emitting = jnp.where(accepted > 0, rows.row, num_rows)
    newest = jnp.take_along_axis(new, jnp.maximum(accepted, 1)[:, None] - 1, axis=1)[:, 0]
    # A row that may sample no more has written its last token all the same.
    length = rows.start + jnp.where(rows.decode, jnp.maximum(accepted, 1), rows.num_tokens)
    length = jnp.minimum(length, rows.limit)
    ids = jnp.where(jnp.arange(new.shape[1]) < accepted[:, None], new, state.vocab.counts.shape[1])
    counts = state.vocab.counts.at[rows.row[:, None], ids].add(1, mode="drop")
    return state.replace(
        kv_len=state.kv_len.at[rows.row].set(length, mode="drop"),
        last_token=state.last_token.at[emitting].set(newest, mode="drop"),
        vocab=state.vocab.replace(counts=counts),
        credit=state.credit.at[rows.row].set(credit, mode="drop"),
    )


def _following(batch: ForwardBatch, rows: Rows, new: jax.Array, accepted: jax.Array, after: jax.Array) -> jax.Array:
    """The token after each of the step's tokens `[T]`, −1 if there is none.

    In a decode row the new tokens; in a chunk the next token of the chunk, and after its last one the token sampled
    here, or the known token `after [B]`.
    """
    t = jnp.arange(len(batch.tokens))
    offset = t - rows.first[batch.row_of]
    ends = jnp.where(rows.emit, new[:, 0], after)
    chunk = jnp.where(t == rows.last[batch.row_of], ends[batch.row_of], jnp.roll(batch.tokens, -1))
    decoded = new[batch.row_of, jnp.clip(offset, 0, new.shape[1] - 1)]
    decoded = jnp.where(offset < accepted[batch.row_of], decoded, -1)
    return jnp.where(rows.decode[batch.row_of], decoded, chunk)


def _keep_drafts(
    state: RowState, rows: Rows, accepted: jax.Array, drafts: jax.Array, weights: jax.Array | None
) -> RowState:
    row = jnp.where(accepted > 0, rows.row, len(state.kv_len))
    count = drafts.shape[1]
    state = state.replace(
        drafts=state.drafts.at[row, :count].set(drafts, mode="drop"),
        num_drafts=state.num_drafts.at[row].set(count, mode="drop"),
    )
    if weights is None:
        return state
    return state.replace(draft_weights=state.draft_weights.at[row, :count].set(weights, mode="drop"))


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
        num_drafts=put(state.num_drafts, jnp.zeros_like(row)),
        credit=put(state.credit, jnp.zeros_like(row)),
    )


def _take(state: RowState, at: dict[str, jax.Array]) -> tuple[Rows, jax.Array]:
    """The step's rows and their newest tokens `[B]`; padding rows ask for nothing."""
    row = at["row"]
    padding = row >= len(state.kv_len)

    def pick(x, empty=0):
        return jnp.where(padding.reshape(-1, *(1,) * (x.ndim - 1)), empty, x[row])

    ends = jnp.cumsum(at["num_tokens"])
    decode = at["decode"] > 0
    rows = Rows(
        row=row,
        start=jnp.where(decode, pick(state.kv_len), at["start"]),
        num_tokens=at["num_tokens"],
        first=ends - at["num_tokens"],
        last=jnp.maximum(ends - 1, 0),
        decode=decode,
        emit=at["emit"] > 0,
        limit=pick(state.limit),
        sampling=jax.tree.map(pick, state.sampling, SamplingRows.neutral(len(row), MAX_STOP_IDS)),
        drafts=pick(state.drafts),
        num_drafts=pick(state.num_drafts),
        weights=pick(state.draft_weights),
        credit=pick(state.credit),
        masked=at["masked"] > 0,
    )
    return rows, pick(state.last_token)


def _batch(
    tokens: jax.Array, pages: jax.Array, last_token: jax.Array, rows: Rows, matched: jax.Array, cache: PagedCache,
    shape: StepShape,
) -> ForwardBatch:  # fmt: skip
    """Positions and slots of the step's tokens, from the rows' lengths.

    A token's row is the last whose query starts at or before it; tokens after all queries, and those at or past their
    request's limit, are padding.
    """
    ends = rows.first + rows.num_tokens
    t = jnp.arange(shape.tokens)
    row_of = jnp.minimum(jnp.searchsorted(ends, t, side="right"), shape.rows - 1).astype(jnp.int32)
    offset = t - rows.first[row_of]
    position = rows.start[row_of] + offset
    real = (t < ends[-1]) & (position < rows.limit[row_of])
    slots = jnp.where(real, position, -1).astype(jnp.int32)
    # Rows of a matched prefix are in the cache already: the first row of a hit reads and is not written.
    written = jnp.where(position >= matched[row_of], slots, -1)
    decoded = jnp.concatenate([last_token[:, None], rows.drafts], axis=1)
    decoded = decoded[row_of, jnp.clip(offset, 0, decoded.shape[1] - 1)]
    return ForwardBatch(
        tokens=jnp.where(rows.decode[row_of], decoded, tokens),
        positions=jnp.maximum(slots, 0),
        slots=slots,
        write_slots=pool_slots(cache.latent.layout, pages, row_of, written),
        row_of=row_of,
        pages=pages,
    )


def prompt_scores(
    params: Params, hidden: jax.Array, places: jax.Array, tokens: jax.Array, net: Network, num: int
) -> tuple[jax.Array, ...]:
    """Log-probabilities of `tokens [N]`, each behind the step's token at `places [N]`, as `sampling.logprobs` gives them."""
    return logprobs(glm_moe_dsa.logits(params, hidden[places], net), tokens, net.cfg.vocab_size, num)


def seed_vocab(state: RowState, row: jax.Array, counts: jax.Array, seen: jax.Array, bias: jax.Array) -> RowState:
    """Sets the per-token state of one row before its first step: `counts`, `seen`, `bias`, each `[V]`."""
    v = state.vocab
    return state.replace(
        vocab=VocabState(v.counts.at[row].set(counts), v.prompt_seen.at[row].set(seen), v.bias.at[row].set(bias))
    )
