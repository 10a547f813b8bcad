"""Bytes that are planned against bytes that are allocated, and against the sizes of the published model."""

import jax
import jax.numpy as jnp
import pytest

from dcpjax import build
from dcpjax.build import EngineConfig
from dcpjax.convert import convert
from dcpjax.footprint import activations, cache_rows, pools, tokens_in, weight_groups
from dcpjax.hub import TINY
from dcpjax.mesh import abstract_plan, make_plan
from models.config import from_hf, read_config, read_raw
from models.params import init, pad_to
from models.published import GLM_5_2
from models.quantconfig import quantization_of
from models.stored import abstract, all_plain, bytes_per_device, published
from models.weights import load

pytestmark = pytest.mark.usefixtures("quick_compile")

GLM = from_hf(GLM_5_2)
MESHES = [(1, 1, False), (3, 1, True), (4, 2, False), (8, 4, True), (8, 4, False)]


@pytest.fixture(scope="module", params=["none", "fp8", "nvfp4"])
def stored(request, tmp_path_factory):
    """The tiny model as published checkpoints are stored."""
    if request.param == "none":
        return TINY, None
    folder = tmp_path_factory.mktemp("converted") / request.param
    convert(TINY, folder, request.param)
    return folder, request.param


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_weights_of_the_tiny_model_take_what_was_planned(stored, mesh):
    """On every device, group by group; three devices pad everything. Nothing but the configuration was read to plan it."""
    folder, name = stored
    cfg = read_config(folder)
    planned = abstract(cfg, abstract_plan(*mesh), jnp.bfloat16, published(name, cfg))
    loaded = load(folder, cfg, make_plan(*mesh), jnp.bfloat16)
    assert weight_groups(loaded) == weight_groups(planned)
    taken = dict.fromkeys(make_plan(*mesh).mesh.devices.flat, 0)
    for array in jax.tree.leaves(loaded):
        for shard in array.addressable_shards:
            taken[shard.device] += shard.data.nbytes
    assert set(taken.values()) == {sum(weight_groups(planned).values())} == {bytes_per_device(planned)}


@pytest.mark.parametrize("mesh", [(1, 1, False), (8, 4, False), (8, 4, True), (6, 3, True)], ids=str)
def test_weights_of_the_real_model_take_what_was_planned(mesh):
    """No memory: shapes of random weights, padded. Six devices divide neither experts nor widths."""
    plan = make_plan(*mesh)
    made = jax.eval_shape(lambda: pad_to(init(GLM, jax.random.key(0), jnp.bfloat16), GLM, plan))
    planned = abstract(GLM, abstract_plan(*mesh), jnp.bfloat16)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), made) == jax.tree.map(lambda x: (x.shape, x.dtype), planned)
    placed = jax.tree.map(lambda x, like: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=like.sharding), made, planned)
    assert bytes_per_device(placed) == sum(weight_groups(planned).values())


def test_the_real_model_has_the_published_number_of_parameters():
    """The routers' biases are not counted there: nothing trains them by gradients."""
    made = jax.eval_shape(lambda: init(GLM, jax.random.key(0), jnp.bfloat16))

    def count(part) -> int:
        biases = (x.size for path, x in jax.tree.leaves_with_path(part) if path[-1].name == "router_bias")
        return sum(x.size for x in jax.tree.leaves(part)) - sum(biases)

    assert (count(made), count(made.mtp)) == (753_329_921_024, 9_952_920_320)


@pytest.mark.parametrize("name, published_bytes", [(None, 1.507e12), ("fp8", 755.6e9), ("nvfp4", 464.8e9)])
def test_the_real_model_takes_the_published_bytes(name, published_bytes):
    """Unsharded. What is widened when it is loaded (kv_b in FP8) adds little."""
    total = bytes_per_device(abstract(GLM, abstract_plan(1), jnp.bfloat16, published(name, GLM)))
    assert total == pytest.approx(published_bytes, rel=2e-3)


def test_a_configuration_says_how_weights_are_stored(stored):
    folder, name = stored
    assert quantization_of(read_raw(folder)) == name


# --- caches -----------------------------------------------------------------------------------------------------------


def test_every_layout_is_told_of():
    rows = list(cache_rows(GLM, 8, 64, 35 * 2**30, ("bfloat16", "fp8")))
    assert len({row.key for row in rows}) == len(rows) == 2 * (1 + 3 * 4)
    fp8 = {row.key: row for row in rows}
    assert fp8[1, "fp8", "sharded", 1].bytes_per_token == 54_728
    assert fp8[4, "fp8", "sharded", 4].bytes_per_token == 13_682
    # The same as the table of every layout says (docs/benchmarks.md), which comes from shapes of pools.
    assert [fp8[4, "fp8", draft, 4].tokens for draft in ("sharded", "replicated")] == [2_746_624, 2_632_896]


def test_a_page_that_does_not_fit_holds_nothing():
    assert tokens_in(100.0, 64, 64 * 100 * 3) == 2 * 64
    assert tokens_in(100.0, 64, 64 * 100 * 3 - 1) == 64
    assert tokens_in(100.0, 64, -5) == 0


def test_no_layout_that_a_page_does_not_divide():
    assert {row.dcp for row in cache_rows(GLM, 6, 64, 1e9, ("fp8",))} == {1, 2}


# --- activations ------------------------------------------------------------------------------------------------------


def ready(cfg, config: EngineConfig, platform: str = "cpu"):
    plan = abstract_plan(
        config.tensor_parallel_size, config.decode_context_parallel_size, config.expert_parallel, platform
    )
    return build.resolve(cfg, config, plan=plan)


def test_pools_take_the_bytes_a_token_was_planned_with():
    found = ready(GLM, EngineConfig(decode_context_parallel_size=4, num_blocks=10, dtype="bfloat16"), "cuda")
    assert bytes_per_device(pools(found)) == found.shape.bytes_per_token() * 640


def test_a_traced_step_holds_about_what_the_compiler_says():
    """The compiler for CPUs fuses less: what is traced was 0.64 to 0.81 of it for the tiny model, on one device and eight."""
    layers = {"num_hidden_layers": 2, "indexer_types": ["full", "shared"], "mlp_layer_types": ["dense", "sparse"]}
    cfg = read_config(TINY, layers)
    config = EngineConfig(
        4, 2, block_size=64, num_blocks=17, max_model_len=1024, max_num_seqs=1, max_num_batched_tokens=64
    )
    found = activations(build.resolve(cfg, config, plan=make_plan(4, 2)), all_plain, compiled=True)
    assert found.compiled / 3 < found.traced < 1.5 * found.compiled
    assert found.shape.tokens == 64 and found.shape.pages == 16
    assert found.traced == activations(ready(cfg, config), all_plain).traced


def test_scores_of_a_long_context_are_most_of_a_long_chunk():
    """2,048 tokens by a million keys, four ranks: 2 GiB of float32."""
    cfg = from_hf({**GLM_5_2, "num_hidden_layers": 4})
    config = EngineConfig(8, 4, num_blocks=16385, dtype="bfloat16", kernels="auto")
    found = activations(ready(cfg, config, "cuda"), all_plain)
    assert 2**31 < found.traced < 2**31 + 1e9 and found.shape.tokens == 2048
