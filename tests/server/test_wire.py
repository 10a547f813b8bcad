"""Messages between the two processes: whole however they are cut, and errors that may cross."""

import pickle
from array import array

from hypothesis import given
from hypothesis import strategies as st

from dcpjax.errors import NeverFitsError
from dcpjax.host.request import SamplingParams
from dcpjax.server.echo import TINY
from dcpjax.server.errors import ApiError
from dcpjax.server.rules import Form, RulesWish
from dcpjax.server.wire import Add, Job, Unpacker, carried, pack
from dcpjax.text import Tokenizer


@given(st.lists(st.one_of(st.text(), st.lists(st.integers()), st.binary(max_size=300)), max_size=5), st.data())
def test_messages_are_whole_however_they_are_cut(messages, data):
    stream = b"".join(map(pack, messages))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=6)))
    unpacker, found = Unpacker(), []
    for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        found += unpacker.take(stream[start:end])
    assert found == messages


def test_jobs_and_errors_arrive_as_they_left(caplog):
    rules = RulesWish(Form("guided_regex", "regex", "[a-c]+"), "</think>", [[1, 2]])
    sent = Add(7, [Job(array("i", [1, 2, 3]), SamplingParams(stop="x", logit_bias={1: 2.0}), rules=rules)], True)
    assert list(Unpacker().take(pack(sent))) == [sent]
    (error,) = Unpacker().take(pack(carried(ApiError(429, "full", "n", {"Retry-After": "1"}))))
    assert (error.status, error.message, error.param, error.headers) == (429, "full", "n", {"Retry-After": "1"})
    (error,) = Unpacker().take(pack(carried(NeverFitsError("max_tokens: no"))))
    assert type(error) is NeverFitsError and str(error) == "max_tokens: no"
    (error,) = Unpacker().take(pack(carried(ValueError("/secret/path"))))
    assert "secret" not in str(error) and "/secret/path" in caplog.text, "others go to the log"


def test_a_tokenizer_can_cross():
    one = Tokenizer.load(TINY)
    other = pickle.loads(pickle.dumps(one))
    messages = [{"role": "user", "content": "naïve <|user|> 東京"}]
    assert other.apply_chat_template(messages) == one.apply_chat_template(messages)
    assert other.encode_chat(other.apply_chat_template(messages)) == one.encode_chat(one.apply_chat_template(messages))
