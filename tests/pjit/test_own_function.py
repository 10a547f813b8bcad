"""The network inside a jitted function of your own.

The mesh of a `MeshPlan` is an ordinary JAX mesh with axes "tp" and "dcp", and the forward pass an ordinary function of
arrays. So a function of yours can call it, state with `in_shardings` and `out_shardings` how its own arrays lie, and be
one program with it: the partitioner adds what your part needs, and what the network pays for stays as it is. (This is
what `pjit` was for; `jax.jit` with shardings is its heir.)

Each test is such a function. It gives the same values on every mesh, and its compiled program (HLO) says which
collectives it pays for; `jax.named_scope` tells yours from the network's.
"""

import collections
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from dcpjax.batch import ForwardBatch
from dcpjax.cache import PagedCache, Record, make_pool, pool_slots
from dcpjax.layout import CacheLayout
from dcpjax.mesh import ALL, MeshPlan, make_plan
from models import glm_moe_dsa
from models.glm_moe_dsa import Network
from models.params import pad_to
from tests.attention import toy

CONFIG = toy.config("FS", "DM")  # a dense layer that selects, then a layer of experts
PAGES, PAGE_TOKENS = 4, 8
TOKENS = np.random.default_rng(0).integers(0, CONFIG.vocab_size, 16).astype(np.int32)
CLASSES = 8
PROBE = np.random.default_rng(1).normal(size=(CONFIG.hidden_size, CLASSES)).astype(np.float32)

# (devices, dcp): one device, four ranks, and two groups of two.
MESHES = [(1, 1), (4, 4), (4, 2)]
# What two layers and an embedding cost on several devices. 16 tokens are more than the rows they see take to send, so rows
# are gathered, once a layer, and the selection once: see `tests/attention/test_collectives_count.py`.
NETWORK = {"outside": 1, "attention": 3, "output": 2, "ffn": 2}


def network(plan: MeshPlan):
    """The network, its weights on this mesh, and an empty cache."""
    layout = CacheLayout(PAGES, PAGE_TOKENS, shards=plan.dcp)
    latent, index = Record(CONFIG.latent_width, jnp.float32), Record(CONFIG.indexer.head_dim, jnp.float32)
    cache = PagedCache(
        make_pool(CONFIG.num_layers, layout, latent, plan), make_pool(CONFIG.num_full_layers, layout, index, plan)
    )
    return Network(CONFIG, plan), pad_to(toy.params(CONFIG), CONFIG, plan), cache


def batch_of(tokens: jax.Array, layout: CacheLayout, start: int = 0) -> ForwardBatch:
    """One request's tokens from position `start` on, on pages 1, 2 and 3."""
    slots = start + jnp.arange(len(tokens))
    pages, row_of = jnp.array([[1, 2, 3]]), jnp.zeros(len(tokens), jnp.int32)
    return ForwardBatch(tokens, slots, slots, pool_slots(layout, pages, row_of, slots), row_of, pages)


_OP = re.compile(r" (all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute)(-start)?\(")


def collectives(program: str) -> dict[str, int]:
    """Collectives of a compiled program by scope; outside of all: the sum of embeddings, and what `out_shardings` moves."""
    found = collections.Counter()
    for line in program.splitlines():
        if _OP.search(line):
            path = re.search(r'op_name="([^"]*)"', line)
            parts = path.group(1).split("/") if path else []
            scopes = ("attention", "output", "ffn", "mine")
            found[next((scope for scope in scopes if scope in parts), "outside")] += 1
    return dict(found)


def mesh_name(sizes: tuple[int, int]) -> str:
    return f"{sizes[0]}devices-dcp{sizes[1]}"


def run(function, sizes: tuple[int, int], *more, in_more=(), out) -> tuple[np.ndarray, dict[str, int]]:
    """Jits `function(params, cache, tokens, *more)` with shardings that are stated: weights and cache as they lie, tokens
    everywhere, `more` as `in_more` says. Gives its value and its collectives."""
    plan = make_plan(*sizes)
    net, params, cache = network(plan)
    lies, where = lambda tree: jax.tree.map(lambda x: x.sharding, tree), functools.partial(NamedSharding, plan.mesh)
    jitted = jax.jit(
        functools.partial(function, net),
        in_shardings=(lies(params), lies(cache), where(PartitionSpec()), *map(where, in_more)),
        out_shardings=where(out),
    )
    more = [jax.device_put(x, where(spec)) for x, spec in zip(more, in_more, strict=True)]
    compiled = jitted.lower(params, cache, TOKENS, *more).compile()
    value = compiled(params, cache, jax.device_put(TOKENS, where(PartitionSpec())), *more)
    assert value.sharding.is_equivalent_to(where(out), value.ndim)
    return np.asarray(value), collectives(compiled.as_text())


