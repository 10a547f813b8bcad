"""Logprobs in the two shapes of the API: a list of entries for chat, parallel lists for plain completions."""

import math
from collections.abc import Sequence
from typing import Any

from dcpjax.host.request import TokenLogprobs
from dcpjax.text import Tokenizer

# JSON has no infinity.
_LOWEST = -9999.0


def chat_entries(
    tokenizer: Tokenizer, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs], as_ids: bool = False
) -> list[dict]:
    """One entry a token. `bytes` are the token's own, so that half characters can be joined. as_ids: "token_id:N" instead
    of the token's text, which may not name one token alone."""

    def entry(token_id: int, logprob: float) -> dict[str, Any]:
        raw = tokenizer.token_bytes(token_id)
        text = f"token_id:{token_id}" if as_ids else raw.decode("utf-8", errors="replace")
        return {"token": text, "logprob": _finite(logprob), "bytes": list(raw)}

    return [
        {**entry(token, best.chosen), "top_logprobs": [entry(*pair) for pair in _top(token, best)]}
        for token, best in zip(token_ids, logprobs, strict=True)
    ]


def prompt_entries(
    tokenizer: Tokenizer | None, prompt: Sequence[int], logprobs: Sequence[TokenLogprobs]
) -> list[dict[str, dict] | None]:
    """One for each prompt token, by token id; the first has none, since nothing stands before it."""

    def entry(token_id: int, logprob: float, rank: int) -> dict[str, Any]:
        text = None if tokenizer is None else tokenizer.decode([token_id], skip_special_tokens=False)
        return {"logprob": _finite(logprob), "rank": rank, "decoded_token": text}

    entries: list[dict[str, dict] | None] = [None]
    for token, best in zip(prompt[1:], logprobs, strict=True):
        pairs = zip(best.ids.tolist(), best.values.tolist(), strict=True)
        ranked = {str(other): entry(other, value, rank) for rank, (other, value) in enumerate(pairs, 1)}
        entries.append({str(token): entry(token, best.chosen, best.rank), **ranked})
    return entries


class CompletionLogprobs:
    """Parallel lists; `offset` is where the next token's text starts in the choice's text."""

    def __init__(self, tokenizer: Tokenizer | None, offset: int = 0, as_ids: bool = False):
        self._tokenizer = tokenizer
        self._as_ids = as_ids or tokenizer is None
        self._offset = offset

    def lists(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs | None]) -> dict[str, list]:
        """Of the next tokens; None for one that nothing stands before."""
        tokens = [self._name(token) for token in token_ids]
        offsets = []
        for token, name in zip(token_ids, tokens, strict=True):
            offsets.append(self._offset)
            self._offset += len(name if self._tokenizer is None else self._text(token))
        top: list[dict[str, float] | None] = []
        for token, best in zip(token_ids, logprobs, strict=True):
            if best is None:
                top.append(None)
                continue
            named: dict[str, float] = {}
            for other, value in _top(token, best, always=True):
                named.setdefault(self._name(other), _finite(value))  # of equal texts the likelier
            top.append(named)
        return {
            "tokens": tokens,
            "token_logprobs": [None if best is None else _finite(best.chosen) for best in logprobs],
            "top_logprobs": top,
            "text_offset": offsets,
        }

    def _name(self, token_id: int) -> str:
        return f"token_id:{token_id}" if self._as_ids else self._text(token_id)

    def _text(self, token_id: int) -> str:
        return self._tokenizer.decode([token_id], skip_special_tokens=False)


def _top(token: int, best: TokenLogprobs, always: bool = False) -> list[tuple[int, float]]:
    """The best tokens, and the chosen one after them if it is not among them and any (or `always`) are wanted."""
    pairs = list(zip(best.ids.tolist(), best.values.tolist(), strict=True))
    if (pairs or always) and all(other != token for other, _ in pairs):
        pairs.append((token, best.chosen))
    return pairs


def _finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else _LOWEST
