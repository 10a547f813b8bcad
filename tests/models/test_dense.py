"""The plain forward against the golden checkpoints: sets and tokens equal, floats within 2e-4."""

import dataclasses
import functools
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dcpjax.mesh import make_plan
from models import dense
from models.config import from_hf
from models.params import init
from models.weights import load

pytestmark = pytest.mark.usefixtures("quick_compile")

GOLDEN = pathlib.Path(__file__).parents[1] / "data" / "golden"
ATOL = 2e-4
# (case, prefix of its arrays, latent norm epsilon: None is the config's own)
CASES = [("a_freq4", "", 1e-6), ("b_group2", "", 1e-6), ("b_group2", "cfgeps_", None), ("c_wide", "", 1e-6)]


@functools.cache
def golden(case, prefix, eps):
    folder = GOLDEN / case
    raw = json.loads((folder / "config.json").read_text())
    cfg = from_hf(raw, {} if eps is None else {"latent_norm_eps": eps})
    with np.load(folder / "golden.npz") as arrays:
        wanted = {k.removeprefix(prefix): arrays[k] for k in arrays if k.startswith("cfgeps_") == bool(prefix)}
    params = load(folder, cfg, make_plan(1, 1), jnp.float32)
    if "input_ids" not in wanted:
        with np.load(folder / "golden.npz") as arrays:
            wanted["input_ids"] = arrays["input_ids"]
    return cfg, params, wanted


@pytest.fixture(params=CASES, ids=lambda c: c[0] + ("_cfgeps" if c[1] else ""))
def case(request):
    return golden(*request.param)


forward = jax.jit(dense.forward, static_argnames=("cfg", "sparse"))
mtp = jax.jit(dense.mtp, static_argnames="cfg")
draft = jax.jit(dense.draft, static_argnames=("cfg", "k"))


def test_forward(case):
    cfg, params, want = case
    out = forward(params, want["input_ids"], cfg)
    for name, got in (
        ("logits", out.logits),
        ("hidden_states", out.hidden_states),
        ("final_hidden", out.final_hidden),
        ("latent_cache", out.latent),
    ):
        np.testing.assert_allclose(got, want[name], atol=ATOL, rtol=0, err_msg=name)
    assert set(out.topk) == {int(k.removeprefix("topk_layer_")) for k in want if k.startswith("topk_layer_")}
    for i, got in out.topk.items():
        np.testing.assert_array_equal(got, want[f"topk_layer_{i}"], err_msg=f"layer {i}")


def test_margins_are_those_the_golden_was_chosen_by():
    cfg, params, want = golden("a_freq4", "", 1e-6)
    out = forward(params, want["input_ids"], cfg)
    margins = json.loads((GOLDEN / "a_freq4" / "meta.json").read_text())["min_margins"]
    # the recorded ones are least over prompt, greedy tokens and draft, so ours cannot be smaller
    assert margins["topk"] - 1e-5 <= float(out.margins.selection.min()) < 0.1
    assert margins["route"] - 1e-5 <= float(out.margins.experts.min()) < 0.1
    assert np.isinf(out.margins.selection[: cfg.indexer.topk]).all()
    top = np.sort(want["logits"], -1)
    np.testing.assert_allclose(out.margins.logits, top[:, -1] - top[:, -2], atol=ATOL)


def test_mtp(case):
    cfg, params, want = case
    out = mtp(params, want["mtp_input_ids"], want["final_hidden"], cfg)
    np.testing.assert_array_equal(out.topk, want["mtp_topk"])
    np.testing.assert_allclose(out.logits, want["mtp_logits"], atol=ATOL, rtol=0)
    np.testing.assert_allclose(out.hidden, want["mtp_hidden"], atol=ATOL, rtol=0)
    np.testing.assert_allclose(out.prenorm, want["mtp_hidden_prenorm"], atol=ATOL, rtol=0)


@pytest.mark.parametrize("share", [True, False], ids=["frozen", "own"])
def test_draft(case, share):
    cfg, params, want = case
    name = "draft_share" if share else "draft_own"
    tokens, logits, hidden = draft(params, want["input_ids"], dataclasses.replace(cfg, share_selection=share), 5)
    np.testing.assert_array_equal(tokens, want[f"{name}_tokens"])
    np.testing.assert_allclose(logits, want[f"{name}_logits"], atol=ATOL, rtol=0)
    np.testing.assert_allclose(hidden, want[f"{name}_hidden"], atol=ATOL, rtol=0)


