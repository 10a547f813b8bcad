"""The trained model: how many drafts are accepted on chats it has not seen, the same in every layout, and no text changed.

A draft that reads its shard as the whole context shows here and nowhere else: the target's verification keeps the text
right, and acceptance falls (from 4.0 to 1.6 where this was first met).
"""

import pytest

from dcpjax import LLM, SamplingParams
from dcpjax.bench import chats

pytestmark = pytest.mark.usefixtures("quick_compile")

K, CHATS, ROOM = 5, 12, 255
GREEDY = SamplingParams(temperature=0, max_tokens=48)


def make(dcp: int, k: int, draft_kv: str = "sharded") -> LLM:
    return LLM(
        decode_context_parallel_size=dcp,
        num_blocks=80,
        max_model_len=320,
        max_num_seqs=8,
        max_num_batched_tokens=256,
        speculative_config={"num_speculative_tokens": k, "draft_kv": draft_kv},
    )


def answers(llm: LLM) -> list[list[int]]:
    return [
        output.outputs[0].token_ids for output in llm.generate(chats.prompts(llm.tokenizer, CHATS, ROOM, 40), GREEDY)
    ]


@pytest.fixture(scope="module")
def alone():
    llm = make(1, K)
    return answers(llm), llm.engine.stats.acceptance


def test_drafts_on_unseen_chats(alone):
    """At least 2.5 of 5 drafts are accepted, and the text is that of no drafts at all."""
    texts, acceptance = alone
    assert acceptance.num_rows > 40 and acceptance.drafts_per_row >= 2.5
    assert answers(make(1, 0)) == texts


@pytest.mark.parametrize("draft_kv", ["sharded", "replicated"])
def test_inv_17_br_01_acceptance_is_the_same_in_every_layout(alone, draft_kv):
    """Not within a per cent: the same drafts are accepted."""
    llm = make(4, K, draft_kv)
    assert answers(llm) == alone[0]
    assert llm.engine.stats.acceptance == alone[1]
