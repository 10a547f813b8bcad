"""`config.json` → `ModelConfig`: the published file, the golden ones, and what is refused."""

import json
import math

import jax
import pytest

from dcpjax.errors import ConfigError
from models.config import IndexerConfig, LayerKind, from_hf, read_config
from models.params import declare, is_weight

GOLDENS = ("a_freq4", "b_group2", "c_wide")
FULL = {"a_freq4": [0, 1, 2, 6], "b_group2": [0, 2], "c_wide": [0, 2]}


@pytest.fixture
def raw(data):
    """The published configuration; a new mapping for each test."""
    return json.loads((data / "glm-5.2" / "config.json").read_text())


def leaves(cfg, **kwargs):
    return jax.tree.leaves(declare(cfg, **kwargs), is_leaf=is_weight)


def full_layers(cfg):
    return [i for i, kind in enumerate(cfg.layers) if kind.full]


def test_published_layers(data):
    cfg = read_config(data / "glm-5.2")
    full, dense = LayerKind(full=True, sparse=True), LayerKind(full=True, sparse=False)
    shared = LayerKind(full=False, sparse=True)
    assert cfg.num_layers == 78
    assert full_layers(cfg) == [0, 1, *range(2, 75, 4)]
    assert cfg.num_full_layers == 21
    assert [i for i, kind in enumerate(cfg.layers) if not kind.sparse] == [0, 1, 2]
    assert cfg.blocks == (((dense,), 2), ((dense, shared, shared, shared), 1), ((full, shared, shared, shared), 18))
    assert cfg.has_mtp and cfg.share_selection


def test_published_numbers(data):
    cfg = read_config(data / "glm-5.2")
    assert (cfg.qk_dim, cfg.v_dim, cfg.latent_width) == (256, 256, 576)
    assert cfg.softmax_scale == 1 / 16
    assert cfg.indexer == IndexerConfig(num_heads=32, head_dim=128, topk=2048, norm_eps=1e-6)
    assert (cfg.moe.num_experts, cfg.moe.experts_per_token, cfg.moe.shared_width, cfg.moe.scale) == (256, 8, 2048, 2.5)
    assert (cfg.rope_theta, cfg.norm_eps, cfg.latent_norm_eps) == (8e6, 1e-5, 1e-5)
    assert cfg.eos_token_ids == (154820, 154827, 154829)
    assert hash(cfg) == hash(read_config(data / "glm-5.2"))


@pytest.mark.parametrize(
    ("overrides", "count"),
    [({}, 753_329_921_024), ({"num_nextn_predict_layers": 0}, 743_377_000_704)],
    ids=["with_draft", "without_draft"],
)
def test_published_parameter_count(data, overrides, count):
    cfg = read_config(data / "glm-5.2", overrides)
    weights = leaves(cfg)
    # The published number leaves out the router biases, one value an expert: they are not trained by gradient.
    biases = cfg.moe.num_experts * (75 + cfg.has_mtp)
    assert sum(math.prod(w.stack + w.size) for w in weights) == count + biases
    assert sum(math.prod(w.stack + w.size) for w in weights if w.float32) == biases
    assert len(weights) <= 128


