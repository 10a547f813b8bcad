"""The grammar of a turn that must be tool calls, in GLM's own form: JSON would fight what the model has learnt."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from dcpjax.server.argument_values import ToolSchemas, resolved
from dcpjax.server.errors import ApiError
from dcpjax.server.tool_calls import CALL, END, KEY, KEY_END, VALUE, VALUE_END
from dcpjax.text import Tokenizer

_SHARED = ("$defs", "definitions")


def tool_grammar(tools: Sequence[Mapping[str, Any]], tokenizer: Tokenizer, many: bool) -> str:
    """Lark source: one call of one of `tools`, or several if `many`. Arguments come in the order of the schema."""
    tag = {name: _id(tokenizer, name) for name in (CALL, END, KEY, KEY_END, VALUE, VALUE_END)}
    schemas, rules, names = ToolSchemas(tools), [], []
    for i, tool in enumerate(tools):
        function = tool["function"]
        root = function.get("parameters") or {}
        schema = resolved(root, root, 0)
        properties, required = schema.get("properties"), schema.get("required")
        properties = properties if isinstance(properties, dict) else {}
        required = required if isinstance(required, list) else []
        arguments = []
        for j, key in enumerate(properties):
            value = _value(function["name"], key, properties[key], root, schemas)
            rules.append(
                f"arg_{i}_{j}: {tag[KEY]} {_literal(key)} {tag[KEY_END]} {tag[VALUE]} {value} {tag[VALUE_END]}"
            )
            arguments.append(f"arg_{i}_{j}" + ("" if key in required else "?"))
        names.append(f"tool_{i}")
        rules.append(f"tool_{i}: {' '.join([_literal(function['name']), *arguments])}")
    return "\n".join(
        [
            f"start: {'call+' if many else 'call'}",
            f"call: {tag[CALL]} ({' | '.join(names)}) {tag[END]}",
            *rules,
            # Any text but the tags of a call.
            r"TEXT: /(?s:.*)/ & ~/(?s:.*)<\/?(arg_|tool_)(?s:.*)/",
        ]
    )


def _value(function: str, key: str, schema: Any, root: Mapping[str, Any], schemas: ToolSchemas) -> str:
    kinds, found = schemas.kinds(function, key), resolved(schema, root, 0)
    choices = found.get("enum") if isinstance(found.get("enum"), list) else [found["const"]] if "const" in found else []
    if choices and all(isinstance(choice, str) for choice in choices):
        return f"({' | '.join(map(_literal, choices))})"
    if kinds is None or "string" in kinds:
        return "TEXT"
    shared = {name: root[name] for name in _SHARED if name in root}
    return f"%json {json.dumps({**shared, **found, 'x-guidance': {'whitespace_flexible': False}})}"


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False) if text else '""'


def _id(tokenizer: Tokenizer, name: str) -> str:
    token = tokenizer.token_id(name)
    if token is None:
        raise ApiError(400, f"tool_choice: this model's vocabulary has no {name}; use 'auto'", "tool_choice")
    return f"<[{token}]>"
