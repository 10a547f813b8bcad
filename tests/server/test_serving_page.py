"""The examples of docs/serving.md, run as they stand there, on the echo engine."""

import contextlib
import io
import json
import pathlib
import re
import shlex

import httpx
import pytest

from tests.server.process import EchoProcess

PAGE = (pathlib.Path(__file__).parent.parent.parent / "docs/serving.md").read_text()
ADDRESS = "http://127.0.0.1:8000"
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
PROGRAMS = [text for language, text in BLOCKS if language == "python"]
REQUESTS = [text for _, text in BLOCKS if text.startswith("curl ")]


@pytest.fixture(scope="module")
def server():
    with EchoProcess() as running:
        yield running


def test_there_are_examples():
    assert len(PROGRAMS) == 2 and len(REQUESTS) == 2
    assert all(ADDRESS in text for text in PROGRAMS + REQUESTS)


@pytest.mark.parametrize("text", PROGRAMS, ids=["openai", "anthropic"])
def test_programs_run(server, text):
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        exec(compile(text.replace(ADDRESS, server.url), "docs/serving.md", "exec"), {})  # noqa: S102 - it is ours
    assert "What is 12 plus 30?" in said.getvalue() and "cache" in said.getvalue()


@pytest.mark.parametrize("text", REQUESTS)
def test_requests_are_answered(server, text):
    """What curl would send."""
    words = shlex.split(text)
    headers = dict(words[i + 1].split(": ") for i, word in enumerate(words) if word == "-H")
    (url,) = (word for word in words if word.startswith(ADDRESS))
    body = words[words.index("-d") + 1]
    response = httpx.post(url.replace(ADDRESS, server.url), content=body, headers=headers, timeout=20)
    assert response.status_code == 200, response.text
    thinking = response.json()["choices"][0]["message"]["reasoning_content"]
    assert thinking.startswith(json.loads(body)["messages"][0]["content"])
