"""Checkpoints in and out: against the safetensors library, at several device counts, and what is refused."""

import dataclasses
import functools
import itertools
import json
import shutil

import chex
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from dcpjax.errors import CheckpointError
from dcpjax.mesh import make_plan
from models.config import from_hf, read_config
from models.params import declare, init, is_weight, pad_to
from models.saving import save
from models.stored import abstract
from models.weights import load

pytestmark = pytest.mark.usefixtures("quick_compile")

GOLDENS = ("a_freq4", "b_group2", "c_wide")
WRONG = "model.layers.1.self_attn.q_b_proj.weight"


@pytest.fixture(params=GOLDENS)
def golden(request, data):
    return data / "golden" / request.param


@pytest.fixture
def copy(data, tmp_path):
    """A checkpoint that a test may spoil: the folder, its configuration and its tensors."""
    for name in ("config.json", "model.safetensors"):
        shutil.copy(data / "golden" / "b_group2" / name, tmp_path / name)
    return tmp_path, read_config(tmp_path), load_file(tmp_path / "model.safetensors")


def rewrite(folder, tensors):
    save_file(tensors, folder / "model.safetensors")


def cut(folder, tensors, index=True):
    """The same tensors in three files with an index."""
    (folder / "model.safetensors").unlink()
    names, where = sorted(tensors), {}
    for i in range(3):
        file = f"model-{i + 1:05}-of-00003.safetensors"
        save_file({name: tensors[name] for name in names[i::3]}, folder / file)
        where |= dict.fromkeys(names[i::3], file)
    if index:
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    return where


def public(params, cfg):
    """Name → array, written out by hand for the names that matter: not derived from the declaration."""
    at, out = "model.layers.", {"model.embed_tokens.weight": params.embed, "lm_head.weight": params.head}
    out["model.norm.weight"] = params.norm
    out[f"{at}{cfg.num_layers}.eh_proj.weight"] = params.mtp.join
    out[f"{at}{cfg.num_layers}.shared_head.norm.weight"] = params.mtp.out_norm
    out[f"{at}{cfg.num_layers}.mlp.experts.1.up_proj.weight"] = params.mtp.layers.moe.up[0, 1]
    for i in range(cfg.num_layers):
        a = params.layers.attention
        out[f"{at}{i}.self_attn.q_b_proj.weight"] = a.q_b[i]
        out[f"{at}{i}.self_attn.o_proj.weight"] = a.o[i]
        out[f"{at}{i}.self_attn.kv_b_proj.weight"] = np.concatenate([a.k_b[i], a.v_b[i]], 1).reshape(-1, cfg.kv_rank)
        out[f"{at}{i}.post_attention_layernorm.weight"] = a.post_norm[i]
    for row, i in enumerate(i for i, kind in enumerate(cfg.layers) if kind.full):
        out[f"{at}{i}.self_attn.indexer.wk.weight"] = params.layers.indexer.k[row]
        out[f"{at}{i}.self_attn.indexer.k_norm.bias"] = params.layers.indexer.k_bias[row]
    for row, i in enumerate(i for i, kind in enumerate(cfg.layers) if not kind.sparse):
        out[f"{at}{i}.mlp.gate_proj.weight"] = params.layers.dense.gate[row]
    for row, i in enumerate(i for i, kind in enumerate(cfg.layers) if kind.sparse):
        moe = params.layers.moe
        out[f"{at}{i}.mlp.gate.e_score_correction_bias"] = moe.router_bias[row]
        out[f"{at}{i}.mlp.shared_experts.down_proj.weight"] = moe.shared_down[row]
        for e in range(cfg.moe.num_experts):
            out[f"{at}{i}.mlp.experts.{e}.gate_proj.weight"] = moe.gate[row, e]
            out[f"{at}{i}.mlp.experts.{e}.down_proj.weight"] = moe.down[row, e]
    return out


def assert_equal(got, want):
    """The same tree, bit for bit, and laid out in the same way."""
    chex.assert_trees_all_equal_shapes_and_dtypes(got, want)
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(np.asarray(a), np.asarray(b)), got, want)
    assert jax.tree.all(jax.tree.map(lambda a, b: a.sharding == b.sharding, got, want))


def test_values_are_those_of_the_file(golden):
    cfg, tensors = read_config(golden), load_file(golden / "model.safetensors")
    params = load(golden, cfg, make_plan(1), jnp.float32)
    for name, got in public(params, cfg).items():
        np.testing.assert_array_equal(np.asarray(got), tensors[name], err_msg=name)
    sizes = sum(leaf.size for leaf in jax.tree.leaves(params))
    assert sizes == sum(tensor.size for tensor in tensors.values())


