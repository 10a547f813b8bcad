"""Drafts and prefixes together on the device: what a hit, an eviction or a wrong draft may change, and what they may not.

A small random checkpoint; the product of layouts is in test_product.py, the trained model in test_tiny_drafts.py.
"""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dcpjax import LLM, SamplingParams, build, capacity
from dcpjax.build import EngineConfig
from dcpjax.cache import PagedCache, Pool, Record, make_pool
from dcpjax.errors import ConfigError
from dcpjax.layout import CacheLayout
from dcpjax.mesh import make_plan
from dcpjax.runner import Runner
from models.config import read_config
from models.params import init
from tests.engine import small

pytestmark = pytest.mark.usefixtures("quick_compile")

PAGE, LENGTH, SEQS, K = 8, 64, 2, 3
ATOL = 1e-4
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
REAL = "tests/data/glm-5.2"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return small.write_checkpoint(tmp_path_factory.mktemp("small"), tokenizer=True)


def make(folder, **more) -> LLM:
    speculative = {"method": "mtp", "num_speculative_tokens": K} | more.pop("speculative", {})
    options = {"decode_context_parallel_size": 4, "block_size": PAGE, "num_blocks": 13, "max_model_len": LENGTH}
    options |= {"max_num_seqs": SEQS, "max_num_batched_tokens": 16, "speculative_config": speculative}
    return LLM(folder, **(options | more))


@pytest.fixture(scope="module", params=["sharded", "replicated"])
def llm(request, folder):
    return make(folder, speculative={"draft_kv": request.param})


@pytest.fixture(scope="module", params=["sharded", "replicated"])
def weighing(request, folder):
    """Acceptance by rejection keeps the draft's log-weights, which the tests below want to see."""
    return make(folder, speculative={"draft_kv": request.param, "acceptance": "rejection"})


@pytest.fixture(autouse=True)
def forget(request):
    """Every test begins with an empty prefix cache."""
    for name in ("llm", "weighing"):
        if name in request.fixturenames:
            assert request.getfixturevalue(name).engine.reset_prefix_cache()


def ids(size: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, small.VOCAB, size).tolist()


# --- what is drafted ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("draft_kv", ["sharded", "replicated"])
def test_the_engine_drafts_what_the_recursive_draft_says(folder, draft_kv, share):
    """Iterations that share a selection, and those that write provisional rows and select anew: as `LLM.draft`, which
    the recorded outputs of the reference library check. Also further on, behind accepted and rejected drafts."""
    overrides = {"index_share_for_mtp_iteration": share}
    llm = make(folder, speculative={"draft_kv": draft_kv}, hf_overrides=overrides, enable_prefix_caching=False)
    seen = 0
    for seed, size in ((1, 9), (2, 21), (3, 2 * PAGE)):
        request = llm.engine.add(ids(size, seed), GREEDY)
        while llm.engine.has_work:
            llm.engine.step_sync()
            if request.status == "running" and request.output:
                drafts = np.asarray(llm.runner.state.drafts[request.row])
                known = request.prompt + request.output
                room = request.limit - len(known)  # no draft row lies at or past the limit
                want = llm.draft(known[:-1], K).tokens
                assert drafts[:room].tolist() == want[:room].tolist(), (seed, len(request.output))
                seen += 1
    assert seen > 20 and llm.engine.stats.acceptance.accepted[0] > 0


# --- the draft after a hit --------------------------------------------------------------------------------------------


def first_drafts(llm: LLM, prompt: list[int]) -> tuple[np.ndarray, int]:
    """The draft's log-weights `[K, V]` when the prompt has just been read, and its cached tokens."""
    request = llm.engine.add(prompt, SamplingParams(temperature=1, seed=5, max_tokens=12, ignore_eos=True))
    while not request.output:
        llm.engine.step_sync()
    weights = np.asarray(llm.runner.state.draft_weights[request.row])
    llm.engine.drain()
    return weights, request.cached_tokens


def check_same_drafts(got: np.ndarray, want: np.ndarray) -> None:
    np.testing.assert_allclose(got, want, atol=ATOL)
    np.testing.assert_array_equal(got.argmax(-1), want.argmax(-1))


