"""The cache in 8-bit records: the trained model answers as before, and all that is promised of text holds within it."""

import random

import numpy as np
import pytest

from dcpjax import LLM, SamplingParams
from dcpjax.errors import RequestError
from dcpjax.transfer import export_prefix, import_prefix
from models.train import tables

pytestmark = pytest.mark.usefixtures("quick_compile")

GREEDY = SamplingParams(temperature=0, max_tokens=16)


def make(kind: str, dcp: int = 1, k: int = 3, draft_kv: str = "sharded") -> LLM:
    return LLM(
        decode_context_parallel_size=dcp,
        kv_cache_dtype=kind,
        num_blocks=80,
        max_model_len=448,
        max_num_seqs=8,
        max_num_batched_tokens=256,
        speculative_config={"num_speculative_tokens": k, "draft_kv": draft_kv},
    )


def look_ups(llm: LLM, count: int = 6) -> tuple[list[list[int]], list[str]]:
    """Prompts that ask for one of 25 codes, and the codes."""
    prompts, codes = [], []
    for seed in range(count):
        rng = random.Random(seed)
        table = tables.table(rng, 25, digits=4)
        name, code = table.entries[rng.randrange(len(table.entries))]
        chat = [{"role": "user", "content": f"{table.text}\n\nWhat is the code of {name}?"}]
        text = llm.tokenizer.apply_chat_template(chat, enable_thinking=False)
        prompts.append(llm.tokenizer.encode_chat(text))
        codes.append(code)
    return prompts, codes


def answers(llm: LLM, prompts: list[list[int]]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(prompts, GREEDY)]


@pytest.fixture(scope="module")
def packed():
    """One rank: the engine, what it was asked, what it said and how its drafts did."""
    llm = make("fp8")
    prompts, codes = look_ups(llm)
    return llm, prompts, codes, answers(llm, prompts), llm.engine.stats.acceptance


def test_pools_hold_records(packed):
    llm = packed[0]
    # 64 values and a scale, and 16 values of a rotated key in 16 bits; 32 values and a scale.
    assert [pool.data.shape[3] for pool in (llm.runner.cache.latent, llm.runner.cache.index)] == [64 // 4 + 1 + 8, 9]
    # Six layers and three index keys, and one of each for the draft.
    assert any("844.0 bytes a token and rank by formula, 844.0 as allocated" in line for line in llm.describe())


def test_look_ups_are_right_as_often_as_in_full(packed):
    llm, prompts, codes, texts, _ = packed
    plain = make("float32")
    right = [
        sum(code in llm.tokenizer.decode(text) for code, text in zip(codes, said, strict=True))
        for said in (texts, answers(plain, prompts))
    ]
    assert right[1] >= 5 and right[0] >= right[1] - 1
    # Another record is another cache: rows are rounded, selections and latents nearly the same.
    short, full = (x.trace(prompts[0]) for x in (llm, plain))
    assert 0 < np.abs(short.latent - full.latent).max() and not np.array_equal(short.logits, full.logits)
    overlap = np.mean([np.isin(a, b).mean() for n in full.topk for a, b in zip(short.topk[n], full.topk[n])])
    assert overlap > 0.9


def test_text_and_drafts_are_the_same_when_dealt_out(packed):
    """Rows are packed alike on every rank; cold, and after hits."""
    _, prompts, _, texts, acceptance = packed
    llm = make("fp8", 4)
    assert answers(llm, prompts) == texts
    assert llm.engine.stats.acceptance == acceptance
    again = llm.generate(prompts, GREEDY)
    assert [output.outputs[0].token_ids for output in again] == texts
    assert all(output.num_cached_tokens > 0 for output in again)
    assert acceptance.num_rows > 10


def test_text_without_drafts_is_the_same(packed):
    _, prompts, _, texts, _ = packed
    assert answers(make("fp8", 2, 0, "replicated"), prompts) == texts


def test_records_move_between_layouts_and_not_between_kinds(packed):
    llm, prompts, _, texts, _ = packed
    prefix = export_prefix(llm, prompts[0])
    other = make("fp8", 4)
    assert import_prefix(other, prefix) == len(prefix.token_ids) > 0
    (out,) = other.generate(prompts[0], GREEDY)
    assert out.outputs[0].token_ids == texts[0]
    assert out.num_cached_tokens == min(len(prefix.token_ids), len(prompts[0]) - 1)
    with pytest.raises(RequestError, match="exported by another model or kv_cache_dtype"):
        import_prefix(make("float32"), prefix)
