"""What the tiny model shows of a layout: the same chats twice, so that the second time their pages are hit."""

import dataclasses
from typing import Any

from dcpjax.bench import chats
from dcpjax.host.request import SamplingParams
from dcpjax.llm import LLM


@dataclasses.dataclass(frozen=True)
class Sizes:
    """chats: prompts, each of at least `least_tokens`. tokens: of an answer at most."""

    chats: int = 12
    least_tokens: int = 40
    max_model_len: int = 256
    tokens: int = 64
    drafts: int = 5
    block_size: int = 16


# No longer than eight blocks, for which a step has one shape.
QUICK = Sizes(chats=2, max_model_len=128, tokens=12, drafts=2)


def measure(dcp: int, draft_kv: str, sizes: Sizes) -> dict[str, Any]:
    """hit_rate: of prompt tokens over both rounds. acceptance_length: tokens a step brought, greedy, both rounds.
    equal_rounds: whether hits changed no token. text: the token ids, which no layout may change."""
    llm = LLM(
        decode_context_parallel_size=dcp,
        block_size=sizes.block_size,
        max_model_len=sizes.max_model_len,
        num_blocks=4096 // sizes.block_size,
        max_num_seqs=1,
        max_num_batched_tokens=64,
        speculative_config={"method": "mtp", "num_speculative_tokens": sizes.drafts, "draft_kv": draft_kv},
    )
    prompts = chats.prompts(llm.tokenizer, sizes.chats, sizes.max_model_len - sizes.tokens - 1, sizes.least_tokens)
    params = SamplingParams(temperature=0.0, max_tokens=sizes.tokens)
    # One after the other: what a prompt hits then depends on the prompts before it alone.
    rounds = [[llm.generate(prompt, params)[0] for prompt in prompts] for _ in range(2)]
    text = [tuple(tuple(answer.outputs[0].token_ids) for answer in answers) for answers in rounds]
    cached = [sum(answer.num_cached_tokens for answer in answers) for answers in rounds]
    queries = sum(map(len, prompts))
    kept = llm.engine.stats.acceptance
    return {
        "hit_rate": sum(cached) / (2 * queries),
        "hit_rate_second_round": cached[1] / queries,
        "acceptance_length": kept.acceptance_length,
        "equal_rounds": text[0] == text[1],
        "text": text[0],
    }