def test_padding_grows_only_sharded_sizes(data):
    cfg = read_config(data / "golden" / "b_group2")  # 3 heads, 101 tokens, widths 80 and 24
    for plain, padded in zip(leaves(cfg), leaves(cfg, pad=lambda n, axis="width": -(-n // 8) * 8)):
        assert plain.shape == plain.size == padded.size
        for axis, size, shape in zip(padded.axes, padded.size, padded.shape):
            assert shape == size if axis is None else shape % 8 == 0 and shape >= size


@pytest.mark.parametrize("case", GOLDENS)
def test_golden(data, case):
    cfg = read_config(data / "golden" / case)
    raw = json.loads((data / "golden" / case / "config.json").read_text())
    assert full_layers(cfg) == FULL[case]
    assert cfg.num_layers == raw["num_hidden_layers"]
    assert [kind.sparse for kind in cfg.layers] == [t == "sparse" for t in raw["mlp_layer_types"]]
    assert cfg.moe.shared_width == raw["n_shared_experts"] * raw["moe_intermediate_size"]
    assert (cfg.moe.num_groups, cfg.moe.groups_per_token) == (raw["n_group"], raw["topk_group"])
    assert (cfg.vocab_size, cfg.v_dim, cfg.rope_dim) == (
        raw["vocab_size"],
        raw["v_head_dim"],
        raw["qk_rope_head_dim"],
    )
    assert sum(len(kinds) * times for kinds, times in cfg.blocks) == cfg.num_layers


def test_head_dim_is_never_used(raw):
    assert from_hf({**raw, "head_dim": 7}) == from_hf(raw)
    assert from_hf({k: v for k, v in raw.items() if k != "head_dim"}) == from_hf(raw)


@pytest.mark.parametrize("case", ["types", "pattern", "frequency"])
def test_full_layers_from_each_source(raw, case):
    """The list comes first, then the pattern, then frequency and offset."""
    types = raw.pop("indexer_types")
    if case == "types":
        raw |= {"indexer_types": types, "index_topk_pattern": "F" * 78, "index_topk_freq": 1}
    elif case == "pattern":
        raw |= {"index_topk_pattern": "".join(t[0].upper() for t in types), "index_topk_freq": 1}
    assert full_layers(from_hf(raw)) == [0, 1, *range(2, 75, 4)]


def test_sparse_layers_from_first_dense(raw):
    del raw["mlp_layer_types"]
    assert [kind.sparse for kind in from_hf(raw).layers] == [False] * 3 + [True] * 75


def test_latent_norm_eps_is_our_own_key(raw):
    assert from_hf(raw, {"latent_norm_eps": 1e-6}).latent_norm_eps == 1e-6
    assert from_hf(raw, {"latent_norm_eps": 1e-6}).norm_eps == 1e-5


def test_generation_config_names_the_end(tmp_path, raw):
    (tmp_path / "config.json").write_text(json.dumps(raw))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": 5}))
    assert read_config(tmp_path).eos_token_ids == (5,)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"new_projection_rank": 64}, "new_projection_rank"),
        ({"extra": {"inner": [1, 2]}}, "extra"),
        ({"vocab_size": None}, "vocab_size"),
        ({"hidden_size": 0}, "hidden_size"),
        ({"hidden_size": 6144.0}, "hidden_size"),
        ({"model_type": "deepseek_v3"}, "model_type"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings"),
        ({"rope_interleave": False}, "rope_interleave"),
        ({"indexer_rope_interleave": False}, "indexer_rope_interleave"),
        ({"scoring_func": "softmax"}, "scoring_func"),
        ({"num_nextn_predict_layers": 2}, "num_nextn_predict_layers"),
        ({"rope_parameters": {"rope_theta": 1e4, "rope_type": "yarn"}}, "yarn"),
        ({"rope_parameters": {"rope_type": "default"}}, "rope_theta"),
        ({"qk_head_dim": 192}, "qk_head_dim"),
        ({"qk_rope_head_dim": 63, "qk_head_dim": 255}, "qk_rope_head_dim"),
        ({"index_head_dim": 32}, "index_head_dim"),
        ({"n_group": 3}, "n_group"),
        ({"n_group": 64, "topk_group": 1}, "groups"),
        ({"indexer_types": ["full"] * 77}, "78"),
        ({"indexer_types": ["shared"] + ["full"] * 77}, "layer 0"),
        ({"indexer_types": ["full"] * 77 + ["half"]}, "half"),
        ({"mlp_layer_types": ["dense"] * 77}, "mlp_layer_types"),
    ],
    ids=lambda x: x if isinstance(x, str) else "-".join(x),
)
def test_refused(raw, change, told):
    from_hf(raw)
    with pytest.raises(ConfigError, match=told):
        from_hf({**raw, **change})


def test_unknown_override_is_refused_whatever_its_value(raw):
    assert from_hf({**raw, "comment": "harmless"}) == from_hf(raw)
    with pytest.raises(ConfigError, match="commnet"):
        from_hf(raw, {"commnet": "a slip"})


def test_ends_are_in_the_vocabulary(tmp_path, raw):
    """Else a text has none; the message names the file that says so."""
    size = raw["vocab_size"]
    for ids in (-1, size, [0, size]):
        with pytest.raises(ConfigError, match=r"^config\.json: eos_token_id"):
            from_hf({**raw, "eos_token_id": ids})
    (tmp_path / "config.json").write_text(json.dumps(raw))
    for ids in ("x", [size]):
        (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
        with pytest.raises(ConfigError, match=r"^generation_config\.json: eos_token_id"):
            read_config(tmp_path)


def test_unreadable_folder(tmp_path):
    with pytest.raises(ConfigError, match=r"no config\.json"):
        read_config(tmp_path)
    for text in ("{", '{"a": 1, "a": 2}'):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(ConfigError, match="not valid JSON"):
            read_config(tmp_path)


ODD = (None, "x", -1, 0, 1.5, True, [], {}, [1], ["a", None], {"a": 1}, 10**400, float("nan"), [[]], "FFF", [True])


@pytest.mark.parametrize("name", ["a_freq4", "b_group2", "q_fp8_block128"])
def test_values_of_wrong_types_are_refused_by_name(data, name):
    """Any key with any odd value: a network, or a sentence that names a key."""
    raw = json.loads((data / "golden" / name / "config.json").read_text())
    refused = 0
    for key in raw:
        for value in ODD:
            try:
                from_hf(raw | {key: value})
            except ConfigError as error:
                refused += 1
                assert str(error).startswith(("config.json", "unknown configuration keys"))
    assert refused > 300
