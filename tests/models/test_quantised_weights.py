"""Quantised checkpoints on the mesh: every spelling, on meshes that cut blocks, and what is refused by name."""

import json
import shutil

import chex
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from dcpjax.errors import CheckpointError, ConfigError
from dcpjax.mesh import make_plan
from dcpjax.quant import QArray, plain
from models.checkpoint import Checkpoint, disk_shape, entries
from models.config import from_hf, read_config
from models.params import declare, is_weight
from models.published import GLM_5_2
from models.quantconfig import quantization_of
from models.saving import save
from models.stored import FORMATS, abstract, bytes_per_device, in_published, published, published_parts
from models.tensorfile import open_file
from models.weights import load, place

pytestmark = pytest.mark.usefixtures("quick_compile")

FP8, NVFP4 = "q_fp8_block128", "q_nvfp4_experts"
EXPERT = "model.layers.2.mlp.experts.1.down_proj"


@pytest.fixture(params=[FP8, NVFP4])
def golden(request, data):
    return data / "golden" / request.param


def read(folder):
    """The checkpoint's tensors, for a test to spoil."""
    return {name: np.array(tensor) for name, tensor in open_file(folder / "model.safetensors").tensors.items()}


def copy(data, tmp_path, name):
    folder = data / "golden" / name
    shutil.copy(folder / "config.json", tmp_path)
    return tmp_path, read_config(folder), read(folder)


def rewrite(folder, tensors):
    save_file(tensors, folder / "model.safetensors")


def leaves(tree):
    return jax.tree.leaves(tree, is_leaf=lambda x: is_weight(x) or isinstance(x, QArray))


def values(params):
    return [np.asarray(x) for x in jax.tree.leaves(plain(params, jnp.float32))]


@pytest.mark.parametrize("devices", [1, 8])
def test_values_are_those_of_the_reference(golden, devices):
    cfg = read_config(golden)
    params = plain(load(golden, cfg, make_plan(devices), jnp.float32), jnp.float32)
    with np.load(golden / "golden.npz") as arrays:
        want = arrays[f"dequant_{EXPERT}.weight"]
    got = np.asarray(params.layers.moe.down[1, 1])
    np.testing.assert_array_equal(got[:, : want.shape[1]], want)
    assert not got[:, want.shape[1] :].any()


@pytest.mark.parametrize(("devices", "whole_experts"), [(2, False), (3, True), (8, False), (8, True)])
def test_padded_shards(golden, devices, whole_experts):
    """At any device count the values are those of one device, then zeros, and every array lies as it was declared."""
    cfg, plan = read_config(golden), make_plan(devices, expert_parallel=whole_experts)
    scheme = quantization_of(json.loads((golden / "config.json").read_text()))
    params = load(golden, cfg, plan, jnp.float32)
    told = abstract(cfg, plan, jnp.float32, published(scheme, cfg))
    chex.assert_trees_all_equal_shapes_and_dtypes(params, told)
    assert jax.tree.all(jax.tree.map(lambda a, b: a.sharding == b.sharding, params, told))
    assert bytes_per_device(params) == bytes_per_device(told) < bytes_per_device(abstract(cfg, plan, jnp.float32))
    for got, want in zip(values(params), values(load(golden, cfg, make_plan(1), jnp.float32)), strict=True):
        np.testing.assert_array_equal(got, np.pad(want, [(0, p - s) for p, s in zip(got.shape, want.shape)]))


