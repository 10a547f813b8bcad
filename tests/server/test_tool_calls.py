"""Tool calls cut anywhere equal those of the whole text; values are what the schema says."""

import itertools
import json
import re

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dcpjax.server.argument_values import ToolSchemas, quoted, written
from dcpjax.server.tool_calls import CALL, END, KEY, KEY_END, VALUE, VALUE_END, CallBegin, CallPart, Content, ToolCalls

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get",
            "parameters": {
                "type": "object",
                "properties": {
                    "s": {"type": "string"},
                    "n": {"type": "integer"},
                    "o": {"type": ["string", "null", "integer"]},
                    "e": {"enum": ["a", "b"]},
                    "r": {"$ref": "#/$defs/text"},
                    "u": {"anyOf": [{"type": "string"}, {"type": "array"}]},
                    "d": {"$ref": "#/$defs/deep"},
                },
                "$defs": {"text": {"type": "string"}, "deep": {"$ref": "#/$defs/deep"}},
            },
        },
    },
    {"type": "function", "function": {"name": "now"}},
]
SCHEMAS = ToolSchemas(TOOLS)


def oracle(text: str, schemas: ToolSchemas) -> tuple[str | None, list[list[str]]]:
    """(content, [name, arguments] of each call), by searching the whole text from tag to tag."""
    content, calls, at = "", [], 0

    def find(*tags: str):
        return re.compile("|".join(map(re.escape, tags))).search(text, at)

    while (found := find(CALL)) is not None:
        content += text[at : found.start()]
        start, at = found.start(), found.end()
        tag = find(KEY, END, CALL)
        if tag is None:
            at = len(text)
            break
        name = text[at : tag.start()].strip()
        if not name:
            at = tag.start() if tag[0] == CALL else tag.end()
            content += text[start:at]
            continue
        arguments, at = [], tag.start()
        calls.append([name, arguments])
        while True:
            tag = find(KEY, END, CALL)
            if tag is None:
                at = len(text)
                break
            at = tag.start() if tag[0] == CALL else tag.end()
            if tag[0] != KEY:
                break
            tag = find(KEY_END, VALUE, END)
            if tag is None:
                at = len(text)
                break
            key, at = text[at : tag.start()].strip(), tag.start() if tag[0] != KEY_END else tag.end()
            tag = find(VALUE, KEY, END)
            if tag is None:
                at = len(text)
                break
            at = tag.start()
            if tag[0] != VALUE:
                continue
            at = tag.end()
            kinds, tag = schemas.kinds(name, key), find(VALUE_END)
            if tag is not None:
                value, at = text[at : tag.start()], tag.end()
                arguments.append((key, written(value, kinds)))
                continue
            if kinds == {"string"}:
                value = text[at:]
                partial = max((n for n in range(len(VALUE_END)) if value.endswith(VALUE_END[:n])), default=0)
                arguments.append((key, quoted(value[: len(value) - partial])))
            at = len(text)
            break
    content += text[at:]
    made = [[name, "{" + ", ".join(f"{quoted(k)}: {v}" for k, v in pairs) + "}"] for name, pairs in calls]
    return (None if calls and not content.strip() else content), made


def read(pieces, schemas=SCHEMAS, most=None) -> tuple[str | None, list[list[str]]]:
    parser, content, calls = ToolCalls(schemas, most), None, []
    for parts in [*(parser.push(piece) for piece in pieces), parser.finish()]:
        for part in parts:
            match part:
                case Content(text):
                    assert text
                    content = (content or "") + text
                case CallBegin(index, name):
                    assert index == len(calls), "calls begin in order, once"
                    calls.append([name, ""])
                case CallPart(index, arguments):
                    assert arguments and index == len(calls) - 1, "of the call that was begun last"
                    calls[index][1] += arguments
    assert parser.finish() == [] and parser.num_calls == len(calls)
    return content, calls


def cut(text: str, places) -> list[str]:
    places = sorted({0, len(text), *(place % (len(text) + 1) for place in places)})
    return [text[a:b] for a, b in itertools.pairwise(places)] or [""]


ARGUMENT = st.tuples(
    st.sampled_from([*"snoerud", "x", " s\n"]),
    st.sampled_from(
        ["", "a", " a b\n", "5", "null", "true", "True", '"q"', "[1, 2]", "{'a': None}", "<b>", CALL, 'é\\"\n', "1e5"]
    ),
).map(lambda pair: f"{KEY}{pair[0]}{KEY_END}{VALUE}{pair[1]}{VALUE_END}")
GOOD = st.tuples(
    st.sampled_from(["get", "get\n", "now", "unknown", ""]), st.lists(ARGUMENT, max_size=3), st.sampled_from(["", "\n"])
).map(lambda parts: f"{CALL}{parts[0]}{parts[2].join(parts[1])}{END}")
BAD = st.lists(
    st.sampled_from(
        [CALL, END, KEY, KEY_END, VALUE, VALUE_END, "get", "s", "n", "v", "<", "</arg", "<tool", " ", "\n"]
    ),
    max_size=10,
).map("".join)
ANY = st.lists(st.one_of(GOOD, BAD, st.sampled_from(["", "\n", "Let me look. "])), max_size=5).map("".join)


