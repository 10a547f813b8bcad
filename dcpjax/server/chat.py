"""`POST /v1/chat/completions`: the OpenAI shape of a conversation."""

import time
from collections.abc import Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from dcpjax.server import wishes
from dcpjax.server.answers import public_id, whole_answer
from dcpjax.server.conversation import Conversation, begin
from dcpjax.server.logprobs import chat_entries, prompt_entries
from dcpjax.server.protocol import ChatBody
from dcpjax.server.service import Served, ServerOptions
from dcpjax.server.stream import EventStream, TextFrame, attended
from dcpjax.server.ticket import Update
from dcpjax.server.tool_calls import CallBegin, CallPart, Content, Part, call_id
from dcpjax.server.turn import Thought, Turn


async def chat_completions(request: Request, body: ChatBody, served: Served, options: ServerOptions) -> Response:
    """The whole answer, or a stream of it. Raises `ApiError` or `RequestError` for what is refused."""
    stream = wishes.stream_options(body, options)
    conversation = await begin(body, served, options, body.request_id or request.scope["request_id"], not stream.stream)
    answer = _Answer(public_id("chatcmpl-", body.request_id, request), body, conversation, served, options, stream)
    ticket = conversation.ticket
    if stream.stream:
        return EventStream(ticket, answer)
    async with attended(ticket, request.receive):
        return await whole_answer(ticket, answer.whole)


class _Choice:
    """One choice while it grows: its turn, and what goes with the turn's parts."""

    def __init__(self, body: ChatBody, turn: Turn, served: Served, reasoning_fields: tuple[str, ...]):
        self.turn = turn
        self.opened = False  # its first chunk is out
        self._entries: list[dict] = []  # logprobs not sent yet
        self._token_ids: list[int] = []  # not sent yet
        self._tokenizer = served.model.tokenizer
        self._logprobs = body.logprobs
        self._as_ids = bool(body.return_tokens_as_token_ids)
        self._ids_wanted = bool(body.return_token_ids)
        self._reasoning_fields = reasoning_fields

    def deltas(self, update: Update) -> list[dict[str, Any]]:
        """The update's parts as deltas of a message."""
        if self._ids_wanted:
            self._token_ids += update.token_ids
        if self._logprobs:
            self._entries += chat_entries(self._tokenizer, update.token_ids, update.logprobs, self._as_ids)
        return [self.delta(part) for part in self.turn.take(update)]

    def flush(self) -> tuple[list[dict], list[int]]:
        """Logprob entries and token ids that were not sent yet."""
        entries, ids = self._entries, self._token_ids
        self._entries, self._token_ids = [], []
        return entries, ids

    def message(self, deltas: list[dict[str, Any]]) -> dict[str, Any]:
        """All deltas as one message."""
        texts: dict[str, list[str]] = {"content": [], **{field: [] for field in self._reasoning_fields}}
        calls: list[dict[str, Any]] = []
        for delta in deltas:
            for key, value in delta.items():
                if key != "tool_calls":
                    texts[key].append(value)
                elif "id" in value[0]:
                    calls.append({key: item for key, item in value[0].items() if key != "index"})
                else:
                    calls[-1]["function"]["arguments"] += value[0]["function"]["arguments"]
        message: dict[str, Any] = {"role": "assistant", "refusal": None}
        message |= {field: "".join(texts[field]) or None for field in self._reasoning_fields}
        content = "".join(texts["content"])
        message["content"] = None if not content and (calls or self.turn.silent) else content
        return {**message, "tool_calls": calls} if calls else message

    def delta(self, part: Thought | Part) -> dict[str, Any]:
        """The part as a delta of a message."""
        match part:
            case Thought(text):
                return dict.fromkeys(self._reasoning_fields, text)
            case Content(text):
                return {"content": text}
            case CallBegin(index, name):
                function = {"name": name, "arguments": ""}
                return {"tool_calls": [{"index": index, "id": call_id(), "type": "function", "function": function}]}
            case CallPart(index, arguments):
                return {"tool_calls": [{"index": index, "function": {"arguments": arguments}}]}


