"""`POST /tokenize` and `/detokenize`: exactly the ids that generation would use."""

import asyncio
from typing import Any

from dcpjax.server.errors import ApiError
from dcpjax.server.prompts import render_chat
from dcpjax.server.protocol import DetokenizeBody, TokenizeBody
from dcpjax.server.service import Served, ServerOptions


async def tokenize(body: TokenizeBody, served: Served, options: ServerOptions) -> dict[str, Any]:
    """The ids of a prompt or a chat, and how many fit. Raises `ApiError` or `RequestError`."""
    served.check_model(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise ApiError(400, "prompt: give either prompt or messages", "prompt")
    tokenizer = served.tokenizer("prompt" if body.messages is None else "messages")
    if body.messages is not None:
        prompt = await asyncio.to_thread(render_chat, body, served, options)
        tokens = prompt.token_ids
    else:
        tokens = await asyncio.to_thread(tokenizer.encode, body.prompt, body.add_special_tokens is not False)
    return {
        "count": len(tokens),
        "max_model_len": served.model.max_model_len,
        "tokens": tokens,
        "token_strs": [tokenizer.token_name(token) for token in tokens] if body.return_token_strs else None,
    }


async def detokenize(body: DetokenizeBody, served: Served) -> dict[str, Any]:
    """All tokens are shown, control tokens too: the inverse of `tokenize`. Raises `ApiError` for ids that there are not."""
    served.check_model(body.model)
    for token in body.tokens:
        if token >= served.vocab_size:
            raise ApiError(
                400, f"tokens: token id {token} is outside the vocabulary of {served.vocab_size} ids", "tokens"
            )
    tokenizer = served.tokenizer("tokens")
    return {"prompt": await asyncio.to_thread(tokenizer.decode, body.tokens, False)}
