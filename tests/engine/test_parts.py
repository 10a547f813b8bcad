"""`trace(parts=True)`: what each rank contributes to attention, merged by hand and followed through a layer."""

import numpy as np
import pytest

from dcpjax import LLM
from tests.engine import small

pytestmark = pytest.mark.usefixtures("quick_compile")

SIZES = {"block_size": 8, "num_blocks": 9, "max_num_seqs": 1, "max_num_batched_tokens": 32, "dtype": "float32"}
TOKENS = [int(x) for x in np.arange(40) ** 2 % 61]  # two chunks
MESHES = {"alone": (1, 1), "dcp4": (4, 4), "tp2dcp2": (4, 2)}


@pytest.fixture(scope="module")
def traces(tmp_path_factory):
    folder = small.write_checkpoint(tmp_path_factory.mktemp("small"))
    found = {}
    for name, (devices, dcp) in MESHES.items():
        llm = LLM(folder, tensor_parallel_size=devices, decode_context_parallel_size=dcp, **SIZES)
        found[name] = llm.trace(TOKENS, parts=True), llm.params
        assert llm.engine.scheduler.pool.num_used == 0
        assert llm.trace(TOKENS[:3]).parts is None
    return found


def merged(parts) -> np.ndarray:
    """`[N, S, H, L]` in float64."""
    lse = parts.lse.astype(np.float64)
    top = lse.max(1, keepdims=True)
    mass = np.exp(lse - top)
    return np.sum(mass[..., None] * parts.out, axis=1) / mass.sum(1)[..., None]


@pytest.mark.parametrize("name", MESHES)
def test_shapes_and_counts(traces, name):
    parts, ranks = traces[name][0].parts, MESHES[name][1]
    cfg = small.CONFIG
    assert parts.out.shape == (cfg.num_layers, ranks, len(TOKENS), cfg.num_heads, cfg.kv_rank)
    assert parts.lse.shape == parts.out.shape[:-1] and parts.count.shape == parts.out.shape[:3]
    # Each token has its own and all before it, up to the selection's size; each is on one rank.
    want = np.minimum(np.arange(1, len(TOKENS) + 1), cfg.indexer.topk)
    np.testing.assert_array_equal(parts.count.sum(1), np.broadcast_to(want, (cfg.num_layers, len(TOKENS))))
    none = parts.count == 0
    assert np.all(parts.lse[none] == -np.inf) and np.all(parts.out[none] == 0)
    assert np.all(np.isfinite(parts.lse[~none]))
    assert none.any() == (ranks > 1)


@pytest.mark.parametrize("name", ["dcp4", "tp2dcp2"])
def test_counts_are_those_of_the_owners(traces, name):
    """Positions of the selection, dealt out by hand."""
    trace, ranks = traces[name][0], MESHES[name][1]
    full = [0, 0, 2]  # the layer that chose, for each layer
    for layer, chosen in enumerate(full):
        slots = trace.topk[chosen]
        for rank in range(ranks):
            own = np.sum((slots >= 0) & (slots % ranks == rank), axis=1)
            np.testing.assert_array_equal(trace.parts.count[layer, rank], own)


@pytest.mark.parametrize("name", ["dcp4", "tp2dcp2"])
def test_merged_parts_are_the_attention_of_one_device(traces, name):
    alone = traces["alone"][0].parts
    np.testing.assert_allclose(merged(traces[name][0].parts), alone.out[:, 0], atol=1e-4)
    total = np.logaddexp.reduce(traces[name][0].parts.lse.astype(np.float64), axis=1)
    np.testing.assert_allclose(total, alone.lse[:, 0], atol=1e-4)


@pytest.mark.parametrize("name", MESHES)
def test_parts_are_what_the_layer_computed(traces, name):
    """The first layer is dense: from its merged parts to the state behind it, in numpy."""
    trace, params = traces[name]
    w = {key: np.asarray(getattr(params.layers.attention, key)[0], np.float64) for key in ("v_b", "o", "post_norm")}
    gate, up, down = (np.asarray(getattr(params.layers.dense, key)[0], np.float64) for key in ("gate", "up", "down"))
    heads = small.CONFIG.num_heads
    value = np.einsum("thl,hvl->thv", merged(trace.parts)[0], w["v_b"][:heads])
    h = trace.hidden_states[0].astype(np.float64)
    h = h + value.reshape(len(h), -1) @ w["o"][:, : value.shape[1] * value.shape[2]].T
    x = h / np.sqrt(np.mean(h * h, -1, keepdims=True) + small.CONFIG.norm_eps) * w["post_norm"]
    a = x @ gate.T
    h = h + (a / (1 + np.exp(-a)) * (x @ up.T)) @ down.T
    np.testing.assert_allclose(h, trace.hidden_states[1], atol=1e-4)