@pytest.mark.parametrize("size", [2 * PAGE, 2 * PAGE + 1, 3 * PAGE + 5])
def test_inv_19_br_13_a_warm_draft_is_the_cold_one(weighing, size):
    """The producer differs right at the token after the hit, on which the draft's row before it depends elsewhere."""
    shared = ids(2 * PAGE, 1)
    prompt, producer = (shared + ids(20, 2))[:size], [*shared, (ids(20, 2)[0] + 1) % small.VOCAB, *ids(9, 3)]
    cold, cached = first_drafts(weighing, prompt)
    assert cached == 0 and weighing.engine.reset_prefix_cache()
    first_drafts(weighing, producer)
    warm, cached = first_drafts(weighing, prompt)
    assert cached == min(2 * PAGE, size - 1)
    check_same_drafts(warm, cold)
    assert not np.allclose(cold, first_drafts(weighing, producer)[0], atol=0.1), "the prompts have different drafts"


def test_after_hit_eviction_and_readmission_drafts_are_the_cold_ones(weighing):
    prompt = ids(3 * PAGE + 2, 4)
    cold, _ = first_drafts(weighing, prompt)
    warm, cached = first_drafts(weighing, prompt)
    assert cached == 3 * PAGE
    check_same_drafts(warm, cold)
    seen = set()
    for seed in range(10, 16):
        first_drafts(weighing, ids(40, seed))  # takes pages away, the tail first
        again, cached = first_drafts(weighing, prompt)
        seen.add(cached)
        check_same_drafts(again, cold)
    # In a crowd: one of the two is sent back when the pool is full, and is admitted again.
    before = weighing.engine.stats.preemptions
    long = SamplingParams(temperature=1, seed=6, max_tokens=LENGTH, ignore_eos=True)
    weighing.generate([ids(30, 21), ids(30, 22)], long)
    assert weighing.engine.stats.preemptions > before
    again, cached = first_drafts(weighing, prompt)
    check_same_drafts(again, cold)
    assert 0 in {*seen, cached} and {*seen, cached} - {0}


def test_br_24_a_warm_turn_leaves_the_drafts_rows_as_they_were(llm):
    """Draft rows lie in the same pages as the target's: bit for bit those of the cold turn."""
    prompt = ids(4 * PAGE + 3, 5)
    request = llm.engine.add(prompt, GREEDY)
    llm.engine.step_sync()
    pages = list(request.pages[:4])
    llm.engine.drain()

    def rows():
        pools = jax.tree.leaves((llm.runner.cache, llm.runner.draft_cache))
        return [np.asarray(pool[:, np.array(pages)]) for pool in pools]

    cold = rows()
    warm = llm.engine.add(prompt, GREEDY)
    llm.engine.step_sync()
    assert warm.matched == 4 * PAGE and list(warm.pages[:4]) == pages
    llm.engine.drain()
    assert warm.output == request.output
    for got, want in zip(rows(), cold, strict=True):
        np.testing.assert_array_equal(got, want)


