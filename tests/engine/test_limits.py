"""What cannot run is refused with words that help, before weights load; what can run reaches its last slot."""

import dataclasses
import json

import numpy as np
import pytest

from dcpjax import LLM, SamplingParams, build
from dcpjax.errors import CheckpointError, ConfigError, RequestError
from models.saving import save
from tests.engine import small

pytestmark = pytest.mark.usefixtures("quick_compile")

LENGTH, PAGE = 32, 8
ENGINE = {
    "block_size": PAGE,
    "num_blocks": 5,  # 4 that can be used: one request of LENGTH
    "max_model_len": LENGTH,
    "max_num_seqs": 2,
    "max_num_batched_tokens": 16,
}
GREEDY = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return small.write_checkpoint(tmp_path_factory.mktemp("small"))


@pytest.fixture(scope="module")
def module_llm(folder):
    return LLM(folder, **ENGINE)


@pytest.fixture
def llm(module_llm):
    yield module_llm
    assert not module_llm.engine.has_work
    assert module_llm.engine.scheduler.pool.num_used == 0


def prompt_of(size, seed=0):
    return np.random.default_rng(seed).integers(0, small.VOCAB, size).tolist()


def check_text(prompt, output):
    logits, _ = small.oracle(prompt + output)
    assert np.argmax(logits[len(prompt) - 1 : -1], axis=-1).tolist() == output


# --- requests -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, PAGE - 1, PAGE, PAGE + 1, LENGTH - PAGE, LENGTH - 2, LENGTH - 1])
def test_a_text_goes_to_the_end_of_the_context(llm, size):
    prompt = prompt_of(size)
    for wanted in (None, LENGTH, 10**9, LENGTH - size):
        (result,) = llm.generate(prompt, dataclasses.replace(GREEDY, max_tokens=wanted))
        choice = result.outputs[0]
        assert len(choice.token_ids) == LENGTH - size and choice.finish_reason == "length"
        check_text(prompt, choice.token_ids)


@pytest.mark.parametrize("size", [LENGTH, LENGTH + 1, 200])
def test_a_prompt_that_leaves_no_room_is_refused(llm, size):
    with pytest.raises(RequestError, match=f"^prompt: .*maximum context length is {LENGTH} tokens.*{size} in the"):
        llm.generate(prompt_of(size), GREEDY)


def test_no_more_pages_than_the_limit_needs(llm):
    """Prompt and tokens end at a page's edge: the next page is never taken, not even for a step ahead."""
    params = dataclasses.replace(GREEDY, max_tokens=6)
    request = llm.engine.add(prompt_of(PAGE * 2 - 6), params)
    most = 0
    while llm.engine.has_work:
        llm.engine.step()
        most = max(most, len(request.pages))
    assert most == 2 and request.num_tokens == 2 * PAGE


def test_a_pool_smaller_than_the_context(folder):
    """The context is what the pool holds, unless more is asked for."""
    small_pool = {**ENGINE, "max_model_len": None, "num_blocks": 3}
    llm = LLM(folder, **small_pool)
    assert llm.max_model_len == 2 * PAGE
    (result,) = llm.generate(prompt_of(5), GREEDY)
    assert len(result.outputs[0].token_ids) == 2 * PAGE - 5
    with pytest.raises(RequestError, match="maximum context length is 16"):
        llm.generate(prompt_of(16), GREEDY)


def test_a_request_larger_than_the_pool_is_refused(llm):
    """Only possible when part of the pool is taken for good: the scheduler says what to change."""
    pool = llm.engine.scheduler.pool
    whole = pool.num_pages
    try:
        pool.num_pages = 4
        with pytest.raises(RequestError, match="need 4 pages of 8 tokens, but the KV cache has 3: shorten the prompt"):
            llm.generate(prompt_of(5), GREEDY)
        with pytest.raises(RequestError, match="or lower max_tokens"):
            llm.generate(prompt_of(5), dataclasses.replace(GREEDY, max_tokens=20))
    finally:
        pool.num_pages = whole
    (result,) = llm.generate(prompt_of(5), dataclasses.replace(GREEDY, max_tokens=20))
    assert len(result.outputs[0].token_ids) == 20


