"""Forms that answers must have, over HTTP: the echo engine says what it is told where the grammar lets it, with drafts."""

import json
import threading
import time

import jsonschema
import pytest

from tests.server.process import EchoProcess, events, metric

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string"},
                    "unit": {"enum": ["C", "F"]},
                    "days": {"$ref": "#/$defs/n"},
                    "more": {"type": "object"},
                },
                "required": ["city"],
                "$defs": {"n": {"type": "integer"}},
            },
        },
    },
    {"type": "function", "function": {"name": "now"}},
]


@pytest.fixture(scope="module")
def server():
    with EchoProcess("--speculative-config", '{"method": "mtp", "num_speculative_tokens": 3}') as running:
        yield running


@pytest.fixture(scope="module")
def client(server):
    with server.client() as client:
        yield client


def chat(client, text: str, **wish) -> dict:
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": 120, **wish}
    response = client.post(CHAT, json=body)
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]


def complete(client, text: str, **wish) -> dict:
    response = client.post(COMPLETIONS, json={"prompt": text, "max_tokens": 60, **wish})
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]


GOOD = '{"name":"Ada \\"é\\"","age":36}'
SCHEMA = {"response_format": {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}}}


@pytest.mark.parametrize(
    "wish", [SCHEMA, {"structured_outputs": {"json": PERSON}}, {"guided_json": json.dumps(PERSON)}], ids=str
)
def test_text_that_fits_is_not_changed(client, wish):
    choice = chat(client, GOOD, reasoning_effort="none", **wish)
    assert choice["message"]["content"] == GOOD and choice["finish_reason"] == "stop"
    assert complete(client, GOOD, **wish)["text"] == GOOD


def test_thinking_is_free_and_its_end_begins_the_grammar(client):
    choice = chat(client, "I think: {not json}</think>" + GOOD, **SCHEMA)
    assert choice["message"]["reasoning_content"] == "I think: {not json}"
    assert choice["message"]["content"] == GOOD and choice["finish_reason"] == "stop"
    choice = chat(client, "endless", max_tokens=40, **SCHEMA)
    assert choice["finish_reason"] == "length" and choice["message"]["content"] is None, "a turn may not end thinking"


@pytest.mark.parametrize(
    "text", ["no json at all", '{"name":"x","age":"old"}', '{"name":"x"}', GOOD + "and more", "{}", ""]
)
def test_text_that_does_not_fit_is_bent_or_cut(client, text):
    choice = chat(client, text or " ", reasoning_effort="none", **SCHEMA)
    content = choice["message"]["content"]
    assert choice["finish_reason"] in ("stop", "length")
    if choice["finish_reason"] == "stop":
        jsonschema.validate(json.loads(content), PERSON)
    else:
        assert content.startswith('{"name":')


def test_streams_and_choices_have_rules_of_their_own(client):
    body = {
        "messages": [{"role": "user", "content": GOOD}],
        "n": 3,
        "stream": True,
        "reasoning_effort": "none",
        **SCHEMA,
    }
    texts = ["", "", ""]
    for chunk in events(client.post(CHAT, json=body).text):
        for choice in chunk["choices"]:
            texts[choice["index"]] += choice["delta"].get("content") or ""
    assert texts == [GOOD] * 3


@pytest.mark.parametrize(
    ("wish", "text", "want"),
    [
        ({"structured_outputs": {"regex": "[a-c]{3}[0-9]+"}}, "abc123", "abc123"),
        ({"guided_regex": "(yes|no)!"}, "no!", "no!"),
        ({"structured_outputs": {"choice": ["red", "green", "blue sky"]}}, "blue sky", "blue sky"),
        ({"guided_choice": ["1", "22"]}, "22", "22"),
        ({"structured_outputs": {"grammar": 'start: "a" b\nb: "x" | "yy"'}}, "ayy", "ayy"),
        ({"guided_grammar": 'root ::= "a" ("x" | "yy")'}, "ax", "ax"),
        ({"response_format": {"type": "json_object"}}, '{"any":[1,{"x":null}]}', '{"any":[1,{"x":null}]}'),
        ({"structured_outputs": {"json_object": True}}, "{}", "{}"),
        ({"response_format": {"type": "text"}}, "free", "free"),
    ],
)
def test_other_forms(client, wish, text, want):
    choice = complete(client, text, **wish)
    assert (choice["text"], choice["finish_reason"]) == (want, "stop")


def test_masks_are_timed(client):
    before = metric(client, "dcpjax:grammar_mask_seconds_count")
    answer = client.post("/v1/completions", json={"prompt": "abc", "guided_regex": "[a-z]{1,9}", "n": 2}).json()
    assert answer["usage"]["completion_tokens"] > 0
    assert metric(client, "dcpjax:grammar_mask_seconds_count") > before + 2
    assert 0 < metric(client, "dcpjax:grammar_mask_seconds_sum") < 10


def test_a_choice_is_made_whatever_the_model_wants(client):
    assert complete(client, "zzz", guided_choice=["red", "green"])["text"] in ("red", "green")


def call(name: str, **arguments: str) -> str:
    pairs = "".join(f"<arg_key>{k}</arg_key><arg_value>{v}</arg_value>" for k, v in arguments.items())
    return f"<tool_call>{name}{pairs}</tool_call>"


