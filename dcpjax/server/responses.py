"""`POST /v1/responses`: the newer OpenAI shape of a conversation, without a store."""

import time
from collections.abc import Iterable
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response

from dcpjax.server.answers import whole_answer
from dcpjax.server.conversation import Conversation, begin
from dcpjax.server.errors import ApiError
from dcpjax.server.responses_body import ResponsesBody, chat_body
from dcpjax.server.service import Served, ServerOptions
from dcpjax.server.stream import EventStream, Frames, attended
from dcpjax.server.ticket import Update
from dcpjax.server.tool_calls import CallBegin, CallPart, Content, Part, call_id
from dcpjax.server.turn import Thought


async def responses(request: Request, body: ResponsesBody, served: Served, options: ServerOptions) -> Response:
    """The whole response, or a stream of its events. Raises `ApiError` or `RequestError` for what is refused."""
    name = request.scope["request_id"]
    try:
        conversation = await begin(chat_body(body), served, options, name, not body.stream)
    except ApiError as error:
        raise _renamed(error) from None
    answer = _Answer(f"resp_{name}", body, served, conversation)
    ticket = conversation.ticket
    if body.stream:
        return EventStream(ticket, answer, FRAMES)
    async with attended(ticket, request.receive):
        return await whole_answer(ticket, answer.whole)


# Fields of a chat that a body of this protocol has by another name.
_NAMES = {"messages": "input", "response_format": "text", "max_completion_tokens": "max_output_tokens"}


def _renamed(error: ApiError) -> ApiError:
    """The error, about the field that the client knows."""
    name = _NAMES.get(error.param)
    if name is None:
        return error
    message = name + error.message.removeprefix(error.param) if error.message.startswith(error.param) else error.message
    return ApiError(error.status, message, name, error.headers)


def _frame(event: dict) -> bytes:
    return b"event: " + event["type"].encode() + b"\ndata: " + orjson.dumps(event) + b"\n\n"


def _error(error: ApiError, number: int) -> bytes:
    event = {"type": "error", "code": str(error.status), "message": error.message, "param": error.param}
    return _frame({**event, "sequence_number": number})


FRAMES = Frames(event=_frame, error=_error, end=b"")


class _Item:
    """One item of the output while it grows, and the events that tell of it."""

    def __init__(self, index: int, part: Thought | Part):
        self.index = index
        self.kind = _kind(part)
        self._id = call_id({"reasoning": "rs_", "message": "msg_", "function_call": "fc_"}[self.kind])
        self._text: list[str] = []
        self._call = {"call_id": call_id(), "name": part.name} if isinstance(part, CallBegin) else {}

    def begin(self) -> list[dict[str, Any]]:
        events = [{"type": "response.output_item.added", "output_index": self.index, "item": self.item("in_progress")}]
        if self.kind == "message":
            events.append({"type": "response.content_part.added", **self._place(), "part": self._part("")})
        return events

    def add(self, text: str) -> dict[str, Any]:
        self._text.append(text)
        return {"type": f"response.{self._event()}.delta", **self._place(), "delta": text}

    def end(self, status: str) -> list[dict[str, Any]]:
        text = "".join(self._text)
        key = "arguments" if self.kind == "function_call" else "text"
        events = [{"type": f"response.{self._event()}.done", **self._place(), key: text}]
        if self.kind == "message":
            events.append({"type": "response.content_part.done", **self._place(), "part": self._part(text)})
        item = self.item(status)
        return [*events, {"type": "response.output_item.done", "output_index": self.index, "item": item}]

    def item(self, status: str) -> dict[str, Any]:
        text = "".join(self._text)
        head = {"type": self.kind, "id": self._id, "status": status}
        if self.kind == "function_call":
            return {**head, **self._call, "arguments": text}
        if self.kind == "reasoning":
            content = [{"type": "reasoning_text", "text": text}] if text else []
            return {**head, "summary": [], "content": content}
        return {**head, "role": "assistant", "content": [self._part(text)] if text else []}

    def _event(self) -> str:
        events = {"reasoning": "reasoning_text", "message": "output_text", "function_call": "function_call_arguments"}
        return events[self.kind]

    def _place(self) -> dict[str, Any]:
        place = {"item_id": self._id, "output_index": self.index}
        if self.kind == "function_call":
            return place
        place["content_index"] = 0
        return {**place, "logprobs": []} if self.kind == "message" else place

    def _part(self, text: str) -> dict[str, Any]:
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _kind(part: Thought | Part) -> str:
    match part:
        case Thought():
            return "reasoning"
        case Content():
            return "message"
    return "function_call"


class _Answer:
    def __init__(self, answer_id: str, body: ResponsesBody, served: Served, conversation: Conversation):
        self._turn = conversation.turns[0]
        self._prompt_tokens = len(conversation.prompt)
        self._items: list[_Item] = []
        self._num_events = 0
        self._fields = {
            "id": answer_id,
            "object": "response",
            "created_at": int(time.time()),
            "model": body.model or served.name,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": (body.reasoning or {}).get("effort"), "summary": None},
            "store": False,
            "temperature": body.temperature,
            "text": body.text or {"format": {"type": "text"}},
            "tool_choice": body.tool_choice or "auto",
            "tools": body.tools or [],
            "top_p": body.top_p,
            "truncation": "disabled",
            "error": None,
        }

    def whole(self, updates: list[Update]) -> dict[str, Any]:
        for update in updates:
            self._take(update)
        return self._response(self._status())

    def begin(self) -> list[dict]:
        response = self._response("in_progress")
        return self._numbered({"type": f"response.{kind}", "response": response} for kind in ("created", "in_progress"))

    def take(self, update: Update) -> list[dict]:
        return self._numbered(self._take(update))

    def end(self) -> list[dict]:
        status = self._status()
        last = self._items[-1].end(status) if self._items else []
        return self._numbered([*last, {"type": f"response.{status}", "response": self._response(status)}])

    def _numbered(self, events: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
        numbered = [{**event, "sequence_number": i} for i, event in enumerate(events, self._num_events)]
        self._num_events += len(numbered)
        return numbered

    def _take(self, update: Update) -> list[dict[str, Any]]:
        events: list[dict[str, Any]] = []
        for part in self._turn.take(update):
            if not self._items or isinstance(part, CallBegin) or self._items[-1].kind != _kind(part):
                events += self._items[-1].end("completed") if self._items else []
                self._items.append(_Item(len(self._items), part))
                events += self._items[-1].begin()
            match part:
                case Thought(text) | Content(text):
                    events.append(self._items[-1].add(text))
                case CallPart(_, arguments):
                    events.append(self._items[-1].add(arguments))
        return events

    def _status(self) -> str:
        return "incomplete" if self._turn.finish_reason in ("length", "abort") else "completed"

    def _response(self, status: str) -> dict[str, Any]:
        cut = self._turn.finish_reason == "length"
        last = len(self._items) - 1
        return {
            **self._fields,
            "status": status,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" and cut else None,
            "output": [item.item(status if i == last else "completed") for i, item in enumerate(self._items)],
            "usage": None if status == "in_progress" else self._usage(),
        }

    def _usage(self) -> dict[str, Any]:
        turn = self._turn
        return {
            "input_tokens": self._prompt_tokens,
            "input_tokens_details": {"cached_tokens": turn.cached_tokens},
            "output_tokens": turn.num_tokens,
            "output_tokens_details": {"reasoning_tokens": turn.num_reasoning},
            "total_tokens": self._prompt_tokens + turn.num_tokens,
        }