@pytest.mark.parametrize("moment", [1, 3, 6, 9])
def test_a_request_that_fills_the_pool_comes_back_after_preemption(llm, moment):
    """It needs every page; sent back at any moment, its known tokens still fit beside nothing."""
    engine, prompt = llm.engine, prompt_of(LENGTH - 9, moment)
    request = engine.add(prompt, GREEDY)
    for _ in range(moment):
        engine.step()
    before = len(request.output)
    engine.scheduler.preempt(request)
    assert request.status == "waiting" and not request.pages
    engine.drain()
    assert len(request.output) == 9 > before
    check_text(prompt, request.output)


def test_two_that_fill_the_pool_take_turns(llm):
    """Each alone needs all pages: the younger is sent back again and again, and both get all their tokens."""
    before = llm.engine.stats.preemptions
    prompts = [prompt_of(3, 1), prompt_of(5, 2)]
    results = llm.generate(prompts, GREEDY)
    assert llm.engine.stats.preemptions > before
    for prompt, result in zip(prompts, results, strict=True):
        assert len(prompt) + len(result.outputs[0].token_ids) == LENGTH
        check_text(prompt, result.outputs[0].token_ids)


# --- configurations -----------------------------------------------------------------------------------------------


@pytest.fixture
def no_weights(monkeypatch):
    """Weights must not be asked for: reading 700 GB to refuse a number is no service."""

    def load(*args, **kwargs):
        raise AssertionError("the weights were loaded before the configuration was refused")

    monkeypatch.setattr(build.weights, "place", load)


REFUSED = [
    ({"tensor_parallel_size": 4, "decode_context_parallel_size": 3}, "3 must divide tensor parallel size 4"),
    ({"tensor_parallel_size": 2, "decode_context_parallel_size": 4}, "a larger tensor parallel size"),
    ({"decode_context_parallel_size": 0}, "decode_context_parallel_size must be at least 1"),
    ({"tensor_parallel_size": 0}, "tensor_parallel_size must be at least 1"),
    ({"decode_context_parallel_size": "4"}, "decode_context_parallel_size must be a whole number, got '4'"),
    ({"block_size": 16.0}, "block_size must be a whole number"),
    ({"max_num_seqs": True}, "max_num_seqs must be a whole number"),
    ({"dcp_debug": 1}, "dcp_debug must be true or false"),
    ({"tensor_parallel_size": 16}, "needs 16 devices, but JAX started with 8"),
    ({"decode_context_parallel_size": 3}, "block size 8 must be a multiple of dcp size × interleave = 3 × 1"),
    (
        {"decode_context_parallel_size": 4, "cp_kv_cache_interleave_size": 4},
        "4 × 4 = 16; use a larger block size or a smaller interleave",
    ),
    ({"cp_kv_cache_interleave_size": 3}, "block size 8 must be a multiple"),
    ({"cp_kv_cache_interleave_size": 0}, "cp_kv_cache_interleave_size must be at least 1"),
    ({"block_size": 0}, "at least 1"),
    ({"block_size": -8}, "at least 1"),
    ({"dcp_comm_backend": "nccl"}, "'nccl'.*ag_rs.*a2a.*psum"),
    ({"dtype": "float8"}, "'float8' is not known; use 'auto', 'bfloat16' or 'float32'"),
    ({"kv_cache_dtype": "int3"}, "'int3' is not known; use 'auto'"),
    ({"decode_context_parallel_size": 4, "index_shards": 2}, "index_shards must be 1 or the dcp size 4, got 2"),
    ({"index_shards": 0}, "index_shards must be 1"),
    ({"speculative_config": {"method": "eagle"}}, "method 'eagle' is not known; use 'mtp'"),
    ({"speculative_config": {"draft_kv": "both"}}, "'sharded' or 'replicated', got 'both'"),
    ({"speculative_config": {"num_speculative_tokens": 9}}, "16 is too small: each of 2 rows .* needs 10 tokens"),
    ({"speculative_config": {"k": 3}}, r"unknown keys \['k'\]"),
    ({"num_blocks": 1}, "num_blocks 1 is too small"),
    ({"num_blocks": 0}, "num_blocks 0 is too small"),
    ({"num_blocks": 4}, "max_model_len 32 does not fit the cache of 3 blocks of 8 tokens = 24: lower max_model_len"),
    ({"num_blocks": None, "kv_cache_memory_bytes": 1000}, "raise kv_cache_memory_bytes or gpu_memory_utilization"),
    ({"gpu_memory_utilization": 90}, "gpu_memory_utilization is the share .* at most 1, got 90"),
    ({"enable_expert_parallel": 1}, "enable_expert_parallel must be true or false, got 1"),
    (
        {"kernels": {"sparse_mla": "triton"}},
        "sparse_mla 'triton' runs on NVIDIA GPUs, these devices are cpu; use 'xla'",
    ),
    ({"kernels": {"experts": "triton"}}, "experts 'triton' runs on NVIDIA GPUs"),
    ({"kernels": {"sparse_mla": "interpret"}}, "does not serve rows of 16 and 8 values; use 'xla'"),
    (
        {"kernels": {"experts": "interpret"}, "tensor_parallel_size": 2},
        "serves widths in multiples of 16; here a device has 8 of an expert's values",
    ),
    ({"max_model_len": 0}, "max_model_len 0 must be between 2 .* and the model's 256"),
    ({"max_model_len": 257}, "max_model_len 257 must be between"),
    ({"max_num_seqs": 0}, "max_num_seqs 0 must be at least 1"),
    ({"max_num_seqs": 17}, "max_num_batched_tokens 16 is too small: each of 17 rows .* lower max_num_seqs"),
    ({"max_num_batched_tokens": 0}, "max_num_batched_tokens 0 must be at least 1"),
    ({"hf_overrides": {"index_topk": 0}}, "index_topk = 0 must be a whole number"),
    ({"hf_overrides": {"n_group": 3}}, "n_group 3 must divide n_routed_experts 4"),
]


