"""Chats for benchmarks that need text which the tiny model speaks and has not seen.

They come from the generator that made its training text, with seeds of their own: small tasks with other words, names and
numbers in another order.
"""

import itertools
import random

from dcpjax.text import Tokenizer
from models.train import generator


def prompts(
    tokenizer: Tokenizer, count: int, most_tokens: int, least_tokens: int = 1, seed: int = 20_000
) -> list[list[int]]:
    """Token ids of `count` different chats, each cut where the model answers the last message."""
    found: list[list[int]] = []
    for number in itertools.count(seed):
        if len(found) == count:
            return found
        rng = random.Random(number)
        messages = generator.small_talk(rng, rng.choice((2, 3, 4)))[:-1]
        ids = tokenizer.encode(generator.render(messages, thinking=rng.random() < 0.5, prompt=True))
        if least_tokens <= len(ids) <= most_tokens and ids not in found:
            found.append(ids)
    raise AssertionError("unreachable")


def stream(tokenizer: Tokenizer, seed: int, num_tokens: int) -> list[int]:
    """`num_tokens` token ids of chats one after the other."""
    rng, ids = random.Random(seed), []
    while len(ids) < num_tokens:
        ids += tokenizer.encode(generator.document(rng, num_tokens))
    return ids[:num_tokens]
