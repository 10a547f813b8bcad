"""Looking inside: one sequence through the paged, sharded path, with its activations.

Traces use free pages of the running engine's own pools, read nothing that was there and leave nothing behind.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from dcpjax import attention
from dcpjax.batch import ForwardBatch
from dcpjax.cache import PagedCache, pool_slots
from dcpjax.errors import ConfigError
from dcpjax.pallas_kernels.topk import NO_SLOT
from dcpjax.runner import Runner
from models import glm_moe_dsa, mtp
from models.glm_moe_dsa import Network, full_layer_numbers


@dataclasses.dataclass(frozen=True)
class Parts:
    """What attention merges in each of N layers: every rank's attention to its own selected rows, numpy.

    out `[N, ranks, S, H, L]` float32, L values of a latent row; lse `[N, ranks, S, H]` float32, natural log; count
    `[N, ranks, S]` int32 selected rows on the rank. Where it has none: output 0 and LSE −inf. One rank if all hold all rows.
    """

    out: np.ndarray
    lse: np.ndarray
    count: np.ndarray


@dataclasses.dataclass(frozen=True)
class Trace:
    """Activations of S tokens, numpy float32. `mtp_*` are None unless a next token was given, parts unless asked for.

    logits `[S, V]`; hidden_states `[N+1, S, D]` (embeddings, then after each layer); final_hidden `[S, D]` (after the
    final norm); latent `[N, S, W]` as cached, 8-bit values times their scales;
    topk: full layer → `[S, K]` int32 positions, ascending, −1 past the end.
    mtp_logits `[S, V]`, mtp_hidden and mtp_hidden_prenorm `[S, D]`, mtp_topk `[S, K]`: row i joins hidden state i with
    token i + 1 (the last with the next token given).
    """

    logits: np.ndarray
    hidden_states: np.ndarray
    final_hidden: np.ndarray
    latent: np.ndarray
    topk: dict[int, np.ndarray]
    mtp_logits: np.ndarray | None = None
    mtp_hidden: np.ndarray | None = None
    mtp_hidden_prenorm: np.ndarray | None = None
    mtp_topk: np.ndarray | None = None
    parts: Parts | None = None


@dataclasses.dataclass(frozen=True)
class Draft:
    """k recursive greedy drafts after the target's greedy next token, numpy: tokens `[k]` int32, logits `[k, V]` and
    hidden `[k, D]` float32."""

    tokens: np.ndarray
    logits: np.ndarray
    hidden: np.ndarray


def _target(params, cache: PagedCache, tokens, start, length, pages, *, net: Network):
    """One chunk `[T]` of which `length` tokens are real, from position `start` on."""
    batch = glm_moe_dsa.with_boxes(_batch(tokens, start, length, pages, cache, 0), params, cache, net)
    hidden, cache, seen = glm_moe_dsa.forward(params, cache, batch, net, capture=True)
    return cache, (glm_moe_dsa.logits(params, hidden, net), hidden, seen.states, seen.slots)


def _draft_rows(params, cache: PagedCache, tokens, hidden, start, length, pages, selection, *, net: Network):
    """Draft rows of a chunk; with a selection, one frozen iteration that writes nothing."""
    batch = glm_moe_dsa.with_boxes(_batch(tokens, start, length, pages, cache, 1), params, cache, net)
    if selection is not None:
        batch = batch.replace(write_slots=jnp.full_like(batch.write_slots, cache.latent.layout.nowhere))
    out, inner, cache, selection = mtp.draft(params, cache, batch, hidden, net, selection)
    return cache, (glm_moe_dsa.logits(params, out, net), out, inner, selection)


def _layer_parts(params, cache: PagedCache, state, slots, layer, start, length, pages, *, net: Network):
    """Parts of one layer for a chunk whose rows are in the cache: `state [T, D]` before the layer, selected `slots [T, K]`."""
    batch = _batch(jnp.zeros(len(state), jnp.int32), start, length, pages, cache, 0)
    w = jax.tree.map(lambda x: x[layer], params.layers.attention)
    _, _, q = glm_moe_dsa.queries(w, state, batch.positions, net)
    cfg = net.cfg
    return attention.parts(q, cache.latent, layer, slots, batch, cfg.kv_rank, cfg.softmax_scale, net.options, net.plan)


def _batch(tokens, start, length, pages, cache: PagedCache, shift: int) -> ForwardBatch:
    """A single request's chunk; its cache rows lie `shift` slots after its positions."""
    t = jnp.arange(len(tokens))
    slots = jnp.where(t < length, start + t + shift, -1)
    row_of = jnp.zeros(len(tokens), jnp.int32)
    return ForwardBatch(
        tokens=tokens,
        positions=jnp.where(t < length, start + t, 0),
        slots=slots,
        write_slots=pool_slots(cache.latent.layout, pages, row_of, slots),
        row_of=row_of,
        pages=pages,
    )


