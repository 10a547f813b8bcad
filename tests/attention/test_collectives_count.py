"""How often a compiled step crosses devices, by scope: a budget per layer, read from the compiled program."""

import collections
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dcpjax.attention import AttentionOptions
from dcpjax.batch import ForwardBatch
from dcpjax.host.plan import StepPlan
from dcpjax.mesh import make_plan
from dcpjax.step import StepShape
from models import glm_moe_dsa, mtp
from models.config import read_config
from models.glm_moe_dsa import Network
from models.params import pad_to
from models.weights import load
from tests.attention import toy
from tests.attention.paged import PAGE, Geometry

SCOPES = ("project", "index", "attention", "output", "ffn")
PER_LAYER = {"a2a": 2, "ag_rs": 3, "psum": 3}
TOKENS, TABLE = 4, 3
# A dense layer that selects and a layer of experts that reuses its selection.
CONFIG = toy.config("FS", "DM")
# Twice the same block: one while loop, whose body is in the program once.
SCANNED = toy.config("FSFS", "MMMM")

_OP = re.compile(
    r" (all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute|collective-broadcast)(-start)?\("
)


def count(text: str) -> dict[str, int]:
    """Collectives of a compiled program by scope, "other" outside all of them. An asynchronous pair counts once."""
    found = collections.Counter()
    for line in text.splitlines():
        if _OP.search(line):
            name = re.search(r'op_name="([^"]*)"', line)
            path = name.group(1).split("/") if name else []
            found[next((scope for scope in SCOPES if scope in path), "other")] += 1
    return dict(found)


def budget(geometry: Geometry, backend: str, full: int = 1, layers: int = 2, other: int = 2) -> dict[str, int]:
    """What a program with these layer bodies may hold; `other`: the embedding and the logits."""
    if geometry.plan.num_devices == 1:
        return {}
    want = {"output": layers, "ffn": layers, "other": other}
    if geometry.dcp > 1 and (geometry.latent_sharded or geometry.index_sharded):
        want["attention"] = PER_LAYER[backend] * layers * geometry.latent_sharded + full * geometry.index_sharded
    return want


def test_the_counting_itself():
    text = """
      %a = f32[4]{0} all-gather-start(%x), metadata={op_name="jit(step)/while/body/attention/shard_map/all_gather"}
      %b = f32[4]{0} all-gather-done(%a), metadata={op_name="jit(step)/while/body/attention/shard_map/all_gather"}
      %c = (u32[1]{0}, u32[1]{0}) all-to-all(%b, %b), metadata={op_name="jit(step)/attention/all_to_all"}
      %d = f32[4]{0} all-reduce(%c), metadata={op_name="jit(step)/output/dot_general"}
      %e = f32[4]{0} all-reduce(%d)
      %f = f32[4]{0} fusion(%e), calls=%all-reduce.1, metadata={op_name="jit(step)/ffn/psum"}
    """
    assert count(text) == {"attention": 2, "output": 1, "other": 1}


def step_lowered(geometry: Geometry, backend: str):
    """One whole engine step: decode rows in, sampled tokens out."""
    runner = toy.runner(CONFIG, geometry, AttentionOptions(backend), seqs=TOKENS)
    shape = StepShape(TOKENS, TOKENS, TABLE)
    args, static = runner._arguments(StepPlan(rows=(), epoch=0), shape)
    return runner._step.lower(*args, **static)


def batch(tokens: int, rows: int) -> ForwardBatch:
    zero = np.zeros(tokens, np.int32)
    return ForwardBatch(zero, zero, zero, zero, zero, np.zeros((rows, TABLE), np.int32))


def forward_program(
    cfg, geometry: Geometry, options: AttentionOptions, tokens: int = TOKENS, rows: int = TOKENS,
    whole_experts: bool = False, load=None,
) -> str:  # fmt: skip
    """The network of a step without its sampling, which compiles faster. `load(plan)`: its weights, if not random ones."""
    plan = make_plan(geometry.plan.num_devices, geometry.dcp, whole_experts)
    net = Network(cfg, plan, options)

    def run(params, cache, batch):
        hidden, cache, _ = glm_moe_dsa.forward(params, cache, batch, net)
        return cache, glm_moe_dsa.logits(params, hidden, net)

    params = pad_to(toy.params(cfg), cfg, plan) if load is None else load(plan)
    args = params, toy.cache(cfg, geometry), batch(tokens, rows)
    return jax.jit(run, donate_argnums=1).lower(*args).compile().as_text()


MESHES = [
    Geometry(1, num_pages=8),
    Geometry(2, tp=2, num_pages=8),
    Geometry(4, num_pages=8),
    Geometry(1, tp=4, num_pages=8),
]


def _name(value):
    return f"tp{value.tp}dcp{value.dcp}" if isinstance(value, Geometry) else None


def test_br_18_decode_step():
    assert count(step_lowered(MESHES[1], "ag_rs").compile().as_text()) == budget(MESHES[1], "ag_rs")