def test_br_26_tokens_after_a_hit_lie_with_their_owners(llm):
    """Five new tokens after a hit of two pages: each is in the slot and on the rank that its number says."""
    shared, fresh = ids(2 * PAGE, 6), ids(5, 7)
    llm.generate(shared + ids(3, 8), GREEDY)
    request = llm.engine.add(shared + fresh, GREEDY)
    llm.engine.step_sync()
    assert request.matched == 2 * PAGE
    slots = np.arange(2 * PAGE, 2 * PAGE + 5)
    page, column = llm.runner.places(request.pages, slots)
    got = np.asarray(llm.runner.cache.latent.data[:, page, column])
    llm.engine.drain()
    np.testing.assert_allclose(got, llm.trace(shared + fresh).latent[:, slots], atol=ATOL)
    assert len(set((column // llm.runner.cache.latent.layout.page_rows).tolist())) == 4, "on all four ranks"


def test_br_16_what_is_reported_is_what_was_taken_over(llm):
    """`num_cached_tokens` is min(matched, n − 1), for a partial hit and for a prompt that is whole pages."""
    for size, want in ((PAGE - 1, 0), (PAGE, PAGE - 1), (2 * PAGE + 3, 2 * PAGE), (3 * PAGE, 3 * PAGE - 1)):
        prompt = ids(size, 100 + size)
        cold, warm = (llm.generate(prompt, GREEDY)[0] for _ in range(2))
        assert (cold.num_cached_tokens, warm.num_cached_tokens) == (0, want)
        assert warm.outputs[0].token_ids == cold.outputs[0].token_ids


# --- the text does not depend on drafts ---------------------------------------------------------------------------------


def test_inv_18_wrong_drafts_change_speed_and_no_text(llm):
    prompts = [ids(19, 30), ids(6, 31)]
    want = [output.outputs[0].token_ids for output in llm.generate(prompts, GREEDY)]
    rng = np.random.default_rng(0)
    requests = [llm.engine.add(prompt, GREEDY) for prompt in prompts]
    while llm.engine.has_work:
        llm.engine.step_sync()
        state = llm.runner.state
        drafts = rng.integers(0, small.VOCAB, state.drafts.shape).astype(np.int32)
        llm.runner.state = state.replace(drafts=jax.device_put(drafts, state.drafts.sharding))
    assert [request.output for request in requests] == want


def test_a_draft_layer_of_noise_changes_no_text(llm):
    prompts = [ids(19, 30), ids(6, 31)]
    want = [output.outputs[0].token_ids for output in llm.generate(prompts, GREEDY)]
    params = llm.params
    try:
        llm.set_params(params.replace(mtp=jax.tree.map(lambda x: -x, params.mtp)))
        assert [output.outputs[0].token_ids for output in llm.generate(prompts, GREEDY)] == want
    finally:
        llm.set_params(params)


@pytest.fixture(scope="module")
def plain(folder):
    """No drafts, no cached prefixes, one rank."""
    return make(folder, decode_context_parallel_size=1, speculative_config=None, enable_prefix_caching=False)


# Three tokens that both target and draft like, so that many drafts are accepted.
BIAS = {5: 6.0, 9: 6.0, 33: 6.0}
WISHES = {
    "greedy": {"temperature": 0},
    "sampled": {},
    "runs": {"logit_bias": BIAS},
    "runs of one": {"logit_bias": {5: 100.0}, "temperature": 0},
    "frequency": {"logit_bias": BIAS, "frequency_penalty": 1.5},
    "presence": {"logit_bias": BIAS, "presence_penalty": 2.0, "repetition_penalty": 1.3},
    "repetition": {"temperature": 0, "repetition_penalty": 1.5},
    "end of text": {"logit_bias": {62: 5.0}, "ignore_eos": False},
    "min_tokens": {"logit_bias": {62: 100.0, 5: 50.0}, "ignore_eos": False, "min_tokens": 7},
    "stop ids": {"logit_bias": BIAS, "stop_token_ids": [33]},
    "stop string": {"logit_bias": BIAS, "stop": ["jH", "ffj"]},  # tokens 9 33, and 5 5 9
    "stop string shown": {"logit_bias": BIAS, "stop": ["jj"], "include_stop_str_in_output": True},
    "logprobs": {"logit_bias": BIAS, "logprobs": 4},
    "all logprobs": {"temperature": 0, "logprobs": -1, "max_tokens": 6},
    "cuts": {"logit_bias": BIAS, "top_k": 4, "top_p": 0.9, "min_p": 0.01},
    "choices": {"logit_bias": BIAS, "n": 3},
    "to the end": {"logit_bias": BIAS, "max_tokens": None},
    "one token": {"max_tokens": 1},
}


@pytest.mark.parametrize("wish", WISHES)
def test_every_wish_gets_the_text_it_gets_without_drafts(llm, plain, wish):
    """Also what is cut inside an accepted run: at an end of text, a stop id or string, the last token, with logprobs."""
    params = SamplingParams(**({"max_tokens": 24, "seed": 3, "ignore_eos": True} | WISHES[wish]))
    prompts = [ids(21, 40), ids(9, 41), ids(2 * PAGE, 42)]
    want = plain.generate(prompts, params)
    before = llm.engine.stats.acceptance
    for _ in range(2):  # cold and warm
        for got, wanted in zip(llm.generate(prompts, params), want, strict=True):
            for mine, other in zip(got.outputs, wanted.outputs, strict=True):
                assert mine.token_ids == other.token_ids
                assert (mine.text, mine.finish_reason, mine.stop_reason) == (
                    other.text,
                    other.finish_reason,
                    other.stop_reason,
                )
                for a, b in zip(mine.logprobs or [], other.logprobs or [], strict=True):
                    assert a.rank == b.rank and a.ids.tolist() == b.ids.tolist()
                    np.testing.assert_allclose([a.chosen, *a.values], [b.chosen, *b.values], atol=ATOL)
                assert (mine.logprobs is None) == (other.logprobs is None)
    counts = llm.engine.stats.acceptance - before
    assert wish == "one token" or counts.num_rows > 0
    if "runs" in wish:
        assert counts.accepted[-1] > 5, "runs of several drafts were accepted"


def test_fewer_drafts_at_any_step_change_no_text(folder, plain):
    """Any sequence of numbers of drafts, 0 included, after which the drafts that are there are still used."""
    adaptive = make(folder, speculative={"adaptive": True})
    rng = np.random.default_rng(5)

    used = set()

    def choose(num_rows):
        k = int(rng.integers(0, K + 1))
        used.add(k)
        return k

    adaptive.engine.scheduler._choose_drafts = choose
    prompts = [ids(21, 40), ids(9, 41)]
    for params in (GREEDY, SamplingParams(seed=3, max_tokens=30, ignore_eos=True, logit_bias=BIAS)):
        want = [output.outputs[0].token_ids for output in plain.generate(prompts, params)]
        assert [output.outputs[0].token_ids for output in adaptive.generate(prompts, params)] == want
    assert used == {0, 1, 2, 3}
    assert adaptive.engine.stats.acceptance.accepted[-1] > 0


def test_a_pinned_text_says_so(folder):
    llm = make(folder, decode_context_parallel_size=1, speculative={"pin": 2.5})
    (output,) = llm.generate(ids(9, 1), dataclasses.replace(GREEDY, max_tokens=41))
    assert output.acceptance_pin == 2.5
    assert abs(llm.engine.stats.acceptance.acceptance_length - 2.5) < 0.1
    assert any("PINNED" in line for line in llm.describe())


def test_a_low_acceptance_warns_once(llm, caplog):
    """Nothing else shows that a draft is broken: the texts stay right."""
    llm._alarm, llm._watched = type(llm._alarm)(K), llm.engine.stats.acceptance
    params = dataclasses.replace(GREEDY, max_tokens=40)
    for seed in range(8):
        llm.generate([ids(9, seed), ids(9, 50 + seed)], params)
    warnings = [record.message for record in caplog.records if "acceptance" in record.message]
    assert len(warnings) == 1 and "Likely causes" in warnings[0]


def test_zeroed_pages_change_no_text(folder, llm):
    """New pages are cleared before they are written to, shared ones are not; what was in them did not matter."""
    zeroing = make(folder, zero_new_pages=True)
    pools = jax.tree.leaves((zeroing.runner.cache, zeroing.runner.draft_cache))
    full = jax.tree.map(lambda x: jax.device_put(jnp.full_like(x, 1e30), x.sharding), pools)
    tree = jax.tree.structure((zeroing.runner.cache, zeroing.runner.draft_cache))
    zeroing.runner.cache, zeroing.runner.draft_cache = tree.unflatten(full)
    prompts = [ids(21, 40), ids(9, 41)]
    for _ in range(2):
        want, got = (x.generate(prompts, GREEDY) for x in (llm, zeroing))
        assert [x.outputs[0].token_ids for x in got] == [x.outputs[0].token_ids for x in want]
        assert [x.num_cached_tokens for x in got] == [x.num_cached_tokens for x in want]
    request = zeroing.engine.add(ids(3, 60), dataclasses.replace(GREEDY, max_tokens=2))
    zeroing.engine.step_sync()
    (page,) = request.pages[:1]
    data = np.asarray(zeroing.runner.cache.latent.data[:, page])
    assert (np.abs(data).max(-1) > 0).sum() == 3 * data.shape[0], "three rows a layer, nothing else"
    zeroing.engine.drain()


# --- one geometry -------------------------------------------------------------------------------------------------------


def test_inv_16_a_draft_with_another_geometry_cannot_be_built(folder):
    """The seed's fault, and its relatives: the draft reads its shard as the whole, or other pages than the target."""
    plan, record = make_plan(4, 4), Record(24, jnp.float32)
    layout = CacheLayout(num_pages=13, page_tokens=PAGE, shards=4)
    sharded = make_pool(1, layout, record, plan)
    with pytest.raises(ConfigError, match="every rank would read its shard as the whole"):
        Pool(sharded.data, dataclasses.replace(layout, shards=1), record)
    with pytest.raises(ConfigError, match="2 are not supported"):
        make_pool(1, dataclasses.replace(layout, shards=2), record, plan)

    config = EngineConfig(tensor_parallel_size=4, decode_context_parallel_size=4, block_size=PAGE, num_blocks=13)
    ready = build.resolve(read_config(folder), dataclasses.replace(config, max_model_len=LENGTH))
    whole = dataclasses.replace(layout, shards=1)

    def pools(layers, latent, index, first_slot):
        return PagedCache(
            make_pool(layers, latent, ready.shape.latent, plan),
            make_pool(2, index, ready.shape.index, plan),
            first_slot,
        )

    target = pools(3, layout, layout, 0)
    params = jax.tree.map(lambda x: x, init(small.CONFIG, jax.random.key(0)))

    def build_with(draft):
        return Runner(ready.net, params, target, draft, ready.limits, ())

    for draft, words in (
        (pools(1, dataclasses.replace(layout, num_pages=12), layout, 1), "pages"),
        (pools(1, dataclasses.replace(layout, page_tokens=2 * PAGE), layout, 1), "pages"),
        (pools(1, layout, layout, 0), "slot"),
        (pools(1, whole, layout, 1), "index"),
    ):
        with pytest.raises(ConfigError, match=words):
            build_with(draft)
    build_with(pools(1, layout, whole, 1)), build_with(pools(1, whole, whole, 1))


def test_inv_20_bytes_of_both_draft_layouts():
    """GLM-5.2 with the fp8 record: bytes of a token on a rank, and what a replicated draft costs in tokens."""
    cfg = read_config(REAL)
    want = {1: (54_728, 54_728), 2: (27_364, 27_758), 4: (13_682, 14_273), 8: (6_841, 7_530.5)}
    for dcp, (sharded, replicated) in want.items():
        plan = make_plan(dcp, dcp)
        got = [capacity.cache_shape(cfg, plan, "fp8", None, kv).bytes_per_token() for kv in ("sharded", "replicated")]
        assert got == [sharded, replicated]
    for dcp, ratio in ((2, 1.014), (4, 1.043), (8, 1.101)):
        assert abs(want[dcp][1] / want[dcp][0] - ratio) < 0.003


@pytest.mark.parametrize(("latent", "want"), [(656, 54_728), (432, 37_032), (368, 31_976)])
def test_br_20_capacity_follows_the_size_of_the_record(latent, want):
    """fp8, NVFP4 and a smaller 4-bit record: 79 latent rows and 22 index keys a token."""
    plan = make_plan(4, 4)
    shape = capacity.cache_shape(read_config(REAL), plan, "fp8")
    shape = dataclasses.replace(shape, latent=Record(latent // 2, jnp.bfloat16))
    assert 4 * shape.bytes_per_token() == want
    pages = capacity.num_pages(shape, 64, 10**9, 35 * 2**30)
    assert pages == 35 * 2**30 // (want // 4 * 64)


@pytest.mark.parametrize("dtype", ["auto", "float32", "bfloat16", "fp8", "nvfp4"])
@pytest.mark.parametrize("dcp", [1, 2, 3, 4])
@pytest.mark.parametrize("drafts", [None, 0, 3, 17])
def test_br_17_what_cannot_run_is_refused_before_weights_load(dtype, dcp, drafts, tmp_path):
    """A folder with a configuration alone: whatever is not refused gets as far as the missing weights."""
    (tmp_path / "config.json").write_text(json.dumps(small.RAW))
    speculative = None if drafts is None else {"num_speculative_tokens": drafts}
    options = {"kv_cache_dtype": dtype, "decode_context_parallel_size": dcp, "speculative_config": speculative}
    fine = dtype != "nvfp4" and dcp != 3 and drafts != 17
    with pytest.raises(Exception, match=r"safetensors|weights" if fine else r"use|must|multiple") as error:
        LLM(tmp_path, tensor_parallel_size=4, block_size=PAGE, num_blocks=13, max_num_seqs=SEQS, **options)
    assert (error.type.__name__ == "CheckpointError") == fine, error.value
