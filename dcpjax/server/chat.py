"""`POST /v1/chat/completions`."""

import asyncio
import time
from collections.abc import AsyncGenerator
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from dcpjax.server import wishes
from dcpjax.server.answers import JsonResponse, public_id
from dcpjax.server.engine_thread import Prediction, Ticket, Update
from dcpjax.server.errors import ApiError
from dcpjax.server.logprobs import chat_entries
from dcpjax.server.prompts import ChatPrompt, check_tool_choice, render_chat
from dcpjax.server.protocol import ChatBody
from dcpjax.server.reasoning import CLOSE, Reasoning
from dcpjax.server.service import Served, ServerOptions
from dcpjax.server.stream import EventStream, attended

_UNSUPPORTED = ("audio", "web_search_options", "functions")


async def chat_completions(request: Request, body: ChatBody, served: Served, options: ServerOptions) -> Response:
    """The whole answer, or a stream of it. Raises `ApiError` or `RequestError` for what is refused."""
    served.check_model(body.model)
    _refuse(body)
    stream = wishes.stream_options(body)
    logprobs = _logprobs(body, options)
    max_tokens = body.max_completion_tokens or body.max_tokens
    prompt = await asyncio.to_thread(render_chat, body, served, options.template_defaults)
    ids = wishes.truncate(prompt.token_ids, body)
    wishes.check_prompt(ids, max_tokens, served, "messages")
    if max_tokens is None:
        max_tokens = wishes.default_max_tokens(served)
    params = wishes.sampling_params(body, served, max_tokens=max_tokens, logprobs=logprobs)
    ticket = served.thread.submit(wishes.jobs(ids, params, body))
    await ticket.accepted()
    answer = _Answer(public_id("chatcmpl", body.request_id, request), body, ChatPrompt(ids, prompt.thinking), served)
    if stream.stream:
        return EventStream(ticket, answer.events(ticket, stream))
    async with attended(ticket, request.receive):
        return JsonResponse(await answer.whole(ticket))


def _refuse(body: ChatBody) -> None:
    wishes.refuse_unsupported(body)
    for field in _UNSUPPORTED:
        if getattr(body, field) is not None:
            raise ApiError(400, f"{field}: not supported; leave it out", field)
    if body.modalities is not None and any(kind != "text" for kind in body.modalities):
        raise ApiError(400, "modalities: this model gives text only", "modalities")
    check_tool_choice(body)


def _logprobs(body: ChatBody, options: ServerOptions) -> int | None:
    if not body.logprobs:
        if body.top_logprobs:
            raise ApiError(400, "top_logprobs: only allowed with logprobs = true", "top_logprobs")
        return None
    wanted = body.top_logprobs or 0
    wishes.check_logprobs(wanted, options.max_logprobs, "top_logprobs")
    return wanted


class _Choice:
    """One choice while it grows: its text in two parts, and what goes with it."""

    def __init__(self, body: ChatBody, thinking: bool, served: Served):
        separate = body.separate_reasoning is not False
        self.num_tokens = 0
        self.num_reasoning = 0
        self.cached_tokens = 0
        self.prediction = Prediction()
        self.opened = False  # its first chunk is out
        self.entries: list[dict] = []  # logprobs not sent yet
        self.token_ids: list[int] = []  # not sent yet
        self._tokenizer = served.llm.tokenizer
        self._close = self._tokenizer.token_id(CLOSE)
        self._thinking = thinking
        self._shown = body.include_reasoning is not False
        self._split = Reasoning(thinking and separate)
        self._logprobs = body.logprobs

    def take(self, update: Update) -> tuple[str, str]:
        """New (reasoning, content)."""
        ids = update.token_ids
        self.num_tokens += len(ids)
        self.cached_tokens = update.cached_tokens
        self.prediction = update.prediction
        self.token_ids += ids
        if self._logprobs:
            self.entries += chat_entries(self._tokenizer, ids, update.logprobs)
        if self._thinking:
            self._thinking = self._close not in ids
            self.num_reasoning += len(ids) if self._thinking else ids.index(self._close) + 1
        reasoning, content = self._split.push(update.text)
        if update.finish_reason is not None:
            late = self._split.finish()
            reasoning, content = reasoning + late[0], content + late[1]
        return (reasoning if self._shown else ""), content

    @property
    def still_thinking(self) -> bool:
        """Whether all of the text is reasoning."""
        return self._split.thinking

    def flush(self) -> tuple[list[dict], list[int]]:
        """Logprob entries and token ids that were not sent yet."""
        entries, ids = self.entries, self.token_ids
        self.entries, self.token_ids = [], []
        return entries, ids


