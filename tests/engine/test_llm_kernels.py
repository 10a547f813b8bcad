"""The tiny model with kernels, run by the interpreter: the text is the one without, and the log says which are used."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dcpjax import LLM, SamplingParams
from dcpjax.errors import ConfigError
from dcpjax.kernels import Kernels

SMALL = {"num_blocks": 4, "max_model_len": 64, "max_num_seqs": 1, "max_num_batched_tokens": 16}
PROMPT = list(range(5, 25))
# The attention of GLM-5.2 to the width, in a small model.
WIDE = {
    "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_head_dim": 96, "num_attention_heads": 64, "num_key_value_heads": 64,
    "index_head_dim": 128, "index_n_heads": 32, "index_topk": 2048,
    "num_hidden_layers": 3, "indexer_types": ["full", "shared", "full"], "mlp_layer_types": ["dense", "sparse", "sparse"],
}  # fmt: skip


def line_of(llm):
    (line,) = [line for line in llm.describe() if line.startswith("kernels: ")]
    return line


@pytest.mark.usefixtures("quick_compile")
@pytest.mark.parametrize("dcp, backend", [(1, "ag_rs"), (2, "a2a")])
def test_same_text(dcp, backend):
    texts = []
    for kernels in ("xla", {"sparse_mla": "interpret", "merge": "interpret"}):
        llm = LLM(decode_context_parallel_size=dcp, dcp_comm_backend=backend, kernels=kernels, **SMALL)
        (out,) = llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=3, ignore_eos=True))
        texts.append(out.outputs[0].token_ids)
        assert ("interpret" in line_of(llm)) == (kernels != "xla")
    assert texts[0] == texts[1]


def test_names_are_checked():
    with pytest.raises(ConfigError, match="kernels: sparse_mla 'fast' is not known"):
        LLM(kernels={"sparse_mla": "fast"}, **SMALL)
    with pytest.raises(ConfigError, match="kernels: give 'auto', 'xla', or a mapping of sparse_mla"):
        LLM(kernels="triton", **SMALL)


def test_kernels_are_the_platforms_and_the_users():
    """A mapping changes what the platform gets; on a CPU that is XLA."""
    where = ("gpu", jnp.bfloat16, 512, 64, 128)
    best = Kernels.for_platform(*where)
    assert Kernels.chosen(None, *where) == Kernels.chosen("auto", *where) == best != Kernels()
    assert Kernels.chosen("xla", *where) == Kernels()
    assert Kernels.chosen({"topk": "xla"}, *where) == dataclasses.replace(best, topk="xla")
    assert "triton" not in line_of(LLM(**SMALL))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype, close", [("float32", 1e-4), ("bfloat16", 3e-2)])
@pytest.mark.parametrize("kernels", [{"sparse_mla": "triton", "merge": "triton"}, "auto"], ids=["attention", "auto"])
def test_same_logits_on_a_gpu(kernels, dtype, close):
    """Close in the norm of all logits, and the same best tokens at nearly all places."""
    plain, fast = (LLM(dtype=dtype, kernels=arm, **SMALL).trace(PROMPT).logits for arm in ("xla", kernels))
    assert np.linalg.norm(fast - plain) < close * np.linalg.norm(plain)
    assert (fast.argmax(1) == plain.argmax(1)).mean() > 0.9


@pytest.mark.gpu
@pytest.mark.parametrize("cache", ["auto", "fp8"])
@pytest.mark.parametrize("dcp", [1, 2])
def test_real_widths_on_a_gpu(dcp, cache):
    """What the platform gets there, Hopper its own kernels; random weights, so that roundings show at once."""
    if jax.device_count() < dcp:
        pytest.skip("needs two GPUs")
    plain, fast = (
        LLM(
            load_format="dummy", hf_overrides=WIDE, kernels=kernels, kv_cache_dtype=cache,
            decode_context_parallel_size=dcp, num_blocks=16, max_model_len=512, max_num_seqs=1, max_num_batched_tokens=64,
        )
        for kernels in ("xla", "auto")
    )  # fmt: skip
    assert "xla" not in line_of(fast)
    first, second = (llm.trace(range(5, 405)).logits for llm in (plain, fast))
    assert np.linalg.norm(second - first) < 0.1 * np.linalg.norm(first)
    assert (second.argmax(1) == first.argmax(1)).mean() > 0.8


@pytest.mark.gpu
def test_merging_through_boxes_on_two_gpus():
    """Few tokens at a time, so that it is parts that move; drafts merge through their step's boxes."""
    if jax.device_count() < 2:
        pytest.skip("needs two GPUs")
    plain, boxed = (
        LLM(
            load_format="dummy", hf_overrides=WIDE, kernels={"merge": merge}, dcp_comm_backend="a2a",
            decode_context_parallel_size=2, num_blocks=16, max_model_len=512, max_num_seqs=2, max_num_batched_tokens=4,
            speculative_config={"method": "mtp", "num_speculative_tokens": 1, "draft_kv": "sharded"},
        )
        for merge in ("triton", "mosaic")
    )  # fmt: skip
    first, second = (llm.trace(range(5, 53)).logits for llm in (plain, boxed))
    assert np.linalg.norm(second - first) < 0.03 * np.linalg.norm(first)
    assert (second.argmax(1) == first.argmax(1)).mean() > 0.8
    # With random weights a rounding changes what follows: only that all of it comes.
    answers = boxed.generate(
        [list(range(5, 25)), list(range(9, 60))], SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    )
    assert [len(answer.outputs[0].token_ids) for answer in answers] == [20, 20]
