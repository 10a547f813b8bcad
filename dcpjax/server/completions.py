"""`POST /v1/completions`: text or token ids in, their continuation out; no chat template, no parsing."""

import dataclasses
import time
from collections.abc import Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from dcpjax.server import wishes
from dcpjax.server.answers import off_loop, public_id, whole_answer
from dcpjax.server.errors import ApiError
from dcpjax.server.logprobs import CompletionLogprobs, prompt_entries
from dcpjax.server.protocol import CompletionBody
from dcpjax.server.service import Served, ServerOptions
from dcpjax.server.stream import EventStream, attended
from dcpjax.server.structure import rules_of
from dcpjax.server.ticket import Prediction, Update

_MAX_TOKENS = 16
# Of all prompts × choices of one request: each is a request of the engine.
_MAX_CHOICES = 1024


@dataclasses.dataclass(frozen=True)
class _Prompt:
    """`text` is what `echo` gives back; empty without it."""

    token_ids: list[int]
    text: str


async def completions(request: Request, body: CompletionBody, served: Served, options: ServerOptions) -> Response:
    """The whole answer, or a stream of it. Raises `ApiError` or `RequestError` for what is refused."""
    served.check_model(body.model)
    _refuse(body, options)
    stream = wishes.stream_options(body, options)
    max_tokens = body.max_tokens or wishes.default_max_tokens(served) or _MAX_TOKENS
    prompts = await off_loop(_text_size(body.prompt), _prompts, body, served)
    params = wishes.sampling_params(body, served, max_tokens=max_tokens, logprobs=body.logprobs)
    if body.echo and body.logprobs is not None and params.prompt_logprobs is None:
        params = dataclasses.replace(params, prompt_logprobs=body.logprobs)
    if len(prompts) * params.n > _MAX_CHOICES:
        raise ApiError(400, f"prompt: {len(prompts)} prompts × n = {params.n} are over {_MAX_CHOICES}", "prompt")
    for prompt in prompts:
        wishes.check_prompt(prompt.token_ids, max_tokens, served, "prompt")
    rules = await rules_of(body, served, False)
    jobs = [job for prompt in prompts for job in wishes.jobs(prompt.token_ids, params, body, rules)]
    ticket = served.engine.submit(jobs, body.request_id or request.scope["request_id"], not stream.stream)
    await ticket.accepted()
    answer = _Answer(public_id("cmpl-", body.request_id, request), body, prompts, served, options, stream)
    if stream.stream:
        return EventStream(ticket, answer)
    async with attended(ticket, request.receive):
        return await whole_answer(ticket, answer.whole)


def _text_size(prompt: str | list) -> int:
    """Characters to be encoded; ids are no work."""
    return len(prompt) if isinstance(prompt, str) else sum(len(text) for text in prompt if isinstance(text, str))


def _refuse(body: CompletionBody, options: ServerOptions) -> None:
    wishes.refuse_unsupported(body, options)
    if body.suffix:
        raise ApiError(400, "suffix: not supported; leave it out", "suffix")
    if body.best_of is not None and body.best_of > (body.n or 1):
        raise ApiError(400, "best_of: must not be greater than n", "best_of")
    if body.logprobs is not None:
        wishes.check_logprobs(body.logprobs, options.max_logprobs, "logprobs")
    wishes.check_prompt_logprobs(body, options.max_logprobs)


def _prompts(body: CompletionBody, served: Served) -> list[_Prompt]:
    """Raises `ApiError` if there is none. Slow for long texts: not for the event loop."""
    given = body.prompt
    if isinstance(given, str) or (given and isinstance(given[0], int)):
        given = [given]
    if not given:
        raise ApiError(400, "prompt: got an empty list; at least 1 prompt is needed", "prompt")
    prompts = []
    for prompt in given:
        if isinstance(prompt, str):
            special = body.add_special_tokens is not False
            ids = served.tokenizer("prompt").encode(prompt, add_special_tokens=special)
        else:
            ids = list(prompt)
        ids = wishes.truncate(ids, body)
        whole = isinstance(prompt, str) and body.truncate_prompt_tokens is None
        text = ""
        if body.echo:
            skip = body.skip_special_tokens is not False
            text = prompt if whole else served.tokenizer("echo").decode(ids, skip_special_tokens=skip)
        prompts.append(_Prompt(ids, text))
    return prompts


