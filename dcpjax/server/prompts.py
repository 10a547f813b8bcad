"""From chat messages to a prompt: what the template may be given, and what GLM-5.2 makes of reasoning switches."""

import dataclasses
from typing import Any

import orjson

from dcpjax.errors import ConfigError
from dcpjax.server.errors import ApiError
from dcpjax.server.protocol import ChatBody, TokenizeBody
from dcpjax.server.reasoning import thinking_open
from dcpjax.server.service import Served, ServerOptions
from dcpjax.template import ChatTemplate

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}

# The template looks for the word "high" only and takes all others for the most: asking for less must not give more.
_EFFORTS = {"minimal": "high", "low": "high", "medium": "high", "high": "high", "xhigh": "max", "max": "max"}

_RESERVED = (
    "messages",
    "tools",
    "add_generation_prompt",
    "continue_final_message",
    "self",
    "allow_special",
    "template",
)


@dataclasses.dataclass(frozen=True)
class ChatPrompt:
    """`thinking`: whether the answer begins inside a think block."""

    token_ids: list[int]
    thinking: bool


def render_chat(body: ChatBody | TokenizeBody, served: Served, options: ServerOptions) -> ChatPrompt:
    """The prompt of a conversation. Slow for long ones: not for the event loop. Raises `ApiError`, `RequestError`."""
    tokenizer = served.tokenizer("messages")
    template = None if body.chat_template is None else _template(body.chat_template, options)
    going_on = bool(body.continue_final_message)
    if going_on and body.add_generation_prompt:
        raise ApiError(
            400, "continue_final_message: not allowed with add_generation_prompt = true", "continue_final_message"
        )
    messages = [_message(i, message) for i, message in enumerate(body.messages)]
    if going_on and messages[-1]["role"] != "assistant":
        raise ApiError(
            400, "continue_final_message: the last message must be the assistant's", "continue_final_message"
        )
    generate = body.add_generation_prompt
    text = tokenizer.apply_chat_template(
        messages,
        tools=_tools(body.tools),
        add_generation_prompt=True if generate is None else generate,
        continue_final_message=going_on,
        allow_special=options.allow_special,
        template=template,
        **_template_values(body, options.template_defaults),
    )
    return ChatPrompt(tokenizer.encode_chat(text), thinking_open(text))


def text_size(body: ChatBody | TokenizeBody) -> int:
    """Characters that rendering and encoding have to do with, about. Raises `ApiError` for what is nested too deeply."""
    size = 0
    for message in body.messages:
        content = message.get("content")
        size += len(content) if isinstance(content, str) else 100 * len(message)
        if isinstance(content, list):
            size += sum(
                len(part.get("text") or "")
                for part in content
                if isinstance(part, dict) and isinstance(part.get("text"), str)
            )
    for field, value in (
        ("tools", body.tools),
        ("messages", [m["tool_calls"] for m in body.messages if m.get("tool_calls")]),
    ):
        try:
            size += len(orjson.dumps(value)) if value else 0
        except TypeError:  # so says the encoder of what is deeper than it goes
            raise ApiError(400, f"{field}: nested too deeply", field) from None
    return size


def _template(source: str, options: ServerOptions) -> ChatTemplate:
    if not options.trust_templates:
        raise ApiError(
            400,
            "chat_template: this server renders only the model's own template (--trust-request-chat-template)",
            "chat_template",
        )
    try:
        return ChatTemplate(source)
    except ConfigError as error:
        raise ApiError(400, f"chat_template: {str(error)[:200]}", "chat_template") from None


def check_tool_choice(body: ChatBody) -> None:
    """Raises `ApiError` for a choice that names no given tool."""
    choice = body.tool_choice
    if choice is None:
        return
    if body.tools is None:
        raise ApiError(400, "tool_choice: only allowed with tools", "tool_choice")
    names = [tool["function"]["name"] for tool in _tools(body.tools)]
    if isinstance(choice, dict):
        function = choice.get("function")
        name = function.get("name") if isinstance(function, dict) else None
        if name not in names:
            raise ApiError(400, f"tool_choice: {name!r:.200} is not among the tools", "tool_choice")
    elif choice not in ("auto", "none", "required"):
        raise ApiError(
            400, f"tool_choice: got {choice!r:.200}; use 'auto', 'none', 'required' or a function", "tool_choice"
        )


