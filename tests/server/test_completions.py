"""Plain completions over a real socket: streamed equals whole, stops, choices, logprobs, usage."""

from types import SimpleNamespace

import pytest

from dcpjax.server.completions import _Choice, _Prompt
from dcpjax.server.protocol import CompletionBody
from dcpjax.server.ticket import Prediction, Update
from tests.server.fake_llm import STORY, make_tokenizer
from tests.server.process import events

PATH = "/v1/completions"
TOKENIZER = make_tokenizer()


def story(choice: int = 0) -> str:
    return STORY.format(choice=choice)


def post(client, **body):
    response = client.post(PATH, json={"prompt": "Tell me", "max_tokens": 100, **body})
    assert response.status_code == 200, response.text
    return response.json()


def stream(client, **body) -> list[dict]:
    response = client.post(PATH, json={"prompt": "Tell me", "max_tokens": 100, "stream": True, **body})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert response.headers["cache-control"] == "no-cache" and response.headers["x-accel-buffering"] == "no"
    return events(response.text)


def joined(chunks: list[dict]) -> dict[int, dict]:
    """Choices put together from the chunks of a stream; each must end once, and last."""
    choices: dict[int, dict] = {}
    for chunk in chunks:
        assert chunk["object"] == "text_completion"
        assert (chunk["id"], chunk["created"], chunk["model"]) == tuple(
            chunks[0][k] for k in ("id", "created", "model")
        )
        for part in chunk["choices"]:
            whole = choices.setdefault(part["index"], {"text": "", "finish_reason": None, "lists": []})
            assert whole["finish_reason"] is None
            assert part["text"] or part["finish_reason"], "a chunk that says nothing"
            whole["text"] += part["text"]
            whole["finish_reason"], whole["stop_reason"] = part["finish_reason"], part["stop_reason"]
            whole["lists"].append(part["logprobs"])
    assert all(choice["finish_reason"] for choice in choices.values())
    return choices


def test_an_answer_has_the_fields_clients_read(client):
    answer = post(client)
    assert answer["object"] == "text_completion" and answer["id"].startswith("cmpl-") and answer["model"] == "fake"
    assert answer["system_fingerprint"].startswith("dcpjax-") and isinstance(answer["created"], int)
    (choice,) = answer["choices"]
    assert choice == {
        "index": 0, "text": story(), "logprobs": None, "finish_reason": "stop", "stop_reason": None
    }  # fmt: skip
    ids = TOKENIZER.encode(story())
    prompt = len(TOKENIZER.encode("Tell me"))
    usage = answer["usage"]
    assert usage["completion_tokens"] == len(ids) + 1  # the end-of-text token is sampled, too
    assert usage["prompt_tokens"] == prompt and usage["total_tokens"] == prompt + len(ids) + 1
    assert usage["prompt_tokens_details"] == {"cached_tokens": 0}


def test_the_default_length_is_16(client):
    answer = client.post(PATH, json={"prompt": "x", "max_tokens": None}).json()
    assert answer["usage"]["completion_tokens"] == 16 and answer["choices"][0]["finish_reason"] == "length"


STOPS = ["END", "naïve 🙂", "ver the E", ["zzz", " of the 東", "story"], "<|user|>", "no such text"]


@pytest.mark.parametrize("stop", STOPS)
@pytest.mark.parametrize("include", [False, True])
def test_streamed_equals_whole_and_stops_span_tokens(client, stop, include):
    body = {"stop": stop, "include_stop_str_in_output": include}
    whole = post(client, **body)["choices"][0]
    places = [(story().find(s), s) for s in ([stop] if isinstance(stop, str) else stop) if s in story()]
    if places:
        at, hit = min(places)
        expected = (story()[: at + len(hit) * include], "stop", hit)
    else:
        expected = (story(), "stop", None)
    assert (whole["text"], whole["finish_reason"], whole["stop_reason"]) == expected
    streamed = joined(stream(client, **body))[0]
    assert (streamed["text"], streamed["finish_reason"], streamed["stop_reason"]) == expected


def test_tokens_after_a_stop_are_not_billed(client):
    # A step brings three tokens: those after the cut are nobody's.
    usage = post(client, stop=" quick")["usage"]
    assert usage["completion_tokens"] == len(TOKENIZER.encode(" the quick"))