class _Answer:
    def __init__(self, answer_id: str, body: ChatBody, prompt: ChatPrompt, served: Served):
        self._head = {"id": answer_id, "created": int(time.time()), "model": body.model or served.name}
        self._fingerprint = served.system_fingerprint
        self._body = body
        self._prompt = prompt
        self._choices = [_Choice(body, prompt.thinking, served) for _ in range(body.n or 1)]

    async def whole(self, ticket: Ticket) -> dict[str, Any]:
        texts = [["", ""] for _ in self._choices]
        last: dict[int, Update] = {}
        async for updates in ticket:
            for update in updates:
                reasoning, content = self._choices[update.index].take(update)
                texts[update.index][0] += reasoning
                texts[update.index][1] += content
                last[update.index] = update
        choices = [self._choice(i, *texts[i], last[i]) for i in range(len(texts))]
        answer = {"object": "chat.completion", **self._head, "choices": choices, "usage": self._usage()}
        if self._body.return_token_ids:
            answer["prompt_token_ids"] = self._prompt.token_ids
        return {**answer, "system_fingerprint": self._fingerprint}

    async def events(self, ticket: Ticket, options: wishes.StreamOptions) -> AsyncGenerator[dict]:
        async for updates in ticket:
            for update in updates:
                for choice in self._deltas(update):
                    usage = {"usage": self._usage()} if options.continuous_usage else {}
                    yield self._chunk([choice], **usage)
        if options.include_usage:
            yield self._chunk([], usage=self._usage())

    def _choice(self, index: int, reasoning: str, content: str, last: Update) -> dict[str, Any]:
        state = self._choices[index]
        entries, ids = state.flush()
        silent = state.still_thinking and not content
        message = {
            "role": "assistant",
            "content": None if silent else content,
            "reasoning_content": reasoning or None,
            "refusal": None,
        }
        choice = {
            "index": index,
            "message": message,
            "logprobs": {"content": entries} if self._body.logprobs else None,
            "finish_reason": last.finish_reason,
            "stop_reason": last.stop_reason,
        }
        return {**choice, "token_ids": ids} if self._body.return_token_ids else choice

    def _deltas(self, update: Update) -> list[dict[str, Any]]:
        state, done = self._choices[update.index], update.finish_reason is not None
        parts = dict(zip(("reasoning_content", "content"), state.take(update), strict=True))
        deltas = [{key: text} for key, text in parts.items() if text]
        if not deltas and done:
            deltas = [{}]
        chunks = []
        if not state.opened:
            state.opened = True
            chunks.append({"index": update.index, "delta": {"role": "assistant", "content": ""}, "finish_reason": None})
        for i, delta in enumerate(deltas):
            last = done and i == len(deltas) - 1
            entries, ids = state.flush()
            chunk = {
                "index": update.index,
                "delta": delta,
                "logprobs": {"content": entries} if entries else None,
                "finish_reason": update.finish_reason if last else None,
            }
            if last:
                chunk["stop_reason"] = update.stop_reason
            if self._body.return_token_ids:
                chunk["token_ids"] = ids
            chunks.append(chunk)
        return chunks

    def _chunk(self, choices: list[dict], **more: Any) -> dict[str, Any]:
        return {
            "object": "chat.completion.chunk",
            **self._head,
            "choices": choices,
            "system_fingerprint": self._fingerprint,
            **more,
        }

    def _usage(self) -> dict[str, Any]:
        return wishes.usage(
            len(self._prompt.token_ids),
            sum(choice.num_tokens for choice in self._choices),
            self._choices[0].cached_tokens,
            (choice.prediction for choice in self._choices),
            sum(choice.num_reasoning for choice in self._choices),
        )
