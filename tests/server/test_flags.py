"""Flags and fields that change what is made of a conversation, each through a socket."""

import json
import re

import httpx
import pytest

from dcpjax.server.echo import TINY
from tests.server.process import EchoProcess, wait_for

CHAT = "/v1/chat/completions"
KEEP = {"clear_thinking": False}
TOOLS = [{"type": "function", "function": {"name": "now"}}]
CALL = "hm</think>Wait. <tool_call>now</tool_call>"


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    template = tmp_path_factory.mktemp("template") / "chat.jinja"
    template.write_text((TINY / "chat_template.jinja").read_text().replace("<sop>", "<sop>Marked.", 1))
    flags = ["--default-chat-template-kwargs", json.dumps(KEEP), "--chat-template", str(template), "--api-key", "k"]
    flags += ["--block-size", "16", "--max-logprobs", "-1", "--no-enable-auto-tool-choice"]
    flags += ["--enable-log-requests", "--disable-access-log-for-endpoints", "/health,/v1/models"]
    with EchoProcess(*flags, "--uvicorn-log-level", "info") as server:
        yield server


@pytest.fixture(scope="module")
def client(server):
    with httpx.Client(base_url=server.url, timeout=20, headers={"x-api-key": "k"}) as client:
        yield client


def user(text: str) -> dict:
    return {"role": "user", "content": text}


def test_a_turn_is_found_again_if_its_thinking_is_kept(client):
    """By the server's default; a request may say otherwise, and then the hit ends where the thinking was."""
    asked = user("Let me think about it for a while.</think>" + "It is long and it goes on. " * 8)
    first = client.post(CHAT, json={"messages": [asked]}).json()
    message, usage = first["choices"][0]["message"], first["usage"]
    assert message["reasoning_content"] and usage["prompt_tokens_details"]["cached_tokens"] == 0
    messages = [asked, message, user("And then?")]
    cached = []
    for kwargs in ({}, {"clear_thinking": True}):
        body = {"messages": messages, "max_tokens": 1, "chat_template_kwargs": kwargs}
        cached.append(client.post(CHAT, json=body).json()["usage"]["prompt_tokens_details"]["cached_tokens"])
    known = (
        usage["prompt_tokens"] + usage["completion_tokens"] - 1
    )  # the last token ends the turn: its row is not written
    assert known - 16 < cached[0] <= known
    assert usage["prompt_tokens"] - 16 < cached[1] <= usage["prompt_tokens"]


def test_another_template_and_no_limit_of_log_probabilities(client):
    body = {"messages": [user("Hi")], "logprobs": True, "top_logprobs": 500, "max_tokens": 2, "return_token_ids": True}
    answer = client.post(CHAT, json=body).json()
    shown = client.post("/detokenize", json={"tokens": answer["prompt_token_ids"]}).json()["prompt"]
    assert shown.startswith("[gMASK]<sop>Marked.")
    assert len(answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"]) >= 20
    assert client.post("/v1/completions", json={"prompt": "Hi", "logprobs": -1}).status_code == 200


def test_calls_that_nothing_forced_can_stay_text(client):
    body = {"messages": [user(CALL)], "tools": TOOLS}
    message = client.post(CHAT, json=body).json()["choices"][0]["message"]
    assert message["content"] == "Wait. <tool_call>now</tool_call>" and "tool_calls" not in message
    choice = client.post(CHAT, json={**body, "tool_choice": "required"}).json()["choices"][0]
    assert choice["message"]["tool_calls"][0]["function"]["name"] == "now"


def test_what_anthropics_agents_send(client):
    """Thinking that the model chooses, a budget, what was redacted, cache marks; and their own header for the key."""
    text = {"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}}
    body = {
        "max_tokens": 50,
        "system": [text],
        "thinking": {"type": "adaptive", "budget_tokens": 1024},
        "messages": [
            user("Hi"),
            {"role": "assistant", "content": [{"type": "redacted_thinking", "data": "secret"}, text]},
            user("hm</think>Hello"),
        ],
    }
    answer = client.post("/v1/messages?beta=true", json=body).json()
    assert [block["type"] for block in answer["content"]] == ["thinking", "text"]
    assert answer["content"][1]["text"] == "Hello" and answer["stop_reason"] == "end_turn"
    assert client.post("/v1/messages", json=body, headers={"x-api-key": "other"}).status_code == 401


def test_a_line_for_every_request(server, client):
    """Once it is answered, but for what monitors ask; nothing of what was asked or answered, and no line that a client made
    up."""
    quiet = [client.get(path).status_code for path in ("/health", "/v1/models")]
    body = {"messages": [user("A secret.")], "stream": True, "max_tokens": 3}
    client.post(CHAT, json=body, headers={"X-Request-Id": "mine"})
    assert client.post("/v1/none%0AINFO dcpjax.requests: GET", headers={"x-api-key": "?"}).status_code == 401
    wait_for(lambda: any(" '/v1/none" in line for line in server.stderr))
    lines = [line for line in server.stderr if line.startswith("INFO dcpjax.requests: ")]
    assert re.fullmatch(
        r"INFO dcpjax.requests: POST '/v1/chat/completions': 200 after \d+\.\d{3} s, request 'mine'\n", lines[-2]
    )
    assert re.fullmatch(
        r".*: POST '/v1/none\\nINFO dcpjax.requests: GET': 401 after .* s, request '[0-9a-f]{32}'\n", lines[-1]
    )
    log = "".join(server.stderr)
    assert quiet == [200, 200] and "/health" not in log and "/v1/models" not in log and "secret" not in log
    assert "INFO uvicorn.error: " in log