def test_which_leaves_stay_quantised(data):
    found = {}
    for name in (FP8, NVFP4):
        folder = data / "golden" / name
        params = load(folder, read_config(folder), make_plan(1), jnp.bfloat16)
        pairs = zip(leaves(declare(read_config(folder))), leaves(params), strict=True)
        found[name] = {w.name.removesuffix(".weight") for w, x in pairs if isinstance(x, QArray)}
        assert params.layers.attention.k_b.dtype == jnp.bfloat16
        assert params.layers.moe.router_bias.dtype == jnp.float32
        assert isinstance(params.mtp.layers.moe.gate, QArray) == (name == FP8)
    stacks = {f"model.layers.{{i}}.mlp.experts.{{e}}.{part}_proj" for part in ("gate", "up", "down")}
    assert found[NVFP4] == stacks
    assert (
        stacks < found[FP8] and {"model.layers.{i}.self_attn.indexer.wk", "model.layers.{i}.mlp.gate_proj"} < found[FP8]
    )
    assert not {name for name in found[FP8] if "norm" in name or "eh_proj" in name or "weights_proj" in name}


def test_streaming_by_layer_gives_the_same(golden):
    cfg, plan = read_config(golden), make_plan(8, dcp=4)
    whole, layers = (load(golden, cfg, plan, jnp.float32, chunk_bytes=n) for n in (1 << 30, 0))
    chex.assert_trees_all_equal_shapes_and_dtypes(whole, layers)
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(np.asarray(a), np.asarray(b)), whole, layers)


def test_halves_of_a_quantised_tensor(data):
    """The halves of kv_b start inside blocks."""
    folder = data / "golden" / FP8
    cfg, tensors = read_config(folder), read(folder)
    name = "model.layers.1.self_attn.kv_b_proj.weight"
    stored, scales = tensors[name].astype(np.float32), tensors[f"{name}_scale_inv"]
    want = stored * scales.repeat(128, 0).repeat(128, 1)[: stored.shape[0], : stored.shape[1]]
    want = want.reshape(cfg.num_heads, cfg.nope_dim + cfg.v_dim, cfg.kv_rank)
    for devices in (1, 2):
        params = load(folder, cfg, make_plan(devices), jnp.float32)
        np.testing.assert_array_equal(params.layers.attention.k_b[1], want[:, : cfg.nope_dim])
        np.testing.assert_array_equal(params.layers.attention.v_b[1], want[:, cfg.nope_dim :])


def compressed(tensors):
    """The same NVFP4 weights in the other spelling."""
    out = {}
    for name, tensor in tensors.items():
        if name.endswith("_scale_2"):
            out[name.replace("weight_scale_2", "weight_global_scale")] = np.reshape(1 / tensor, 1)
        elif name.endswith("input_scale"):
            out[name.replace("input_scale", "input_global_scale")] = tensor
        else:
            out[f"{name}_packed" if tensor.dtype == np.uint8 else name] = tensor
    return out


def test_the_other_spelling_of_nvfp4(data, tmp_path):
    folder, cfg, tensors = copy(data, tmp_path, NVFP4)
    # A power of two: its reciprocal is exact.
    for name in tensors:
        if name.endswith("_scale_2"):
            tensors[name] = np.full_like(tensors[name], 2.0**-7)
    rewrite(folder, tensors)
    want = load(folder, cfg, make_plan(2), jnp.float32)
    rewrite(folder, compressed(tensors))
    got = load(folder, cfg, make_plan(2), jnp.float32)
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(np.asarray(a), np.asarray(b)), got, want)


def test_gate_and_up_have_factors_of_their_own(data, tmp_path):
    folder, cfg, tensors = copy(data, tmp_path, NVFP4)
    tensors[f"{EXPERT.replace('down', 'up')}.weight_scale_2"] *= 3
    rewrite(folder, tensors)
    moe = load(folder, cfg, make_plan(1), jnp.float32).layers.moe
    before = load(data / "golden" / NVFP4, cfg, make_plan(1), jnp.float32).layers.moe
    np.testing.assert_array_equal(moe.gate.factor, before.gate.factor)
    ratio = np.ones(moe.up.factor.shape)
    ratio[1, 1] = 3
    np.testing.assert_allclose(moe.up.factor, before.up.factor * ratio)


