"""Keys of page contents: a hash chain over the whole pages of one sequence.

A key stands for all tokens up to the end of its page and for everything else the content depends on. It is a hash of
bytes written in one way only, so that every process with the same settings finds the same keys::

    root  = H(text(seed) ‖ u32(page_tokens))
    key_0 = H(root      ‖ text(model) ‖ option(adapter) ‖ option(salt) ‖ tokens of page 0)
    key_i = H(key_{i−1} ‖ text(model) ‖ option(adapter) ‖ 02           ‖ tokens of page i)

u32: four bytes, little-endian. text: u32 length in bytes, then UTF-8. option: 00 for none, else 01 and the text.
tokens: int32, little-endian. The salt reaches later keys through the chain.
"""

import dataclasses
import hashlib
import struct
import sys
from array import array
from collections.abc import Callable, Sequence

from dcpjax.errors import ConfigError

Hash = Callable[[bytes], bytes]

TOKEN_BYTES = 4
_NOT_FIRST = b"\x02"


def sha256(data: bytes) -> bytes:
    """The default hash: 32 bytes, and nobody can make two contents that share a key."""
    return hashlib.sha256(data).digest()


def hash_named(name: str) -> Hash:
    """The hash that users call so: "sha256", or "xxhash", which is XXH3 of 128 bits: four times as fast, but whoever can
    choose prompts can make two contents that share a key. Then one of them is not cached; a wrong hit it can not make.

    Raises `ConfigError` for another name, and for "xxhash" if that package is not installed.
    """
    if name == "sha256":
        return sha256
    if name != "xxhash":
        raise ConfigError(f"prefix_caching_hash_algo: got {name!r:.100}; use 'sha256' or 'xxhash'")
    try:
        import xxhash
    except ImportError:
        raise ConfigError(
            "prefix_caching_hash_algo 'xxhash' needs the package xxhash, dcpjax's extra of that name: install it, or use 'sha256'"
        ) from None
    return xxhash.xxh3_128_digest


@dataclasses.dataclass(frozen=True)
class KeyScheme:
    """What keys depend on beside a sequence. Equal schemes give equal keys in every process.

    page_tokens: tokens of a page. model: whose content it is. seed: any text; sets apart installations that share
    nothing. hash: bytes to a digest of constant length: hits are confirmed by their tokens, so a weaker hash costs hits
    and no correctness.
    """

    page_tokens: int
    model: str = ""
    seed: str = ""
    hash: Hash = sha256

    def start(self, adapter: str | None = None, salt: str | None = None) -> "PageKeys":
        """Keys of a sequence that has no tokens yet."""
        return PageKeys(self, adapter, salt)


class PageKeys:
    """Keys of one sequence's whole pages. They grow as tokens arrive, and no token is hashed twice.

    keys: digests, page by page. contents: the tokens of the same pages as bytes. adapter, salt: who may share them.
    """

    __slots__ = ("_hash", "_head", "_page_tokens", "_parent", "_tail", "adapter", "contents", "keys", "salt")

    def __init__(self, scheme: KeyScheme, adapter: str | None, salt: str | None):
        self.keys: list[bytes] = []
        self.contents: list[bytes] = []
        self.adapter, self.salt = adapter, salt
        self._hash, self._page_tokens = scheme.hash, scheme.page_tokens
        self._parent = scheme.hash(_text(scheme.seed) + struct.pack("<I", scheme.page_tokens))
        self._head = _text(scheme.model) + _option(adapter)
        self._tail = array("i")

    @property
    def num_tokens(self) -> int:
        """Tokens so far, those behind the last whole page included."""
        return len(self.contents) * self._page_tokens + len(self._tail)

    @property
    def tail(self) -> bytes:
        """The tokens after the last whole page."""
        return _encode(self._tail)

    def extend(self, tokens: Sequence[int]) -> None:
        """Adds tokens, int32 each, and the keys of the pages they fill."""
        tail = self._tail
        tail.extend(array("i", tokens))  # twice as fast as without the copy
        whole = len(tail) - len(tail) % self._page_tokens
        if not whole:
            return
        data = _encode(tail[:whole])
        del tail[:whole]
        size = self._page_tokens * TOKEN_BYTES
        contents = [data[start : start + size] for start in range(0, len(data), size)]
        make, keys, parent = self._hash, self.keys, self._parent
        head = self._head + (_NOT_FIRST if keys else _option(self.salt))
        for content in contents:
            parent = make(parent + head + content)
            if not keys:
                head = self._head + _NOT_FIRST
            keys.append(parent)
        self.contents += contents
        self._parent = parent


def decode(content: bytes) -> tuple[int, ...]:
    """The tokens of a page's content."""
    return struct.unpack(f"<{len(content) // TOKEN_BYTES}i", content)


def _encode(tokens: array) -> bytes:
    if sys.byteorder == "big":
        tokens = tokens[:]
        tokens.byteswap()
    return tokens.tobytes()


def _text(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<I", len(data)) + data


def _option(text: str | None) -> bytes:
    return b"\x00" if text is None else b"\x01" + _text(text)
