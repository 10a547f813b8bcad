"""Sparse MLA on Hopper's matrix instructions: by the interpreter, where rows come one by one; lowered; and on a GPU."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dcpjax.pallas_kernels.sparse_mla import MosaicMLAConfig, SparseMLAConfig, fitting, sparse_mla
from tests.kernels.base import lower_for_h200, same_bits
from tests.kernels.test_sparse_mla_triton import CLOSE, SCALE, Case


def case_of(tokens, heads, width, rows=400, kind="bfloat16"):
    return Case(kind, tokens, heads, width, 512, 64, rows)


@pytest.mark.parametrize(
    "kind, config, dtype",
    [
        ("bfloat16", MosaicMLAConfig(early=True), jnp.bfloat16),
        ("packed", MosaicMLAConfig(splits=2), jnp.float32),
    ],
    ids=["whole", "split"],
)
def test_the_interpreted_kernel_equals_float64(kind, config, dtype):
    """Lists of 0, 1 and 140 rows: none, a half-empty pair of tiles, and a second pair with an empty tile."""
    case = case_of(3, 8, 140, kind=kind)
    case.check(*case.run("mosaic", dataclasses.replace(config, interpret=True), dtype), CLOSE["bfloat16"])


def test_splits_in_turn_and_columns_have_the_bits_of_splits_apart():
    """Three splits, the last one short, for tokens with 0, 1 and 300 rows; one block takes two of them, one the third."""
    case = case_of(3, 8, 300)
    apart = MosaicMLAConfig(split_rows=128, interpret=True)
    first = case.run("mosaic", apart, jnp.bfloat16)
    case.check(*first, CLOSE["bfloat16"])
    same_bits(case.run("mosaic", dataclasses.replace(apart, in_turn=2, columns=2), jnp.bfloat16), first)


def test_tokens_in_turn_have_the_bits_of_tokens_apart():
    """Three tokens a block with one, no and two pairs of tiles, then two with none and one: lists of 17, 0, 140, 0 and 1 rows."""
    case, order = case_of(5, 8, 140), [3, 0, 2, 4, 1]
    case.q, case.rows, case.count = case.q[jnp.array(order)], case.rows[order], case.count[order]
    case.count[3] = 0
    apart = MosaicMLAConfig(interpret=True)
    first = case.run("mosaic", apart, jnp.bfloat16)
    case.check(*first, CLOSE["bfloat16"])
    out, lse = case.run("mosaic", dataclasses.replace(apart, in_turn=3, early=True), jnp.bfloat16)
    same_bits(out, first[0])
    # This machine's compiler may fuse sums otherwise where a program is another.
    np.testing.assert_allclose(lse, first[1], rtol=1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["bfloat16", "packed"])
@pytest.mark.parametrize(
    "tokens, heads, config, dtype",
    [
        (17, 64, None, jnp.bfloat16),
        (5, 128, MosaicMLAConfig(early=True), jnp.float32),
        (33, 32, MosaicMLAConfig(split_rows=512), jnp.bfloat16),
        (33, 64, MosaicMLAConfig(split_rows=512, in_turn=3), jnp.bfloat16),
        (7, 128, MosaicMLAConfig(split_rows=512, columns=4), jnp.bfloat16),
        (6, 64, MosaicMLAConfig(splits=16, cluster=True), jnp.bfloat16),
        (17, 128, MosaicMLAConfig(splits=8, columns=2, cluster=True, early=True), jnp.bfloat16),
        (9, 32, MosaicMLAConfig(splits=4, cluster=True), jnp.bfloat16),
        (70, 64, MosaicMLAConfig(splits=2, cluster=True), jnp.bfloat16),
        (5, 16, MosaicMLAConfig(splits=16, columns=4, cluster=True), jnp.bfloat16),
        (5, 8, MosaicMLAConfig(splits=8, cluster=True), jnp.bfloat16),
    ],
)
def test_equals_float64_on_a_gpu(tokens, heads, config, dtype, kind):
    """Few shapes: each takes seconds to compile."""
    case = case_of(tokens, heads, 2048, 6000, kind)
    case.count[4] = 129
    case.rows[4] = np.where(np.arange(2048) < 129, case.rows[2], -1)  # whose list is whole
    first = case.run("mosaic", config, dtype)
    case.check(*first, 1e-2)
    for _ in range(10):
        same_bits(case.run("mosaic", config, dtype), first)


@pytest.mark.gpu
@pytest.mark.parametrize("heads, kind", [(128, "bfloat16"), (64, "packed")])
def test_tokens_in_turn_have_the_bits_of_tokens_apart_on_a_gpu(heads, kind):
    """Lists of many lengths, four of them empty, four a block and the last one alone."""
    case = case_of(17, heads, 2048, 6000, kind)
    case.count[[5, 6, 12]] = 0
    first = case.run("mosaic", MosaicMLAConfig(), jnp.bfloat16)
    case.check(*first, 1e-2)
    for early in (False, True):
        same_bits(case.run("mosaic", MosaicMLAConfig(in_turn=4, early=early), jnp.bfloat16), first)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "tokens, heads, kind", [(40, 64, "packed"), (100, 64, "bfloat16"), (70, 32, "bfloat16"), (20, 128, "packed")]
)
def test_invariant_bits_do_not_depend_on_the_other_tokens(tokens, heads, kind):
    """Of tokens whose blocks take two or four splits in turn, beside one whose splits are dealt out by columns."""
    many = case_of(tokens, heads, 2048, 6000, kind)
    together = many.run("mosaic", invariant=True)
    for t in (2, tokens - 1):
        alone = case_of(tokens, heads, 2048, 6000, kind)
        alone.q, alone.rows, alone.count = alone.q[t : t + 1], alone.rows[t : t + 1], alone.count[t : t + 1]
        same_bits(alone.run("mosaic", invariant=True), jax.tree.map(lambda x, t=t: x[t : t + 1], together))


@pytest.mark.parametrize(
    "tokens, heads, invariant, dtype, kind, merged",
    [
        (16, 64, False, jnp.float32, "bfloat16", "apart"),
        (128, 128, False, jnp.bfloat16, "packed", "none"),
        (64, 32, True, jnp.bfloat16, "bfloat16", "apart"),
        (2, 32, False, jnp.bfloat16, "packed", "none"),
    ],
)
def test_lowers_for_an_h200(tokens, heads, invariant, dtype, kind, merged):
    """With a kernel that merges, or none: of a few tokens a cluster merges the splits."""
    shape = jax.ShapeDtypeStruct
    text = lower_for_h200(
        functools.partial(
            sparse_mla, value_width=512, scale=SCALE, out_dtype=dtype, backend="mosaic", invariant=invariant
        ),
        shape((tokens, heads, 576), jnp.bfloat16),
        shape((2, 1000, 164), jnp.uint32) if kind == "packed" else shape((2, 1000, 576), jnp.bfloat16),
        shape((), jnp.int32),
        shape((tokens, 2000), jnp.int32),
        shape((tokens,), jnp.int32),
    )
    assert text.count("mosaic_gpu_v2") == 1
    assert ("merge_splits" in text) == (merged == "apart")


@pytest.mark.parametrize("tokens, grid", [(16_383, (65_532, 2)), (16_384, (2, 65_536))])
def test_only_the_last_axis_of_a_grid_is_long(tokens, grid):
    """The one that CUDA allows more than 65,535 blocks: lists of 128 heads in four parts at fixed places, each a block's."""
    shape = jax.ShapeDtypeStruct
    call = functools.partial(
        sparse_mla, value_width=512, scale=SCALE, out_dtype=jnp.bfloat16, backend="mosaic",
        config=MosaicMLAConfig(split_rows=512),
    )  # fmt: skip
    program = jax.make_jaxpr(call)(
        shape((tokens, 128, 576), jnp.bfloat16), shape((2, 1000, 576), jnp.bfloat16), shape((), jnp.int32),
        shape((tokens, 2048), jnp.int32), shape((tokens,), jnp.int32),
    )  # fmt: skip
    assert f"grid={grid}" in str(program)


