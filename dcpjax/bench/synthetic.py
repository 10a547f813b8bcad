"""Random checkpoints of real shapes, written as published ones are: for loading, not for reading what they say."""

import functools
import math
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import ml_dtypes
import numpy as np

from models.checkpoint import disk_shape, entries, leaves
from models.config import from_hf
from models.params import Weight, declare
from models.published import GLM_5_2
from models.saving import Spec, write_folder, write_json
from models.stored import FORMATS, Format, in_published, published_parts

# GLM-5.2's widths with the layers that fit a device and its disk: every kind of layer, the draft's too.
FEW_LAYERS = {key: value for key, value in GLM_5_2.items() if not key.startswith(("index_topk_freq", "index_skip"))} | {
    "num_hidden_layers": 6,
    "mlp_layer_types": ["dense"] * 2 + ["sparse"] * 4,
    "indexer_types": ["full", "shared", "shared", "shared", "full", "shared"],
}

_POOL = 1 << 26
# Root mean square of the eight magnitudes of e2m1.
_RMS_E2M1 = 8.5625**0.5


def write(folder: pathlib.Path, raw: Mapping[str, Any], quantization: str | None = "fp8", seed: int = 0) -> int:
    """Writes weights for the configuration `raw` to the new `folder`; returns their bytes.

    quantization: "fp8", "nvfp4" or None for BF16. Matrices have the variance 1 / columns, norms are 1, biases 0; numbers
    repeat after some millions. Memory holds one tensor at a time.
    """
    cfg, rng = from_hf(dict(raw)), np.random.default_rng(seed)
    form_of = FORMATS.get(quantization)
    specs: dict[str, Spec] = {}
    makers: dict[str, Callable[[], np.ndarray]] = {}
    numbers = _Numbers(rng)
    for w in leaves(declare(cfg)):
        form = form_of if form_of and in_published(quantization, w, cfg) else None
        for _, name in entries(w):
            tensors = published_parts(form, name).expected(disk_shape(w))
            *_, last = tensors
            for tensor, (shape, kinds) in tensors.items():
                if form is None:
                    specs[tensor] = np.dtype(np.float32 if w.float32 else ml_dtypes.bfloat16), shape
                    makers[tensor] = functools.partial(numbers.plain, w, shape)
                    continue
                specs[tensor] = kinds[0], shape
                if tensor == name:
                    makers[tensor] = functools.partial(numbers.codes, shape)
                else:  # the last scale brings the variance
                    scale = disk_shape(w)[-1] ** -0.5 / numbers.rms(form) if tensor == last else 1
                    makers[tensor] = functools.partial(np.full, shape, scale)

    def fetch(tensor: str) -> np.ndarray:
        value, kind = makers[tensor](), specs[tensor][0]
        return value.view(kind) if value.dtype == np.uint8 else value.astype(kind)

    folder.mkdir(parents=True)
    write_folder(folder, specs, fetch)
    write_json(folder / "config.json", dict(raw))
    return sum(math.prod(shape) * kind.itemsize for kind, shape in specs.values())


class _Numbers:
    """Random numbers, drawn once and given out in pieces."""

    def __init__(self, rng: np.random.Generator):
        self._rng = rng
        self._normal = rng.normal(size=_POOL // 16).astype(np.float32)
        self._codes = rng.integers(0, 256, _POOL, np.uint8)
        self._codes[self._codes & 127 == 127] = 0  # NaN in e4m3

    def codes(self, shape: tuple[int, ...]) -> np.ndarray:
        return _cut(self._codes, shape, self._rng)

    def plain(self, w: Weight, shape: tuple[int, ...]) -> np.ndarray:
        if w.start in ("one", "zero"):
            return np.full(shape, float(w.start == "one"), np.float32)
        return _cut(self._normal, shape, self._rng) * (1.0 if w.start == "normal" else shape[-1] ** -0.5)

    def rms(self, form: Format) -> float:
        if form.per_byte == 2:
            return _RMS_E2M1
        return float(np.sqrt(np.mean(np.square(self._codes[: 1 << 20].view(form.values).astype(np.float32)))))


def _cut(pool: np.ndarray, shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    """An array of `shape` out of the pool, from a random place on."""
    size = math.prod(shape)
    start = int(rng.integers(0, max(1, len(pool) - size)))
    return np.resize(pool[start : start + size], shape)