# --- a score of a text --------------------------------------------------------------------------------------------


def log_likelihood(net: Network, params, cache, tokens):
    """Mean log-probability of each token after the ones before it."""
    hidden, _, _ = glm_moe_dsa.forward(params, cache, batch_of(tokens, cache.latent.layout), net)
    with jax.named_scope("mine"):
        logits = glm_moe_dsa.logits(params, hidden[:-1], net)[:, : net.cfg.vocab_size]
        return jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[1:, None], axis=1))


@pytest.fixture(scope="module")
def likelihood_alone():
    value, paid = run(log_likelihood, MESHES[0], out=PartitionSpec())
    assert paid == {}  # one device has nobody to talk to
    return value


@pytest.mark.parametrize("sizes", MESHES[1:], ids=mesh_name)
def test_a_score_of_a_text(likelihood_alone, sizes):
    """Beside the network's own collectives it pays for one gather of logits."""
    value, paid = run(log_likelihood, sizes, out=PartitionSpec())
    np.testing.assert_allclose(value, likelihood_alone, atol=1e-5)
    assert paid == NETWORK | {"mine": 1}


# --- weights of your own ------------------------------------------------------------------------------------------


def probe(net: Network, params, cache, tokens, weights):
    """A linear probe on the final hidden states: `[T, D] · [D, classes]`."""
    hidden, _, _ = glm_moe_dsa.forward(params, cache, batch_of(tokens, cache.latent.layout), net)
    # Said once, where the network ends: or the partitioner carries a cut of `weights` back into every layer.
    hidden = net.plan.constrain(hidden)
    with jax.named_scope("mine"):
        return jnp.einsum("td,dc->tc", hidden, weights, precision=jax.lax.Precision.HIGHEST)


@pytest.fixture(scope="module")
def probe_alone():
    return run(probe, MESHES[0], PROBE, in_more=[PartitionSpec()], out=PartitionSpec())[0]


@pytest.mark.parametrize(
    ("weights", "out", "more"),
    [
        # Classes on devices, and the answer left there: nothing crosses.
        (PartitionSpec(None, ALL), PartitionSpec(None, ALL), {}),
        # The same, but everybody wants the answer: one gather.
        (PartitionSpec(None, ALL), PartitionSpec(), {"outside": 1}),
        # The summed dimension on devices: one sum of partial products.
        (PartitionSpec(ALL, None), PartitionSpec(), {"mine": 1}),
    ],
    ids=["left-where-it-is", "gathered", "summed"],
)
def test_weights_of_your_own(probe_alone, weights, out, more):
    value, paid = run(probe, (4, 4), PROBE, in_more=[weights], out=out)
    np.testing.assert_allclose(value, probe_alone, atol=1e-4)
    assert paid == dict(collections.Counter(NETWORK) + collections.Counter(more))


# --- a cache that goes round --------------------------------------------------------------------------------------


def test_a_cache_that_goes_round():
    """Donated, and asked for as it came: two calls share one program, and the second reads what the first wrote."""
    plan = make_plan(4, 4)
    net, params, cache = network(plan)
    lies = jax.tree.map(lambda x: x.sharding, cache)

    def extend(params, cache, tokens, start):
        batch = batch_of(tokens, cache.latent.layout, start)
        hidden, cache, _ = glm_moe_dsa.forward(params, cache, batch, net)
        return cache, glm_moe_dsa.logits(params, hidden, net)

    jitted = jax.jit(extend, donate_argnames="cache", out_shardings=(lies, plan.sharding()))
    found = []
    for start in (0, 8):
        cache, logits = jitted(params, cache, TOKENS[start : start + 8], start)
        found.append(np.asarray(logits))
    assert jitted._cache_size() == 1
    want = jax.jit(extend)(params, network(plan)[2], TOKENS, 0)[1]
    np.testing.assert_allclose(np.concatenate(found), want, atol=1e-4)
