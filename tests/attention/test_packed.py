"""Packed 8-bit pools: selection and attention over what the records say, in every geometry; what is written is packed."""

import dataclasses

import numpy as np
import pytest

from dcpjax.attention import AttentionOptions
from dcpjax.cache import index_record, latent_record
from tests.attention.paged import (
    INDEX_DIM,
    LAYERS,
    PAGE,
    VALUE,
    WIDTH,
    Geometry,
    Queries,
    World,
    check,
    oracle_output,
    pool_of,
    rows_of,
    run,
    same_bits,
    slots_of,
)

pytestmark = pytest.mark.usefixtures("quick_compile")

LATENT, INDEX = latent_record(VALUE, WIDTH - VALUE, "fp8"), index_record(INDEX_DIM, "fp8")
LENGTHS = [1, 5, 2 * PAGE, 3 * PAGE + 5]


def pools(world: World, geometry: Geometry, known: np.ndarray):
    """NaN, as far as a record can hold it, in every row that is not known."""

    def fill(rows, layout, record):
        layers = np.full((LAYERS, *rows.shape), np.nan, np.float32)
        layers[1, known] = rows[known]
        return pool_of(layers, layout, geometry.plan, record)

    return fill(world.latent, geometry.latent, LATENT), fill(world.index, geometry.index, INDEX)


@pytest.mark.parametrize("movement", ["queries", "rows"])
@pytest.mark.parametrize(
    "geometry",
    [Geometry(1), Geometry(4), Geometry(2, 4), Geometry(4, 2, index_sharded=False), Geometry(2, 2, tp=2)],
    ids=["dcp1", "dcp4", "dcp2i4", "dcp4-index1", "tp2dcp2"],
)
def test_every_geometry_equals_the_oracle_over_unpacked_rows(geometry, movement):
    """Three tokens a request, written as they come: what is read back is the oracle's unpacked row, own rows included."""
    exact = World.make(LENGTHS, 5, seed=6)
    stored = dataclasses.replace(exact, latent=np.asarray(LATENT.unpack(LATENT.pack(exact.latent))))
    assert 1e-3 < np.abs(stored.latent - exact.latent).max() < 0.3
    # The indexer's small integers have 8-bit forms of their own.
    assert same_bits(INDEX.unpack(INDEX.pack(exact.index)), exact.index)
    tokens = [(r, s) for r, length in enumerate(LENGTHS) for s in range(max(0, length - 3), length)]
    queries = Queries.make(tokens, 16)
    before = exact.written.copy()
    before[[exact.place(r, s) for r, s in tokens]] = False
    options = AttentionOptions("a2a" if geometry.dcp > 1 else "ag_rs", movement, 2 * PAGE)
    after, chosen, out = run(exact, pools(exact, geometry, before), queries, geometry, options=options)
    check(stored, queries, chosen, out)
    # Rows that were not rounded would be noticed.
    assert np.abs(oracle_output(exact, queries, slots_of(chosen)) - out).max() > 1e-3
    for got, want in zip(after, pools(exact, geometry, exact.written), strict=True):
        assert same_bits(got.data, want.data)
    assert same_bits(rows_of(after[0])[1, exact.written], stored.latent[exact.written])
