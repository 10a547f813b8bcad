"""Eight devices, dcp 4: the same text as on one device, with a part of each expert or whole experts on a device."""

import functools

import pytest

from dcpjax import LLM, SamplingParams
from dcpjax.bench import chats

pytestmark = pytest.mark.usefixtures("quick_compile")

MESH = {"tensor_parallel_size": 8, "decode_context_parallel_size": 4}
LIMITS = {"max_num_seqs": 4, "max_num_batched_tokens": 128, "max_model_len": 192, "num_blocks": 40}
GREEDY = SamplingParams(temperature=0, max_tokens=32)


def texts(**changes) -> list[list[int]]:
    llm = LLM(**LIMITS, **changes, speculative_config={"num_speculative_tokens": 2})
    prompts = chats.prompts(llm.tokenizer, 4, 120, 40)
    return [output.outputs[0].token_ids for output in llm.generate(prompts, GREEDY)]


@functools.cache
def alone() -> list[list[int]]:
    return texts()


@pytest.mark.parametrize("whole_experts", [False, True])
def test_the_trained_model_on_eight_devices(whole_experts):
    """Its checkpoint is in bfloat16, the arithmetic in float32. One expert a device."""
    assert texts(**MESH, enable_expert_parallel=whole_experts) == alone()
