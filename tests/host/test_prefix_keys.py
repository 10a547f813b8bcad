"""Page keys: one way to write bytes, no token hashed twice, and everything that must be in a key is."""

import hashlib
import struct
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcpjax.errors import ConfigError
from dcpjax.host.keys import KeyScheme, decode, hash_named, sha256


def keys_of(tokens, *, page_tokens=4, adapter=None, salt=None, **scheme):
    keys = KeyScheme(page_tokens, **scheme).start(adapter, salt)
    keys.extend(tokens)
    return keys.keys


def test_the_bytes_are_those_of_the_description():
    """Written out by hand: another process, another language, finds the same keys."""

    def text(value):
        return struct.pack("<I", len(value.encode())) + value.encode()

    def sha(data):
        return hashlib.sha256(data).digest()

    root = sha(text("né") + struct.pack("<I", 2))
    first = sha(root + text("m") + b"\x01" + text("lora") + b"\x01" + text("s") + struct.pack("<2i", 7, 2**31 - 1))
    second = sha(first + text("m") + b"\x01" + text("lora") + b"\x02" + struct.pack("<2i", 0, 258))
    tokens = [7, 2**31 - 1, 0, 258, 5]
    assert keys_of(tokens, page_tokens=2, model="m", seed="né", adapter="lora", salt="s") == [first, second]
    plain = sha(sha(text("") + struct.pack("<I", 2)) + text("") + b"\x00" + b"\x00" + struct.pack("<2i", 7, 2**31 - 1))
    assert keys_of(tokens[:3], page_tokens=2) == [plain]


@given(st.lists(st.lists(st.integers(0, 2**31 - 1), max_size=9), max_size=6), st.integers(1, 5))
def test_keys_do_not_depend_on_how_tokens_arrive(parts, page_tokens):
    tokens = [token for part in parts for token in part]
    calls = []

    def counted(data):
        calls.append(data)
        return sha256(data)

    keys = KeyScheme(page_tokens, hash=counted).start()
    del calls[:]
    for part in parts:
        keys.extend(part)
        keys.extend(())
    num_pages = len(tokens) // page_tokens
    assert keys.keys == keys_of(tokens, page_tokens=page_tokens)
    assert len(keys.keys) == len(keys.contents) == len(calls) == num_pages, "nothing is hashed twice"
    assert keys.num_tokens == len(tokens)
    assert list(decode(b"".join(keys.contents) + keys.tail)) == tokens
    assert all(len(content) == 4 * page_tokens for content in keys.contents)


def test_everything_that_content_depends_on_is_in_the_key():
    tokens = [1, 2, 3, 4] * 3
    variants = [
        {},
        {"model": "a"},
        {"adapter": "a"},
        {"adapter": ""},
        {"salt": "a"},
        {"salt": ""},
        {"seed": "a"},
        {"model": "a", "adapter": "a"},
        {"adapter": "a", "salt": "a"},
        {"hash": lambda data: hashlib.blake2s(data).digest()},
    ]
    chains = [keys_of(tokens, **variant) for variant in variants]
    chains.append(keys_of(tokens, page_tokens=3)[:3])
    for page in range(3):
        assert len({chain[page] for chain in chains}) == len(chains), "in the first key and, through it, in all"
    assert len({*keys_of(tokens)}) == 3, "equal tokens elsewhere have another key"
    # Texts are prefixed by their lengths: no two settings write the same bytes.
    assert keys_of(tokens, model="ab", adapter="c") != keys_of(tokens, model="a", adapter="bc")


def test_hashes_by_name(monkeypatch):
    assert hash_named("sha256") is sha256
    keys = keys_of(range(12), hash=hash_named("xxhash"), salt="s")
    assert [len(key) for key in keys] == [16] * 3 and keys != keys_of(range(12), hash=hash_named("xxhash"))
    assert hash_named("xxhash")(b"").hex() == "99aa06d3014798d86001c324468d497f", "XXH3 of 128 bits"
    with pytest.raises(ConfigError, match="got 'md5'; use 'sha256' or 'xxhash'"):
        hash_named("md5")
    monkeypatch.setitem(sys.modules, "xxhash", None)
    with pytest.raises(ConfigError, match=r"extra of that name: install it, or use 'sha256'"):
        hash_named("xxhash")


def test_the_hash_is_a_parameter():
    """Any digest of constant length does."""
    keys = keys_of(range(12), hash=lambda data: sum(data).to_bytes(2, "little"))
    assert [len(key) for key in keys] == [2, 2, 2]
    with pytest.raises(OverflowError):
        keys_of([2**31, 1, 2, 3])
