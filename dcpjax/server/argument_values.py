"""What a value between `<arg_value>` tags is: GLM writes strings bare and everything else as JSON; the schema decides."""

import ast
import json
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

_DEEPEST = 16  # references followed
_LONGEST_LITERAL = 10_000  # characters read as a Python literal

Kinds = frozenset[str] | None
"""JSON types that a schema allows; None: it does not say."""


class ToolSchemas:
    """The tools of a request. A tool or an argument that is not among them may be anything."""

    def __init__(self, tools: Sequence[Mapping[str, Any]] | None):
        self._parameters = {}
        for tool in tools or ():
            function = tool["function"]
            parameters = function.get("parameters")
            self._parameters[function["name"]] = parameters if isinstance(parameters, dict) else {}

    def kinds(self, function: str, key: str) -> Kinds:
        """JSON types that the argument `key` may have."""
        root = self._parameters.get(function, {})
        schema = resolved(root, root, 0)
        properties = schema.get("properties")
        found = properties.get(key) if isinstance(properties, dict) else None
        if found is None:
            found = schema.get("additionalProperties")
        return _kinds(found, root, 0)


def written(value: str, kinds: Kinds) -> str:
    """The value as JSON text.

    Where a string is allowed, it is one unless it is valid JSON of another allowed type. Else it is JSON, or a Python
    literal (`True`, single quotes), or, for want of anything better, a string.
    """
    found = _parse(value)
    if kinds is not None and "string" in kinds:
        if found is not None and _type(found[0]) != "string" and _fits(found[0], kinds):
            return value.strip()
        return quoted(value)
    if found is not None:
        return value.strip()
    return _literal(value) or quoted(value)


def quoted(text: str) -> str:
    """A JSON string of `text`; characters beyond ASCII stay as they are."""
    return json.dumps(text, ensure_ascii=False)


def _parse(text: str) -> tuple[Any] | None:
    try:
        return (json.loads(text, parse_constant=_refuse),)
    except (ValueError, RecursionError):
        return None


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _literal(text: str) -> str | None:
    if len(text) > _LONGEST_LITERAL:
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about odd escapes in what a model wrote
            return json.dumps(ast.literal_eval(text.strip()), ensure_ascii=False, allow_nan=False)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return None


def _type(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int):
        return "integer"
    if isinstance(value, float):
        return "number"
    return {str: "string", list: "array", dict: "object"}[type(value)]


def _fits(value: Any, kinds: frozenset[str]) -> bool:
    kind = _type(value)
    whole = kind == "number" and value.is_integer()
    return kind in kinds or (kind == "integer" and "number" in kinds) or (whole and "integer" in kinds)


def _kinds(schema: Any, root: Mapping[str, Any], depth: int) -> Kinds:
    schema = resolved(schema, root, depth)
    named = schema.get("type")
    if isinstance(named, str):
        return frozenset([named])
    if isinstance(named, list):
        return frozenset(kind for kind in named if isinstance(kind, str))
    values = schema.get("enum")
    if isinstance(values, list):
        return frozenset(map(_type, values))
    if "const" in schema:
        return frozenset([_type(schema["const"])])
    for word in ("anyOf", "oneOf"):
        if isinstance(schema.get(word), list):
            each = [_kinds(part, root, depth + 1) for part in schema[word]]
            return None if None in each else frozenset().union(*each)
    if isinstance(schema.get("allOf"), list):
        each = [kinds for part in schema["allOf"] if (kinds := _kinds(part, root, depth + 1)) is not None]
        return frozenset.intersection(*each) if each else None
    return None


def resolved(schema: Any, root: Mapping[str, Any], depth: int) -> Mapping[str, Any]:
    """The schema behind its references within `root`; an empty one if they lead nowhere."""
    while isinstance(schema, dict) and isinstance(schema.get("$ref"), str):
        depth += 1
        if depth > _DEEPEST or not schema["$ref"].startswith("#"):
            return {}
        found: Any = root
        for part in schema["$ref"][1:].split("/")[1:]:
            name = part.replace("~1", "/").replace("~0", "~")
            found = found.get(name) if isinstance(found, dict) else None
        schema = found
    return schema if isinstance(schema, dict) and depth <= _DEEPEST else {}
