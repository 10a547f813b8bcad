"""Text that grows token by token equals the text of all tokens; stop strings cut where a whole-text search cuts."""

import dataclasses
import json

import pytest
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dcpjax.errors import ConfigError, RequestError
from dcpjax.template import ChatTemplate
from dcpjax.text import Needle, TextStream, Tokenizer

SPECIAL = ["<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>"]
TAGS = ["<think>", "</think>", "<tool_call>"]


def byte_level() -> tokenizers.Tokenizer:
    inner = tokenizers.Tokenizer(tokenizers.models.BPE())
    inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=330,
        show_progress=False,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
    )
    inner.train_from_iterator(["the stop and the end of the story, naïve café 東京 🙂 " * 3], trainer)
    inner.add_special_tokens(SPECIAL)
    inner.add_tokens([tokenizers.AddedToken(tag, special=False, normalized=False) for tag in TAGS])
    return inner


INNER = byte_level()
TOKENIZER = Tokenizer(INNER)
IDS = st.integers(0, TOKENIZER.vocab_size - 1)
TEXT = st.text(alphabet="aab. é東🙂<>/", max_size=24)


@dataclasses.dataclass(frozen=True)
class Rules:
    stop: tuple[str, ...] = ()
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    min_tokens: int = 0


def first_stop(text: str, stops: tuple[str, ...]) -> tuple[int, str] | None:
    """Oracle: where the first stop string to be complete ends, found by trying every end."""
    for end in range(len(text) + 1):
        hits = [stop for stop in stops if text[:end].endswith(stop)]
        if hits:
            return end, max(hits, key=len)
    return None


@given(st.text(max_size=40))
def test_encode_then_decode_is_the_text(text):
    assert TOKENIZER.decode(TOKENIZER.encode(text)) == INNER.decode(INNER.encode(text).ids)


@given(st.lists(IDS, max_size=30), st.booleans())
def test_decode_equals_the_library(ids, skip):
    assert TOKENIZER.decode(ids, skip_special_tokens=skip) == INNER.decode(ids, skip_special_tokens=skip)


def test_ids_outside_the_vocabulary_have_no_text():
    assert TOKENIZER.token_bytes(TOKENIZER.vocab_size) == b"" and TOKENIZER.token_bytes(-1) == b""
    assert TOKENIZER.decode([TOKENIZER.vocab_size + 5]) == ""


@given(st.lists(IDS, max_size=30), st.booleans())
def test_pushed_text_is_the_whole_text_and_never_half_a_character(ids, skip):
    stream = TextStream(TOKENIZER, Rules(skip_special_tokens=skip))
    pieces = [stream.push(token) for token in ids] + [stream.finish()]
    assert "".join(pieces) == stream.text == TOKENIZER.decode(ids, skip_special_tokens=skip)
    assert stream.finish() == "" and stream.stop_hit is None


def test_multi_byte_characters_wait_for_their_last_byte():
    stream = TextStream(TOKENIZER, Rules())
    ids = [byte_token(byte) for byte in "🙂é".encode()]
    assert [stream.push(token) for token in ids] == ["", "", "", "🙂", "", "é"]


def byte_token(byte: int) -> int:
    return next(token for token in range(256) if TOKENIZER.token_bytes(token) == bytes([byte]))


def test_a_character_begun_in_the_prompt_is_finished_whole():
    euro = [byte_token(byte) for byte in "€".encode()]
    assert TextStream(TOKENIZER, Rules(), prompt_tail=euro[:2]).push(euro[2]) == "€"
    assert TextStream(TOKENIZER, Rules()).push(euro[2]) == "\ufffd"


@settings(max_examples=300)
@given(
    st.lists(TEXT, max_size=6),
    st.lists(st.text(alphabet="ab. é東", min_size=1, max_size=4), max_size=3),
    st.booleans(),
)
@example(["ab", "c"], ["abc", "b"], False)
@example(["aab", "aab", "b"], ["aabb"], True)
def test_stop_strings_cut_as_on_the_whole_text(parts, stops, include):
    ids = [token for part in parts for token in TOKENIZER.encode(part)]
    rules = Rules(stop=tuple(stops), include_stop_str_in_output=include)
    stream = TextStream(TOKENIZER, rules)
    shown = ""
    for token in ids:
        shown += stream.push(token)
        if stream.stop_hit is not None:
            break
    whole = TOKENIZER.decode(ids)
    hit = first_stop(whole, rules.stop)
    if hit is None:
        assert stream.stop_hit is None and shown + stream.finish() == whole
    else:
        end, stop = hit
        assert stream.stop_hit == stop
        assert shown == whole[: end if include else end - len(stop)] and stream.finish() == ""


@given(st.lists(st.sampled_from("ab"), max_size=20), st.text(alphabet="ab", min_size=1, max_size=3))
def test_what_is_held_back_is_the_longest_end_that_could_become_the_stop(chars, stop):
    stream, pushed = TextStream(TOKENIZER, Rules(stop=(stop,))), ""
    for char in chars:
        stream.push(byte_token(ord(char)))
        pushed += char
        if stream.stop_hit is not None:
            return
        held = next(k for k in range(len(stop) - 1, -1, -1) if pushed.endswith(stop[:k]))
        assert stream.text == pushed[: len(pushed) - held]