class _Answer:
    def __init__(
        self,
        answer_id: str,
        body: ChatBody,
        conversation: Conversation,
        served: Served,
        options: ServerOptions,
        stream: wishes.StreamOptions,
    ):
        self._head = {"id": answer_id, "created": int(time.time()), "model": body.model or served.name}
        self._fingerprint = served.system_fingerprint
        self._body = body
        self._prompt = conversation.prompt
        self._tokenizer = served.model.tokenizer
        self._details = options.prompt_details
        self._stream = stream
        self._bare = not (
            body.logprobs or body.return_token_ids or stream.continuous_usage
        )  # chunks are parts, and no more
        self._frames: dict[tuple[int, type], TextFrame] = {}
        self._choices = [_Choice(body, turn, served, options.reasoning_fields) for turn in conversation.turns]

    def whole(self, updates: list[Update]) -> dict[str, Any]:
        deltas: list[list[dict[str, Any]]] = [[] for _ in self._choices]
        last: dict[int, Update] = {}
        for update in updates:
            deltas[update.index] += self._choices[update.index].deltas(update)
            last[update.index] = update
        choices = [self._choice(i, deltas[i], last[i]) for i in range(len(deltas))]
        answer = {"object": "chat.completion", **self._head, "choices": choices, "usage": self._usage()}
        if self._body.return_token_ids:
            answer["prompt_token_ids"] = self._prompt
        if self._body.prompt_logprobs is not None:
            answer["prompt_logprobs"] = prompt_entries(self._tokenizer, self._prompt, last[0].prompt_logprobs)
        return {**answer, "system_fingerprint": self._fingerprint}

    def begin(self) -> Sequence[dict]:
        return ()

    def take(self, update: Update) -> list[dict | bytes]:
        state = self._choices[update.index]
        if self._bare and state.opened and update.finish_reason is None:
            return [self._frame(update.index, part) for part in state.turn.take(update)]
        first = self._body.return_token_ids and not any(choice.opened for choice in self._choices)
        chunks = [self._chunk([choice]) for choice in self._chunks(update)]
        if first:
            chunks[0]["prompt_token_ids"] = self._prompt
        if self._stream.continuous_usage:
            for chunk in chunks:
                chunk["usage"] = self._usage()
        return chunks

    def end(self) -> list[dict]:
        return [{**self._chunk([]), "usage": self._usage()}] if self._stream.include_usage else []

    def _choice(self, index: int, deltas: list[dict[str, Any]], last: Update) -> dict[str, Any]:
        state = self._choices[index]
        entries, ids = state.flush()
        choice = {
            "index": index,
            "message": state.message(deltas),
            "logprobs": {"content": entries} if self._body.logprobs else None,
            "finish_reason": state.turn.finish_reason,
            "stop_reason": last.stop_reason,
        }
        return {**choice, "token_ids": ids} if self._body.return_token_ids else choice

    def _chunks(self, update: Update) -> list[dict[str, Any]]:
        state, done = self._choices[update.index], update.finish_reason is not None
        deltas = state.deltas(update)
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
                "finish_reason": state.turn.finish_reason if last else None,
            }
            if last:
                chunk["stop_reason"] = update.stop_reason
            if self._body.return_token_ids:
                chunk["token_ids"] = ids
            chunks.append(chunk)
        return chunks

    def _chunk(self, choices: list[dict]) -> dict[str, Any]:
        return {
            "object": "chat.completion.chunk",
            **self._head,
            "choices": choices,
            "system_fingerprint": self._fingerprint,
        }

    def _frame(self, index: int, part: Thought | Part) -> dict | bytes:
        """The chunk of a part that is neither the first nor the last."""
        kind = type(part)
        known = self._frames.get((index, kind))
        if known is not None:
            return known.of(part.text)

        def chunk(part: Thought | Part) -> dict[str, Any]:
            delta = self._choices[index].delta(part)
            return self._chunk([{"index": index, "delta": delta, "logprobs": None, "finish_reason": None}])

        if kind is not Content and kind is not Thought:
            return chunk(part)
        made = self._frames[index, kind] = TextFrame(lambda text: chunk(kind(text)))
        return made.of(part.text)

    def _usage(self) -> dict[str, Any]:
        turns = [choice.turn for choice in self._choices]
        return wishes.usage(
            len(self._prompt),
            sum(turn.num_tokens for turn in turns),
            turns[0].cached_tokens if self._details else None,
            (turn.prediction for turn in turns),
            sum(turn.num_reasoning for turn in turns),
        )
