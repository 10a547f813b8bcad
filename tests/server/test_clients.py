"""The OpenAI and Anthropic clients against the echo engine: what is asked is what the model says."""

import asyncio
import json

import anthropic
import httpx
import openai
import pytest

from tests.server.process import EchoProcess

SPEC = '{"method": "mtp", "num_speculative_tokens": 3}'
CITY = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "description": "of a city", "parameters": CITY}},
    {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}},
]
ANTHROPIC_TOOLS = [{"name": "weather", "description": "of a city", "input_schema": CITY}, {"name": "now"}]


def call(name: str, **arguments) -> str:
    pairs = (
        f"<arg_key>{key}</arg_key><arg_value>{value if isinstance(value, str) else json.dumps(value)}</arg_value>"
        for key, value in arguments.items()
    )
    return f"<tool_call>{name}{''.join(pairs)}</tool_call>"


SAY = "I look.</think>Let me see." + call("weather", city='東京 "x"\n', days=2) + call("now")


@pytest.fixture(scope="module")
def server():
    with EchoProcess("--speculative-config", SPEC) as running:
        yield running


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def claude(server):
    with anthropic.Anthropic(base_url=server.url, api_key="any", max_retries=0) as client:
        yield client


def user(text: str) -> dict:
    return {"role": "user", "content": text}


def test_a_tool_loop_of_three_turns(client):
    """Two calls at once, then one whose question is in the result, then an answer."""
    messages = [user(SAY)]
    asked = client.chat.completions.create(model="tiny", messages=messages, tools=TOOLS)
    choice = asked.choices[0]
    assert choice.finish_reason == "tool_calls" and choice.message.content == "Let me see."
    assert choice.message.model_extra["reasoning_content"] == "I look."
    first, second = choice.message.tool_calls
    assert (first.function.name, json.loads(first.function.arguments)) == ("weather", {"city": '東京 "x"\n', "days": 2})
    assert (second.function.name, second.function.arguments) == ("now", "{}")
    assert first.id != second.id and first.id.startswith("call_") and len(first.id) == 29
    messages += [
        choice.message.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": first.id, "content": "sunny"},
        {"role": "tool", "tool_call_id": second.id, "content": "12:00 " + call("weather", city="Rome")},
    ]
    choice = client.chat.completions.create(model="tiny", messages=messages, tools=TOOLS).choices[0]
    assert choice.finish_reason == "tool_calls"
    (third,) = choice.message.tool_calls
    assert json.loads(third.function.arguments) == {"city": "Rome"}
    messages += [choice.message.model_dump(exclude_none=True)]
    messages += [{"role": "tool", "tool_call_id": third.id, "content": "</think>It rains."}]
    choice = client.chat.completions.create(model="tiny", messages=messages, tools=TOOLS).choices[0]
    assert choice.finish_reason == "stop" and choice.message.tool_calls is None
    assert choice.message.content == "It rains.</tool_response>"


def streamed(chunks) -> dict:
    """A message put together as clients do it."""
    whole = {"content": "", "reasoning_content": "", "calls": [], "finish": None}
    for chunk in chunks:
        for choice in chunk.choices:
            delta = choice.delta
            whole["content"] += delta.content or ""
            whole["reasoning_content"] += (delta.model_extra or {}).get("reasoning_content") or ""
            for part in delta.tool_calls or []:
                if part.index == len(whole["calls"]):
                    assert part.id and part.type == "function" and part.function.name and part.function.arguments == ""
                    whole["calls"].append([part.function.name, ""])
                else:
                    assert part.id is None and part.function.name is None and part.index == len(whole["calls"]) - 1
                whole["calls"][part.index][1] += part.function.arguments
            whole["finish"] = choice.finish_reason or whole["finish"]
    return whole


TEXTS = [
    SAY,
    call("weather", city="a"),
    "x</think>" + call("unknown", a="1", b="b"),
    "x</think>\n" + call("now") + "\n" + call("now"),
    "x</think>a <tool_call></tool_call> b",
    "x</think>" + call("weather", city="<tool_call>x</tool_call>"),
    "only thinking",
]


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("most", [None, 12, 20])
def test_streamed_calls_are_those_of_the_whole(client, text, most):
    wish = {"model": "tiny", "messages": [user(text)], "tools": TOOLS, "max_tokens": most}
    choice = client.chat.completions.create(**wish).choices[0]
    parts = streamed(client.chat.completions.create(**wish, stream=True))
    message = choice.message
    assert parts["content"] == (message.content or "") and parts["finish"] == choice.finish_reason
    assert parts["reasoning_content"] == (message.model_extra["reasoning_content"] or "")
    calls = [[each.function.name, each.function.arguments] for each in message.tool_calls or []]
    assert parts["calls"] == calls
    for _, arguments in calls:
        assert isinstance(json.loads(arguments), dict)
    if most is not None and choice.finish_reason == "length":
        assert choice.finish_reason != "tool_calls"


def test_wishes_about_calls(client):
    def ask(**wish):
        return client.chat.completions.create(model="tiny", messages=[user(SAY)], tools=TOOLS, **wish).choices[0]

    plain = ask(tool_choice="none")
    assert plain.message.content == SAY.removeprefix("I look.</think>") and plain.finish_reason == "stop"
    assert [each.function.name for each in ask(parallel_tool_calls=False).message.tool_calls] == ["weather"]
    no_tools = client.chat.completions.create(model="tiny", messages=[user(SAY)]).choices[0]
    assert no_tools.message.content == plain.message.content
    stopped = ask(stop="東")
    assert stopped.finish_reason == "stop" and stopped.message.tool_calls[0].function.arguments == '{"city": ""}'


