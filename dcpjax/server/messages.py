"""`POST /v1/messages` and `/v1/messages/count_tokens`: the Anthropic shape of a conversation."""

import asyncio
from collections.abc import Sequence
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response

from dcpjax.server.answers import public_id, whole_answer
from dcpjax.server.conversation import Conversation, begin
from dcpjax.server.errors import unavailable
from dcpjax.server.messages_body import CountBody, MessagesBody, chat_body
from dcpjax.server.prompts import render_chat
from dcpjax.server.service import Served, ServerOptions
from dcpjax.server.stream import EventStream, Frames, attended
from dcpjax.server.ticket import Update
from dcpjax.server.tool_calls import CallBegin, CallPart, Content, Part, call_id
from dcpjax.server.turn import Thought, Turn


async def messages(request: Request, body: MessagesBody, served: Served, options: ServerOptions) -> Response:
    """The whole message, or a stream of its events. Raises `ApiError` or `RequestError` for what is refused."""
    conversation = await begin(chat_body(body), served, options, request.scope["request_id"], not body.stream)
    answer = _Answer(public_id("msg_", None, request), body.model or served.name, conversation)
    ticket = conversation.ticket
    if body.stream:
        return EventStream(ticket, answer, FRAMES)
    async with attended(ticket, request.receive):
        return await whole_answer(ticket, answer.whole)


async def count_tokens(body: CountBody, served: Served, options: ServerOptions) -> dict[str, Any]:
    """`{"input_tokens": N}` of the prompt that `messages` would render. Raises `ApiError` or `RequestError`."""
    served.check_model(body.model)
    prompt = await asyncio.to_thread(render_chat, chat_body(body), served, options)
    return {"input_tokens": len(prompt.token_ids)}


def _frame(event: dict) -> bytes:
    return b"event: " + event["type"].encode() + b"\ndata: " + orjson.dumps(event) + b"\n\n"


FRAMES = Frames(
    event=_frame, error=lambda error, number: _frame(error.anthropic_body()), end=b"", ping={"type": "ping"}
)


class _Answer:
    def __init__(self, answer_id: str, model: str, conversation: Conversation):
        self._id = answer_id
        self._model = model
        self._turn: Turn = conversation.turns[0]
        self._prompt_tokens = len(conversation.prompt)
        self._stop_sequence: str | None = None
        self._began = False  # the first event is out
        self._blocks = _Blocks()

    def whole(self, updates: list[Update]) -> dict[str, Any]:
        blocks: list[dict[str, Any]] = []
        for update in updates:
            for part in self._take(update):
                _add(blocks, part)
        for block in blocks:
            if block["type"] == "tool_use":
                block["input"] = orjson.loads(block["input"])
        return self._message(blocks, self._stop_reason())

    def begin(self) -> Sequence[dict]:
        return ()

    def take(self, update: Update) -> list[dict]:
        events, parts = [], self._take(update)
        if not self._began:
            self._began = True
            events.append({"type": "message_start", "message": {**self._message([], None), "stop_sequence": None}})
        for part in parts:
            events += self._blocks.add(part)
        return events

    def end(self) -> list[dict]:
        delta = {"stop_reason": self._stop_reason(), "stop_sequence": self._stop_sequence}
        return [
            *self._blocks.close(),
            {"type": "message_delta", "delta": delta, "usage": self._usage()},
            {"type": "message_stop"},
        ]

    def _take(self, update: Update) -> list[Thought | Part]:
        if isinstance(update.stop_reason, str):
            self._stop_sequence = update.stop_reason
        return self._turn.take(update)

    def _message(self, content: list[dict[str, Any]], stop_reason: str | None) -> dict[str, Any]:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": content,
            "stop_reason": stop_reason,
            "stop_sequence": self._stop_sequence,
            "usage": self._usage(),
        }

    def _usage(self) -> dict[str, int]:
        cached = self._turn.cached_tokens
        return {
            "input_tokens": self._prompt_tokens - cached,
            "cache_read_input_tokens": cached,
            "cache_creation_input_tokens": 0,
            "output_tokens": self._turn.num_tokens,
        }

    def _stop_reason(self) -> str:
        reason = self._turn.finish_reason
        if reason == "abort":  # the protocol has no word for it, and the text must not pass for a whole one
            raise unavailable(
                "The message is not complete: it was aborted, took longer than this server allows, or the server is ending.",
                30,
            )
        if self._stop_sequence is not None:
            return "stop_sequence"
        return {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}[reason]


def _new_block(part: Thought | Part) -> dict[str, Any]:
    match part:
        case Thought(_):
            return {"type": "thinking", "thinking": "", "signature": ""}
        case Content(_):
            return {"type": "text", "text": ""}
        case CallBegin(_, name):
            return {"type": "tool_use", "id": call_id("toolu_"), "name": name, "input": {}}
    raise TypeError(f"no block begins with {part}")


def _add(blocks: list[dict[str, Any]], part: Thought | Part) -> None:
    """Arguments are gathered as text."""
    kind = _kind(part)
    if isinstance(part, CallBegin) or not blocks or blocks[-1]["type"] != kind:
        blocks.append(_new_block(part))
    match part:
        case Thought(text):
            blocks[-1]["thinking"] += text
        case Content(text):
            blocks[-1]["text"] += text
        case CallBegin():
            blocks[-1]["input"] = ""
        case CallPart(_, arguments):
            blocks[-1]["input"] += arguments


def _kind(part: Thought | Part) -> str:
    match part:
        case Thought():
            return "thinking"
        case Content():
            return "text"
    return "tool_use"


class _Blocks:
    """Parts as events of content blocks, one open at a time."""

    def __init__(self):
        self._index = -1
        self._open: str | None = None

    def add(self, part: Thought | Part) -> list[dict[str, Any]]:
        events = []
        if isinstance(part, CallBegin) or self._open != _kind(part):
            events += self.close()
            self._index += 1
            self._open = _kind(part)
            events.append({"type": "content_block_start", "index": self._index, "content_block": _new_block(part)})
        match part:
            case Thought(text):
                delta = {"type": "thinking_delta", "thinking": text}
            case Content(text):
                delta = {"type": "text_delta", "text": text}
            case CallPart(_, arguments):
                delta = {"type": "input_json_delta", "partial_json": arguments}
            case _:
                return events
        return [*events, {"type": "content_block_delta", "index": self._index, "delta": delta}]

    def close(self) -> list[dict[str, Any]]:
        if self._open is None:
            return []
        self._open = None
        return [{"type": "content_block_stop", "index": self._index}]
