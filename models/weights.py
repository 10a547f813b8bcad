"""Checkpoint folders → parameters on the mesh.

Names, shapes and splits come from `params.declare`, formats from the tensors themselves. One array after another is filled:
each device gets its own part of each tensor straight from the mapped file, padded with zeros, and a stack too large for
host memory goes to the devices layer by layer.
"""

import concurrent.futures
import dataclasses
import functools
import math
import pathlib
import zlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dcpjax.mesh import MeshPlan
from dcpjax.quant import QArray
from models.checkpoint import Checkpoint, entries
from models.config import ModelConfig
from models.params import Params, Weight, declare, is_weight, map_weights
from models.quantise import checked, factor_of, rows_of
from models.stored import Format, arrays

# Files are read by so many threads: one alone waits for the disk half of the time.
_READERS = 8

Spans = tuple[range, ...]


def load(
    folder: str | pathlib.Path, cfg: ModelConfig, plan: MeshPlan, dtype: jnp.dtype, *, chunk_bytes: int = 1 << 30
) -> Params:
    """`place` of the checkpoint in `folder`. Raises `CheckpointError`, see `Checkpoint.open`."""
    return place(Checkpoint.open(folder, cfg), cfg, plan, dtype, chunk_bytes=chunk_bytes)


def place(
    checkpoint: Checkpoint, cfg: ModelConfig, plan: MeshPlan, dtype: jnp.dtype, *, chunk_bytes: int = 1 << 30,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Params:  # fmt: skip
    """Parameters padded and sharded for `plan`: plain ones in `dtype` (router bias: float32), quantised ones as stored.

    Host memory holds one array of at most `chunk_bytes`, or two layers of one larger array. `progress(done, total)` is
    called after each, with bytes. Raises `CheckpointError` for scales that are no numbers.
    """
    declared = declare(cfg, plan.pad)
    targets = map_weights(lambda w: arrays(w, checkpoint.form(w), plan, dtype), declared)
    total = sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(targets))
    threads = concurrent.futures.ThreadPoolExecutor
    with threads(_READERS) as pool, threads(1) as ahead:
        loader = _Loader(checkpoint, pool, ahead, chunk_bytes, _Count(total, progress))
        return jax.tree.map(loader.leaf, declared, targets, is_leaf=is_weight)


def dummy(cfg: ModelConfig, plan: MeshPlan, dtype: jnp.dtype) -> Params:
    """Parameters without a checkpoint, of the shapes, dtypes and places that plain ones get from `place`: matrices of the
    variance 1 / columns, norms 1, biases 0, padding 0. Each device makes its own part; the same every time."""
    declared = declare(cfg, plan.pad)
    targets = map_weights(lambda w: arrays(w, None, plan, dtype), declared)

    def make() -> Params:
        return jax.tree.map(_dummy_leaf, declared, targets, is_leaf=is_weight)

    return jax.jit(make, out_shardings=jax.tree.map(lambda target: target.sharding, targets))()


def _dummy_leaf(w: Weight, target: jax.ShapeDtypeStruct) -> jax.Array:
    """Values are a hash of their indices: unlike drawing, that is one cheap expression, of any part of the array."""
    places = [jax.lax.broadcasted_iota(jnp.uint32, target.shape, axis) for axis in range(len(target.shape))]
    if w.start in ("one", "zero"):
        values = jnp.full(target.shape, float(w.start == "one"), jnp.float32)
    else:
        mixed = jnp.full(target.shape, zlib.crc32(w.name.encode()), jnp.uint32)
        for place in places:
            mixed = (mixed ^ place) * jnp.uint32(0x9E3779B1)
            mixed ^= mixed >> 15
        uniform = (mixed.astype(jnp.float32) * 2.0**-31 - 1) * math.sqrt(3)
        values = uniform * (1.0 if w.start == "normal" else w.size[-1] ** -0.5)
    for place, size in zip(places, w.stack + w.size, strict=True):
        values = jnp.where(place < size, values, 0)
    return values.astype(target.dtype)


@dataclasses.dataclass
class _Count:
    """Bytes that are done."""

    total: int
    progress: Callable[[int, int], None]
    done: int = 0

    def add(self, nbytes: int) -> None:
        self.done += nbytes
        self.progress(self.done, self.total)


