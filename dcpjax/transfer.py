"""Cached prefixes out of one engine and into another, whatever their meshes, pages and draft layouts.

Rows leave in token order, gathered from all ranks; none of the layout goes with them, so another layout can take them.
A prefix that is stored by what one rank holds would be 1/dcp of it, and would be read back wrong at another dcp.
"""

import dataclasses
import hashlib
import pathlib
import zipfile
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dcpjax.cache import PagedCache, Pool, pool_places
from dcpjax.errors import CacheFullError, CheckpointError, RequestError
from dcpjax.llm import LLM
from dcpjax.quant import plain
from models.params import Params

_NOT_ROWS = ("model", "weights", "token_ids")


@dataclasses.dataclass(frozen=True)
class CachedPrefix:
    """Rows of the first S tokens of a sequence.

    model: name of the model that computed them, and weights: what tells its weights from others.
    token_ids: `[S]` int32. latent `[N, S, W]` and index `[X, S, I]` of the
    target's layers; draft_latent and draft_index `[1, S, …]` of draft slots 0 … S − 1, or None from an engine that keeps
    no draft rows. Numpy, in the dtype of the cache.
    """

    model: str
    weights: str
    token_ids: np.ndarray
    latent: np.ndarray
    index: np.ndarray
    draft_latent: np.ndarray | None = None
    draft_index: np.ndarray | None = None

    def save(self, path: str | pathlib.Path) -> None:
        """Writes one .npz file."""
        arrays = {name: value for name, value in vars(self).items() if value is not None}
        # npz knows no bfloat16: rows go as their bytes, with the dtype beside them.
        dtype = self.latent.dtype
        rows = {name: x.view(np.uint8) for name, x in arrays.items() if name not in _NOT_ROWS}
        with open(path, "wb") as file:  # given a path, numpy would add an ending
            np.savez(file, **(arrays | rows), dtype=dtype.name)

    @classmethod
    def load(cls, path: str | pathlib.Path) -> "CachedPrefix":
        """Reads what `save` wrote. Raises `CheckpointError`."""
        try:
            with open(path, "rb") as file, np.load(file) as arrays:
                fields = {name: arrays[name] for name in arrays}
            model, weights, dtype = (str(fields.pop(name)) for name in ("model", "weights", "dtype"))
            token_ids = fields.pop("token_ids")
            return cls(model, weights, token_ids, **{name: x.view(np.dtype(dtype)) for name, x in fields.items()})
        except FileNotFoundError:
            raise CheckpointError(f"{path} is not there; give the path that CachedPrefix.save was given") from None
        except (OSError, EOFError, ValueError, KeyError, TypeError, zipfile.BadZipFile) as error:
            raise CheckpointError(f"{path} is not a cached prefix, or is damaged: export it again") from error


def export_prefix(llm: LLM, token_ids: list[int], *, cache_salt: str | None = None) -> CachedPrefix:
    """The cached rows of a prompt's first tokens, as many whole pages as there are. Raises `RequestError` if none."""
    prefix, runner = llm.engine.scheduler.prefix, llm.runner
    pages: list[int] = []
    if prefix is not None:
        keys = prefix.scheme.start(None, cache_salt)
        keys.extend(token_ids)
        pages = prefix.lookup(keys)
    if not pages:
        raise RequestError("token_ids: no page of this prompt is cached; generate with it first")
    slots = np.arange(len(pages) * runner.page_tokens)
    rows = [_read(pool, pages, slots) for pool in (runner.cache.latent, runner.cache.index)]
    if runner.spec is not None:
        rows += [_read(pool, pages, slots) for pool in (runner.draft_cache.latent, runner.draft_cache.index)]
    return CachedPrefix(llm.name, _fingerprint(llm), np.array(token_ids[: len(slots)], np.int32), *rows)


