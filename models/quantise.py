"""Matrices on the host into quantised formats and back, in numpy.

Widening serves weights that cannot stay as they are stored; narrowing writes checkpoints (`dcpjax.convert`).
The 4- and 8-bit numbers are those of the OCP microscaling formats (2023).
"""

from collections.abc import Mapping

import ml_dtypes
import numpy as np

from dcpjax.errors import CheckpointError
from models.stored import FP8, NVFP4, Format, Parts

_E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
_LARGEST_E4M3, _LARGEST_E2M1 = 448.0, 6.0
_MAGNITUDES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
# Tables by code: looking up is much faster than converting.
_OF_E4M3 = np.arange(256, dtype=np.uint8).view(_E4M3).astype(np.float32)
_OF_BYTE = np.stack(
    [np.where(code & 8, -1, 1) * _MAGNITUDES[code & 7] for code in (np.arange(256) & 15, np.arange(256) >> 4)], axis=-1
).astype(np.float32)


def rows_of(tensors: Mapping[str, np.ndarray], parts: Parts, rows: slice) -> np.ndarray:
    """Rows `[rows, in]` of one stored matrix, float32. Raises `CheckpointError` for scales that are no numbers."""
    values = tensors[parts.values][rows]
    if parts.form is None:
        return values.astype(np.float32)
    height, width = parts.form.block
    first, last = rows.start // height, -(-rows.stop // height)
    scales = checked(parts.scales, tensors[parts.scales][first:last], parts.form).astype(np.float32)
    scales = scales.repeat(height, axis=0)[rows.start - first * height :][: len(values)]
    if parts.form is FP8:
        return _OF_E4M3[values.view(np.uint8)] * scales.repeat(width, axis=1)[:, : values.shape[1]]
    wide = _OF_BYTE[values].reshape(len(values), 2 * values.shape[1])
    return wide * scales.repeat(width, axis=1)[:, : wide.shape[1]] * factor_of(tensors, parts)


def factor_of(tensors: Mapping[str, np.ndarray], parts: Parts) -> np.float32:
    """What multiplies all of an NVFP4 matrix, a float32 scalar. Raises `CheckpointError` if it is 0 or no finite
    number."""
    factor = checked(parts.factor, tensors[parts.factor], parts.form).astype(np.float32).reshape(())
    if factor == 0:
        raise CheckpointError(f"{parts.factor} is 0, which cannot be a scale; the checkpoint is damaged")
    with np.errstate(over="ignore"):
        made = np.float32(1 / factor if parts.divides else factor)
    checked(parts.factor, made, parts.form)
    return made


def checked(name: str, scales: np.ndarray, form: Format) -> np.ndarray:
    """The same scales `[…]`, of any float dtype. Raises `CheckpointError` if one is negative, or so large that the largest
    numbers of the format times it are infinite."""
    if scales.dtype == _E4M3:
        codes = scales.view(np.uint8)
        good = codes <= 126  # 127 is NaN, what follows is negative: −0 too
    else:
        largest = _LARGEST_E4M3 if form is FP8 else _LARGEST_E2M1 * _LARGEST_E4M3
        wide = scales.astype(np.float32)
        good = (wide >= 0) & (wide <= np.finfo(np.float32).max / largest)
    if not good.all():
        raise CheckpointError(
            f"{name} holds scales that are NaN, infinite, negative or too large; the checkpoint is damaged, fetch it again"
        )
    return scales


def to_fp8(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """`x [out, in]` → e4m3 values and float32 scales `[ceil(out/128), ceil(in/128)]`; the largest value of a block
    becomes 448."""
    height, width = FP8.block
    grid = [-(-n // size) for n, size in zip(x.shape, FP8.block)]
    padded = np.zeros((grid[0] * height, grid[1] * width), np.float32)
    padded[: x.shape[0], : x.shape[1]] = x
    blocks = padded.reshape(grid[0], height, grid[1], width)
    largest = np.abs(blocks).max(axis=(1, 3))
    scales = np.where(largest > 0, largest / _LARGEST_E4M3, 1).astype(np.float32)
    small = np.clip(blocks / scales[:, None, :, None], -_LARGEST_E4M3, _LARGEST_E4M3)
    return small.reshape(padded.shape)[: x.shape[0], : x.shape[1]].astype(_E4M3), scales


def to_nvfp4(x: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """`x [out, in]` → packed e2m1 `[out, in/2]` uint8, e4m3 scales `[out, in/16]`, and the factor `[]` float32.

    The largest value of the matrix has scale 448 and code 6. Raises `CheckpointError` unless 16 divides the columns.
    """
    _, width = NVFP4.block
    if x.shape[1] % width:
        raise CheckpointError(f"NVFP4 takes matrices whose columns are a multiple of {width}, not {list(x.shape)}")
    groups = x.astype(np.float32).reshape(len(x), -1, width)
    largest = np.abs(groups).max(axis=-1)
    factor = np.float32(max(largest.max(), np.finfo(np.float32).tiny) / (_LARGEST_E2M1 * _LARGEST_E4M3))
    scales = np.minimum(largest / (_LARGEST_E2M1 * factor), _LARGEST_E4M3).astype(_E4M3)
    step = scales.astype(np.float32)[..., None] * factor
    ratio = np.divide(groups, step, out=np.zeros_like(groups), where=step > 0)
    # The nearest of eight magnitudes; a tie goes to the even code, as in all of IEEE's rounding.
    middles = (_MAGNITUDES[1:] + _MAGNITUDES[:-1]) / 2
    size = np.abs(ratio)
    code = np.searchsorted(middles, size, side="left")
    tie = (code < 7) & (size == middles[np.minimum(code, 6)]) & (code % 2 == 1)
    code = (code + tie).astype(np.uint8) | np.signbit(ratio).astype(np.uint8) << 3
    code = code.reshape(len(x), -1)
    return code[:, 0::2] | code[:, 1::2] << 4, scales, factor.reshape(())