def test_a_stack_of_both_kinds_is_widened(data, tmp_path):
    """What some leave unquantised in one layer is plain in all of them, with the same values."""
    folder, cfg, tensors = copy(data, tmp_path, FP8)
    want = load(data / "golden" / FP8, cfg, make_plan(2), jnp.float32)
    name = "model.layers.1.self_attn.o_proj.weight"
    wide = np.asarray(plain(want.layers.attention.o, jnp.float32)[1])
    tensors[name] = wide
    del tensors[f"{name}_scale_inv"]
    rewrite(folder, tensors)
    got = load(folder, cfg, make_plan(2), jnp.float32)
    np.testing.assert_array_equal(got.layers.attention.o, plain(want.layers.attention.o, jnp.float32))
    assert isinstance(got.layers.attention.q_a, QArray)


def test_scales_for_activations_and_cache_are_ignored(data, tmp_path):
    folder, cfg, tensors = copy(data, tmp_path, FP8)
    for name in ("self_attn.q_a_proj.input_scale", "self_attn.k_proj.k_scale", "self_attn.v_scale"):
        tensors[f"model.layers.0.{name}"] = np.ones((), np.float32)
    head = f"model.layers.{cfg.num_layers}.shared_head.head.weight"
    tensors[head] = np.zeros((2, 2), ml_dtypes.float8_e4m3fn)
    tensors[f"{head}_scale_inv"] = np.ones((1, 1), np.float32)
    rewrite(folder, tensors)
    load(folder, cfg, make_plan(1), jnp.float32)
    rewrite(folder, tensors | {"model.layers.9.mlp.input_scale": np.ones((), np.float32)})
    with pytest.raises(CheckpointError, match=r"1 unknown: model\.layers\.9\.mlp\.input_scale"):
        load(folder, cfg, make_plan(1), jnp.float32)


def test_faults_of_scales_are_told_by_name(data, tmp_path):
    folder, cfg, tensors = copy(data, tmp_path, FP8)
    lost, shape, kind = (f"model.layers.{i}.self_attn.q_b_proj.weight_scale_inv" for i in range(3))
    del tensors[lost]
    tensors[shape] = tensors[shape][:1]
    tensors[kind] = tensors[kind].astype(np.int32)
    rewrite(folder, tensors)
    with pytest.raises(CheckpointError) as error:
        load(folder, cfg, make_plan(1), jnp.float32)
    told = str(error.value)
    assert f"1 missing: {lost};" in told and f"{shape} [1, 1] instead of [2, 1]" in told
    assert f"{kind} int32 instead of float32 or bfloat16 or float16" in told


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        (FP8, f"{EXPERT}.weight_scale_inv"),
        (FP8, "model.layers.0.self_attn.kv_b_proj.weight_scale_inv"),
        (NVFP4, f"{EXPERT}.weight_scale"),
        (NVFP4, f"{EXPERT}.weight_scale_2"),
    ],
)
def test_scales_that_are_no_numbers(data, tmp_path, name, tensor):
    folder, cfg, tensors = copy(data, tmp_path, name)
    tensors[tensor][...] = np.nan
    rewrite(folder, tensors)
    with pytest.raises(CheckpointError, match=f"^{tensor} holds scales that are NaN".replace(".", r"\.")):
        load(folder, cfg, make_plan(2), jnp.float32)


def test_bytes_are_not_cut(data):
    """144 columns over 5 devices are parts of 29; two NVFP4 values lie in a byte."""
    folder = data / "golden" / NVFP4
    with pytest.raises(ConfigError, match=r"down_proj.* parts of 29; use a tensor parallel size"):
        load(folder, read_config(folder), make_plan(5), jnp.float32)
    load(folder, read_config(folder), make_plan(5, expert_parallel=True), jnp.float32)


@pytest.mark.parametrize("chunk_bytes", [1 << 30, 0])
def test_progress_ends_at_the_total(golden, chunk_bytes):
    cfg, told = read_config(golden), []
    checkpoint = Checkpoint.open(golden, cfg)
    params = place(
        checkpoint, cfg, make_plan(2), jnp.float32, chunk_bytes=chunk_bytes, progress=lambda *x: told.append(x)
    )
    total = sum(x.nbytes for x in jax.tree.leaves(params))
    done = [x for x, _ in told]
    assert {x for _, x in told} == {total} and done == sorted(done) and done[-1] == total