def test_forced_calls_in_the_models_own_form(client):
    said = call("weather", city="New <b>York</b>", unit="F", days="3", more='{"a":1}') + call("now")
    calls = chat(client, f"x</think>{said}", tools=TOOLS, tool_choice="required")["message"]["tool_calls"]
    assert [each["function"]["name"] for each in calls] == ["weather", "now"]
    assert json.loads(calls[0]["function"]["arguments"]) == {
        "city": "New <b>York</b>", "unit": "F", "days": 3, "more": {"a": 1}
    }  # fmt: skip
    one = {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "now"}}}
    choice = chat(client, f"x</think>{call('now')}", **one)
    assert choice["finish_reason"] == "tool_calls" and choice["message"]["tool_calls"][0]["function"]["name"] == "now"


@pytest.mark.parametrize("text", ["x</think>I would rather talk.", "x</think>" + call("weather", city="Rome")])
def test_a_named_call_is_made_whatever_the_model_wants(client, text):
    wish = {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "now"}}}
    choice = chat(client, text, **wish)
    assert [each["function"]["name"] for each in choice["message"]["tool_calls"]] == ["now"]
    assert choice["message"]["content"] is None and choice["finish_reason"] == "tool_calls"


def test_only_one_call_if_only_one_is_wanted(client):
    said = f"x</think>{call('now')}{call('now')}"
    for wish, count in (({}, 2), ({"parallel_tool_calls": False}, 1)):
        choice = chat(client, said, tools=TOOLS, tool_choice="required", **wish)
        assert len(choice["message"]["tool_calls"]) == count


def test_bad_words_do_not_come(client):
    assert complete(client, "one two three")["text"] == "one two three"
    for word in ("two", "two three"):
        assert word not in complete(client, "one two three", bad_words=[word])["text"]


BAD = [
    ({"response_format": {"type": "xml"}}, "response_format"),
    ({"response_format": {"type": "json_schema"}}, "response_format"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "nope"}}}}, "response_format"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": 5}}}, "response_format"),
    ({"structured_outputs": {}}, "structured_outputs"),
    ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
    ({"structured_outputs": {"xml": "a"}}, "structured_outputs"),
    ({"structured_outputs": {"regex": "("}}, "structured_outputs"),
    ({"structured_outputs": {"regex": 5}}, "structured_outputs"),
    ({"guided_choice": []}, "guided_choice"),
    ({"guided_choice": ["a", 1]}, "guided_choice"),
    ({"guided_grammar": "start: nowhere"}, "guided_grammar"),
    ({"guided_grammar": "root ::= ((("}, "guided_grammar"),
    ({"guided_json": "{"}, "guided_json"),
    ({"guided_regex": "a", "guided_json": {}}, "guided_regex"),
    ({"guided_regex": "a", "min_tokens": 3}, "min_tokens"),
    ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos"),
    ({"bad_words": [""]}, "bad_words"),
]


@pytest.mark.parametrize(("wish", "param"), BAD)
def test_refusals_have_the_compilers_words(client, wish, param):
    response = client.post(COMPLETIONS, json={"prompt": "x", **wish})
    assert response.status_code == 400 and response.json()["error"]["param"] == param, response.text
    assert len(response.json()["error"]["message"]) < 500


def test_a_part_that_takes_everything_stops_nobody(client):
    """What must come next is not looked for without end."""
    body = {"prompt": "aaaa", "max_tokens": 5, "structured_outputs": {"grammar": "start: /a+/ /a+/"}}
    (choice,) = client.post(COMPLETIONS, json=body).json()["choices"]
    assert choice["text"] and set(choice["text"]) == {"a"}


def test_what_is_too_deep_or_too_much_is_refused(client):
    deep = {"type": "object"}
    for _ in range(300):
        deep = {"type": "object", "properties": {"a": deep}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": deep}}]
    for path, body, word in (
        (COMPLETIONS, {"prompt": "x", "structured_outputs": {"json": deep}}, "too deep"),
        (
            COMPLETIONS,
            {"prompt": "x", "structured_outputs": {"choice": list(map(str, range(10_001)))}},
            "at most 10,000",
        ),
        (CHAT, {"messages": [{"role": "user", "content": "x"}], "tools": tools}, "too deep"),
    ):
        response = client.post(path, json=body)
        assert response.status_code == 400 and word in response.json()["error"]["message"], response.text


def test_tokens_by_id(client):
    choice = complete(client, "Hi there", logprobs=0, return_tokens_as_token_ids=True, return_token_ids=True)
    assert choice["logprobs"]["tokens"] == [f"token_id:{token}" for token in choice["token_ids"]]
    choice = chat(client, "Hi", logprobs=True, return_tokens_as_token_ids=True, return_token_ids=True)
    entries = choice["logprobs"]["content"]
    assert [entry["token"] for entry in entries] == [f"token_id:{token}" for token in choice["token_ids"]]


def test_a_long_prompt_does_not_stall_a_stream(server, client):
    """A megabyte is tokenised beside a stream whose chunks go on coming; what is measured is the longest gap."""
    long = {"prompt": "many words in a row, " * 50_000}
    gaps, done = [], threading.Event()

    def tokenise():
        with server.client() as other:
            assert other.post("/tokenize", json=long, timeout=60).json()["count"] > 100_000
        done.set()

    body = {"prompt": "on and on", "max_tokens": 4000, "ignore_eos": True, "stream": True}
    thread = threading.Thread(target=tokenise)
    with client.stream("POST", COMPLETIONS, json=body) as response:
        last = None
        for _ in response.iter_lines():
            now = time.monotonic()
            if last is None:
                thread.start()
            elif not done.is_set():
                gaps.append(now - last)
            last = now
    thread.join()
    assert len(gaps) > 20 and max(gaps) < 0.5, max(gaps)
