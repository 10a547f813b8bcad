"""The Anthropic body, and what it says as a chat body."""

from typing import Annotated, Any

import pydantic
from pydantic import Field

from dcpjax.server.errors import ApiError
from dcpjax.server.protocol import Body, ChatBody, Finite, Stop, explain


class CountBody(Body):
    """The body of `POST /v1/messages/count_tokens`: everything that makes the prompt."""

    model: str | None = None
    messages: list[dict[str, Any]] = Field(min_length=1)
    system: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None


class MessagesBody(CountBody):
    """The body of `POST /v1/messages`, by Anthropic's published protocol."""

    max_tokens: int = Field(ge=1)
    stop_sequences: Annotated[list[Stop], Field(max_length=16)] | None = None
    temperature: Finite | None = Field(None, ge=0)
    top_p: Finite | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1)
    stream: bool | None = None
    cache_salt: str | None = Field(None, min_length=1)
    no_store: bool | None = None


def chat_body(body: CountBody) -> ChatBody:
    """The same wish as a chat body. Raises `ApiError` (400) for what a chat cannot say."""
    wish: dict[str, Any] = {"model": body.model, "messages": _messages(body)}
    if body.tools:
        wish["tools"] = [_tool(i, tool) for i, tool in enumerate(body.tools)]
    if body.tools or body.tool_choice:
        wish |= _tool_choice(body.tool_choice or {"type": "auto"})
    wish["thinking"] = _thinking(body.thinking)
    if isinstance(body, MessagesBody):
        wish["stop"] = body.stop_sequences or None
        same = ("max_tokens", "temperature", "top_p", "top_k", "cache_salt", "no_store")
        wish |= {name: getattr(body, name) for name in same}
    try:
        return ChatBody.model_validate({key: value for key, value in wish.items() if value is not None})
    except pydantic.ValidationError as error:
        raise explain(error) from None


def _messages(body: CountBody) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    if body.system:
        messages.append({"role": "system", "content": _text("system", body.system)})
    for i, message in enumerate(body.messages):
        role, content = message.get("role"), message.get("content")
        place = f"messages[{i}]"
        if isinstance(content, str):
            content = [{"type": "text", "text": content}]
        if not isinstance(content, list) or not all(isinstance(block, dict) for block in content):
            raise ApiError(
                400, f"{place}: content must be a string or a list of blocks; got {content!r:.200}", "messages"
            )
        if role == "assistant":
            messages.append(_assistant(place, content))
        elif role == "user":
            messages += _user(place, content)
        elif role == "system":
            messages.append({"role": "system", "content": _text(place, content)})
        else:
            raise ApiError(400, f"{place}: role must be user or assistant; got {role!r:.200}", "messages")
    return messages


def _user(place: str, blocks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A user's message, cut at tool results: those are turns of their own."""
    messages: list[dict[str, Any]] = []
    for block in blocks:
        if block.get("type") == "tool_result":
            result = block.get("content") or ""
            messages.append(
                {
                    "role": "tool",
                    "tool_call_id": str(block.get("tool_use_id", "")),
                    "content": _text(f"{place}: tool_result", result),
                }
            )
            continue
        text = _text(place, [block])
        if messages and messages[-1]["role"] == "user":
            messages[-1]["content"] += text
        else:
            messages.append({"role": "user", "content": text})
    return messages or [{"role": "user", "content": ""}]


def _assistant(place: str, blocks: list[dict[str, Any]]) -> dict[str, Any]:
    texts, thoughts, calls = [], [], []
    for block in blocks:
        match block.get("type"):
            case "thinking":
                thoughts.append(str(block.get("thinking") or ""))
            case "redacted_thinking":
                pass
            case "tool_use":
                function = {"name": block.get("name"), "arguments": block.get("input") or {}}
                calls.append({"id": block.get("id"), "type": "function", "function": function})
            case _:
                texts.append(_text(place, [block]))
    message: dict[str, Any] = {"role": "assistant", "content": "".join(texts)}
    if thoughts:
        message["reasoning_content"] = "".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message


def _text(place: str, content: Any) -> str:
    """A string, or the text of text blocks; their `cache_control` says nothing here."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ApiError(
            400, f"{place}: must be a string or a list of blocks; got {content!r:.200}", place.partition("[")[0]
        )
    texts = []
    for block in content:
        kind = block.get("type") if isinstance(block, dict) else None
        if kind != "text" or not isinstance(block.get("text"), str):
            raise ApiError(
                400, f"{place}: this model reads text only; a block of type {kind!r:.100} is not supported", "messages"
            )
        texts.append(block["text"])
    return "".join(texts)


def _tool(i: int, tool: dict[str, Any]) -> dict[str, Any]:
    if tool.get("type") not in (None, "custom"):
        raise ApiError(
            400, f"tools[{i}]: type {tool['type']!r:.100} runs elsewhere; give tools with input_schema", "tools"
        )
    if not isinstance(tool.get("name"), str):
        raise ApiError(400, f"tools[{i}]: each tool needs a name", "tools")
    function = {"name": tool["name"], "parameters": tool.get("input_schema") or {"type": "object"}}
    if isinstance(tool.get("description"), str):
        function = {"name": tool["name"], "description": tool["description"], "parameters": function["parameters"]}
    return {"type": "function", "function": function}


def _tool_choice(choice: dict[str, Any]) -> dict[str, Any]:
    kind = choice.get("type")
    if kind not in ("auto", "any", "tool", "none"):
        raise ApiError(400, f"tool_choice: type must be auto, any, tool or none; got {kind!r:.200}", "tool_choice")
    named = {"type": "function", "function": {"name": choice.get("name")}}
    wish: dict[str, Any] = {"tool_choice": {"auto": "auto", "any": "required", "tool": named, "none": "none"}[kind]}
    if choice.get("disable_parallel_tool_use") is True:
        wish["parallel_tool_calls"] = False
    return wish


def _thinking(thinking: dict[str, Any] | None) -> dict[str, Any] | None:
    if thinking is None:
        return None
    kind = thinking.get("type")
    if kind not in ("enabled", "disabled", "adaptive"):
        raise ApiError(400, f"thinking: type must be enabled, adaptive or disabled; got {kind!r:.200}", "thinking")
    return {"type": "disabled" if kind == "disabled" else "enabled"}
