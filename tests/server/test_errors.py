"""Every refusal is the same object, names the field, and shows neither a traceback nor a path."""

import pytest

from tests.server.process import ROOT

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HI = [{"role": "user", "content": "Hi"}]
TOOL = {"type": "function", "function": {"name": "look"}}


def check(response, status: int, kind: str, param: str | None = None) -> str:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    body = response.json()
    assert body.keys() == {"error"} and body["error"].keys() == {"message", "type", "param", "code"}
    error = body["error"]
    assert (error["type"], error["param"], error["code"]) == (kind, param, status)
    assert not any(word in error["message"] for word in ("Traceback", ".py", str(ROOT)))
    assert len(error["message"]) < 600
    return error["message"]


SHARED = [
    ("n", 0), ("n", 65), ("n", "2"), ("n", True), ("n", 1.5),
    ("temperature", -0.1), ("temperature", "hot"), ("temperature", "x" * 5000), ("top_p", 0), ("top_p", 1.1),
    ("top_k", -2), ("min_p", 1.5), ("presence_penalty", 2.1), ("frequency_penalty", -2.1), ("repetition_penalty", 0),
    ("logit_bias", {"1": 101}), ("logit_bias", {"x": 1}), ("logit_bias", {"99999": 1}), ("logit_bias", {"-1": 1}),
    ("logit_bias", {"²": 1}), ("logit_bias", [1]), ("seed", 2**63), ("seed", 1.5), ("stop", ""), ("stop", ["a", ""]),
    ("stop", ["a"] * 17), ("stop", 5), ("stop_token_ids", [-1]), ("stop_token_ids", [99999]),
    ("stop_token_ids", list(range(31))), ("max_tokens", 0), ("max_tokens", "5"), ("min_tokens", -1), ("stream", "yes"),
    ("stream_options", {"include_usage": True}), ("cache_salt", ""), ("priority", 3), ("use_beam_search", True),
    ("prompt_logprobs", 21), ("prompt_logprobs", -2), ("bad_words", [""]), ("allowed_token_ids", [99999]), ("allowed_token_ids", []),
    ("guided_json", "{"), ("structured_outputs", {"rex": "a"}), ("response_format", {"type": "xml"}), ("model", 5),
]  # fmt: skip


@pytest.mark.parametrize(("field", "value"), SHARED)
def test_fields_out_of_range(client, field, value):
    for path, body in ((CHAT, {"messages": HI}), (COMPLETIONS, {"prompt": "x"})):
        message = check(client.post(path, json={**body, field: value}), 400, "BadRequestError", field)
        assert field in message


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": "Hi"}, "messages"),
        ({"messages": ["Hi"]}, "messages"),
        ({"messages": [{"content": "Hi"}]}, "messages"),
        ({"messages": [{"role": "king", "content": "Hi"}]}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages"),
        ({"messages": [{"role": "user", "content": "forbidden"}]}, "messages"),
        ({"messages": [{"role": "assistant", "content": "", "reasoning_content": 1}]}, "messages"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]},
            "messages",
        ),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "1"}}]}]},
            "messages",
        ),
        ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "messages"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
        ({"logprobs": 3}, "logprobs"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"min_tokens": 6, "max_tokens": 5}, "min_tokens"),
        ({"tools": []}, "tools"),
        ({"tools": [{"name": "f"}]}, "tools"),
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": "required"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice"),
        ({"reasoning_effort": "huge"}, "reasoning_effort"),
        ({"thinking": {"type": "perhaps"}}, "thinking"),
        ({"chat_template": "{{ 1 }}"}, "chat_template"),
        ({"chat_template_kwargs": []}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"add_generation_prompt": True, "continue_final_message": True}, "continue_final_message"),
        ({"continue_final_message": True}, "continue_final_message"),
        ({"audio": {"voice": "x"}}, "audio"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"web_search_options": {}}, "web_search_options"),
        ({"guided_regex": "a", "structured_outputs": {"choice": ["a"]}}, "guided_regex"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs"),
        ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options"),
    ],
)
def test_chat_bodies(client, body, param):
    body = body if "messages" in body or not body else {"messages": HI, **body}
    check(client.post(CHAT, json=body), 400, "BadRequestError", param)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": [99999]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": {"text": "a"}}, "prompt"),
        ({"prompt": ["x"] * 1025}, "prompt"),
        ({"prompt": "x", "suffix": "y"}, "suffix"),
        ({"prompt": "x", "best_of": 2}, "best_of"),
        ({"prompt": "x", "logprobs": 21}, "logprobs"),
        ({"prompt": "x", "logprobs": True}, "logprobs"),
        ({"prompt": "x", "prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
    ],
)
def test_completion_bodies(client, body, param):
    check(client.post(COMPLETIONS, json=body), 400, "BadRequestError", param)


