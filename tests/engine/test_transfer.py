"""Cached prefixes between engines of other meshes, pages and draft layouts."""

import dataclasses

import jax
import numpy as np
import pytest

from dcpjax import LLM, SamplingParams
from dcpjax.errors import CacheFullError, CheckpointError, RequestError
from dcpjax.transfer import CachedPrefix, export_prefix, import_prefix
from tests.engine import small

pytestmark = pytest.mark.usefixtures("quick_compile")

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return small.write_checkpoint(tmp_path_factory.mktemp("small"))


def make(folder, dcp, page, draft_kv="sharded", **more) -> LLM:
    options = {
        "decode_context_parallel_size": dcp,
        "block_size": page,
        "num_blocks": 1 + 96 // page,
        "max_model_len": 64,
        "max_num_seqs": 1,
        "max_num_batched_tokens": 16,
        "speculative_config": {"num_speculative_tokens": 2, "draft_kv": draft_kv},
    }
    return LLM(folder, **(options | more))


@pytest.fixture(scope="module")
def source(folder):
    return make(folder, 4, 8)


@pytest.fixture(scope="module")
def exported(source):
    """A prompt of 37 tokens, its text and its first four pages."""
    prompt = np.random.default_rng(1).integers(0, small.VOCAB, 37).tolist()
    text = source.generate(prompt, GREEDY)[0].outputs[0].token_ids
    return prompt, text, export_prefix(source, prompt)


def test_br_19_rows_of_all_ranks_leave_in_token_order(source, exported):
    """Not what one rank holds, which would be a quarter: the rows of every token, as a trace computes them."""
    prompt, _, prefix = exported
    assert prefix.token_ids.tolist() == prompt[:32]
    np.testing.assert_allclose(prefix.latent, source.trace(prompt).latent[:, :32], atol=1e-4)
    assert prefix.index.shape[1] == prefix.draft_latent.shape[1] == prefix.draft_index.shape[1] == 32


@pytest.mark.parametrize(
    ("dcp", "page", "draft_kv", "more", "want"),
    [
        (4, 8, "sharded", {}, 32),
        (2, 16, "replicated", {"cp_kv_cache_interleave_size": 8}, 32),
        (1, 12, "sharded", {}, 24),
    ],
)
def test_br_19_another_layout_takes_them(folder, exported, tmp_path, dcp, page, draft_kv, more, want):
    """The same text and the same acceptance as after its own cold run, through a file."""
    prompt, text, prefix = exported
    prefix.save(tmp_path / "prefix.npz")
    prefix = CachedPrefix.load(tmp_path / "prefix.npz")
    llm = make(folder, dcp, page, draft_kv, **more)
    cold = llm.generate(prompt, GREEDY)[0]
    accepted = llm.engine.stats.acceptance
    assert cold.num_cached_tokens == 0 and llm.engine.reset_prefix_cache()
    assert import_prefix(llm, prefix) == want
    assert llm.engine.scheduler.pool.num_used == 0
    warm = llm.generate(prompt, GREEDY)[0]
    assert warm.num_cached_tokens == want
    assert warm.outputs[0].token_ids == cold.outputs[0].token_ids == text
    assert llm.engine.stats.acceptance == accepted + accepted
    # Again: the pages are there, and nothing is taken.
    assert import_prefix(llm, prefix) == want
    llm.engine.scheduler.check()


def test_a_salt_keeps_a_prefix_apart(source, exported):
    prompt, _, prefix = exported
    assert import_prefix(source, prefix, cache_salt="a") == 32
    assert len(export_prefix(source, prompt, cache_salt="a").token_ids) == 32
    with pytest.raises(RequestError, match="no page of this prompt is cached"):
        export_prefix(source, prompt, cache_salt="b")


def test_what_does_not_fit_is_refused_and_changes_nothing(folder, source, exported, tmp_path):
    prompt, _, prefix = exported
    free = source.engine.scheduler.pool.num_free
    for wrong, words in (
        ({"weights": "other"}, "other weights"),
        ({"latent": prefix.latent[:2]}, "another model or kv_cache_dtype"),
        ({"latent": prefix.latent.astype(np.float16)}, "float16"),
        ({"draft_latent": None, "draft_index": None}, "no draft rows"),
    ):
        with pytest.raises(RequestError, match=words):
            import_prefix(source, dataclasses.replace(prefix, **wrong))
    with pytest.raises(RequestError, match="no page of this prompt"):
        export_prefix(source, prompt[1:])
    full = make(folder, 1, 8, num_blocks=9, max_model_len=None)
    held = full.engine.scheduler.pool.take(6)
    with pytest.raises(CacheFullError, match="needs 4 pages, 2 are free"):
        import_prefix(full, prefix)
    full.engine.scheduler.pool.retire(held, 0)
    assert source.engine.scheduler.pool.num_free == free and full.engine.scheduler.pool.num_used == 0


def test_damaged_files_are_refused_by_name(exported, tmp_path):
    whole = tmp_path / "prefix"  # saved under the name that is given
    exported[2].save(whole)
    np.testing.assert_array_equal(CachedPrefix.load(whole).latent, exported[2].latent)
    data = whole.read_bytes()
    flipped = bytearray(data)
    flipped[len(data) // 2] ^= 1
    for name, content in (("junk", b"PK no"), ("cut", data[: len(data) // 2]), ("empty", b""), ("flip", flipped)):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(CheckpointError, match=f"{name} is not a cached prefix, or is damaged"):
            CachedPrefix.load(tmp_path / name)
    with pytest.raises(CheckpointError, match="none is not there"):
        CachedPrefix.load(tmp_path / "none")


def test_rows_of_other_weights_are_refused(folder, exported):
    llm = make(folder, 1, 8)
    llm.set_params(jax.tree.map(lambda x: x * 1.05, llm.params))
    with pytest.raises(RequestError, match="computed with other weights"):
        import_prefix(llm, exported[2])