@pytest.mark.parametrize(("scheme", "gigabytes"), [("fp8", 755.6), ("nvfp4", 464.8), (None, 1506.7)])
def test_bytes_of_the_published_checkpoints(scheme, gigabytes):
    """GLM-5.2's own shapes, by the names that each of its three checkpoints has."""
    cfg, sizes = from_hf(GLM_5_2), {}
    for w in leaves(declare(cfg)):
        form = FORMATS[scheme] if scheme and in_published(scheme, w, cfg) else None
        for _, name in entries(w):
            for tensor, (shape, dtypes) in published_parts(form, name).expected(disk_shape(w)).items():
                plain_dtype = dtypes[0] if form or w.float32 else jnp.dtype(jnp.bfloat16)
                sizes[tensor] = int(np.prod(shape)) * plain_dtype.itemsize
    assert len(sizes) == {"fp8": 118_629, "nvfp4": 174_785, None: 59_585}[scheme]
    assert round(sum(sizes.values()) / 1e9, 1) == gigabytes


def test_saving_wants_plain_parameters(data, tmp_path):
    folder = data / "golden" / NVFP4
    cfg = read_config(folder)
    params = load(folder, cfg, make_plan(2), jnp.float32)
    with pytest.raises(CheckpointError, match=r"dcpjax\.quant\.plain"):
        save(params, cfg, tmp_path)
    save(plain(params, jnp.float32), cfg, tmp_path)
    again = load(tmp_path, cfg, make_plan(2), jnp.float32)
    for got, want in zip(values(again), values(params), strict=True):
        np.testing.assert_array_equal(got, want)


def announced(**given):
    return {"quantization_config": given}


def test_what_configurations_announce(data):
    names = ("q_fp8_block128", "q_nvfp4_experts", "a_freq4")
    raw = [json.loads((data / "golden" / name / "config.json").read_text()) for name in names]
    assert [*map(quantization_of, raw)] == ["fp8", "nvfp4", None]
    nested = announced(quant_method="modelopt", quantization={"quant_algo": "NVFP4", "group_size": 16})
    packed = announced(quant_method="compressed-tensors", format="nvfp4-pack-quantized")
    assert quantization_of(nested) == quantization_of(packed) == "nvfp4"
    assert set(FORMATS) == {"fp8", "nvfp4"}


@pytest.mark.parametrize(
    ("raw", "told"),
    [
        (announced(quant_method="awq", bits=4), "quant_method 'awq' is not known"),
        (announced(quant_method="fp8"), r"weight_block_size None must be \[128, 128\]"),
        (announced(quant_method="fp8", weight_block_size=[64, 128]), r"weight_block_size \[64, 128\] must be"),
        (announced(quant_method="fp8", fmt="e5m2", weight_block_size=[128, 128]), "fmt 'e5m2' must be 'e4m3'"),
        (announced(quant_method="modelopt", quant_algo="FP8"), "quant_algo 'FP8' cannot be read"),
        (announced(quant_method="modelopt", quant_algo="NVFP4", group_size=32), "group_size 32 must be 16"),
        (announced(quant_method="modelopt", quantization=[1]), "quant_algo None cannot be read"),
        (announced(quant_method="compressed-tensors", format="pack-quantized"), "format 'pack-quantized' cannot"),
        ({"quantization_config": "fp8"}, "must be a mapping"),
    ],
)
def test_other_quantisations_are_refused(data, raw, told):
    with pytest.raises(ConfigError, match=told):
        quantization_of(raw)
    with pytest.raises(ConfigError, match=told):
        from_hf(json.loads((data / "golden" / "a_freq4" / "config.json").read_text()) | raw)