def test_a_stream_is_refused_before_it_begins(client):
    check(client.post(CHAT, json={"messages": HI, "stream": True, "top_p": 2}), 400, "BadRequestError", "top_p")
    body = {"prompt": "x", "stream": True, "stop_token_ids": list(range(31))}
    check(client.post(COMPLETIONS, json=body), 400, "BadRequestError", "stop_token_ids")


def test_the_context_message_has_all_numbers(client):
    body = {"messages": [{"role": "user", "content": "x" * 20}], "max_tokens": 250}
    message = check(client.post(CHAT, json=body), 400, "BadRequestError", "messages")
    length = client.post("/tokenize", json={"messages": body["messages"]}).json()["count"]
    assert message.startswith(
        f"This model's maximum context length is 256 tokens. However, you requested {length + 250} tokens "
        f"({length} in the messages, 250 in the completion)."
    )
    check(client.post(COMPLETIONS, json={"prompt": [5] * 256}), 400, "BadRequestError", "prompt")
    assert client.post(COMPLETIONS, json={"prompt": [5] * 240}).status_code == 200
    check(client.post(COMPLETIONS, json={"prompt": [5] * 241}), 400, "BadRequestError", "prompt")


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, "/tokenize", "/detokenize"])
def test_bodies_that_are_not_json_objects(client, path):
    for kind in ("text/plain", "application/x-www-form-urlencoded", None):
        headers = {} if kind is None else {"content-type": kind}
        assert "application/json" in check(client.post(path, content=b"{}", headers=headers), 400, "BadRequestError")
    headers = {"content-type": "application/json; charset=utf-8"}
    for content in (
        b"",
        b"{",
        b"[1]",
        b"nul",
        b'"x"',
        b'{"prompt": NaN}',
        b'{"prompt": "\\ud800"}',
        b"\xff",
        b"[" * 5000,
    ):
        check(client.post(path, content=content, headers=headers), 400, "BadRequestError")


def test_of_several_allowed_types_the_one_that_was_meant_is_told(client):
    wishes = (({"prompt": [-1]}, "prompt", "greater than or equal to 0"), ({"stop": ["a"] * 17}, "stop", "at most 16"))
    for wish, param, words in wishes:
        response = client.post(COMPLETIONS, json={"prompt": "x", **wish})
        assert words in check(response, 400, "BadRequestError", param)


def test_routes_and_methods_that_do_not_exist(client):
    assert client.head("/live").status_code == 405, "a feed has no end, and so no head"
    check(client.get("/v1/nothing"), 404, "NotFoundError")
    stored = {"input": "x", "previous_response_id": "resp_1"}
    check(client.post("/v1/responses", json=stored), 404, "NotFoundError", "previous_response_id")
    for response in (client.get("/v1/responses/resp_1"), client.post("/v1/responses/resp_1/cancel")):
        assert "this server stores no responses" in check(response, 404, "NotFoundError")
    assert "not supported by this model" in check(client.post("/v1/embeddings", json={}), 404, "NotFoundError")
    response = client.get(CHAT)
    check(response, 405, "MethodNotAllowedError")
    assert response.headers["allow"] == "POST"
    check(client.delete("/v1/models"), 405, "MethodNotAllowedError")


def test_models_that_do_not_exist(client):
    for path, body in (
        (CHAT, {"messages": HI}),
        (COMPLETIONS, {"prompt": "x"}),
        ("/tokenize", {"prompt": "x"}),
        ("/detokenize", {"tokens": [1]}),
    ):
        check(client.post(path, json={**body, "model": "gpt"}), 404, "NotFoundError", "model")
    check(client.get("/v1/models/gpt"), 404, "NotFoundError", "model")