def _message(i: int, message: dict[str, Any]) -> dict[str, Any]:
    given = {key: value for key, value in message.items() if value is not None}
    role = given.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise _bad(i, f"role must be one of {', '.join(_ROLES)}; got {role!r:.200}")
    known: dict[str, Any] = {**given, "role": _ROLES[role], "content": _content(i, role, given.get("content"))}
    if role != "assistant":
        return known
    reasoning = known.pop("reasoning", None)
    reasoning = known.get("reasoning_content", reasoning)
    if reasoning is not None:
        if not isinstance(reasoning, str):
            raise _bad(i, "reasoning_content must be a string")
        known["reasoning_content"] = reasoning
    if "tool_calls" in known:
        if not isinstance(known["tool_calls"], list):
            raise _bad(i, "tool_calls must be a list")
        known["tool_calls"] = [_tool_call(i, call) for call in known["tool_calls"]]
    return known


def _content(i: int, role: str, content: Any) -> str:
    if isinstance(content, str):
        return content
    if content is None and role == "assistant":
        return ""
    if not isinstance(content, list):
        raise _bad(i, f"content must be a string or a list of text parts; got {content!r:.200}")
    texts = []
    for part in content:
        if not isinstance(part, dict) or part.get("type") != "text":
            raise _bad(i, "this model reads text only; content parts must be {'type': 'text', 'text': …}")
        if not isinstance(part.get("text"), str):
            raise _bad(i, "the text of a content part must be a string")
        texts.append(part["text"])
    return "".join(texts)


def _tool_call(i: int, call: Any) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise _bad(i, "each tool call needs a function with a name")
    arguments = function.get("arguments")
    if isinstance(arguments, str) or arguments is None:
        try:
            arguments = orjson.loads(arguments) if arguments else {}
        except orjson.JSONDecodeError:
            raise _bad(i, f"arguments of {function['name'][:100]!r} are not valid JSON") from None
    if not isinstance(arguments, dict):
        raise _bad(i, f"arguments of {function['name'][:100]!r} must be a JSON object")
    return {**call, "function": {**function, "arguments": arguments}}


def _tools(tools: list[dict[str, Any]] | None) -> list[dict[str, Any]] | None:
    for tool in tools or ():
        function = tool.get("function")
        if (
            tool.get("type") != "function"
            or not isinstance(function, dict)
            or not isinstance(function.get("name"), str)
        ):
            raise ApiError(
                400, "tools: each must be {'type': 'function', 'function': {'name': …, 'parameters': …}}", "tools"
            )
    return tools


def _template_values(body: ChatBody | TokenizeBody, defaults: dict[str, Any]) -> dict[str, Any]:
    values = {**defaults, **(body.chat_template_kwargs or {})}
    for name in _RESERVED:
        if name in values:
            raise ApiError(400, f"chat_template_kwargs: {name!r} has a field of its own", "chat_template_kwargs")
    if body.thinking is not None:
        kind = body.thinking.get("type")
        if kind not in ("enabled", "disabled"):
            raise ApiError(400, f"thinking: type must be 'enabled' or 'disabled'; got {kind!r:.200}", "thinking")
        values["enable_thinking"] = kind == "enabled"
        if isinstance(body.thinking.get("clear_thinking"), bool):
            values["clear_thinking"] = body.thinking["clear_thinking"]
    if body.reasoning_effort is not None:
        values["reasoning_effort"] = body.reasoning_effort
    effort = values.get("reasoning_effort")
    if effort == "none":
        del values["reasoning_effort"]
        values["enable_thinking"] = False
    elif isinstance(effort, str):
        values["reasoning_effort"] = _EFFORTS.get(effort, effort)
    return values


def _bad(i: int, words: str) -> ApiError:
    return ApiError(400, f"messages[{i}]: {words}", "messages")