def _compile(function, cache: PagedCache):
    """Jitted with the cache donated and put back with its sharding, as the runner's step expects it."""
    pools = jax.tree.map(lambda x: x.sharding, cache)
    return jax.jit(function, static_argnames=("net",), donate_argnames=("cache",), out_shardings=(pools, None))


class Tracer:
    """Runs traces on a runner's caches with pages lent by the caller."""

    def __init__(self, runner: Runner):
        self.runner = runner
        self._target = _compile(_target, runner.cache)
        self._layer_parts = jax.jit(_layer_parts, static_argnames="net")
        self._draft_rows = None if runner.draft_cache is None else _compile(_draft_rows, runner.draft_cache)

    def num_pages(self, num_tokens: int) -> int:
        """Pages a trace of `num_tokens` borrows."""
        return -(-num_tokens // self.runner.page_tokens)

    def trace(self, token_ids: list[int], next_token: int | None, pages: list[int], parts: bool = False) -> Trace:
        """See `Trace`. `pages` hold the tokens, and one more slot if a next token is given."""
        cfg, size = self.runner.net.cfg, len(token_ids)
        logits, hidden, states, slots = self._run_target(token_ids, pages)
        found = Trace(
            logits=logits[:, : cfg.vocab_size],
            hidden_states=states,
            final_hidden=hidden,
            latent=self._read_latent(pages, size),
            topk={layer: _positions(slots[x], 0) for x, layer in enumerate(full_layer_numbers(cfg))},
            parts=self._run_parts(states, slots, pages) if parts else None,
        )
        if next_token is None:
            return found
        chunks = self._run_draft([*token_ids[1:], next_token], hidden, pages)
        logits, out, inner, slots = (np.concatenate(chunk) for chunk in zip(*chunks, strict=True))
        return dataclasses.replace(
            found,
            mtp_logits=logits[:, : cfg.vocab_size],
            mtp_hidden=out,
            mtp_hidden_prenorm=inner,
            mtp_topk=_positions(slots, 1),
        )

    def draft(self, token_ids: list[int], k: int, pages: list[int]) -> Draft:
        """See `Draft`. The selection is frozen after the first draft iff the model shares it among iterations."""
        net, runner = self.runner.net, self.runner
        logits, hidden, _, _ = self._run_target(token_ids, pages)
        size, vocab = len(token_ids), net.cfg.vocab_size
        token = int(np.argmax(logits[-1, :vocab]))
        if size > 1:
            self._run_draft(token_ids[1:], hidden[:-1], pages)
        state, selection, table = hidden[-1:], None, self._table(pages)
        tokens, all_logits, all_hidden = [], [], []
        for i in range(k):
            runner.draft_cache, (logits, out, _, used) = self._draft_rows(
                runner.params,
                runner.draft_cache,
                np.array([token], np.int32),
                state,
                np.int32(size - 1 + i),
                np.int32(1),
                table,
                selection,
                net=net,
            )
            selection = used if net.cfg.share_selection else None
            state, scores = out, np.asarray(logits)[0, :vocab].astype(np.float32)
            token = int(np.argmax(scores))
            tokens.append(token)
            all_logits.append(scores)
            all_hidden.append(np.asarray(out)[0].astype(np.float32))
        width, d = vocab, net.cfg.hidden_size
        return Draft(
            np.array(tokens, np.int32),
            np.array(all_logits, np.float32).reshape(k, width),
            np.array(all_hidden, np.float32).reshape(k, d),
        )

    def _chunks(self, num_tokens: int):
        """(start, length, padded length) of the chunks; lengths are powers of two, so few shapes are compiled."""
        most = self.runner.max_num_batched_tokens
        for start in range(0, num_tokens, most):
            length = min(most, num_tokens - start)
            yield start, length, min(most, max(16, 1 << (length - 1).bit_length()))

    def _table(self, pages: list[int]) -> np.ndarray:
        width = next((p for p in self.runner.buckets.pages if p >= len(pages)), None)
        if width is None:
            raise ConfigError(f"a trace of {len(pages)} pages is longer than max_model_len; use a shorter sequence")
        return np.array([[*pages, *[0] * (width - len(pages))]], np.int32)

    def _run_target(self, token_ids: list[int], pages: list[int]) -> tuple[np.ndarray, ...]:
        runner, table, parts = self.runner, self._table(pages), []
        for start, length, padded in self._chunks(len(token_ids)):
            tokens = _padded(np.array(token_ids[start : start + length], np.int32), padded)
            runner.cache, out = self._target(
                runner.params, runner.cache, tokens, np.int32(start), np.int32(length), table, net=runner.net
            )
            logits, hidden, states, slots = (np.asarray(x) for x in out)
            parts.append((logits[:length], hidden[:length], states[:, :length], slots[:, :length]))
        logits, hidden, states, slots = zip(*parts, strict=True)
        wide = (np.concatenate(x, axis).astype(np.float32) for x, axis in ((logits, 0), (hidden, 0), (states, 1)))
        return *wide, np.concatenate(slots, 1)

    def _run_parts(self, states: np.ndarray, slots: np.ndarray, pages: list[int]) -> Parts:
        """Of all layers; the rows of the trace are still in the cache. `states [N + 1, S, D]`, `slots [X, S, K]`."""
        runner, table, found = self.runner, self._table(pages), []
        cfg, full = runner.net.cfg, -1
        for layer, kind in enumerate(cfg.layers):
            full += kind.full
            chunks = []
            for start, length, padded in self._chunks(states.shape[1]):
                own = slice(start, start + length)
                state = _padded(states[layer, own], padded).astype(runner.params.norm.dtype)
                chosen = _padded(slots[full, own], padded)
                where = np.int32(layer), np.int32(start), np.int32(length), table
                out = self._layer_parts(runner.params, runner.cache, state, chosen, *where, net=runner.net)
                chunks.append([np.asarray(x)[:, :length] for x in out])
            found.append([np.concatenate(chunk, 1) for chunk in zip(*chunks, strict=True)])
        out, lse, count = (np.stack(x) for x in zip(*found, strict=True))
        return Parts(out[:, :, :, : cfg.num_heads], lse[..., : cfg.num_heads], count)

    def _run_draft(self, token_ids: list[int], hidden: np.ndarray, pages: list[int]) -> list[tuple[np.ndarray, ...]]:
        runner, table, parts = self.runner, self._table(pages), []
        if runner.draft_cache is None:
            raise ConfigError("this checkpoint has no MTP layer; call trace without next_token")
        for start, length, padded in self._chunks(len(token_ids)):
            tokens = _padded(np.array(token_ids[start : start + length], np.int32), padded)
            state = _padded(hidden[start : start + length], padded).astype(runner.params.norm.dtype)
            runner.draft_cache, out = self._draft_rows(
                runner.params, runner.draft_cache, tokens, state, np.int32(start), np.int32(length), table, None,
                net=runner.net,
            )  # fmt: skip
            logits, out_hidden, inner, selection = out
            arrays = (logits, out_hidden, inner)
            parts.append(
                (*(np.asarray(x)[:length].astype(np.float32) for x in arrays), np.asarray(selection.slots)[:length])
            )
        return parts

    def _read_latent(self, pages: list[int], num_tokens: int) -> np.ndarray:
        page, column = self.runner.places(pages, np.arange(num_tokens))
        pool = self.runner.cache.latent
        return np.asarray(pool.record.unpack(pool.data[:, page, column])).astype(np.float32)


def _padded(x: np.ndarray, size: int) -> np.ndarray:
    return np.concatenate([x, np.zeros((size - len(x), *x.shape[1:]), x.dtype)])


def _positions(slots: np.ndarray, first_slot: int) -> np.ndarray:
    """Slots → positions; slots of the draft lie one after the position of their hidden state."""
    return np.where(slots == NO_SLOT, -1, slots - first_slot).astype(np.int32)