class _Choice:
    """One choice while it grows."""

    def __init__(self, prompt: _Prompt, body: CompletionBody, served: Served):
        self.prompt = prompt
        self.num_tokens = 0
        self.cached_tokens = 0
        self.prediction = Prediction()
        self.opened = False  # its first chunk is out
        self._logprobs = None
        self._echo = bool(body.echo)
        if body.logprobs is not None:
            as_ids = bool(body.return_tokens_as_token_ids)
            self._logprobs = CompletionLogprobs(served.model.tokenizer, 0, as_ids)
        self._spoken = served.model.tokenizer is not None  # else no token has a text
        self._held: Update | None = None  # brought tokens, but no text yet

    def take(self, update: Update) -> Update | None:
        """What to send now: nothing while there is no text, unless it is the last."""
        self.num_tokens += len(update.token_ids)
        self.cached_tokens, self.prediction = update.cached_tokens, update.prediction
        if self._held is not None:
            update, self._held = self._held.then(update), None
        if not update.text and update.finish_reason is None and self._spoken:
            self._held = update
            return None
        return update

    def part(self, update: Update) -> dict[str, Any]:
        """The fields of a choice that grow."""
        text, ids, logprobs = update.text, update.token_ids, update.logprobs
        if not self.opened and self._echo:
            text = self.prompt.text + text
            ids, logprobs = [*self.prompt.token_ids, *ids], [None, *update.prompt_logprobs, *logprobs]
        self.opened = True
        lists = None if self._logprobs is None else self._logprobs.lists(ids, logprobs)
        return {"text": text, "logprobs": lists}


class _Answer:
    def __init__(
        self,
        answer_id: str,
        body: CompletionBody,
        prompts: list[_Prompt],
        served: Served,
        options: ServerOptions,
        stream: wishes.StreamOptions,
    ):
        self._head = {
            "id": answer_id,
            "object": "text_completion",
            "created": int(time.time()),
            "model": body.model or served.name,
            "system_fingerprint": served.system_fingerprint,
        }
        self._body = body
        self._n = body.n or 1
        self._details = options.prompt_details
        self._stream = stream
        self._tokenizer = served.model.tokenizer
        self._choices = [_Choice(prompt, body, served) for prompt in prompts for _ in range(self._n)]

    def whole(self, updates: list[Update]) -> dict[str, Any]:
        sums: dict[int, Update] = {}
        for update in updates:
            state = self._choices[update.index]
            state.num_tokens += len(update.token_ids)
            state.cached_tokens, state.prediction = update.cached_tokens, update.prediction
            earlier = sums.get(update.index)
            sums[update.index] = update if earlier is None else earlier.then(update)
        choices = []
        for index, state in enumerate(self._choices):
            choice = self._choice(index, sums[index])
            if self._body.return_token_ids:
                choice["prompt_token_ids"] = state.prompt.token_ids
            if self._body.prompt_logprobs is not None:
                scores = sums[index].prompt_logprobs
                choice["prompt_logprobs"] = prompt_entries(self._tokenizer, state.prompt.token_ids, scores)
            choices.append(choice)
        return {**self._head, "choices": choices, "usage": self._usage()}

    def begin(self) -> Sequence[dict]:
        return ()

    def take(self, update: Update) -> list[dict]:
        ready = self._choices[update.index].take(update)
        if ready is None:
            return []
        state = self._choices[update.index]
        first, choice = not state.opened, self._choice(update.index, ready)
        if first and self._body.return_token_ids:
            choice["prompt_token_ids"] = state.prompt.token_ids
        usage = {"usage": self._usage()} if self._stream.continuous_usage else {}
        return [{**self._head, "choices": [choice], **usage}]

    def end(self) -> list[dict]:
        return [{**self._head, "choices": [], "usage": self._usage()}] if self._stream.include_usage else []

    def _choice(self, index: int, update: Update) -> dict[str, Any]:
        choice = {
            "index": index,
            **self._choices[index].part(update),
            "finish_reason": update.finish_reason,
            "stop_reason": update.stop_reason,
        }
        return {**choice, "token_ids": update.token_ids} if self._body.return_token_ids else choice

    def _usage(self) -> dict[str, Any]:
        firsts = self._choices[:: self._n]  # the choices of a prompt share it
        return wishes.usage(
            sum(len(choice.prompt.token_ids) for choice in firsts),
            sum(choice.num_tokens for choice in self._choices),
            sum(choice.cached_tokens for choice in firsts) if self._details else None,
            (choice.prediction for choice in self._choices),
        )