def test_stop_token_ids_end_the_text_and_are_not_in_it(client):
    token = TOKENIZER.encode(" fox")[0]
    choice = post(client, stop_token_ids=[token])["choices"][0]
    assert (choice["text"], choice["stop_reason"]) == (story()[: story().find(" fox")], token)


def test_choices_and_prompts_are_ordered_prompt_major(client):
    body = {"prompt": ["one", "two"], "n": 2, "return_token_ids": True}
    whole = post(client, **body)
    assert [choice["index"] for choice in whole["choices"]] == [0, 1, 2, 3]
    assert [choice["text"] for choice in whole["choices"]] == [story(0), story(1), story(0), story(1)]
    ids = [TOKENIZER.encode(prompt) for prompt in ("one", "one", "two", "two")]
    assert [choice["prompt_token_ids"] for choice in whole["choices"]] == ids
    assert whole["usage"]["prompt_tokens"] == len(ids[0]) + len(ids[2])
    assert whole["usage"]["completion_tokens"] == sum(len(choice["token_ids"]) for choice in whole["choices"])
    chunks = stream(client, **body)
    streamed = joined(chunks)
    assert [streamed[i]["text"] for i in range(4)] == [story(0), story(1), story(0), story(1)]
    given = {c["index"]: c["prompt_token_ids"] for chunk in chunks for c in chunk["choices"] if "prompt_token_ids" in c}
    assert [given[i] for i in range(4)] == ids


def test_tokens_without_a_text_are_sent_as_they_come():
    """A model without a tokenizer has none; one with a tokenizer waits for the end of a character."""
    for tokenizer, sent in ((None, [[1], [2]]), (TOKENIZER, [[1, 2]])):
        served = SimpleNamespace(model=SimpleNamespace(tokenizer=tokenizer))
        choice = _Choice(_Prompt([5], ""), CompletionBody(prompt=[5]), served)
        taken = [choice.take(Update(0, "", [i], [], 0, Prediction(), end)) for i, end in ((1, None), (2, "stop"))]
        assert [update.token_ids for update in taken if update is not None] == sent


def test_prompts_of_token_ids(client):
    ids = TOKENIZER.encode("Tell me")
    for prompt, count in ((ids, 1), ([ids, ids], 2)):
        answer = post(client, prompt=prompt)
        assert [choice["text"] for choice in answer["choices"]] == [story()] * count
        assert answer["usage"]["prompt_tokens"] == count * len(ids)


def test_a_character_begun_in_the_prompt_of_ids_is_finished_whole(client):
    # The text of the choice goes on where the prompt's bytes end.
    half = TOKENIZER.encode("é")[:1]
    if len(half) == len(TOKENIZER.encode("é")):
        half = [next(i for i in range(TOKENIZER.vocab_size) if TOKENIZER.token_bytes(i) == b"\xc3")]
    text = post(client, prompt=half, echo=True)["choices"][0]["text"]
    assert text.startswith("\ufffd")


def test_echo_gives_the_prompt_first(client):
    for prompt, shown in (("Tell me", "Tell me"), (TOKENIZER.encode("Tell me"), "Tell me")):
        assert post(client, prompt=prompt, echo=True)["choices"][0]["text"] == shown + story()
        assert joined(stream(client, prompt=prompt, echo=True))[0]["text"] == shown + story()


def test_logprobs_are_parallel_lists(client):
    whole = post(client, logprobs=3)["choices"][0]["logprobs"]
    tokens = [*TOKENIZER.encode(story()), TOKENIZER.token_id("<|user|>")]
    names = [TOKENIZER.decode([token], skip_special_tokens=False) for token in tokens]
    assert whole["tokens"] == names and whole["token_logprobs"] == [-0.25] * len(names)
    assert whole["text_offset"] == [sum(map(len, names[:i])) for i in range(len(names))]
    best = [TOKENIZER.decode([token], skip_special_tokens=False) for token in range(3)]
    assert whole["top_logprobs"][1] == {best[0]: -1.0, best[1]: -2.0, best[2]: -3.0, names[1]: -0.25}
    for key in ("tokens", "token_logprobs", "text_offset", "top_logprobs"):
        streamed = joined(stream(client, logprobs=3))[0]["lists"]
        assert [item for part in streamed for item in part[key]] == whole[key]