@pytest.mark.parametrize(
    "heads, value, dtype", [(64, 256, jnp.bfloat16), (96, 512, jnp.bfloat16), (64, 512, jnp.float32)]
)
def test_shapes_that_are_not_here(heads, value, dtype):
    q = jnp.zeros((1, heads, value + 64), dtype)
    pool, rows = jnp.zeros((1, 8, value + 64), dtype), np.zeros((1, 128), np.int32)
    with pytest.raises(NotImplementedError, match="8, 16, 32 or whole 64 heads over bfloat16 or packed rows of 512"):
        sparse_mla(q, pool, 0, rows, np.zeros(1, np.int32), value_width=value, scale=1.0, backend="mosaic")


SERVED = {"shape": (128, 64, 576), "value_width": 512, "dtype": jnp.bfloat16, "out_dtype": jnp.bfloat16, "width": 2048}


@pytest.mark.parametrize(
    "more",
    [
        {"shape": (3, 64, 576), "width": 1024},
        {"shape": (3, 64, 576), "dtype": jnp.uint32, "width": 1024},
        {"shape": (1, 64, 576), "dtype": jnp.uint32},
        {"shape": (2, 32, 576), "dtype": jnp.uint32},
        {"shape": (3, 16, 576)},
        {"shape": (6, 16, 576)},
        {"shape": (4, 16, 576), "width": 1024},
        {"shape": (128, 96, 576)},
        {"shape": (128, 64, 192), "value_width": 128},
        {"shape": (63, 16, 576), "dtype": jnp.uint32, "width": 1024},
        {"shape": (7, 16, 576), "dtype": jnp.uint32},
        {"shape": (3, 128, 576), "dtype": jnp.uint32, "width": 1024},
        {"dtype": jnp.float32},
        {"out_dtype": jnp.float32},
        {"width": 256},
        {"shape": (128, 16, 576), "invariant": True},
    ],
)
def test_triton_serves_what_is_not_here_or_not_ahead(more):
    assert fitting("mosaic", **SERVED)[0] == "mosaic"
    backend, config = fitting("mosaic", **SERVED | more)
    assert backend == "triton"
    assert isinstance(config, SparseMLAConfig)
    for asked in ("xla", "triton", "interpret"):
        assert fitting(asked, **SERVED | more)[0] == asked