@pytest.mark.parametrize("whole_experts", [False, True])
@pytest.mark.parametrize("devices", [2, 3, 8])
def test_padded_shards(golden, devices, whole_experts):
    """At any device count each leaf is the unpadded one, then zeros, on the sharding that was declared."""
    cfg, plan = read_config(golden), make_plan(devices, expert_parallel=whole_experts)
    params = load(golden, cfg, plan, jnp.float32)
    chex.assert_trees_all_equal_shapes_and_dtypes(params, abstract(cfg, plan, jnp.float32))
    plain = jax.tree.map(np.asarray, load(golden, cfg, make_plan(1), jnp.float32))
    for w, got, want in zip(*map(leaves, (declare(cfg, plan.pad), params, plain))):
        assert got.sharding == plan.sharding(*w.full_axes)
        widths = [(0, p - s) for p, s in zip(got.shape, want.shape)]
        np.testing.assert_array_equal(np.asarray(got), np.pad(want, widths), err_msg=w.name)


def leaves(tree):
    return jax.tree.leaves(tree, is_leaf=is_weight)


def test_streaming_by_layer_gives_the_same(data):
    folder = data / "golden" / "b_group2"
    cfg, plan = read_config(folder), make_plan(8, dcp=4)
    assert_equal(load(folder, cfg, plan, jnp.float32, chunk_bytes=0), load(folder, cfg, plan, jnp.float32))


def test_host_memory_is_bounded_by_a_layer(data, monkeypatch):
    """No array is made on the host that is larger than a device's part of one layer of one leaf."""
    folder = data / "golden" / "a_freq4"
    cfg, plan = read_config(folder), make_plan(8)
    made = []
    zeros = np.zeros
    monkeypatch.setattr("models.weights.np.zeros", lambda *a: made.append(zeros(*a).nbytes) or zeros(*a))
    load(folder, cfg, plan, jnp.float32, chunk_bytes=0)
    whole = abstract(cfg, plan, jnp.float32)
    layer = max(
        4 * int(np.prod(w.full_shape)) // max(1, len(w.layers)) // (8 if any(w.axes) else 1)
        for w in leaves(declare(cfg, plan.pad))
    )
    assert max(made) <= layer < max(x.size * 4 // 8 for x in jax.tree.leaves(whole))


@pytest.mark.parametrize("devices, whole_experts", [(1, False), (3, False), (8, False), (3, True)])
def test_round_trip(golden, tmp_path, devices, whole_experts):
    cfg, plan = read_config(golden), make_plan(devices, expert_parallel=whole_experts)
    params = load(golden, cfg, plan, jnp.float32)
    save(params, cfg, tmp_path)
    written, read = load_file(tmp_path / "model.safetensors"), load_file(golden / "model.safetensors")
    assert written.keys() == read.keys()
    for name, tensor in read.items():
        np.testing.assert_array_equal(written[name], tensor, err_msg=name)
    assert_equal(load(tmp_path, cfg, plan, jnp.float32), params)


def test_saving_layer_by_layer_gives_the_same(data, tmp_path):
    cfg = read_config(data / "golden" / "b_group2")
    params = load(data / "golden" / "b_group2", cfg, make_plan(8), jnp.float32)
    for name, chunk_bytes in (("whole", 1 << 30), ("layers", 0)):
        save(params, cfg, tmp_path / name, chunk_bytes=chunk_bytes)
    whole, layers = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("whole", "layers"))
    assert whole == layers


def test_round_trip_of_random_weights_between_meshes(data, tmp_path):
    cfg = read_config(data / "golden" / "b_group2")
    params = jax.jit(functools.partial(init, cfg, dtype=jnp.bfloat16))(jax.random.key(0))
    save(pad_to(params, cfg, make_plan(4)), cfg, tmp_path)
    assert_equal(load(tmp_path, cfg, make_plan(8), jnp.bfloat16), pad_to(params, cfg, make_plan(8)))
    assert load_file(tmp_path / "model.safetensors")["lm_head.weight"].dtype == ml_dtypes.bfloat16


def test_without_a_draft(copy):
    folder, cfg, tensors = copy
    bare = dataclasses.replace(cfg, has_mtp=False)
    assert load(folder, bare, make_plan(1), jnp.float32).mtp is None
    rewrite(folder, {k: v for k, v in tensors.items() if not k.startswith(f"model.layers.{cfg.num_layers}.")})
    load(folder, bare, make_plan(1), jnp.float32)
    with pytest.raises(CheckpointError, match=rf"missing: .*model\.layers\.{cfg.num_layers}\.enorm\.weight"):
        load(folder, cfg, make_plan(1), jnp.float32)


