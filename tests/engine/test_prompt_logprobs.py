"""Logprobs of a prompt, scored chunk by chunk, are those of the traced sequence."""

import jax
import numpy as np
import pytest

from dcpjax import LLM, SamplingParams
from dcpjax.errors import RequestError


@pytest.fixture(scope="module")
def llm(quick_compile):
    drafts = {"method": "mtp", "num_speculative_tokens": 1}
    sizes = {"max_num_seqs": 2, "max_num_batched_tokens": 16, "max_model_len": 64, "block_size": 16}
    return LLM(decode_context_parallel_size=2, speculative_config=drafts, **sizes)


PROMPT = "The quick brown fox jumps over the lazy dog and comes back. Then it sleeps."


@pytest.mark.parametrize("best", [0, 2])
def test_scores_are_those_of_the_trace(llm, best):
    ids = llm.tokenizer.encode(PROMPT)
    assert len(ids) > 16 + 2, "several chunks"
    want = np.asarray(jax.nn.log_softmax(np.asarray(llm.trace(ids).logits, np.float32), axis=-1))
    params = SamplingParams(temperature=0, max_tokens=4, prompt_logprobs=best, ignore_eos=True)
    llm.generate(PROMPT, params)  # its pages are in the cache now, and are not to be used
    requests = [llm.add(ids, params), llm.add(ids[:20], SamplingParams(max_tokens=9, temperature=0, prompt_logprobs=0))]
    for _ in range(6):
        llm.engine.step()
    llm.engine.reset_prefix_cache(running=True)  # both begin again
    llm.engine.drain()
    for request in requests:
        prompt = request.prompt
        assert len(request.prompt_logprobs) == len(prompt) - 1 and request.cached_tokens == 0
        for i, scored in enumerate(request.prompt_logprobs):
            np.testing.assert_allclose(scored.chosen, want[i, prompt[i + 1]], atol=1e-4)
            assert scored.rank == 1 + (want[i] > want[i, prompt[i + 1]]).sum()
            assert len(scored.ids) == request.params.prompt_logprobs
            if len(scored.ids):
                np.testing.assert_allclose(scored.values, np.sort(want[i])[::-1][:best], atol=1e-4)


def test_no_more_than_there_are(llm):
    with pytest.raises(RequestError, match="prompt_logprobs"):
        llm.generate("x", SamplingParams(prompt_logprobs=99999))
    with pytest.raises(RequestError, match="prompt_logprobs"):
        SamplingParams(prompt_logprobs=-2)