@pytest.mark.parametrize(
    "tokens, heads, width", [(1, 32, 2048), (1, 64, 2048), (4, 64, 512), (2, 128, 1024), (5, 16, 2048)]
)
def test_few_tokens_are_served_where_clusters_merge(tokens, heads, width):
    backend, config = fitting("mosaic", **SERVED | {"shape": (tokens, heads, 576), "width": width})
    assert backend == "mosaic" and config.clustered(config.splits, heads)


@pytest.mark.parametrize(
    "tokens, heads, width", [(2, 64, 2048), (1, 128, 2048), (4, 64, 512), (16, 32, 512), (8, 16, 2048), (64, 16, 512)]
)
def test_records_of_other_heads_are_served_from_where_they_were_ahead(tokens, heads, width):
    backend, config = fitting("mosaic", **SERVED | {"shape": (tokens, heads, 576), "dtype": jnp.uint32, "width": width})
    # Scores of records before the product of the tile ahead were slower, whatever the heads.
    assert (backend, config.early) == ("mosaic", False)


@pytest.mark.parametrize(
    "heads, kind", [(32, jnp.bfloat16), (128, jnp.bfloat16), (16, jnp.uint32), (32, jnp.uint32), (128, jnp.uint32)]
)
def test_fixed_places_of_other_heads(heads, kind):
    fixed = [
        fitting("mosaic", **SERVED | {"shape": (n, heads, 576), "dtype": kind, "invariant": True}) for n in (1, 128)
    ]
    assert [(backend, config.split_rows) for backend, config in fixed] == [("mosaic", 512)] * 2


def test_fixed_places_are_the_same_for_every_number_of_tokens():
    shapes = [(tokens, 64, 576) for tokens in (1, 16, 32, 64, 128, 300)]
    backends, configs = zip(
        *(fitting("mosaic", **SERVED | {"shape": x, "invariant": True}) for x in shapes), strict=True
    )
    assert set(backends) == {"mosaic"}
    assert {c.split_rows for c in configs} == {512}
    # Of 132 multiprocessors none waits longer than it must, in as few blocks as can be.
    assert [(c.in_turn, c.columns) for c in configs] == [(1, 4), (1, 2), (1, 1), (2, 1), (4, 1), (2, 1)]
    # Nor does the kernel depend on the longest list, which is another token's.
    assert {fitting("mosaic", **SERVED | {"width": n, "invariant": True})[0] for n in (64, 512, 2048)} == {"mosaic"}


@pytest.mark.parametrize(
    "tokens, heads, width, splits, in_turn",
    [
        (4, 64, 2048, 16, 1),
        (16, 64, 2048, 8, 1),
        (64, 64, 2048, 2, 1),
        (128, 64, 2048, 1, 1),
        (16, 32, 512, 4, 1),
        # More blocks than multiprocessors: two lists each, or three halves where they would leave many idle.
        (128, 128, 2048, 1, 2),
        (160, 64, 2048, 2, 3),
        (160, 64, 512, 1, 2),
        (2048, 64, 2048, 1, 4),
    ],
)
def test_splits_fill_the_chip(tokens, heads, width, splits, in_turn):
    config = MosaicMLAConfig.choose(tokens, heads, width)
    assert (config.splits, config.in_turn) == (splits, in_turn)


@pytest.mark.parametrize(
    "tokens, heads, width, cluster, columns",
    [
        (1, 64, 2048, True, 4),
        (2, 64, 2048, True, 2),
        (2, 128, 2048, True, 1),
        (5, 64, 2048, True, 1),
        (6, 64, 2048, False, 1),
        (16, 64, 2048, False, 1),
        (16, 64, 512, True, 1),
        (64, 64, 2048, True, 1),
        (128, 64, 2048, False, 1),
        (1, 8, 2048, False, 1),
        (1, 64, 600, False, 1),
    ],
)
def test_splits_are_merged_by_clusters_that_the_chip_has_room_for(tokens, heads, width, cluster, columns):
    config = MosaicMLAConfig.choose(tokens, heads, width)
    assert (config.cluster, config.columns) == (cluster, columns)
    assert config.clustered(config.splits, heads) == cluster
    assert not MosaicMLAConfig.choose(tokens, heads, width, invariant=True).cluster


def test_fixed_splits_are_whole_pairs_of_tiles():
    case = case_of(3, 8, 140)
    with pytest.raises(ValueError, match="split_rows 64 must be a multiple of 128"):
        case.run("mosaic", MosaicMLAConfig(split_rows=64))