@given(st.text(alphabet="ab", min_size=1, max_size=4), st.lists(st.text(alphabet="ab", max_size=5), max_size=6))
def test_needle_skips_to_the_same_state_as_one_long_read(text, pieces):
    parts, whole = Needle(text), Needle(text)
    for piece in pieces:
        parts.skip(piece)
    whole.skip("".join(pieces))
    assert parts.matched == whole.matched


def test_a_stop_before_min_tokens_is_text_and_one_that_ends_after_it_counts():
    ids = [byte_token(ord(char)) for char in "ababxab"]
    stream = TextStream(TOKENIZER, Rules(stop=("ab",), min_tokens=4))
    shown = "".join(stream.push(token) for token in ids[:3])
    assert shown == "ab" and stream.stop_hit is None
    stream.push(ids[3])
    assert stream.stop_hit == "ab" and stream.text == "ab"


def test_take_gives_each_character_once():
    stream = TextStream(TOKENIZER, Rules())
    stream.push(byte_token(ord("a")))
    stream.push(byte_token(ord("b")))
    assert stream.take() == "ab" and stream.take() == ""
    stream.push(byte_token(0xE2))
    stream.finish()
    assert stream.take() == "\ufffd" and stream.text == "ab\ufffd"


TEMPLATE = """[gMASK]<sop>{%- for m in messages %}
{%- if m.role == 'odd' %}{{ raise_exception('role odd') }}{% endif %}
<|{{ m.role }}|>{{ m.content }}
{%- if loop.index > 8 %}{% break %}{% endif %}
{%- endfor %}
{%- if tools %}{% for t in tools %}{{ t | tojson }}{% endfor %}{% endif %}
{%- if add_generation_prompt %}<|assistant|>{{ '<think></think>' if enable_thinking is false else '<think>' }}{% endif %}
"""


@pytest.fixture
def folder(tmp_path):
    INNER.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "<|endoftext|>"}}))
    return tmp_path


def test_chat_template_renders_and_its_control_tokens_are_single_ids(folder):
    tokenizer = Tokenizer.load(folder)
    text = tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}])
    assert text == "[gMASK]<sop><|user|>Hi<|assistant|><think>"
    ids = tokenizer.encode_chat(text)
    assert [tokenizer.decode([i], skip_special_tokens=False) for i in ids[:3]] == ["[gMASK]", "<sop>", "<|user|>"]
    assert ids[-1] == tokenizer.token_id("<think>")
    off = tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], enable_thinking=False)
    assert off.endswith("<|assistant|><think></think>")


def test_tojson_keeps_order_and_letters(folder):
    tools = [{"zebra": "<é>", "ant": 1}]
    text = Tokenizer.load(folder).apply_chat_template([{"role": "user", "content": ""}], tools=tools)
    assert '{"zebra": "<é>", "ant": 1}' in text


def test_continue_final_message_ends_with_its_text(folder):
    messages = [{"role": "user", "content": "go on"}, {"role": "assistant", "content": "go on "}]
    text = Tokenizer.load(folder).apply_chat_template(messages, continue_final_message=True)
    assert text == "[gMASK]<sop><|user|>go on<|assistant|>go on"
    with pytest.raises(RequestError, match="continue_final_message"):
        Tokenizer.load(folder).apply_chat_template([{"role": "user", "content": None}], continue_final_message=True)


@pytest.mark.parametrize("source", [TEMPLATE, "{{ messages.missing.again }}", "{{ 1 / messages }}"])
def test_template_failures_are_request_errors(source):
    with pytest.raises(RequestError, match="messages: the chat template"):
        ChatTemplate(source).render(messages=[{"role": "odd", "content": ""}])


def test_the_sandbox_keeps_a_template_from_python():
    template = ChatTemplate("{{ ''.__class__.__mro__ }}{{ messages.append(1) }}")
    with pytest.raises(RequestError):
        template.render(messages=[])


def test_load_names_what_is_wrong(folder, tmp_path_factory):
    with pytest.raises(ConfigError, match="no tokenizer.json"):
        Tokenizer.load(tmp_path_factory.mktemp("empty"))
    with pytest.raises(ConfigError, match="chat template cannot be read"):
        Tokenizer.load(folder, chat_template="{% if %}")
    with pytest.raises(ConfigError, match="only ByteLevel"):
        Tokenizer(tokenizers.Tokenizer(tokenizers.models.BPE()))
    (folder / "tokenizer_config.json").write_text("[")
    with pytest.raises(ConfigError, match="not valid JSON"):
        Tokenizer.load(folder)


def test_without_a_template_chat_is_refused():
    with pytest.raises(RequestError, match="no chat template"):
        TOKENIZER.apply_chat_template([{"role": "user", "content": "x"}])


def test_the_template_of_the_configuration_file_is_the_fallback(folder):
    (folder / "chat_template.jinja").unlink()
    config = {"chat_template": [{"name": "default", "template": "{{ eos_token }}!"}], "eos_token": "E"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    assert Tokenizer.load(folder).apply_chat_template([]) == "E!"