@pytest.mark.parametrize(("options", "words"), REFUSED, ids=lambda x: json.dumps(x) if isinstance(x, dict) else "")
def test_refused_before_weights_load(folder, no_weights, options, words):
    with pytest.raises(ConfigError, match=words):
        LLM(folder, **{**ENGINE, **options})


def test_folders_that_are_no_checkpoint(folder, tmp_path):
    with pytest.raises(ConfigError, match="'/no/such/folder' is not a folder; give a folder with config.json"):
        LLM("/no/such/folder")
    with pytest.raises(ConfigError, match="has no config.json; give a folder"):
        LLM(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="not valid JSON"):
        LLM(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(small.RAW))
    with pytest.raises(CheckpointError, match="has neither model.safetensors nor"):
        LLM(tmp_path, **ENGINE)
    (tmp_path / "generation_config.json").write_text("[")
    with pytest.raises(ConfigError, match="not valid JSON"):
        LLM(tmp_path, **ENGINE)
    with pytest.raises(ConfigError, match="has no tokenizer.json; give a folder that has one"):
        LLM(folder, tokenizer=tmp_path)


def test_a_checkpoint_without_a_draft(tmp_path):
    cfg = dataclasses.replace(small.CONFIG, has_mtp=False)
    params = small.params().replace(mtp=None)
    save(params, cfg, tmp_path, raw_config={**small.RAW, "num_nextn_predict_layers": 0})
    llm = LLM(tmp_path, **ENGINE)
    assert llm.runner.draft_cache is None
    prompt = prompt_of(7)
    logits, _ = small.oracle(prompt)
    np.testing.assert_allclose(llm.trace(prompt).logits, logits, atol=1e-4)
    for call in (lambda: llm.draft(prompt, 2), lambda: llm.trace(prompt, 3)):
        with pytest.raises(ConfigError, match="no MTP layer"):
            call()
    assert llm.engine.scheduler.pool.num_used == 0


@pytest.mark.parametrize("kv", ["auto", "float32", "bfloat16", "fp8"])
@pytest.mark.parametrize("dcp", [1, 2, 4])
@pytest.mark.parametrize("spec", [None, {"method": "mtp"}, {"method": "mtp", "draft_kv": "replicated"}])
def test_each_configuration_runs_or_is_refused_early(folder, kv, dcp, spec):
    """What passes the checks has pools of the sizes that were promised."""
    options = {
        **ENGINE,
        "decode_context_parallel_size": dcp,
        "kv_cache_dtype": kv,
        "speculative_config": spec,
    }
    llm = LLM(folder, **options)
    stored = {"auto": "float32", "fp8": "uint32"}.get(kv, kv)
    draft_shards = 1 if spec and spec.get("draft_kv") == "replicated" else dcp
    for cache, shards in ((llm.runner.cache, dcp), (llm.runner.draft_cache, draft_shards)):
        for pool in (cache.latent, cache.index):
            assert pool.data.dtype == stored and pool.layout.shards == shards
            assert pool.data.sharding.shard_shape(pool.data.shape)[2] == PAGE // shards