def import_prefix(llm: LLM, prefix: CachedPrefix, *, cache_salt: str | None = None) -> int:
    """Lets prompts that begin with these tokens hit them; returns how many tokens, whole pages of this engine.

    Raises `RequestError` if other weights computed them or draft rows that this engine needs are missing, and
    `CacheFullError` if too few pages are free.
    """
    scheduler, runner = llm.engine.scheduler, llm.runner
    _check(llm, prefix)
    count = len(prefix.token_ids) // runner.page_tokens
    if scheduler.prefix is None or not count:
        return 0
    keys = scheduler.prefix.scheme.start(None, cache_salt)
    keys.extend(prefix.token_ids[: count * runner.page_tokens].tolist())
    known = scheduler.prefix.lookup(keys)
    pages = scheduler.pool.take(count - len(known), share=known)
    if pages is None:
        raise CacheFullError(f"the prefix needs {count - len(known)} pages, {scheduler.pool.num_free} are free")
    slots = np.arange(len(known) * runner.page_tokens, count * runner.page_tokens)
    table = [*known, *pages]
    runner.cache = _write(runner.cache, (prefix.latent, prefix.index), table, slots)
    if runner.spec is not None:
        runner.draft_cache = _write(runner.draft_cache, (prefix.draft_latent, prefix.draft_index), table, slots)
    scheduler.prefix.publish(keys, table, len(known), count)
    scheduler.pool.retire(table, scheduler.epoch)
    return count * runner.page_tokens


def _check(llm: LLM, prefix: CachedPrefix) -> None:
    runner, size = llm.runner, len(prefix.token_ids)
    ids = np.asarray(prefix.token_ids)
    if not np.issubdtype(ids.dtype, np.integer) or (size and not 0 <= ids.min() <= ids.max() < llm.config.vocab_size):
        raise RequestError(f"prefix: its token_ids are not ids of this model's vocabulary of {llm.config.vocab_size}")
    if prefix.weights != _fingerprint(llm):
        raise RequestError(
            f"prefix: computed with other weights or another configuration (model {prefix.model!r}) than this engine's "
            f"({llm.name!r}); export it from an engine like this one"
        )
    pairs = [(prefix.latent, runner.cache.latent), (prefix.index, runner.cache.index)]
    if runner.spec is not None:
        if prefix.draft_latent is None or prefix.draft_index is None:
            raise RequestError(
                "prefix: it has no draft rows, so drafts after it would be bad; export it with drafts on"
            )
        pairs += [(prefix.draft_latent, runner.draft_cache.latent), (prefix.draft_index, runner.draft_cache.index)]
    for rows, pool in pairs:
        want = (pool.data.shape[0], size, pool.data.shape[3])
        if rows.shape != want or rows.dtype != pool.data.dtype:
            raise RequestError(
                f"prefix: rows {rows.dtype.name}{list(rows.shape)}, this engine's cache has "
                f"{pool.data.dtype.name}{list(want)}; it was exported by another model or kv_cache_dtype"
            )


def _fingerprint(llm: LLM) -> str:
    """The same for the same weights and configuration, however they are padded and dealt out to devices."""
    sums = np.asarray(_bit_sums(llm.params)).tobytes()
    return hashlib.sha256(repr(llm.config).encode() + sums).hexdigest()[:32]


@jax.jit
def _bit_sums(params: Params) -> jax.Array:
    """Sums of the bits of each weight, modulo 2^32: no order and no zero of the padding changes them.

    Quantised ones are widened first: how large a scale's block is depends on the mesh, its values do not.
    """
    words = {2: jnp.uint16, 4: jnp.uint32}
    leaves = jax.tree.leaves(plain(params, jnp.float32))
    bits = (jax.lax.bitcast_convert_type(x, words[x.dtype.itemsize]) for x in leaves)
    return jnp.stack([jnp.sum(x, dtype=jnp.uint32) for x in bits])


def _read(pool: Pool, pages: list[int], slots: np.ndarray) -> np.ndarray:
    page, column = pool_places(pool.layout, pages, slots)
    return np.asarray(pool.data[:, page, column])


def _write(cache: PagedCache, rows: tuple[Any, Any], pages: list[int], slots: np.ndarray) -> PagedCache:
    """`cache` with the rows of `slots`, in place."""
    pools = []
    for pool, values in zip((cache.latent, cache.index), rows, strict=True):
        page, column = pool_places(pool.layout, pages, slots)
        put = jax.jit(_put, donate_argnums=0, out_shardings=pool.data.sharding)
        pools.append(pool.replace(data=put(pool.data, page, column, values[:, slots])))
    return cache.replace(latent=pools[0], index=pools[1])


def _put(data: jax.Array, page: jax.Array, column: jax.Array, values: jax.Array) -> jax.Array:
    return data.at[:, page, column].set(values)
