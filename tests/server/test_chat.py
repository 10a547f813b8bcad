"""Chat over a real socket: the reasoning split, streams, templates, tools in the prompt, logprobs."""

import httpx
import openai
import pytest

from dcpjax.server.protocol import ChatBody
from tests.server.fake_llm import ANSWER, THOUGHT, make_tokenizer
from tests.server.process import events

PATH = "/v1/chat/completions"
TOKENIZER = make_tokenizer()
REASONING = THOUGHT.removeprefix("<think>")  # a repeated opening tag is dropped


def post(client: httpx.Client, content="Hi", **body):
    messages = body.pop("messages", [{"role": "user", "content": content}])
    response = client.post(PATH, json={"messages": messages, **body})
    assert response.status_code == 200, response.text
    return response.json()


def joined(text: str) -> dict[int, dict]:
    """Choices put together from a stream: each opens with a role, before all text, and ends once."""
    choices: dict[int, dict] = {}
    for chunk in events(text):
        assert chunk["object"] == "chat.completion.chunk"
        for part in chunk["choices"]:
            delta = part["delta"]
            if part["index"] not in choices:
                assert delta == {"role": "assistant", "content": ""} and part["finish_reason"] is None
                choices[part["index"]] = {"content": "", "reasoning_content": "", "finish": None, "logprobs": []}
                continue
            whole = choices[part["index"]]
            assert whole["finish"] is None and (delta or part["finish_reason"]) and "role" not in delta
            for key, piece in delta.items():
                assert piece
                assert key == "content" or not whole["content"], "reasoning after content"
                whole[key] += piece
            if part["finish_reason"]:
                whole["finish"] = (part["finish_reason"], part["stop_reason"])
            whole["logprobs"] += (part["logprobs"] or {"content": []})["content"]
    return choices


def tokenized(client, **body) -> str:
    response = client.post("/tokenize", json=body)
    assert response.status_code == 200, response.text
    return TOKENIZER.decode(response.json()["tokens"], skip_special_tokens=False)


def test_thinking_and_content_are_parted(client):
    answer = post(client)
    assert answer["object"] == "chat.completion" and answer["id"].startswith("chatcmpl-")
    (choice,) = answer["choices"]
    assert choice["message"] == {
        "role": "assistant", "content": ANSWER.format(choice=0), "reasoning_content": REASONING, "refusal": None
    }  # fmt: skip
    assert (choice["finish_reason"], choice["stop_reason"], choice["logprobs"]) == ("stop", None, None)
    usage = answer["usage"]
    assert usage["completion_tokens_details"]["reasoning_tokens"] == len(TOKENIZER.encode(THOUGHT + "</think>"))
    assert usage["completion_tokens"] == len(TOKENIZER.encode(THOUGHT + "</think>" + ANSWER.format(choice=0))) + 1


def test_without_thinking_all_is_content(client):
    # What the template does not look at does not change how its answer is read.
    assert post(client, chat_template_kwargs={"thinking": False})["choices"][0]["message"]["reasoning_content"]
    assert post(client, thinking={"type": "enabled", "clear_thinking": False})["usage"]["completion_tokens"] > 9
    for body in (
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"reasoning_effort": "none"},
        {"thinking": {"type": "disabled"}},
    ):
        answer = post(client, **body)
        message = answer["choices"][0]["message"]
        assert message["content"] == ANSWER.format(choice=0) and message["reasoning_content"] is None
        assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] == 0


def test_an_answer_cut_while_thinking_has_no_content(client):
    answer = post(client, max_completion_tokens=5, max_tokens=50)
    message = answer["choices"][0]["message"]
    assert answer["usage"]["completion_tokens"] == 5 and answer["choices"][0]["finish_reason"] == "length"
    assert message["content"] is None
    assert message["reasoning_content"] == TOKENIZER.decode(TOKENIZER.encode(THOUGHT)[1:5])


def test_reasoning_can_be_left_in_or_out(client):
    message = post(client, separate_reasoning=False)["choices"][0]["message"]
    assert message["content"] == THOUGHT + "</think>" + ANSWER.format(choice=0)
    assert message["reasoning_content"] is None
    message = post(client, include_reasoning=False)["choices"][0]["message"]
    assert message["content"] == ANSWER.format(choice=0) and message["reasoning_content"] is None


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"n": 3},
        {"stop": "question", "include_stop_str_in_output": True},
        {"stop": ["is open", "</think>He"]},
        {"max_tokens": 7},
        {"reasoning_effort": "none"},
        {"separate_reasoning": False},
    ],
)
def test_streamed_equals_whole(client, body):
    whole = post(client, **body)
    response = client.post(
        PATH, json={"messages": [{"role": "user", "content": "Hi"}], "stream": True, "logprobs": True, **body}
    )
    streamed = joined(response.text)
    assert len(streamed) == len(whole["choices"]) == body.get("n", 1)
    for choice in whole["choices"]:
        part = streamed[choice["index"]]
        assert part["content"] == (choice["message"]["content"] or "")
        assert part["reasoning_content"] == (choice["message"]["reasoning_content"] or "")
        assert part["finish"] == (choice["finish_reason"], choice["stop_reason"])
    assert sum(len(part["logprobs"]) for part in streamed.values()) == whole["usage"]["completion_tokens"]


