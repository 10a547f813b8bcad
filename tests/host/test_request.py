"""What may be asked for, and the host record of it."""

import pytest

from dcpjax.errors import RequestError
from dcpjax.host.request import Request, SamplingParams


def test_defaults_and_forms():
    params = SamplingParams()
    assert params.max_tokens == 16 and params.stop == () and not params.greedy
    assert SamplingParams(stop="end", stop_token_ids=[3]).stop == ("end",)
    assert SamplingParams(stop=["a", "b"], stop_token_ids=[3]).stop_token_ids == (3,)
    assert SamplingParams(temperature=9e-6).greedy and not SamplingParams(temperature=1e-5).greedy
    assert SamplingParams(max_tokens=None, min_tokens=5).max_tokens is None
    SamplingParams(seed=-(2**63), top_k=-1, logprobs=-1, n=64, logit_bias={5: -100}, top_p=1, min_p=1, stop=["x"] * 16)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("temperature", "hot"),
        ("temperature", True),
        ("top_k", -2),
        ("top_k", 1.5),
        ("top_p", 0.0),
        ("top_p", 1.01),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("max_tokens", 0),
        ("max_tokens", True),
        ("min_tokens", -1),
        ("min_tokens", 17),
        ("stop", ""),
        ("stop", ["a"] * 17),
        ("stop", [7]),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", ["7"]),
        ("seed", 2**63),
        ("seed", 1.0),
        ("n", 0),
        ("n", 65),
        ("presence_penalty", 2.1),
        ("frequency_penalty", -2.1),
        ("repetition_penalty", 0),
        ("repetition_penalty", 1e-46),
        ("logit_bias", {"5": 1.0}),
        ("logit_bias", {-5: 1.0}),
        ("logit_bias", {5: 101}),
        ("logprobs", -2),
    ],
)
def test_a_bad_value_is_refused_by_name(field, value):
    with pytest.raises(RequestError, match=f"^{field}: got "):
        SamplingParams(**{field: value})


def test_known_tokens():
    request = Request("a", [1, 2, 3], SamplingParams(), limit=9, seed=0, output=[4, 5])
    assert request.num_tokens == 5 and request.tokens == [1, 2, 3, 4, 5]
    for start in range(6):
        for stop in range(start, 6):
            assert list(request.known(start, stop)) == request.tokens[start:stop]


def test_the_table_is_one_object_until_it_grows():
    request = Request("a", [1], SamplingParams(), limit=9, seed=0)
    request.hold([7])
    table = request.table
    assert request.table is table == (7,)
    request.hold([9])
    assert request.table == (7, 9)
    assert request.drop_pages() == [7, 9] and request.table == () and request.pages == []


def test_check_finds_positions_out_of_order():
    request = Request("a", [1, 2, 3], SamplingParams(), limit=9, seed=0)
    request.check(num_drafts=0)
    request.status, request.row, request.prefill, request.computed = "running", 0, 3, 3
    with pytest.raises(AssertionError):  # position 3 is nobody's: no token was sampled and none is in flight
        request.check(num_drafts=0)
    request.inflight = request.promised = 1
    request.check(num_drafts=0)
    request.computed = 5
    with pytest.raises(AssertionError):
        request.check(num_drafts=1)
    request.check(num_drafts=2)
    request.matched = 8
    with pytest.raises(AssertionError):
        request.check(num_drafts=2)