@pytest.mark.parametrize(
    ("disk", "wanted"),
    list(itertools.product([np.float32, np.float16, ml_dtypes.bfloat16], [jnp.float32, jnp.bfloat16])),
)
def test_dtypes(copy, disk, wanted):
    folder, cfg, tensors = copy
    rewrite(folder, {k: v.astype(disk) if v.ndim > 1 else v for k, v in tensors.items()})
    params = load(folder, cfg, make_plan(1), wanted)
    assert params.layers.moe.router_bias.dtype == jnp.float32
    assert params.layers.attention.q_a.dtype == wanted
    want = tensors["model.layers.2.self_attn.q_a_proj.weight"].astype(disk).astype(wanted)
    np.testing.assert_array_equal(np.asarray(params.layers.attention.q_a[2]), want)


def test_save_in_another_dtype(copy):
    folder, cfg, tensors = copy
    params = load(folder, cfg, make_plan(2), jnp.float32)
    raw = {"quantization_config": {}, "torch_dtype": "float32", **json.loads((folder / "config.json").read_text())}
    save(params, cfg, folder, jnp.bfloat16, raw_config=raw)
    got = load_file(folder / "model.safetensors")
    assert got["lm_head.weight"].dtype == ml_dtypes.bfloat16
    bias = "model.layers.1.mlp.gate.e_score_correction_bias"
    np.testing.assert_array_equal(got[bias], tensors[bias])
    said = json.loads((folder / "config.json").read_text())
    assert said["dtype"] == "bfloat16" and not {"quantization_config", "torch_dtype"} & said.keys()
    assert from_hf(said) == cfg


def test_index(copy):
    folder, cfg, tensors = copy
    want = load(folder, cfg, make_plan(2), jnp.float32)
    cut(folder, tensors)
    assert_equal(load(folder, cfg, make_plan(2), jnp.float32), want)


def test_save_cuts_large_checkpoints_and_replaces_old_ones(copy):
    folder, cfg, tensors = copy
    want = load(folder, cfg, make_plan(2), jnp.float32)
    save(want, cfg, folder, file_bytes=200_000)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    files = sorted(path.name for path in folder.glob("*.safetensors*") if path.suffix != ".json")
    assert len(files) > 3 and files == sorted(set(index["weight_map"].values()))
    assert index["weight_map"].keys() == tensors.keys()
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in tensors.values())
    for file in files:
        assert sum(tensor.nbytes for tensor in load_file(folder / file).values()) <= 200_000
    assert_equal(load(folder, cfg, make_plan(2), jnp.float32), want)
    save(want, cfg, folder)
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors"]


def test_unused_tensors_are_accepted(copy):
    folder, cfg, tensors = copy
    want = load(folder, cfg, make_plan(1), jnp.float32)
    draft, shared = f"model.layers.{cfg.num_layers}", "model.layers.1.self_attn.indexer"
    extra = {
        f"{draft}.embed_tokens.weight": tensors["model.embed_tokens.weight"],
        f"{draft}.shared_head.head.weight": tensors["lm_head.weight"],
        "model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(4, np.float32),
        f"{shared}.wk.weight": np.ones((2, 2), np.float32),
        f"{shared}.k_norm.bias": np.ones(2, np.int8),
    }
    rewrite(folder, tensors | extra)
    assert_equal(load(folder, cfg, make_plan(1), jnp.float32), want)


def test_all_faults_are_told_at_once_by_name(copy):
    folder, cfg, tensors = copy
    lost = ["model.norm.weight", "model.layers.2.mlp.experts.5.up_proj.weight"]
    for name in lost:
        del tensors[name]
    tensors[WRONG] = tensors[WRONG][:-1]
    tensors["lm_head.weight"] = tensors["lm_head.weight"].astype(np.int8)
    tensors["model.layers.0.self_attn.gate.weight"] = np.ones(1, np.float32)
    tensors["model.layers.1.mlp.experts.8.up_proj.weight"] = np.ones(1, np.float32)
    rewrite(folder, tensors)
    with pytest.raises(CheckpointError) as error:
        load(folder, cfg, make_plan(1), jnp.float32)
    told = str(error.value)
    missing, shape, kind, unknown = told.split("; ")
    assert str(folder) in told
    assert "2 missing" in missing and all(name in missing for name in lost)
    assert f"{WRONG} [83, 48] instead of [84, 48]" in shape
    assert "lm_head.weight int8 instead of float32 or bfloat16 or float16" in kind
    assert "2 unknown" in unknown
    assert "model.layers.0.self_attn.gate.weight" in unknown and "experts.8.up_proj" in unknown


