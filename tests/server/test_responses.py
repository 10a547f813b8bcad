"""`/v1/responses` with the OpenAI client: texts, tools, streams, forms."""

import json

import openai
import pytest

from tests.server.process import EchoProcess

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [{"type": "function", "name": "weather", "parameters": CITY}]
CALL = "<tool_call>weather<arg_key>city</arg_key><arg_value>東京</arg_value></tool_call>"
SAY = f"hm</think>Let me see.{CALL}{CALL}"


@pytest.fixture(scope="module")
def client():
    with (
        EchoProcess("--speculative-config", '{"method": "mtp", "num_speculative_tokens": 3}') as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0) as client,
    ):
        yield client


def test_a_text(client):
    answer = client.responses.create(model="tiny", input="hm</think>Hello", instructions="Be kind.", temperature=0.5)
    assert answer.output_text == "Hello" and answer.status == "completed" and answer.id.startswith("resp_")
    thinking, message = answer.output
    assert thinking.type == "reasoning" and thinking.content[0].text == "hm" and message.status == "completed"
    assert answer.usage.total_tokens == answer.usage.input_tokens + answer.usage.output_tokens
    assert answer.usage.output_tokens_details.reasoning_tokens > 0 and answer.temperature == 0.5
    cut = client.responses.create(model="tiny", input="a b c d e f", max_output_tokens=3)
    assert cut.status == "incomplete" and cut.incomplete_details.reason == "max_output_tokens"


def test_a_tool_loop(client):
    first = client.responses.create(model="tiny", input=[{"role": "user", "content": SAY}], tools=TOOLS)
    assert [item.type for item in first.output] == ["reasoning", "message", "function_call", "function_call"]
    calls = [item for item in first.output if item.type == "function_call"]
    assert all(json.loads(call.arguments) == {"city": "東京"} for call in calls)
    results = [{"type": "function_call_output", "call_id": call.call_id, "output": "</think>Sunny"} for call in calls]
    items = [{"role": "user", "content": SAY}, *(item.model_dump(exclude_none=True) for item in first.output), *results]
    second = client.responses.create(model="tiny", input=items, tools=TOOLS)
    assert "Sunny" in second.output_text and second.output[-1].type == "message"


@pytest.mark.parametrize("wish", [{"input": SAY, "tools": TOOLS}, {"input": "only thinking", "max_output_tokens": 2}])
def test_streamed_equals_whole(client, wish):
    whole = client.responses.create(model="tiny", **wish)
    with client.responses.create(model="tiny", stream=True, **wish) as stream:
        events = list(stream)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    assert events[-1].type == f"response.{whole.status}"

    def shown(response) -> list[dict]:
        return [item.model_dump(exclude={"id", "call_id"}) for item in response.output]

    assert shown(events[-1].response) == shown(whole) and events[-1].response.usage == whole.usage
    for i, item in enumerate(whole.output):
        kind = {"reasoning": "reasoning_text", "message": "output_text", "function_call": "function_call_arguments"}
        name = f"response.{kind[item.type]}.delta"
        text = "".join(event.delta for event in events if event.type == name and event.output_index == i)
        assert text == (item.arguments if item.type == "function_call" else item.content[0].text)
    added = [event.type for event in events].count("response.output_item.added")
    assert added == [event.type for event in events].count("response.output_item.done") == len(whole.output)


def test_forms_and_forced_calls(client):
    form = {"format": {"type": "json_schema", "name": "city", "schema": {**CITY, "additionalProperties": False}}}
    answer = client.responses.create(
        model="tiny", input='{"city":"Rome"}', text=form, reasoning={"effort": "none"}, max_output_tokens=40
    )
    assert json.loads(answer.output_text) == {"city": "Rome"}
    named = {"type": "function", "name": "weather"}
    answer = client.responses.create(model="tiny", input=f"x</think>{CALL}", tools=TOOLS, tool_choice=named)
    assert answer.output[-1].name == "weather"


@pytest.mark.parametrize(
    ("wish", "param"),
    [
        ({"input": 5}, "input"),
        ({"input": [{"type": "image_generation_call"}]}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input"),
        ({"input": "x", "tools": [{"type": "web_search"}]}, "tools"),
        ({"input": "x", "background": True}, "background"),
        ({"input": "x", "max_output_tokens": 0}, "max_output_tokens"),
        ({"input": "x", "text": {"format": {"type": "xml"}}}, "text"),
        ({"input": "x", "tool_choice": "required"}, "tool_choice"),
        ({"input": []}, "input"),
        ({"input": [{"role": "king", "content": "x"}]}, "input"),
    ],
)
def test_refusals(client, wish, param):
    with pytest.raises(openai.BadRequestError) as error:
        client.responses.create(model="tiny", **wish)
    assert error.value.param == param