@settings(max_examples=500)
@given(ANY, st.lists(st.integers(0, 500), max_size=8))
@example(f"{CALL}get{KEY}s{KEY_END}{VALUE}</arg_value", [3])
def test_pieces_equal_the_whole(text, places):
    want = oracle(text, SCHEMAS)
    for pieces in (cut(text, places), list(text), [text]):
        content, calls = read(pieces)
        assert (content, calls) == ((want[0] or None), want[1])


@given(ANY)
def test_arguments_are_json_objects(text):
    for _, arguments in read([text])[1]:
        assert isinstance(json.loads(arguments), dict)


EXAMPLE = f"{CALL}get\n{KEY}s{KEY_END}\n{VALUE}  two\nlines {VALUE_END}\n{KEY}n{KEY_END}{VALUE}5{VALUE_END}\n{END}\n{CALL}now{END}"


def test_every_cut_in_two_of_two_calls():
    want = (None, [["get", '{"s": "  two\\nlines ", "n": 5}'], ["now", "{}"]])
    for place in range(len(EXAMPLE) + 1):
        assert read([EXAMPLE[:place], EXAMPLE[place:]]) == want


@pytest.mark.parametrize("end", range(len(EXAMPLE)))
def test_a_call_that_is_cut_keeps_what_needs_no_guess(end):
    _, calls = read([EXAMPLE[:end]])
    for name, arguments in calls:
        assert name in ("get", "now") and set(json.loads(arguments)) <= {"s", "n"}
    if 0 < end < EXAMPLE.index(KEY):
        assert not calls, "the name may go on"


def test_strings_are_sent_as_they_come_and_other_values_when_whole():
    parser = ToolCalls(SCHEMAS)
    parser.push(f"{CALL}get{KEY}s{KEY_END}{VALUE}")
    assert [parser.push("ab"), parser.push('"'), parser.push("<")] == [[CallPart(0, "ab")], [CallPart(0, '\\"')], []]
    assert parser.push("x") == [CallPart(0, "<x")]
    parser.push(f"{VALUE_END}{KEY}n{KEY_END}{VALUE}")
    assert parser.push("12") == parser.push("3") == []
    assert parser.push(VALUE_END) == [CallPart(0, ', "n": 123')]


def test_time_is_that_of_the_new_text():
    parser, seen = ToolCalls(SCHEMAS), 0
    parser.push(f"{CALL}get{KEY}n{KEY_END}{VALUE}")
    for _ in range(2000):
        parser.push("x" * 50)
        seen = max(seen, len(parser._held))
    assert seen < len(VALUE_END), "nothing but the start of a tag is looked at again"


def test_only_so_many_calls():
    assert read([EXAMPLE], most=1) == (None, [["get", '{"s": "  two\\nlines ", "n": 5}']])


@pytest.mark.parametrize(
    ("key", "value", "want"),
    [
        ("s", "5", '"5"'), ("s", "null", '"null"'), ("s", "", '""'), ("s", '{"a": 1}', '"{\\"a\\": 1}"'),
        ("n", " 5 ", "5"), ("n", "true", "true"), ("n", "True", "true"), ("n", "None", "null"), ("n", "five", '"five"'),
        ("n", "12345678901234567890123", "12345678901234567890123"), ("n", "NaN", '"NaN"'), ("n", "", '""'),
        ("n", "{'a': [1, None]}", '{"a": [1, null]}'), ("n", "{1, 2}", '"{1, 2}"'), ("n", "'\\d'", '"\\\\d"'),
        ("o", "null", "null"), ("o", "7", "7"), ("o", "7.5", '"7.5"'), ("o", '"q"', '"\\"q\\""'), ("o", "true", '"true"'),
        ("e", "a", '"a"'), ("e", "1", '"1"'), ("r", "[1]", '"[1]"'), ("u", "[1]", "[1]"), ("u", "{}", '"{}"'),
        ("x", "x", '"x"'), ("x", "1.5", "1.5"), ("d", "[" * 5000, quoted("[" * 5000)), ("d", "1", "1"),
    ],
)  # fmt: skip
def test_values(key, value, want):
    assert written(value, SCHEMAS.kinds("get", key)) == want
    json.loads(want)


@pytest.mark.parametrize(
    ("schema", "kinds"),
    [
        (True, None),
        ({}, None),
        ({"const": 1}, {"integer"}),
        ({"oneOf": [{"type": "string"}, {}]}, None),
        ({"allOf": [{"type": ["string", "null"]}, {"type": "string"}]}, {"string"}),
        ({"allOf": []}, None),
        ({"$ref": "#/properties/other"}, {"boolean"}),
        ({"$ref": "#/nowhere"}, None),
        ({"$ref": "https://elsewhere"}, None),
        ({"type": ["string", 5]}, {"string"}),
    ],
)
def test_kinds(schema, kinds):
    parameters = {"properties": {"k": schema, "other": {"type": "boolean"}}}
    assert ToolSchemas([{"function": {"name": "f", "parameters": parameters}}]).kinds("f", "k") == kinds


def test_arguments_that_are_not_listed():
    parameters = {"additionalProperties": {"type": "string"}}
    assert ToolSchemas([{"function": {"name": "f", "parameters": parameters}}]).kinds("f", "any") == {"string"}
    assert ToolSchemas(None).kinds("f", "k") is None
