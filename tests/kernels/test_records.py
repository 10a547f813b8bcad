"""Packed records of latent rows: their size, what they hold, and that packing again changes nothing."""

import jax.numpy as jnp
import numpy as np
import pytest

from dcpjax.cache import index_record, latent_record
from dcpjax.pallas_kernels.records import GROUP, has_record, pack_rows, packed_words, unpack_rows
from tests.kernels.base import fresh, same_bits


def rows_of(*sizes, value=512, rope=64):
    rng = fresh("rows", sizes)
    return jnp.asarray(rng.normal(size=(*sizes, value + rope)) * np.exp(rng.normal(size=(*sizes, 1)) * 3), jnp.bfloat16)


@pytest.mark.parametrize("value, rope", [(512, 64), (64, 16), (256, 32), (128, 64), (128, 0), (32, 0)])
def test_records_have_the_size_that_pools_are_planned_with(value, rope):
    records = pack_rows(rows_of(3, value=value, rope=rope), value)
    assert records.dtype == jnp.uint32
    assert records.shape == (3, packed_words(value, rope))
    record = latent_record(value, rope, "fp8") if rope else index_record(value, "fp8")
    assert records.nbytes // 3 == record.nbytes
    assert records.shape[1] == record.width and records.dtype == record.dtype


@pytest.mark.parametrize("value, rope", [(512, 64), (64, 16), (256, 32), (128, 0)])
def test_values_come_back_within_half_a_step(value, rope):
    """Three bits of fraction, and a step at the bottom that is 2⁻⁹ of the group's scale."""
    rows = rows_of(4, 5, value=value, rope=rope)
    back = unpack_rows(pack_rows(rows, value), value, rope)
    assert back.shape == rows.shape
    rows = np.asarray(rows, np.float32)
    np.testing.assert_array_equal(back[..., value:], rows[..., value:])
    group = min(value, GROUP)
    largest = np.abs(rows[..., :value]).reshape(4, 5, -1, group).max(-1).repeat(group, -1).reshape(4, 5, value)
    allowed = np.maximum(np.abs(rows[..., :value]) / 16, largest / 224 / 1024)
    assert (np.abs(back[..., :value] - rows[..., :value]) <= allowed).all()


def test_groups_have_scales_of_their_own():
    rows = np.ones((1, 576), np.float32)
    rows[:, :128] = 1e-4
    rows[:, 128:256] = 3e4
    rows[:, 256:384] = 0
    back = unpack_rows(pack_rows(jnp.asarray(rows), 512), 512, 64)
    np.testing.assert_allclose(back, rows, rtol=1 / 16)


@pytest.mark.parametrize("largest", [448.0, 449.0, 224.0, 1.0, 2.0**-100])
def test_the_largest_value_fits(largest):
    rows = jnp.zeros((1, 576)).at[0, 7].set(-largest)
    back = unpack_rows(pack_rows(rows, 512), 512, 64)
    assert np.isfinite(back).all()
    np.testing.assert_allclose(back[0, 7], -largest, rtol=1 / 16)


def test_what_is_larger_than_any_record_holds():
    """The same for all kernels, one of which has no scale above 2⁷; and what is broken stays so."""
    rows = jnp.zeros((1, 576)).at[0, :4].set(jnp.array([1e6, -3e38, 5e4, 0])).at[0, 128].set(jnp.inf)
    back = unpack_rows(pack_rows(rows, 512), 512, 64)
    np.testing.assert_allclose(back[0, :4], [57344, -57344, 5e4, 0], rtol=1 / 16)
    assert np.isnan(back[0, 128]) and np.isfinite(back).sum() == 575


@pytest.mark.parametrize("value, rope", [(512, 64), (128, 0), (32, 0)])
def test_packing_again_changes_nothing(value, rope):
    records = pack_rows(rows_of(6, value=value, rope=rope), value)
    same_bits(pack_rows(unpack_rows(records, value, rope), value), records)


def test_widths_that_have_no_record():
    assert all(has_record(*widths) for widths in [(512, 64), (128, 0), (64, 16), (4, 2)])
    assert not any(has_record(*widths) for widths in [(510, 64), (192, 64), (512, 63)])