def test_logprobs_of_nothing_but_the_chosen_and_of_the_impossible(client):
    lists = post(client, logprobs=0, max_tokens=2)["choices"][0]["logprobs"]
    assert lists["top_logprobs"] == [{name: -0.25} for name in lists["tokens"]]
    lists = post(client, logprobs=20, max_tokens=1)["choices"][0]["logprobs"]
    last = TOKENIZER.decode([19], skip_special_tokens=False)
    assert lists["top_logprobs"][0][last] == -9999.0


def test_usage_comes_last_and_only_when_asked_for(client):
    chunks = stream(client)
    assert all("usage" not in chunk for chunk in chunks)
    chunks = stream(client, stream_options={"include_usage": True})
    assert chunks[-1]["choices"] == [] and all(chunk.get("usage") is None for chunk in chunks[:-1])
    assert chunks[-1]["usage"] == post(client)["usage"]
    chunks = stream(client, stream_options={"include_usage": True, "continuous_usage_stats": True})
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts) and counts[-1] == post(client)["usage"]["completion_tokens"]


def test_min_tokens_and_ignore_eos(client):
    length = len(TOKENIZER.encode(story()))
    answer = post(client, min_tokens=length + 5)
    assert answer["usage"]["completion_tokens"] == length + 6
    answer = post(client, ignore_eos=True)
    assert answer["usage"]["completion_tokens"] == 100 and answer["choices"][0]["finish_reason"] == "length"


def test_null_and_unknown_fields_do_not_count(client):
    nulls = dict.fromkeys(set(CompletionBody.model_fields) - {"prompt", "max_tokens"})
    body = {**nulls, "user": "me", "a_field_of_tomorrow": {"x": [1]}}
    assert post(client, **body)["choices"][0]["text"] == story()


def test_truncated_prompts_keep_their_end(client):
    answer = post(client, prompt="one two three", truncate_prompt_tokens=2, return_token_ids=True)
    assert answer["choices"][0]["prompt_token_ids"] == TOKENIZER.encode("one two three")[-2:]


def test_ids_carry_the_clients_own_suffix(client):
    assert post(client, request_id="mine")["id"] == "cmpl-mine"
    response = client.post(PATH, json={"prompt": "x", "max_tokens": 1}, headers={"X-Request-Id": "header"})
    assert response.json()["id"] == "cmpl-header"


def test_prompts_have_logprobs_too(client):
    """Of every token but the first, computed anew even if the prompt is cached."""
    prompt = "one two three four five six seven"
    ids = TOKENIZER.encode(prompt)
    names = [TOKENIZER.decode([token]) for token in ids]
    for _ in range(2):
        answer = post(client, prompt=prompt, prompt_logprobs=2, max_tokens=1, n=2)
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        for choice in answer["choices"]:
            first, *rest = choice["prompt_logprobs"]
            assert first is None and len(rest) == len(ids) - 1
            for token, entry in zip(ids[1:], rest, strict=True):
                assert entry[str(token)]["logprob"] == -0.25 and entry[str(token)]["rank"] == 1
                assert entry["1"] == {"logprob": -2.0, "rank": 2, "decoded_token": TOKENIZER.decode([1], False)}
    body = {"prompt": prompt, "echo": True, "logprobs": 1, "max_tokens": 3}
    lists = post(client, **body)["choices"][0]["logprobs"]
    assert lists["tokens"][: len(ids)] == names and len(lists["tokens"]) == len(ids) + 3
    assert lists["token_logprobs"] == [None, *[-0.25] * (len(ids) + 2)] and lists["top_logprobs"][0] is None
    assert lists["text_offset"][len(ids)] == len(prompt)
    parts = joined(stream(client, **body))[0]["lists"]
    assert [item for part in parts for item in part["token_logprobs"]] == lists["token_logprobs"]
    chat = {
        "messages": [{"role": "user", "content": "Hi"}],
        "prompt_logprobs": 0,
        "max_tokens": 1,
        "return_token_ids": True,
    }
    answer = client.post("/v1/chat/completions", json=chat).json()
    assert [next(iter(entry)) for entry in answer["prompt_logprobs"][1:]] == [
        str(i) for i in answer["prompt_token_ids"][1:]
    ]
