"""Speculation with the draft layer: which drafts the target accepts, and the drafts for the next step.

Everything here runs inside the one jitted step. A decode row brings its newest token and k drafts; the target scores all
of them at once, `verify` keeps a prefix, and `propose` writes the draft's rows of everything verified and drafts again.

Two rules of acceptance. *coupled* (default): a draft is accepted iff it equals the target's own sample at its position.
Draft and target are drawn with the same noise, so they agree often, and the text is the one that would come without
drafts. *rejection* (Leviathan et al. 2023, Chen et al. 2023): accepted with probability min(1, p/q), else a token
from what p has above q; the same distribution, another text.
"""

import dataclasses
import math
import numbers
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from dcpjax.attention import Selection
from dcpjax.batch import ForwardBatch, RowState
from dcpjax.cache import PagedCache, pool_slots
from dcpjax.errors import ConfigError
from dcpjax.sampling import ACCEPT, DRAFT, SamplingRows, adjust, log_weights, noise, restrict, sample, uniform
from models import glm_moe_dsa, mtp
from models.glm_moe_dsa import Network
from models.params import Params

# Drafts that are refused above, and those that seldom pay above.
MOST_DRAFTS, USUAL_DRAFTS = 16, 5
# What `speculative_config` may say.
KEYS = ("method", "num_speculative_tokens", "draft_kv", "acceptance", "pin", "adaptive")


@dataclasses.dataclass(frozen=True)
class Speculation:
    """How to speculate. Static. Raises `ConfigError`.

    num_drafts: k, the most drafts of a step; 0 only keeps the draft's cache up to date. acceptance: "coupled" or
    "rejection". pin: None, or the mean acceptance length (1 … k + 1) that is forced whatever the target says: for
    benchmarks only, the text is then not the model's. adaptive: whether a step may use fewer drafts.
    """

    num_drafts: int = 0
    acceptance: str = "coupled"
    pin: float | None = None
    adaptive: bool = False

    def __post_init__(self):
        k = self.num_drafts
        if isinstance(k, bool) or not isinstance(k, numbers.Integral) or not 0 <= k <= MOST_DRAFTS:
            raise ConfigError(
                f"speculative_config: num_speculative_tokens must be a whole number, 0 to {MOST_DRAFTS}, got {k!r}"
            )
        if self.acceptance not in ("coupled", "rejection"):
            raise ConfigError(
                f"speculative_config: acceptance must be 'coupled' or 'rejection', got {self.acceptance!r}"
            )
        if not isinstance(self.adaptive, bool):
            raise ConfigError(f"speculative_config: adaptive must be true or false, got {self.adaptive!r}")
        if self.pin is not None and not _pinnable(self.pin, k):
            raise ConfigError(
                f"speculative_config: pin is a mean acceptance length, 1 to {k + 1} with {k} drafts, got {self.pin!r}"
            )

    @classmethod
    def read(cls, config: Mapping[str, Any] | None) -> tuple["Speculation | None", str]:
        """A user's `speculative_config` → how to speculate (None without one) and where the draft's cache lies."""
        if config is None:
            return None, "sharded"
        if not isinstance(config, Mapping):
            raise ConfigError(f"speculative_config: give a mapping with {', '.join(KEYS)}, got {config!r:.100}")
        unknown = sorted(map(str, set(config) - set(KEYS)))
        if unknown:
            raise ConfigError(f"speculative_config: unknown keys {unknown}; allowed: {', '.join(KEYS)}")
        if config.get("method", "mtp") != "mtp":
            raise ConfigError(f"speculative_config: method {config['method']!r} is not known; use 'mtp'")
        spec = cls(
            num_drafts=config.get("num_speculative_tokens", 1),
            acceptance=config.get("acceptance", "coupled"),
            pin=config.get("pin"),
            adaptive=config.get("adaptive", False),
        )
        return spec, config.get("draft_kv", "sharded")

    @property
    def levels(self) -> tuple[int, ...]:
        """Numbers of drafts that a step may have."""
        return tuple(range(self.num_drafts + 1)) if self.adaptive else (self.num_drafts,)

    @property
    def keeps_weights(self) -> bool:
        """Whether verification needs the distribution that each draft was drawn from."""
        return self.acceptance == "rejection" and self.num_drafts > 0 and self.pin is None


def _pinnable(pin: float, k: int) -> bool:
    number = isinstance(pin, numbers.Real) and not isinstance(pin, bool)
    return number and math.isfinite(pin) and 1 <= pin <= k + 1


