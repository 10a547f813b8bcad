"""From a request body to `SamplingParams`: defaults, limits, and what is refused rather than ignored."""

import dataclasses
from array import array
from collections.abc import Iterable
from typing import Any

from dcpjax.host.request import SamplingParams
from dcpjax.hub import SAMPLING_DEFAULTS
from dcpjax.server.errors import ApiError
from dcpjax.server.protocol import SamplingBody
from dcpjax.server.rules import RulesWish
from dcpjax.server.service import Served, ServerOptions
from dcpjax.server.ticket import Prediction
from dcpjax.server.wire import Job

# Fields of generation_config.json that stand in for fields a request leaves out.

# Sampling fields that have the same name and meaning in the body and in `SamplingParams`.
_SAME = (
    *SAMPLING_DEFAULTS,
    "n",
    "min_tokens",
    "presence_penalty",
    "frequency_penalty",
    "seed",
    "allowed_token_ids",
    "prompt_logprobs",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "skip_special_tokens",
    "include_stop_str_in_output",
)


@dataclasses.dataclass(frozen=True)
class StreamOptions:
    """include_usage: usage in a last chunk. continuous_usage: in every chunk."""

    stream: bool
    include_usage: bool
    continuous_usage: bool


def refuse_unsupported(body: SamplingBody, options: ServerOptions) -> None:
    """Raises `ApiError` for fields that change the answer and cannot be honoured."""
    if body.use_beam_search:
        raise ApiError(400, "use_beam_search: not supported; leave it out", "use_beam_search")
    if body.priority and not options.priorities:
        raise ApiError(
            400,
            "priority: this server runs requests in the order of arrival; leave it out, or start it with "
            "--scheduling-policy priority",
            "priority",
        )


def stream_options(body: SamplingBody, server: ServerOptions) -> StreamOptions:
    """Raises `ApiError` for options without a stream, or that are not true or false."""
    options = {key: value for key, value in (body.stream_options or {}).items() if value is not None}
    if body.stream_options is not None and not body.stream:
        raise ApiError(400, "stream_options: only allowed with stream = true", "stream_options")
    for key in ("include_usage", "continuous_usage_stats"):
        if not isinstance(options.get(key, False), bool):
            raise ApiError(400, f"stream_options: {key} must be true or false", "stream_options")
    include = options.get("include_usage", False) or server.force_usage
    return StreamOptions(bool(body.stream), include, include and options.get("continuous_usage_stats", False))


def sampling_params(
    body: SamplingBody, served: Served, *, max_tokens: int | None, logprobs: int | None
) -> SamplingParams:
    """The body's wish over the server's defaults. `max_tokens`, `logprobs`: resolved by the caller, None: none given.

    Raises `ApiError` or `RequestError`.
    """
    given = {name: value for name in _SAME if (value := getattr(body, name)) is not None}
    defaults = {name: served.sampling_defaults[name] for name in SAMPLING_DEFAULTS if name in served.sampling_defaults}
    if served.model.tokenizer is None and given.get("stop"):
        served.tokenizer("stop")
    for field in ("stop_token_ids", "allowed_token_ids"):
        for token in given.get(field, ()):
            _check_id(field, token, served)
    return SamplingParams(
        **{**defaults, **given}, max_tokens=max_tokens, logprobs=logprobs, logit_bias=_logit_bias(body, served)
    )


def jobs(prompt: list[int], params: SamplingParams, body: SamplingBody, rules: RulesWish | None) -> list[Job]:
    """One for each choice. rules: of every choice by itself."""
    more = {"cache_salt": body.cache_salt, "no_store": bool(body.no_store), "priority": body.priority or 0}
    ids = array("i", prompt)
    return [Job(ids, params, choice, rules=rules, **more) for choice in range(params.n)]


def check_logprobs(wanted: int, most: int, param: str) -> None:
    """Raises `ApiError` if more logprobs are wanted than the server gives; −1 is the whole vocabulary."""
    if most != -1 and not 0 <= wanted <= most:
        raise ApiError(400, f"{param}: got {wanted}, this server gives 0 to {most} (--max-logprobs)", param)


def check_prompt_logprobs(body: SamplingBody, most: int) -> None:
    """Raises `ApiError` if more of the prompt's logprobs are wanted than the server gives, or in a stream."""
    if body.prompt_logprobs is None:
        return
    check_logprobs(body.prompt_logprobs, most, "prompt_logprobs")
    if body.stream:
        raise ApiError(400, "prompt_logprobs: not possible with stream = true", "prompt_logprobs")


def check_prompt(prompt: list[int], max_tokens: int | None, served: Served, param: str) -> None:
    """Raises `ApiError` if the prompt is empty, has unknown ids, or does not fit the context with its answer."""
    if not prompt:
        raise ApiError(400, f"{param}: the prompt has no tokens; at least 1 is needed", param)
    _check_id(param, max(prompt), served)
    most, wanted = served.model.max_model_len, max_tokens or 1
    if len(prompt) + wanted > most:
        raise ApiError(
            400,
            f"This model's maximum context length is {most} tokens. However, you requested {len(prompt) + wanted} "
            f"tokens ({len(prompt)} in the messages, {wanted} in the completion). Shorten the messages or the "
            "completion.",
            param,
        )


def truncate(prompt: list[int], body: SamplingBody) -> list[int]:
    """The last `truncate_prompt_tokens` tokens."""
    return prompt if body.truncate_prompt_tokens is None else prompt[-body.truncate_prompt_tokens :]


def default_max_tokens(served: Served) -> int | None:
    """The model's own answer length, None: the rest of the context."""
    value = served.sampling_defaults.get("max_new_tokens")
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def usage(
    prompt_tokens: int,
    completion_tokens: int,
    cached_tokens: int | None,
    predictions: Iterable[Prediction],
    reasoning_tokens: int = 0,
) -> dict[str, Any]:
    """`cached_tokens` None: are not told."""
    predictions = tuple(predictions)
    cached = {} if cached_tokens is None else {"prompt_tokens_details": {"cached_tokens": cached_tokens}}
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        **cached,
        "completion_tokens_details": {
            "reasoning_tokens": reasoning_tokens,
            "accepted_prediction_tokens": sum(prediction.accepted for prediction in predictions),
            "rejected_prediction_tokens": sum(prediction.rejected for prediction in predictions),
        },
    }


def _logit_bias(body: SamplingBody, served: Served) -> dict[int, float] | None:
    bias = {}
    for key, value in (body.logit_bias or {}).items():
        if not (key.isascii() and key.isdigit()):
            raise ApiError(400, f"logit_bias: key {key[:200]!r} is not a token id", "logit_bias")
        bias[_check_id("logit_bias", int(key[:20]), served)] = float(value)
    return bias or None


def _check_id(param: str, token: int, served: Served) -> int:
    if token >= served.vocab_size:
        raise ApiError(400, f"{param}: token id {token} is outside the vocabulary of {served.vocab_size} ids", param)
    return token