def test_br_18_decode_step_on_one_device():
    """None at all, already before the compiler sees it: collectives of one device are not left for it to remove."""
    explicit = ("stablehlo.all_", "stablehlo.reduce_scatter", "stablehlo.collective")
    alone, group = (step_lowered(geometry, "ag_rs").as_text() for geometry in MESHES[:2])
    assert [[name in text for name in explicit[:2]] for text in (alone, group)] == [[False, False], [True, True]]
    assert explicit[2] not in alone


@pytest.mark.matrix
@pytest.mark.parametrize("backend", PER_LAYER)
@pytest.mark.parametrize("geometry", MESHES, ids=_name)
def test_br_18_decode_step_full_product(geometry, backend):
    assert count(step_lowered(geometry, backend).compile().as_text()) == budget(geometry, backend)


@pytest.mark.parametrize(
    "geometry, backend",
    [(MESHES[2], "ag_rs"), (MESHES[3], "ag_rs"), (MESHES[1], "a2a"), (MESHES[2], "psum")],
    ids=_name,
)
def test_br_18_network(geometry, backend):
    assert count(forward_program(CONFIG, geometry, AttentionOptions(backend))) == budget(geometry, backend)


@pytest.mark.parametrize("geometry", [MESHES[2], Geometry(2, tp=4, num_pages=8)], ids=_name)
def test_br_18_whole_experts_cross_as_often(geometry):
    """No token is sent to its experts: every device has it. On eight devices there are more places than experts."""
    text = forward_program(CONFIG, geometry, AttentionOptions("ag_rs"), whole_experts=True)
    assert count(text) == budget(geometry, "ag_rs")


def test_br_18_scanned_blocks_are_one_body():
    """Four layers in two equal blocks: the loop's body has two layers, within the same budget each."""
    text = forward_program(SCANNED, MESHES[1], AttentionOptions("a2a"))
    assert count(text) == budget(MESHES[1], "a2a")
    # The loop carries the caches; nothing is gathered before or after it but embedding and logits.
    in_body = [line for line in text.splitlines() if _OP.search(line) and "while/body" in line]
    assert len(in_body) == sum(count(text).values()) - 2


def test_br_18_a_replicated_index_needs_no_exchange():
    geometry = Geometry(4, index_sharded=False, num_pages=8)
    assert count(forward_program(CONFIG, geometry, AttentionOptions("ag_rs"))) == budget(geometry, "ag_rs")


def test_br_18_long_prefill_gathers_rows_once_a_tile():
    """One gather a layer and tile in place of queries, LSE and outputs: here three tiles of a page."""
    geometry, options = Geometry(4, num_pages=8), AttentionOptions("ag_rs", tile_tokens=PAGE)
    found = count(forward_program(CONFIG, geometry, options, tokens=32, rows=1))
    assert found == budget(geometry, "ag_rs") | {"attention": 2 * TABLE + 1}


@pytest.mark.parametrize("sharded", [True, False], ids=["sharded", "replicated"])
def test_br_18_draft_layer_crosses_like_a_target_layer(sharded):
    """A draft over dealt-out pools gathers and merges as the target does; over replicated ones nothing moves."""
    geometry = Geometry(4, latent_sharded=sharded, index_sharded=sharded, num_pages=8)
    net = Network(CONFIG, geometry.plan, AttentionOptions("a2a"))

    def run(params, cache, batch, hidden):
        hidden, _, cache, _ = mtp.draft(params, cache, batch, hidden, net)
        return cache, glm_moe_dsa.logits(params, hidden, net)

    hidden = np.zeros((TOKENS, CONFIG.hidden_size), np.float32)
    args = toy.sharded_params(CONFIG, 1, 4), toy.cache(CONFIG, geometry, draft=True), batch(TOKENS, TOKENS), hidden
    text = jax.jit(run, donate_argnums=1).lower(*args).compile().as_text()
    assert count(text) == budget(geometry, "a2a", layers=1)


def test_logits_are_gathered_and_not_the_matrix():
    """The vocabulary's share of the products crosses, not the head's weights: they are a thousand times as large."""
    geometry = MESHES[2]
    text = forward_program(CONFIG, geometry, AttentionOptions("ag_rs"))
    gathered = [line for line in text.splitlines() if " all-gather" in line and "attention" not in line]
    assert len(gathered) == 1
    assert re.search(rf"= f32\[{TOKENS},{CONFIG.vocab_size}\]", gathered[0])


@pytest.mark.parametrize("name", ["q_fp8_block128", "q_nvfp4_experts"])
def test_quantised_weights_are_scaled_where_they_lie(data, name):
    """Also where the mesh cuts blocks: every device has the scales of its own part."""
    folder, geometry = data / "golden" / name, Geometry(2, tp=2, num_pages=8)
    cfg = read_config(folder)
    text = forward_program(
        cfg, geometry, AttentionOptions("ag_rs"), load=lambda plan: load(folder, cfg, plan, jnp.float32)
    )
    assert count(text) == budget(geometry, "ag_rs", full=2, layers=3)
