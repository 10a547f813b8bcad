"""Narrowing and widening on the host, against the formats' own definitions."""

import ml_dtypes
import numpy as np
import pytest

from dcpjax.errors import CheckpointError
from models.quantise import checked, factor_of, rows_of, to_fp8, to_nvfp4
from models.stored import FP8, NVFP4, Parts

FP8_PARTS, NVFP4_PARTS = Parts(FP8, "v", "s"), Parts(NVFP4, "v", "s", "f")


def matrix(out, into, seed=0):
    """Values of very different sizes, with a row of zeros."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(out, into)) * np.exp(rng.normal(size=(out, 1)))
    x[out // 2] = 0
    return x.astype(np.float32)


def wide(parts, arrays, rows=slice(0, 200)):
    return rows_of(dict(zip("vsf", arrays, strict=False)), parts, rows)


def test_fp8_keeps_three_bits_and_the_largest_of_each_block():
    x = matrix(200, 144)
    values, scales = to_fp8(x)
    assert values.dtype == ml_dtypes.float8_e4m3fn and values.shape == x.shape and scales.shape == (2, 2)
    got = wide(FP8_PARTS, (values, scales))
    floor = np.repeat(np.repeat(scales, 128, 0), 128, 1)[:200, :144] * 2.0**-10  # half of the least e4m3 number
    assert (np.abs(got - x) <= np.maximum(np.abs(x) * 2.0**-4, floor) * (1 + 1e-6)).all()
    for rows, columns in ((slice(0, 128), slice(0, 128)), (slice(128, 200), slice(128, 144))):
        np.testing.assert_allclose(np.abs(got[rows, columns]).max(), np.abs(x[rows, columns]).max(), rtol=1e-6)


def test_nvfp4_takes_the_nearest_number_of_the_group():
    x = matrix(40, 64, seed=1)
    packed, scales, factor = to_nvfp4(x)
    assert packed.shape == (40, 32) and scales.shape == (40, 4) and factor.shape == ()
    got = wide(NVFP4_PARTS, (packed, scales, factor), slice(0, 40))
    magnitudes = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    step = np.repeat(scales.astype(np.float64), 16, 1)[..., None] * factor
    best = np.abs(x[..., None] - np.concatenate([magnitudes, -magnitudes]) * step).min(-1)
    np.testing.assert_allclose(np.abs(got - x), best, atol=1e-6)
    assert np.abs(got).max() == np.abs(x).max() or np.isclose(np.abs(got).max(), np.abs(x).max(), rtol=1e-6)


@pytest.mark.parametrize(("narrow", "parts"), [(to_fp8, FP8_PARTS), (to_nvfp4, NVFP4_PARTS)])
def test_what_was_narrowed_stays_the_same(narrow, parts):
    once = wide(parts, narrow(matrix(96, 160, seed=2)), slice(0, 96))
    np.testing.assert_array_equal(wide(parts, narrow(once), slice(0, 96)), once)


@pytest.mark.parametrize(("narrow", "parts"), [(to_fp8, FP8_PARTS), (to_nvfp4, NVFP4_PARTS)])
def test_any_rows(narrow, parts):
    arrays = narrow(matrix(200, 160, seed=3))
    whole = wide(parts, arrays)
    for rows in (slice(0, 1), slice(100, 150), slice(128, 200), slice(199, 200), slice(5, 5)):
        np.testing.assert_array_equal(wide(parts, arrays, rows), whole[rows])


def test_zeros():
    for narrow, parts in ((to_fp8, FP8_PARTS), (to_nvfp4, NVFP4_PARTS)):
        np.testing.assert_array_equal(wide(parts, narrow(np.zeros((4, 32), np.float32)), slice(0, 4)), 0)


def test_a_factor_may_divide():
    packed, scales, _ = to_nvfp4(matrix(8, 32))
    parts = Parts(NVFP4, "v", "s", "f", divides=True)
    np.testing.assert_array_equal(
        wide(parts, (packed, scales, 1 / np.float32(0.25)), slice(0, 8)),
        wide(NVFP4_PARTS, (packed, scales, np.float32(0.25)), slice(0, 8)),
    )
    with pytest.raises(CheckpointError, match="f is 0"):
        wide(parts, (packed, scales, np.float32(0)), slice(0, 8))


@pytest.mark.parametrize("value", [np.nan, -np.nan, np.inf, -np.inf, -0.5, 3e38])
def test_scales_must_be_numbers(value):
    for dtype in (np.float32, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn):
        scales = np.zeros((2, 3), dtype)
        assert checked("x", scales, FP8) is scales
        if dtype == ml_dtypes.float8_e4m3fn and value == 3e38:
            continue  # its largest is 448
        scales[1, 2] = value
        with pytest.raises(CheckpointError, match="^x holds scales that are NaN, infinite, negative or too large"):
            checked("x", scales, FP8)


@pytest.mark.filterwarnings("error")
def test_a_factor_that_divides_must_not_be_next_to_nothing():
    parts = Parts(NVFP4, "v", "s", "f", divides=True)
    with pytest.raises(CheckpointError, match="^f holds scales that are .* too large"):
        factor_of({"f": np.float32(1e-45)}, parts)


def test_nvfp4_needs_whole_groups():
    with pytest.raises(CheckpointError, match=r"multiple of 16, not \[4, 24\]"):
        to_nvfp4(np.ones((4, 24), np.float32))
