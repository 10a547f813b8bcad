"""Text in and out of the model: the tokenizer with its chat template, and text that grows token by token.

Tokenizers of this family are byte-level: every token is a run of bytes, so text is the bytes of the tokens, joined and
read as UTF-8 with U+FFFD for what is not. `TextStream` does that one token at a time in time that depends on the new
bytes only, and gives the same characters as decoding everything at the end.
"""

import codecs
import functools
import json
import pathlib
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import tokenizers

from dcpjax.errors import ConfigError, RequestError
from dcpjax.template import ChatTemplate
from dcpjax.typed import MARK, TypedTokens

# Characters that are encoded in less time than it takes to wake other threads for it.
_SHORT = 2000

# Names in tokenizer_config.json that templates may refer to.
_NAMED_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token")


class TextRules(Protocol):
    """What a `TextStream` reads of the sampling parameters: `stop`, `include_stop_str_in_output`, `skip_special_tokens`
    and `min_tokens`, see `SamplingParams`."""

    @property
    def stop(self) -> Sequence[str]: ...
    @property
    def include_stop_str_in_output(self) -> bool: ...
    @property
    def skip_special_tokens(self) -> bool: ...
    @property
    def min_tokens(self) -> int: ...


class Tokenizer:
    """A byte-level tokenizer and its chat template. Safe to use from several threads. Raises `ConfigError` for
    others."""

    def __init__(self, tokenizer: tokenizers.Tokenizer, template: ChatTemplate | None = None):
        if not isinstance(tokenizer.decoder, tokenizers.decoders.ByteLevel):
            raise ConfigError(
                f"tokenizer.json has the decoder {type(tokenizer.decoder).__name__}; only ByteLevel is supported"
            )
        self._tokenizer = tokenizer
        self._template = template
        self._bytes, self._special = _token_table(tokenizer)
        self.texts = {
            token: data.decode()
            for token, data in enumerate(self._bytes)
            if data.isascii() and token not in self._special
        }  # of tokens that are whole characters whatever stands before them, but for control tokens
        self._typed = TypedTokens(token.content for token in tokenizer.get_added_tokens_decoder().values())

    def __reduce__(self):
        return Tokenizer, (self._tokenizer, self._template)

    @functools.cached_property
    def _plain(self) -> tokenizers.Tokenizer:
        """To which every text is only text. Made when somebody types a control token: it takes a second for 150k tokens."""
        without = {**json.loads(self._tokenizer.to_str()), "added_tokens": []}
        return tokenizers.Tokenizer.from_str(json.dumps(without))

    @classmethod
    def load(cls, folder: str | pathlib.Path, chat_template: str | None = None) -> "Tokenizer":
        """Reads `tokenizer.json`, `tokenizer_config.json` and `chat_template.jinja` of a folder.

        `chat_template` (Jinja source) replaces the folder's own. Raises `ConfigError` for what is missing or broken.
        """
        folder = pathlib.Path(folder)
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise ConfigError(f"{folder} has no tokenizer.json; give a folder that has one with --tokenizer")
        try:
            inner = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # noqa: BLE001 - the library raises bare Exception
            raise ConfigError(f"{path} cannot be read: {error}") from None
        inner.no_padding()
        inner.no_truncation()
        config = _read_json(folder / "tokenizer_config.json")
        source = chat_template if chat_template is not None else _template_source(folder, config)
        named = {name: _token_text(config.get(name)) for name in _NAMED_TOKENS if config.get(name) is not None}
        return cls(inner, ChatTemplate(source, named) if source is not None else None)

    @property
    def vocab_size(self) -> int:
        """One more than the greatest token id."""
        return len(self._bytes)

    @property
    def has_chat_template(self) -> bool:
        """Whether conversations can be rendered."""
        return self._template is not None

    def token_id(self, text: str) -> int | None:
        """The id of the token that is written `text`, None when there is none."""
        return self._tokenizer.token_to_id(text)

    def token_name(self, token_id: int) -> str | None:
        """How the vocabulary writes this token (byte-level letters), None for an id outside it."""
        return self._tokenizer.id_to_token(token_id)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes this token stands for; empty for ids the vocabulary does not name."""
        return self._bytes[token_id] if 0 <= token_id < len(self._bytes) else b""

    def is_special(self, token_id: int) -> bool:
        """Whether this is a control token, which decoding leaves out by default."""
        return token_id in self._special

    def to_json(self) -> str:
        """The tokenizer as the text of a tokenizer.json."""
        return self._tokenizer.to_str()

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`; control tokens written out in it become those tokens."""
        if len(text) < _SHORT:
            return self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        # The batch call releases the interpreter lock, the single one does not: a long prompt must not stall others.
        return self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids

    def decode(self, token_ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """Text of all the tokens together; bytes that are not UTF-8 become U+FFFD."""
        table, most = self._bytes, len(self._bytes)
        hidden = self._special if skip_special_tokens else ()
        pieces = [table[t] for t in token_ids if 0 <= t < most and t not in hidden]
        return b"".join(pieces).decode("utf-8", errors="replace")

    def apply_chat_template(
        self,
        messages: Sequence[dict[str, Any]],
        tools: Sequence[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        allow_special: bool = False,
        template: ChatTemplate | None = None,
        **kwargs: Any,
    ) -> str:
        """The prompt of a conversation, for `encode_chat`. `kwargs` go to the template as they are.

        `continue_final_message` ends the prompt right after the text of the last message, so that the model goes on
        with it. Control tokens in messages and tools are marked, which makes them text; with `allow_special` they are
        control tokens. `template` is rendered instead of the model's own. Raises `RequestError` when there is no template
        or it refuses the messages.
        """
        template = template or self._template
        if template is None:
            raise RequestError("messages: this model has no chat template; use /v1/completions, or --chat-template")
        if not allow_special:
            messages, tools = self._typed.mark_messages(messages), self._typed.mark(tools)
        text = template.render(
            messages=messages,
            tools=tools,
            add_generation_prompt=add_generation_prompt and not continue_final_message,
            **kwargs,
        )
        return _cut_after(text, messages[-1]) if continue_final_message else text

    def encode_chat(self, prompt: str) -> list[int]:
        """Token ids of a rendered conversation: the template has already written every control token."""
        if MARK not in prompt:
            return self.encode(prompt, add_special_tokens=False)
        return self._typed.encode(prompt, self.token_id, self._encode_plain)

    def _encode_plain(self, texts: list[str]) -> list[list[int]]:
        if sum(map(len, texts)) < _SHORT:
            return [self._plain.encode(text, add_special_tokens=False).ids for text in texts]
        return [found.ids for found in self._plain.encode_batch_fast(texts, add_special_tokens=False)]


class Needle:
    """Finds one string in text that comes in pieces, reading each character once (Knuth, Morris and Pratt).

    `matched` is the length of the longest end of the text so far that begins the string: what must be held back.
    """

    def __init__(self, text: str):
        self.text = text
        self.matched = 0
        self._fallback = _fallback(text)

    def scan(self, piece: str) -> int | None:
        """Reads on; the place in `piece` right behind the first full occurrence, where reading stops, or None."""
        if not self.matched and self.text[0] not in piece:
            return None
        text, matched = self.text, self.matched
        for i, char in enumerate(piece):
            while matched and char != text[matched]:
                matched = self._fallback[matched]
            matched += char == text[matched]
            if matched == len(text):
                self.matched = self._fallback[matched]
                return i + 1
        self.matched = matched
        return None

    def copy(self) -> "Needle":
        """One that has read as much."""
        other = Needle(self.text)
        other.matched = self.matched
        return other

    def skip(self, piece: str) -> None:
        """Reads on over full occurrences."""
        at = 0
        while at < len(piece) and (end := self.scan(piece[at:])) is not None:
            at += end


class TextStream:
    """The text of one choice while its tokens arrive.

    What `push` returns may be shown at once: it never ends inside a character, and an end that could become a stop
    string is held back. The stop string that is *complete* first ends the text; of those complete at the same place
    the longest. One complete before `min_tokens` tokens is plain text.
    """

    def __init__(self, tokenizer: Tokenizer, params: TextRules, prompt_tail: Sequence[int] = ()):
        """`prompt_tail`: the last few prompt tokens, so that a character begun in the prompt is finished whole."""
        self.stop_hit: str | None = None
        self._tokenizer = tokenizer
        self._skip_special = params.skip_special_tokens
        self._include_stop = params.include_stop_str_in_output
        self._min_tokens = params.min_tokens
        self._needles = [Needle(stop) for stop in params.stop]
        self._num_tokens = 0
        self._held = ""
        self._pieces: list[str] = []
        self._taken = 0
        self._ended = False
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        # A character has at most 4 bytes, a token at least one.
        self._decoder.decode(b"".join(map(tokenizer.token_bytes, prompt_tail[-4:])))
        self._begun = self._inside()

    @property
    def text(self) -> str:
        """Everything shown so far."""
        return "".join(self._pieces)

    def push(self, token_id: int) -> str:
        """Takes the next token; returns the text that may be shown now, often empty."""
        self._num_tokens += 1
        if self._ended:
            return ""
        if not self._begun:
            piece = self._tokenizer.texts.get(
                token_id
            )  # most tokens: to ask the decoder takes longer than all the rest
            if piece is not None:
                return self._advance(piece)
        if self._skip_special and self._tokenizer.is_special(token_id):
            return ""
        piece = self._decoder.decode(self._tokenizer.token_bytes(token_id))
        self._begun = self._inside()
        return self._advance(piece)

    def finish(self) -> str:
        """Ends the text: returns what was held back, nothing after a stop string or a second time."""
        if self._ended:
            return ""
        self._ended = True
        return self._show(self._held + self._decoder.decode(b"", final=True))

    def take(self) -> str:
        """What was shown since the last call: for a reader that does not see every `push`."""
        taken, self._taken = self._taken, len(self._pieces)
        return self._pieces[taken] if taken == self._taken - 1 else "".join(self._pieces[taken:])

    def _inside(self) -> bool:
        """Whether a character has begun and not ended."""
        return bool(self._decoder.getstate()[0])

    def _advance(self, piece: str) -> str:
        if not self._needles:
            if piece:
                self._pieces.append(piece)
            return piece
        if not piece:
            return piece
        text = self._held + piece
        if self._num_tokens < self._min_tokens:
            for needle in self._needles:
                needle.skip(piece)
        else:
            ends = [(end, -len(needle.text), needle.text) for needle in self._needles if (end := needle.scan(piece))]
            if ends:
                end, _, self.stop_hit = min(ends)
                self._ended = True
                return self._show(text[: len(self._held) + end - (0 if self._include_stop else len(self.stop_hit))])
        keep = len(text) - max(needle.matched for needle in self._needles)
        self._held = text[keep:]
        return self._show(text[:keep])

    def _show(self, piece: str) -> str:
        if piece:
            self._pieces.append(piece)
        return piece


@functools.lru_cache(maxsize=1024)
def _fallback(text: str) -> tuple[int, ...]:
    """At i: the length of the longest proper end of `text[:i]` that begins it."""
    table, known = [0] * (len(text) + 1), 0
    for i in range(1, len(text)):
        while known and text[i] != text[known]:
            known = table[known]
        known += text[i] == text[known]
        table[i + 1] = known
    return tuple(table)


@functools.cache
def _byte_of_letter() -> dict[str, int]:
    """Byte-level vocabularies write each byte as one visible letter: itself if it is one, else 256, 257, … in order."""
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = [byte for byte in range(256) if byte not in visible]
    return {chr(byte): byte for byte in visible} | {chr(256 + i): byte for i, byte in enumerate(hidden)}


def _token_table(tokenizer: tokenizers.Tokenizer) -> tuple[list[bytes], frozenset[int]]:
    """Bytes of every token id, and the ids of special tokens."""
    letters = _byte_of_letter()
    vocab = tokenizer.get_vocab(with_added_tokens=True)
    table = [b""] * (max(vocab.values(), default=-1) + 1)
    added = tokenizer.get_added_tokens_decoder()
    for name, token_id in vocab.items():
        if token_id in added or not all(char in letters for char in name):
            table[token_id] = name.encode()
        else:
            table[token_id] = bytes(letters[char] for char in name)
    return table, frozenset(token_id for token_id, token in added.items() if token.special)


def _read_json(path: pathlib.Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{path} must hold a JSON object")
    return value


def _template_source(folder: pathlib.Path, config: dict[str, Any]) -> str | None:
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    source = config.get("chat_template")
    if isinstance(source, list):  # several named templates
        source = {entry["name"]: entry["template"] for entry in source}.get("default")
    return source


def _token_text(token: str | dict[str, Any]) -> str:
    return token["content"] if isinstance(token, dict) else token


def _cut_after(prompt: str, message: dict[str, Any]) -> str:
    """`prompt` up to the end of its last message's text, without the blanks that ended that text or follow it."""
    content = message.get("content")
    text = content.strip() if isinstance(content, str) else ""
    at = prompt.rfind(text) if text else -1
    if at < 0:
        raise RequestError("continue_final_message: the last message has no text that the chat template shows")
    return prompt[: at + len(text)]
