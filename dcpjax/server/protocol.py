"""The bodies that clients send. A field that is null counts as not given; fields not named here are ignored.

Values are checked strictly (no text where a number belongs) and the ranges are part of the published schema. What needs
the model, its vocabulary or another field is checked where the request is built.
"""

import logging
from typing import Annotated, Any, Literal

import orjson
import pydantic
from pydantic import Field
from starlette.requests import Request

from dcpjax.server.errors import ApiError

log = logging.getLogger("dcpjax.server")

Finite = Annotated[float, Field(allow_inf_nan=False)]
TokenId = Annotated[int, Field(ge=0)]
Stop = Annotated[str, Field(min_length=1)]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class Body(pydantic.BaseModel):
    """What all bodies share: strict types, unknown fields ignored."""

    model_config = pydantic.ConfigDict(strict=True, extra="ignore", frozen=True)


class SamplingBody(Body):
    """What chat and plain completions share."""

    model: str | None = None
    n: int | None = Field(None, ge=1, le=64)
    max_tokens: int | None = Field(None, ge=1)
    min_tokens: int | None = Field(None, ge=0)
    temperature: Finite | None = Field(None, ge=0)
    top_p: Finite | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1)
    min_p: Finite | None = Field(None, ge=0, le=1)
    presence_penalty: Finite | None = Field(None, ge=-2, le=2)
    frequency_penalty: Finite | None = Field(None, ge=-2, le=2)
    repetition_penalty: Finite | None = Field(None, ge=1.2e-38, le=3.4e38)
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100, allow_inf_nan=False)]] | None = None
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    stop: Stop | Annotated[list[Stop], Field(max_length=16)] | None = None
    stop_token_ids: list[TokenId] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    spaces_between_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = Field(None, ge=1)
    request_id: str | None = Field(None, min_length=1, max_length=200)
    cache_salt: str | None = Field(None, min_length=1)
    no_store: bool | None = None
    priority: int | None = None
    use_beam_search: bool | None = None  # known, and refused rather than ignored
    prompt_logprobs: int | None = Field(None, ge=-1)
    allowed_token_ids: list[TokenId] | None = None
    bad_words: list[str] | None = None
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: Any = None
    guided_regex: str | None = None
    guided_choice: list[Any] | None = None
    guided_grammar: str | None = None


class ChatBody(SamplingBody):
    """The body of `POST /v1/chat/completions`: OpenAI's protocol, with the fields that vLLM and GLM add."""

    messages: list[dict[str, Any]] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=-1)
    tools: Annotated[list[dict[str, Any]], Field(min_length=1)] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Effort | None = None
    thinking: dict[str, Any] | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    separate_reasoning: bool | None = None
    include_reasoning: bool | None = None
    audio: dict[str, Any] | None = None
    modalities: list[str] | None = None
    web_search_options: dict[str, Any] | None = None
    functions: list[dict[str, Any]] | None = None


class CompletionBody(SamplingBody):
    """The body of `POST /v1/completions`: OpenAI's protocol, with vLLM's fields. prompt: texts or lists of ids."""

    prompt: str | list[str] | list[TokenId] | list[list[TokenId]]
    logprobs: int | None = Field(None, ge=-1)
    echo: bool | None = None
    suffix: str | None = None
    best_of: int | None = Field(None, ge=1)
    add_special_tokens: bool | None = None


class TokenizeBody(Body):
    """The body of `POST /tokenize`, by vLLM's protocol: a prompt, or the messages of a chat."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[dict[str, Any]], Field(min_length=1)] | None = None
    tools: Annotated[list[dict[str, Any]], Field(min_length=1)] | None = None
    reasoning_effort: Effort | None = None
    thinking: dict[str, Any] | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(Body):
    """The body of `POST /detokenize`, by vLLM's protocol."""

    model: str | None = None
    tokens: list[TokenId]


class AbortBody(Body):
    """request_ids: the ids of answers, or what the clients gave as such."""

    request_ids: list[str]


async def read_body[B: Body](request: Request, kind: type[B], max_bytes: int) -> B:
    """The request's JSON as a `kind`. Raises `ApiError`: 400, or 413 for more than `max_bytes`."""
    media = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media != "application/json":
        raise ApiError(400, f"Content-Type must be application/json, got {media[:200] or 'none'}")
    too_large = ApiError(413, f"the body is larger than {max_bytes} bytes, which is all this server reads")
    length = request.headers.get("content-length", "")
    if length.isdigit() and int(length) > max_bytes:
        raise too_large
    data = bytearray()
    async for chunk in request.stream():  # the header may be missing or wrong
        data += chunk
        if len(data) > max_bytes:
            raise too_large
    try:
        value = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise ApiError(400, f"the body is not valid JSON: {str(error)[:200]}") from None
    if not isinstance(value, dict):
        raise ApiError(400, f"the body must be a JSON object, got {_quote(value)}")
    given = {key: item for key, item in value.items() if item is not None}
    unknown = given.keys() - kind.model_fields.keys()
    if unknown:
        log.debug("ignored fields: %s", ", ".join(sorted(unknown))[:200])
    try:
        return kind.model_validate(given)
    except pydantic.ValidationError as error:
        raise explain(error) from None


def explain(error: pydantic.ValidationError) -> ApiError:
    """A 400 that names the first field that is wrong, what is wrong with it, and what it was."""
    found = error.errors(include_url=False, include_context=False)
    # In a union every member complains: best told is what is wrong with a value of the right type, then the first.
    same = [one for one in found if one["loc"][:1] == found[0]["loc"][:1]]
    first = next((one for one in same if not one["type"].endswith(("_type", "_parsing"))), found[0])
    place = [str(part) for part in first["loc"]]
    field = place[0] if place else None
    got = "" if first["type"] == "missing" else f"; got {_quote(first['input'])}"
    return ApiError(400, f"{field}: {first['msg']}{got}", field)


def _quote(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 200 else text[:200] + "…"