def test_async_streams_at_once(server):
    async def run():
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0) as client:

            async def one(i: int) -> str:
                stream = await client.chat.completions.create(
                    model="tiny", messages=[user(f"t</think>number {i}")], stream=True
                )
                return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

            return await asyncio.gather(*map(one, range(20)))

    assert asyncio.run(run()) == [f"number {i}" for i in range(20)]


def test_anthropic_messages(claude):
    message = claude.messages.create(
        model="tiny", max_tokens=200, messages=[user("hm</think>Hello")], system=[{"type": "text", "text": "Be kind."}]
    )
    thinking, text = message.content
    assert (thinking.type, thinking.thinking, thinking.signature) == ("thinking", "hm", "")
    assert (text.type, text.text) == ("text", "Hello") and message.stop_reason == "end_turn"
    assert message.id.startswith("msg_") and message.usage.output_tokens > 3
    again = claude.messages.create(model="tiny", max_tokens=3, messages=[user("a b c d e f g")])
    assert again.stop_reason == "max_tokens" and again.usage.output_tokens == 3
    stopped = claude.messages.create(
        model="tiny",
        max_tokens=99,
        messages=[user("one two three")],
        stop_sequences=["two"],
        thinking={"type": "disabled"},
    )
    assert (stopped.stop_reason, stopped.stop_sequence, stopped.content[0].text) == ("stop_sequence", "two", "one ")


def test_anthropic_streams_with_tools_and_thinking(claude):
    wish = {"model": "tiny", "max_tokens": 300, "messages": [user(SAY)], "tools": ANTHROPIC_TOOLS}
    whole = claude.messages.create(**wish)
    with claude.messages.stream(**wish) as stream:
        events = [event.type for event in stream]
        final = stream.get_final_message()
    assert [block.type for block in whole.content] == ["thinking", "text", "tool_use", "tool_use"]

    def shown(message):
        return [block.model_dump(exclude={"id"}) for block in message.content]

    assert shown(final) == shown(whole)
    assert final.stop_reason == whole.stop_reason == "tool_use"
    assert final.usage.output_tokens == whole.usage.output_tokens
    assert whole.content[2].input == {"city": '東京 "x"\n', "days": 2} and whole.content[3].input == {}
    assert events[0] == "message_start" and events[-1] == "message_stop"
    assert events.count("content_block_start") == events.count("content_block_stop") == 4


def test_anthropic_tool_results_are_turns(claude):
    first = claude.messages.create(
        model="tiny", max_tokens=300, messages=[user(SAY)], tools=ANTHROPIC_TOOLS, tool_choice={"type": "auto"}
    )
    results = [
        {"type": "tool_result", "tool_use_id": block.id, "content": [{"type": "text", "text": "</think>Sunny"}]}
        for block in first.content
        if block.type == "tool_use"
    ]
    content = [block.model_dump() for block in first.content]
    messages = [user(SAY), {"role": "assistant", "content": content}, {"role": "user", "content": results}]
    answer = claude.messages.create(model="tiny", max_tokens=99, messages=messages, tools=ANTHROPIC_TOOLS)
    assert "Sunny" in answer.content[-1].text


def test_anthropic_counts_what_it_takes(server, claude):
    wish = {"model": "tiny", "messages": [user("How many? " * 30)], "tools": ANTHROPIC_TOOLS, "system": "S"}
    count = claude.messages.count_tokens(**wish).input_tokens
    assert httpx.post(f"{server.url}/reset_prefix_cache").status_code == 200
    cold, warm = (claude.messages.create(max_tokens=2, **wish).usage for _ in range(2))
    assert cold.input_tokens == count and cold.cache_read_input_tokens == 0
    assert warm.cache_read_input_tokens == (count - 1) // 64 * 64 > 0
    assert warm.input_tokens + warm.cache_read_input_tokens == count and warm.cache_creation_input_tokens == 0


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"messages": [user("x")]}, "max_tokens"),
        ({"max_tokens": 0, "messages": [user("x")]}, "max_tokens"),
        ({"max_tokens": 5}, "messages"),
        ({"max_tokens": 5, "messages": [{"role": "king", "content": "x"}]}, "role must be"),
        (
            {"max_tokens": 5, "messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
            "reads text only",
        ),
        (
            {"max_tokens": 5, "messages": [user("x")], "tool_choice": {"type": "perhaps"}, "tools": ANTHROPIC_TOOLS},
            "any",
        ),
        ({"max_tokens": 5, "messages": [user("x")], "tool_choice": {"type": "any"}}, "only allowed with tools"),
        ({"max_tokens": 5, "messages": [user("x")], "tools": [{"type": "web_search_1", "name": "w"}]}, "elsewhere"),
        ({"max_tokens": 5, "messages": [user("x")], "thinking": {"type": "maybe"}}, "thinking"),
        ({"max_tokens": 5, "messages": [user("x")], "system": 5}, "system"),
        ({"max_tokens": 5, "messages": [user("x")], "temperature": -1}, "temperature"),
        ({"max_tokens": 9999, "messages": [user("x")]}, "maximum context length"),
    ],
)
def test_anthropic_refusals(claude, body, words):
    with pytest.raises(anthropic.BadRequestError) as error:
        claude.post("/v1/messages?beta=true", body=body, cast_to=object)
    found = error.value.body
    assert found["type"] == "error" and found["error"]["type"] == "invalid_request_error"
    assert words in found["error"]["message"]


def test_anthropic_models_that_do_not_exist(claude):
    with pytest.raises(anthropic.NotFoundError) as error:
        claude.messages.create(model="other", max_tokens=5, messages=[user("x")])
    assert error.value.body["error"]["type"] == "not_found_error"