@struct.dataclass
class Rows:
    """One step's rows on the device, `[B]` int32 each where nothing else is said.

    row: row slot, R for padding. start: position of the first query token. num_tokens: query tokens. first, last: of
    the step's T tokens the row's first and last one. decode, emit: bool. limit: tokens at most. drafts `[B, k]`: what
    a decode row verifies, of which `num_drafts` are real; weights `[B, k, V]` float32: log-weights they were drawn with.
    credit: float32, see `RowState`. masked: bool, whether a grammar says which tokens are allowed.
    """

    row: jax.Array
    start: jax.Array
    num_tokens: jax.Array
    first: jax.Array
    last: jax.Array
    decode: jax.Array
    emit: jax.Array
    limit: jax.Array
    sampling: SamplingRows
    drafts: jax.Array
    num_drafts: jax.Array
    weights: jax.Array
    credit: jax.Array
    masked: jax.Array

    @property
    def position(self) -> jax.Array:
        """`[B]` int32: index in its sequence of the first token that the step samples."""
        return self.start + jnp.where(self.decode, 1, self.num_tokens)


def verify(
    logits: jax.Array,
    rows: Rows,
    state: RowState,
    spec: Speculation | None,
    vocab_size: int,
    allowed: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """What each row gets from the target's `logits [B, k + 1, V]`.

    Row j of a decode row is scored after drafts 0 … j − 1; penalties count them as generated. Returns tokens
    `[B, k + 1]`, of which the first `accepted [B]` count (accepted drafts, then one of the target's own; 0 in rows that
    emit nothing; cut at the limit), and the pin's credit `[B]`. `allowed [B, k + 1, ceil(V / 32)]` uint32: tokens that may
    follow drafts 0 … j − 1, in rows that are `masked`; None: no row is. A draft that they forbid is never accepted.
    """
    batch, width, _ = logits.shape
    k = width - 1
    flat = _repeat(rows.sampling, width)
    position = rows.position[:, None] + jnp.arange(width)
    # Drafts before j, −1 from j on: what `counts` does not know yet.
    before = jnp.where(jnp.arange(k) < jnp.arange(width)[:, None], rows.drafts[:, None, :k], -1)
    adjusted = adjust(
        logits.reshape(batch * width, -1),
        flat,
        state.vocab,
        position.reshape(-1),
        vocab_size,
        vocab_row=jnp.repeat(rows.row, width),
        also=before.reshape(batch * width, k),
    )
    if allowed is not None:
        adjusted = restrict(adjusted, allowed.reshape(batch * width, -1), jnp.repeat(rows.masked, width))
    valid = jnp.arange(k) < jnp.where(rows.decode, rows.num_drafts, 0)[:, None]
    drafts, credit = rows.drafts[:, :k], rows.credit
    if spec is not None and spec.keeps_weights and k > 0:
        tokens, count = _reject(adjusted.reshape(logits.shape), rows, drafts, valid, position)
    else:
        own = sample(adjusted, flat, position.reshape(-1)).reshape(batch, width)
        if spec is not None and spec.pin is not None:
            count, credit = _pinned(spec.pin, rows, valid)
        else:
            count = _leading((drafts == own[:, :k]) & valid)
        tokens = jnp.where(jnp.arange(width) < count[:, None], jnp.pad(drafts, ((0, 0), (0, 1))), own)
    room = jnp.maximum(rows.limit - rows.position, 0)
    accepted = jnp.where(rows.emit, jnp.minimum(count + 1, room), 0)
    return tokens.astype(jnp.int32), accepted.astype(jnp.int32), credit


def _repeat(rows: SamplingRows, times: int) -> SamplingRows:
    return jax.tree.map(lambda x: jnp.repeat(x, times, axis=0), rows)


def _leading(good: jax.Array) -> jax.Array:
    """How many of `good [B, k]` hold before the first that does not."""
    return jnp.sum(jnp.cumprod(good.astype(jnp.int32), axis=1), axis=1)


def _pinned(pin: float, rows: Rows, valid: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Accepted drafts of the least variance with mean `pin` − 1: each step takes the whole part of what is due."""
    credit = rows.credit + jnp.float32(pin - 1)
    count = jnp.minimum(jnp.floor(credit + 1e-3).astype(jnp.int32), jnp.sum(valid, axis=1))
    return count, jnp.where(rows.decode & rows.emit, credit - count, rows.credit)


def _reject(
    adjusted: jax.Array, rows: Rows, drafts: jax.Array, valid: jax.Array, position: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Rejection sampling of `drafts [B, k]` against `adjusted [B, k + 1, V]`: tokens `[B, k + 1]`, accepted drafts."""
    batch, width, vocab = adjusted.shape
    k = width - 1
    flat = _repeat(rows.sampling, width)
    p = jax.nn.softmax(log_weights(adjusted.reshape(-1, vocab), flat).reshape(adjusted.shape), axis=-1)
    q = jnp.where(valid[..., None], jax.nn.softmax(rows.weights[:, :k], axis=-1), 0)
    at = drafts[..., None]
    p_draft, q_draft = (jnp.take_along_axis(x, at, axis=-1)[..., 0] for x in (p[:, :k], q))
    u = uniform(_repeat(rows.sampling, k), position[:, :k].reshape(-1), jnp.zeros(1, jnp.int32), ACCEPT)
    count = _leading((u.reshape(batch, k) * q_draft < p_draft) & valid)
    stop = count[:, None, None]
    p_stop = jnp.take_along_axis(p, stop, axis=1)[:, 0]
    q_stop = jnp.take_along_axis(jnp.pad(q, ((0, 0), (0, 1), (0, 0))), stop, axis=1)[:, 0]
    rest = jnp.maximum(p_stop - q_stop, 0)
    # Where p and q are equal but for rounding nothing is left, and nothing was to be rejected.
    rest = jnp.where(jnp.sum(rest, axis=-1, keepdims=True) > 0, rest, p_stop)
    gumbel = noise(rows.sampling, rows.position + count, jnp.arange(vocab, dtype=jnp.int32))
    own = jnp.argmax(jnp.log(rest) + gumbel, axis=-1)
    drafts = jnp.pad(drafts, ((0, 0), (0, 1)))
    return jnp.where(jnp.arange(width) < count[:, None], drafts, own[:, None]), count


def propose(
    params: Params, cache: PagedCache, state: RowState, batch: ForwardBatch, following: jax.Array,
    hidden: jax.Array, rows: Rows, accepted: jax.Array, num_drafts: int, net: Network, spec: Speculation,
) -> tuple[PagedCache, jax.Array, jax.Array | None]:  # fmt: skip
    """Writes the draft rows of all verified tokens, then makes `num_drafts` drafts for each row that emitted.

    `following [T]` int32 is the token after each of the step's tokens, −1 where it is not known: rejected drafts, the
    end of a chunk without a next token. Returns the draft's cache, drafts `[B, k]`, and for rejection the log-weights
    they were drawn with `[B, k, V]`. With `num_drafts` 0 only the rows are written.
    """
    limit = rows.limit[batch.row_of]
    slots = batch.slots + 1
    real = (batch.slots >= 0) & (following >= 0) & (slots < limit)
    out, _, cache, selection = mtp.draft(params, cache, _draft_batch(batch, following, slots, real, cache), hidden, net)
    if num_drafts == 0:
        return cache, jnp.zeros((len(rows.row), 0), jnp.int32), None

    active = accepted > 0
    newest = jnp.where(rows.decode, rows.first + jnp.maximum(accepted, 1) - 1, rows.last)
    known = rows.position + accepted  # tokens known; the first draft has this index
    h = out[newest]
    drafts = jnp.full((len(rows.row), num_drafts), -1, jnp.int32)
    token, weight = _draw(params, h, drafts, known, rows, state, net, spec)
    frozen = None
    if net.cfg.share_selection:
        # Nothing is written after the first iteration, so the rows it selected are all there is.
        frozen = Selection(selection.slots[newest], selection.rows[:, newest], selection.count[:, newest])

    def iterate(carry, j):
        cache, h, drafts = carry
        slot = known - 1 + j
        own = jnp.arange(len(slot), dtype=jnp.int32)
        one = ForwardBatch(drafts[:, j - 1], slot - 1, slot, slot, own, batch.pages, batch.boxes)
        one = _draft_batch(one, drafts[:, j - 1], slot, active & (slot < rows.limit), cache, write=frozen is None)
        h, _, cache, _ = mtp.draft(params, cache, one, h, net, frozen)
        token, weight = _draw(params, h, drafts, known + j, rows, state, net, spec)
        return (cache, h, drafts.at[:, j].set(token)), weight

    (cache, _, drafts), weights = jax.lax.scan(
        iterate, (cache, h, drafts.at[:, 0].set(token)), jnp.arange(1, num_drafts)
    )
    if weight is not None:
        weight = jnp.concatenate([weight[:, None], jnp.swapaxes(weights, 0, 1)], axis=1)
    return cache, drafts, weight


def _draft_batch(
    batch: ForwardBatch, tokens: jax.Array, slots: jax.Array, real: jax.Array, cache: PagedCache, write: bool = True
) -> ForwardBatch:
    """The draft's rows: `tokens` joined with the hidden states of `batch`'s tokens, in draft slots `slots`."""
    slots = jnp.where(real, slots, -1).astype(jnp.int32)
    layout = cache.latent.layout
    written = pool_slots(layout, batch.pages, batch.row_of, slots if write else jnp.full_like(slots, -1))
    return batch.replace(
        tokens=jnp.where(real, tokens, 0),
        positions=jnp.maximum(slots - cache.first_slot, 0),
        slots=slots,
        write_slots=written,
    )


def _draw(params, h, drafts, position, rows: Rows, state: RowState, net: Network, spec: Speculation):
    """One draft a row from hidden states `h [B, D]`, as the request would sample it; with its log-weights if kept."""
    adjusted = adjust(
        glm_moe_dsa.logits(params, h, net),
        rows.sampling,
        state.vocab,
        position,
        net.cfg.vocab_size,
        vocab_row=rows.row,
        also=drafts,
    )
    if not spec.keeps_weights:
        return sample(adjusted, rows.sampling, position), None
    return sample(adjusted, rows.sampling, position, DRAFT), log_weights(adjusted, rows.sampling)