def test_a_long_list_of_names_is_cut(copy):
    folder, cfg, tensors = copy
    rewrite(folder, {"lm_head.weight": tensors["lm_head.weight"]})
    with pytest.raises(CheckpointError, match=r"and \d+ more"):
        load(folder, cfg, make_plan(1), jnp.float32)


@pytest.mark.parametrize("keep", [0, 5, 100, -1], ids=["empty", "length", "header", "data"])
def test_truncated_file(copy, keep):
    folder, cfg, _ = copy
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match=r"model\.safetensors is truncated"):
        load(folder, cfg, make_plan(1), jnp.float32)


def test_truncated_file_of_an_index(copy):
    folder, cfg, tensors = copy
    cut(folder, tensors)
    path = folder / "model-00002-of-00003.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=r"model-00002-of-00003\.safetensors is truncated"):
        load(folder, cfg, make_plan(1), jnp.float32)
    path.unlink()
    with pytest.raises(CheckpointError, match=r"model-00002-of-00003\.safetensors cannot be read"):
        load(folder, cfg, make_plan(1), jnp.float32)


def header(folder, change):
    """Replaces the JSON header of the checkpoint, and its length."""
    path = folder / "model.safetensors"
    raw = path.read_bytes()
    size = int.from_bytes(raw[:8], "little")
    text = change(raw[8 : 8 + size])
    path.write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + size :])


def edit(change):
    def apply(text):
        entries = json.loads(text)
        change(entries["model.norm.weight"])
        return json.dumps(entries).encode()

    return apply


@pytest.mark.parametrize(
    "change",
    [
        lambda text: b"{" * len(text),
        lambda text: b"[1]",
        edit(lambda entry: entry.update(dtype="F3")),
        edit(lambda entry: entry.pop("data_offsets")),
        edit(lambda entry: entry.update(shape=[7])),
        edit(lambda entry: entry.update(data_offsets=[0, 4])),
        edit(lambda entry: entry.update(data_offsets=[-4, 0])),
    ],
    ids=["json", "list", "dtype", "no_offsets", "shape", "overlap", "negative"],
)
def test_corrupt_header(copy, change):
    folder, cfg, _ = copy
    header(folder, change)
    with pytest.raises(CheckpointError, match=r"model\.safetensors is corrupt"):
        load(folder, cfg, make_plan(1), jnp.float32)


def test_bytes_after_the_data(copy):
    folder, cfg, _ = copy
    with (folder / "model.safetensors").open("ab") as file:
        file.write(b"more")
    with pytest.raises(CheckpointError, match=r"is corrupt: 4 bytes follow"):
        load(folder, cfg, make_plan(1), jnp.float32)


def test_unaligned_data(copy):
    """A header of any length is legal; the arrays behind it need not be aligned."""
    folder, cfg, _ = copy
    want = load(folder, cfg, make_plan(2), jnp.float32)
    header(folder, lambda text: text.rstrip() + b" " * (3 - len(text.rstrip()) % 2))
    assert_equal(load(folder, cfg, make_plan(2), jnp.float32), want)


def test_index_that_lies(copy):
    folder, cfg, tensors = copy
    where = cut(folder, tensors)
    where["model.norm.weight"] = next(file for file in where.values() if file != where["model.norm.weight"])
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    with pytest.raises(CheckpointError, match=r"do not hold: model\.norm\.weight"):
        load(folder, cfg, make_plan(1), jnp.float32)
    (folder / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"index\.json is corrupt"):
        load(folder, cfg, make_plan(1), jnp.float32)


def test_no_checkpoint(copy):
    folder, cfg, tensors = copy
    cut(folder, tensors, index=False)
    with pytest.raises(CheckpointError, match=r"neither model\.safetensors nor"):
        load(folder, cfg, make_plan(1), jnp.float32)


def test_params_of_another_network_are_not_saved(data, tmp_path):
    cfg = read_config(data / "golden" / "b_group2")
    params = load(data / "golden" / "b_group2", cfg, make_plan(1), jnp.float32)
    with pytest.raises(CheckpointError, match=r"lm_head|embed_tokens"):
        save(params, dataclasses.replace(cfg, vocab_size=500), tmp_path)