def test_logprobs_have_the_tokens_own_bytes(client):
    body = {"logprobs": True, "top_logprobs": 2, "reasoning_effort": "none"}
    entries = post(client, **body)["choices"][0]["logprobs"]["content"]
    whole = b"".join(bytes(entry["bytes"]) for entry in entries).decode()
    assert whole == ANSWER.format(choice=0) + "<|user|>"
    assert any("\ufffd" in entry["token"] for entry in entries), "the text should have half characters"
    for entry in entries:
        assert entry["logprob"] == -0.25
        assert [top["logprob"] for top in entry["top_logprobs"]] == [-1.0, -2.0, -0.25]
        assert entry["top_logprobs"][2]["bytes"] == entry["bytes"]
    entries = post(client, logprobs=True)["choices"][0]["logprobs"]["content"]
    assert all(entry["top_logprobs"] == [] for entry in entries)


def test_the_effort_asked_for_never_becomes_more(client):
    messages = [{"role": "user", "content": "Hi"}]
    for given, shown in (("minimal", "high"), ("low", "high"), ("medium", "high"), ("high", "high"), ("xhigh", "max")):
        assert tokenized(client, messages=messages, reasoning_effort=given).endswith(f"<think>{shown}")
        assert tokenized(client, messages=messages, chat_template_kwargs={"reasoning_effort": given}).endswith(shown)


def test_messages_reach_the_template_in_its_own_form(client):
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"b": [1], "a": "é"}'}}
    empty = {"id": "c2", "type": "function", "function": {"name": "g", "arguments": ""}}
    text = tokenized(
        client,
        messages=[
            {"role": "developer", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]},
            {"role": "assistant", "content": None, "reasoning": "hm", "tool_calls": [call, empty]},
            {"role": "tool", "tool_call_id": "c1", "content": "found"},
        ],
    )
    assert text == (
        "[gMASK]<sop><|system|>Be brief.<|user|>onetwo<|assistant|><think>hm</think>"
        "[('b', [1]), ('a', 'é')][]<|tool|>found<|assistant|><think>"
    )


def test_tools_are_in_the_prompt(client):
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
    messages = [{"role": "user", "content": "Hi"}]
    assert '"name": "look"' in tokenized(client, messages=messages, tools=[tool])
    assert post(client, messages=messages, tools=[tool], tool_choice="auto")["choices"][0]["finish_reason"] == "stop"


def test_the_prompt_is_what_tokenize_gives(client):
    messages = [{"role": "system", "content": "S"}, {"role": "user", "content": "Hi"}]
    tokens = client.post("/tokenize", json={"messages": messages, "return_token_strs": True}).json()
    answer = post(client, messages=messages, return_token_ids=True, max_tokens=3)
    assert answer["prompt_token_ids"] == tokens["tokens"]
    assert tokens["count"] == len(tokens["tokens"]) == len(tokens["token_strs"]) == answer["usage"]["prompt_tokens"]
    assert len(answer["choices"][0]["token_ids"]) == 3
    body = {"messages": messages, "return_token_ids": True, "max_tokens": 3, "n": 2, "stream": True}
    first, *others = events(client.post(PATH, json=body).text)
    assert first["prompt_token_ids"] == tokens["tokens"] and not any("prompt_token_ids" in chunk for chunk in others)


def test_continuing_a_message(client):
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hel"}]
    assert tokenized(client, messages=messages, continue_final_message=True).endswith("<think></think>Hel")
    assert post(client, messages=messages, continue_final_message=True)["choices"][0]["message"]["content"]


def test_null_and_unknown_fields_do_not_count(client):
    nulls = dict.fromkeys(set(ChatBody.model_fields) - {"messages"})
    ignored = {
        "user": "me", "store": True, "metadata": {"a": "b"}, "service_tier": "auto", "safety_identifier": "s",
        "prompt_cache_key": "k", "verbosity": "low", "spaces_between_special_tokens": True, "a_field_of_tomorrow": [1],
    }  # fmt: skip
    same = {"id": 0, "created": 0}
    assert post(client, **nulls) | same == post(client, **ignored) | same == post(client) | same


def test_the_answer_takes_the_rest_of_the_context_by_default(client):
    answer = post(client, content="SLOW")
    assert answer["usage"]["total_tokens"] == 256 and answer["choices"][0]["finish_reason"] == "length"


def test_openai_client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0) as client:
        messages = [{"role": "user", "content": "Hi"}]
        answer = client.chat.completions.create(model="alias", messages=messages, seed=1)
        assert answer.model == "alias" and answer.choices[0].message.content == ANSWER.format(choice=0)
        stream = client.chat.completions.create(
            model="fake", messages=messages, stream=True, stream_options={"include_usage": True}
        )
        chunks = list(stream)
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        assert text == ANSWER.format(choice=0) and chunks[-1].usage.completion_tokens > 0
        done = client.completions.create(model="fake", prompt="x", max_tokens=3, logprobs=1)
        assert len(done.choices[0].logprobs.tokens) == 3
        assert [model.id for model in client.models.list()] == ["fake", "alias"]
        with pytest.raises(openai.NotFoundError) as error:
            client.chat.completions.create(model="other", messages=messages)
        assert error.value.param == "model" and error.value.type == "NotFoundError"
        with pytest.raises(openai.BadRequestError) as error:
            client.chat.completions.create(model="fake", messages=messages, temperature=-1)
        assert error.value.param == "temperature" and error.value.code == "400"