def test_generate(case):
    cfg, params, want = case
    prompt, greedy = want["input_ids"].tolist(), want["greedy_tokens"].tolist()
    assert dense.generate(params, prompt, 24, cfg) == greedy
    stop = greedy[7]
    cut = greedy.index(stop) + 1
    assert dense.generate(params, prompt, 24, cfg, eos={stop}) == greedy[:cut]


def test_greedy_logits(case):
    """The logits behind each greedy token, from one pass over prompt and continuation."""
    cfg, params, want = case
    tokens = np.concatenate([want["input_ids"], want["greedy_tokens"]])
    out = forward(params, tokens, cfg)
    start = len(want["input_ids"]) - 1
    np.testing.assert_allclose(out.logits[start : start + 24], want["greedy_logits"], atol=ATOL, rtol=0)


def test_sparse_equals_dense_while_everything_fits():
    cfg, params, want = golden("c_wide", "", 1e-6)
    tokens = want["input_ids"][: cfg.indexer.topk]
    np.testing.assert_allclose(
        forward(params, tokens, cfg).logits, forward(params, tokens, cfg, sparse=False).logits, atol=1e-5
    )
    full = forward(params, want["input_ids"], cfg, sparse=False)
    assert full.topk == {}
    assert np.abs(full.logits - want["logits"]).max() > 1


def test_ties_go_to_the_lower_position_and_zeros_have_no_sign():
    positions = jnp.arange(6)
    scores = jnp.array([[1.0, 2.0, 2.0, 2.0, -3.0, 2.0]])
    visible = jnp.array([[True, True, True, True, True, False]])
    got = dense.select(scores, visible, positions, 2)
    np.testing.assert_array_equal(got.positions, [[1, 2]])
    assert got.margin.tolist() == [0.0]
    np.testing.assert_array_equal(dense.select(scores, visible, positions, 8).positions, [[0, 1, 2, 3, 4, -1, -1, -1]])
    assert np.isinf(dense.select(scores, visible, positions, 5).margin).all()

    cfg, params, _ = golden("a_freq4", "", 1e-6)
    w = dense.layer_weights(params.layers, cfg.layers, 0).indexer
    a = jnp.ones((3, cfg.hidden_size))
    low = jnp.zeros((3, cfg.q_rank))  # every dot product is 0, and every head weight negative
    w = w.replace(head_weight=-jnp.ones_like(w.head_weight))
    at = jnp.arange(3)
    zeros = dense.index_scores(w, a, low, at, dense.index_keys(w, a, at, cfg), cfg)
    assert not np.signbit(zeros).any() and not zeros.any()


def test_padding_behind_a_sequence_changes_nothing():
    cfg, params, want = golden("b_group2", "", 1e-6)
    ids = want["input_ids"]
    long = forward(params, np.concatenate([ids, ids[:11]]), cfg)
    np.testing.assert_allclose(long.logits[: len(ids)], want["logits"], atol=ATOL)


def test_float64_follows_the_parameters():
    cfg, params, want = golden("b_group2", "", 1e-6)
    with jax.enable_x64(True):
        double = jax.tree.map(lambda x: jnp.asarray(np.asarray(x, np.float64)), params)
        out = dense.forward(double, jnp.asarray(want["input_ids"]), cfg)
        assert out.logits.dtype == out.latent.dtype == out.margins.selection.dtype == jnp.float64
        np.testing.assert_allclose(out.logits, want["logits"], atol=5e-5)


def test_gradients_reach_everything_a_token_passes_through():
    cfg, _, want = golden("a_freq4", "", 1e-6)
    params = init(cfg, jax.random.key(0))
    ids = want["input_ids"][:20]

    def loss(p):
        out = dense.forward(p, ids, cfg)
        return -jnp.mean(jax.nn.log_softmax(out.logits[:-1])[jnp.arange(19), ids[1:]])

    grads = jax.jit(jax.grad(loss))(params)
    assert all(np.isfinite(g).all() for g in jax.tree.leaves(grads))
    assert all(np.abs(g).max() > 0 for g in jax.tree.leaves((grads.embed, grads.layers.attention, grads.layers.dense)))
    # choices are not differentiated: an indexer learns from a loss of its own
    assert not any(np.any(g) for g in jax.tree.leaves(grads.layers.indexer))
