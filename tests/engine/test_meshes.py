"""Eight devices, dcp 4: the same text as on one device, with a part of each expert or whole experts on a device."""

import pytest

from dcpjax import LLM, SamplingParams
from dcpjax.bench import chats
from dcpjax.convert import convert
from dcpjax.hub import TINY

pytestmark = pytest.mark.usefixtures("quick_compile")

MESH = {"tensor_parallel_size": 8, "decode_context_parallel_size": 4}
# One request at a time: two programs for each engine, a chunk of a prompt and a decode step.
LIMITS = {"max_num_seqs": 1, "max_num_batched_tokens": 64, "max_model_len": 192, "num_blocks": 10}
GREEDY = SamplingParams(temperature=0, max_tokens=32)


def texts(model, **changes) -> list[list[int]]:
    llm = LLM(model, **LIMITS, **changes, speculative_config={"num_speculative_tokens": 1})
    prompts = chats.prompts(llm.tokenizer, 4, 120, 40)
    return [output.outputs[0].token_ids for output in llm.generate(prompts, GREEDY)]


@pytest.fixture(scope="module", params=["bfloat16", "fp8"])
def alone(request, quick_compile, tmp_path_factory):
    """A folder of the trained model, and its texts on one device. The arithmetic is in float32 in either case."""
    folder = TINY
    if request.param != "bfloat16":
        folder = tmp_path_factory.mktemp("converted") / request.param
        convert(TINY, folder, request.param)
    return folder, texts(folder)


@pytest.mark.parametrize("whole_experts", [False, True])
def test_the_trained_model_on_eight_devices(alone, whole_experts):
    """One expert a device, or 16 hidden values of each; FP8 blocks of 128 are cut for both."""
    folder, want = alone
    assert texts(folder, **MESH, enable_expert_parallel=whole_experts) == want