@dataclasses.dataclass(frozen=True)
class _Loader:
    checkpoint: Checkpoint
    pool: concurrent.futures.Executor
    ahead: concurrent.futures.Executor
    chunk_bytes: int
    count: _Count

    def leaf(self, w: Weight, target: Any) -> Any:
        """One leaf on the mesh, as `target` describes it."""
        if not isinstance(target, QArray):
            return self._array(w, target, lambda name, spans: self._plain(w, name, spans))
        form = self.checkpoint.form(w)
        factor = target.factor
        return target.replace(
            values=self._array(w, target.values, lambda name, spans: self._values(w, form, name, spans)),
            scales=self._array(w, target.scales, lambda name, spans: self._scales(w, form, target.block, name, spans)),
            factor=None if factor is None else self._array(w, factor, lambda name, _: self._factor(w, name)),
        )

    def _array(self, w: Weight, target: jax.ShapeDtypeStruct, read: Callable[[str, Spans], np.ndarray]) -> jax.Array:
        """One array. `read(name, spans)` gives what a tensor has within spans of the dimensions behind the stack."""

        def make(w: Weight) -> jax.Array:
            lead = (len(w.layers),) if w.layers else ()
            shape = lead + target.shape[len(lead) :]

            # Devices that hold the same part ask for it one after another; it is read once.
            @functools.lru_cache(maxsize=1)
            def part(spans: Spans) -> np.ndarray:
                return self._fill(w, spans, target.dtype, read)

            return jax.make_array_from_callback(
                shape,
                target.sharding,
                lambda index: part(tuple(range(*s.indices(n)) for s, n in zip(index, shape, strict=True))),
            )

        nbytes = math.prod(target.shape) * target.dtype.itemsize
        if len(w.layers) < 2 or nbytes <= self.chunk_bytes:
            return self._finish(make(w), nbytes)
        stack = jax.jit(lambda: jnp.zeros(target.shape, target.dtype), out_shardings=target.sharding)()
        layers = [dataclasses.replace(w, layers=(layer,)) for layer in w.layers]
        following = self.ahead.submit(make, layers[0])
        for at, after in enumerate([*layers[1:], None]):
            # One layer is read while the one before travels, and no more: waiting for each bounds what the host holds.
            layer = following.result()
            following = self.ahead.submit(make, after) if after else None
            stack = self._finish(_set_layer(stack, layer, np.int32(at)), nbytes // len(layers))
        return stack

    def _finish(self, x: jax.Array, nbytes: int) -> jax.Array:
        x.block_until_ready()
        self.checkpoint.release()
        self.count.add(nbytes)
        return x

    def _fill(self, w: Weight, spans: Spans, dtype: Any, read: Callable[[str, Spans], np.ndarray]) -> np.ndarray:
        """The part `spans` of the padded stack, copied from the mapped files."""
        depth = len(w.stack)
        out = np.zeros([len(span) for span in spans], dtype)

        def fill(at: tuple[int, ...], name: str) -> None:
            found = read(name, spans[depth:])
            corner = tuple(i - span.start for i, span in zip(at, spans)) + tuple(map(slice, found.shape))
            _copy(out[(*corner, ...)], found)

        inside = [(at, name) for at, name in entries(w) if all(i in span for i, span in zip(at, spans))]
        for job in [self.pool.submit(fill, *entry) for entry in inside]:
            job.result()
        return out

    def _plain(self, w: Weight, name: str, spans: Spans) -> np.ndarray:
        first, *rest = (_within(span, n) for span, n in zip(spans, w.size, strict=True))
        most = 1 if w.view is None else w.view[1]
        # Of the tensor's rows, those of the heads that are wanted.
        rows = slice(first.start * most, first.stop * most)
        parts, tensors = self.checkpoint.parts(w, name), self.checkpoint.tensors
        found = tensors[name][rows] if parts.form is None else rows_of(tensors, parts, rows)
        if w.view is not None:
            found = found.reshape(-1, *w.view[1:])[:, slice(*w.take)]
        return found[(slice(None), *rest)]

    def _values(self, w: Weight, form: Format, name: str, spans: Spans) -> np.ndarray:
        out, into = w.size
        source = _within(spans[0], out), _within(spans[1], into // form.per_byte)
        return self.checkpoint.tensors[self.checkpoint.parts(w, name).values][source]

    def _scales(self, w: Weight, form: Format, block: tuple[int, int], name: str, spans: Spans) -> np.ndarray:
        """Scales of blocks that may be smaller than those of the checkpoint; each lies within one of them."""
        at = []
        for span, size, mine, theirs in zip(spans, w.size, block, form.block, strict=True):
            here = np.arange(span.start, max(span.start, min(span.stop, -(-size // mine))))
            at.append(here * mine // theirs)
        scales = self.checkpoint.parts(w, name).scales
        return checked(scales, self.checkpoint.tensors[scales][np.ix_(*at)], form)

    def _factor(self, w: Weight, name: str) -> np.ndarray:
        return np.asarray(factor_of(self.checkpoint.tensors, self.checkpoint.parts(w, name)))


def _within(span: range, size: int) -> slice:
    return slice(span.start, max(span.start, min(span.stop, size)))


def _copy(out: np.ndarray, found: np.ndarray) -> None:
    """`out[:] = found`; numbers of the same type as bits, which numpy moves at the speed of memory."""
    if out.dtype == found.dtype:
        bits = f"u{out.dtype.itemsize}"
        out, found = out.view(bits), found.view(bits)
    out[...] = found


@functools.partial(jax.jit, donate_argnums=0)
def _set_layer(stack: jax.Array, layer: jax.Array, at: jax.Array) -> jax.Array:
    """`stack [N, …]` with row `at` replaced by `layer [1, …]`, in place."""
    # As bits: XLA on CPU would take a whole stack of 8-bit floats to 16 bits and back.
    bits = jnp.dtype(f"uint{8 * stack.dtype.itemsize}")
    stack_bits, layer_bits = (jax.lax.bitcast_convert_type(x, bits) for x in (stack, layer))
    placed = jax.lax.dynamic_update_slice_in_dim(stack_bits, layer_bits, at, 0)
    return jax.lax.bitcast_convert_type(placed, stack.dtype)
