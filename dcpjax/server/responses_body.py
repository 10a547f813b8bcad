"""The body of `/v1/responses`, and what it says as a chat body. Nothing is stored: every request brings its conversation."""

from typing import Any

import pydantic
from pydantic import Field

from dcpjax.server.errors import ApiError
from dcpjax.server.protocol import Body, ChatBody, Finite, explain


class ResponsesBody(Body):
    """The body of `POST /v1/responses`, by OpenAI's published protocol."""

    model: str | None = None
    input: str | list[dict[str, Any]]
    instructions: str | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    max_output_tokens: int | None = Field(None, ge=1)
    temperature: Finite | None = Field(None, ge=0)
    top_p: Finite | None = Field(None, gt=0, le=1)
    reasoning: dict[str, Any] | None = None
    text: dict[str, Any] | None = None
    stream: bool | None = None
    previous_response_id: str | None = None
    background: bool | None = None
    metadata: dict[str, Any] | None = None
    cache_salt: str | None = Field(None, min_length=1)
    no_store: bool | None = None


def chat_body(body: ResponsesBody) -> ChatBody:
    """The same wish as a chat body. Raises `ApiError`: 404 for a stored response, 400 for what a chat cannot say."""
    if body.previous_response_id is not None:
        raise ApiError(
            404,
            f"previous_response_id: {body.previous_response_id[:100]!r} is not here: this server stores no responses; send "
            "the conversation as input",
            "previous_response_id",
        )
    if body.background:
        raise ApiError(400, "background: not supported; leave it out", "background")
    wish: dict[str, Any] = {
        "model": body.model,
        "messages": _messages(body),
        "max_completion_tokens": body.max_output_tokens,
        "reasoning_effort": (body.reasoning or {}).get("effort"),
        "response_format": _format((body.text or {}).get("format")),
        "parallel_tool_calls": body.parallel_tool_calls,
    }
    if body.tools:
        wish["tools"] = [_tool(i, tool) for i, tool in enumerate(body.tools)]
    if body.tools or body.tool_choice not in ("auto", "none"):
        wish["tool_choice"] = _choice(body.tool_choice)
    wish |= {name: getattr(body, name) for name in ("temperature", "top_p", "cache_salt", "no_store")}
    try:
        return ChatBody.model_validate({key: value for key, value in wish.items() if value is not None})
    except pydantic.ValidationError as error:
        raise explain(error) from None


def _messages(body: ResponsesBody) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    if body.instructions:
        messages.append({"role": "system", "content": body.instructions})
    items = [{"role": "user", "content": body.input}] if isinstance(body.input, str) else body.input
    for i, item in enumerate(items):
        kind = item.get("type") or "message"
        if kind == "message" and item.get("role") != "assistant":
            messages.append({"role": item.get("role"), "content": _text(i, item.get("content"))})
        elif kind == "function_call_output":
            output = item.get("output")
            messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": _text(i, output)})
        elif kind == "message":
            turn = _turn(messages)
            turn["content"] += _text(i, item.get("content"))
        elif kind == "reasoning":
            turn = _turn(messages)
            turn["reasoning_content"] = turn.get("reasoning_content", "") + _text(i, item.get("content") or [])
        elif kind == "function_call":
            function = {"name": item.get("name"), "arguments": item.get("arguments")}
            calls = _turn(messages).setdefault("tool_calls", [])
            calls.append({"id": item.get("call_id"), "type": "function", "function": function})
        else:
            raise ApiError(400, f"input[{i}]: type {kind!r:.100} is not supported", "input")
    return messages


def _turn(messages: list[dict[str, Any]]) -> dict[str, Any]:
    """The assistant's turn that is being put together: its items follow each other."""
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": ""})
    return messages[-1]


def _text(i: int, content: Any) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ApiError(400, f"input[{i}]: must be a string or a list of parts; got {content!r:.200}", "input")
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in ("input_text", "output_text", "reasoning_text", "text") or not isinstance(part.get("text"), str):
            raise ApiError(400, f"input[{i}]: this model reads text only; a part of type {kind!r:.100} is not", "input")
        texts.append(part["text"])
    return "".join(texts)


def _tool(i: int, tool: dict[str, Any]) -> dict[str, Any]:
    if tool.get("type") != "function" or not isinstance(tool.get("name"), str):
        raise ApiError(400, f"tools[{i}]: must be {{'type': 'function', 'name': …, 'parameters': …}}", "tools")
    function = {key: tool[key] for key in ("name", "description", "parameters") if tool.get(key) is not None}
    return {"type": "function", "function": function}


def _choice(choice: str | dict[str, Any] | None) -> str | dict[str, Any] | None:
    if isinstance(choice, dict):
        return {"type": "function", "function": {"name": choice.get("name")}}
    return choice


def _format(form: Any) -> dict[str, Any] | None:
    """`text.format` as a `response_format`."""
    if not isinstance(form, dict) or form.get("type") in (None, "text"):
        return None
    if form["type"] != "json_schema":
        return {"type": form["type"]}
    return {"type": "json_schema", "json_schema": {key: form[key] for key in ("name", "schema") if key in form}}
