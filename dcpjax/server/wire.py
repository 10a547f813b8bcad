"""What the two processes of the server say to each other.

The front answers HTTP; the engine process runs the engine and nothing else. Each message is one pickled object behind its
length. Neither process ever reads what somebody else wrote: the socket between them has no name.
"""

import dataclasses
import logging
import pickle
import struct
from array import array
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from dcpjax.errors import RequestError
from dcpjax.host.request import FinishReason, SamplingParams, TokenLogprobs
from dcpjax.server.errors import ApiError
from dcpjax.server.rules import RulesWish
from dcpjax.text import Tokenizer

log = logging.getLogger("dcpjax.server")

_LENGTH = struct.Struct("<I")


class Job(NamedTuple):
    """One choice of one prompt. prompt: ids, int32, which cross several times as fast as a list of them. rules: what its answer must look like. cache_salt, no_store, priority: see
    `EngineCore.add`."""

    prompt: array
    params: SamplingParams
    choice: int = 0
    cache_salt: str | None = None
    no_store: bool = False
    rules: RulesWish | None = None
    priority: int = 0


# From the front to the engine process.


class Add(NamedTuple):
    """Jobs for the engine, all or none. whole: a job brings its first token, and at its end all others."""

    ticket: int
    jobs: list[Job]
    whole: bool


class Drop(NamedTuple):
    """Ends a ticket's jobs; nothing more is told of them."""

    ticket: int


class Cut(NamedTuple):
    """Ends a ticket's jobs, None: all jobs, with a last row each, reason "abort"."""

    ticket: int | None


class Ask(NamedTuple):
    """To be answered with what `function(side, *arguments)` gives. threads: which of the engine side's do that, whatever the
    engine does: "aside", or "forms" for what may take seconds; None: between two steps."""

    number: int
    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    threads: str | None


class Stop(NamedTuple):
    """The engine process is to end after the step it is in."""


# From the engine process to the front.


@dataclasses.dataclass(frozen=True)
class ModelFacts:
    """What the front needs of the model that is loaded. vocab_size: ids. generation_defaults: of its folder."""

    name: str
    tokenizer: Tokenizer | None
    vocab_size: int
    max_model_len: int
    generation_defaults: dict[str, Any]


class Failed(NamedTuple):
    """The model cannot be loaded. text: what is told of it; empty if the log has it already."""

    code: int
    text: str


class Row(NamedTuple):
    """What is new of one job of a ticket; sent as a plain tuple, see `Update`. prompt_logprobs: in its first and last row."""

    ticket: int
    index: int
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs]
    cached_tokens: int
    prediction: tuple[int, int] | None  # drafts accepted, rejected; None: none were verified
    finish_reason: FinishReason | None
    stop_reason: int | str | None
    prompt_logprobs: list[TokenLogprobs]


class News(NamedTuple):
    """After commands, and after every step. waiting, live: requests in the engine's queue, and all it has. taken: tickets
    whose jobs are in the engine now, how many they are, and why not."""

    waiting: int
    live: int
    taken: list[tuple[int, int, Exception | None]]
    rows: list[tuple]


class Told(NamedTuple):
    """The answer to a question, or why there is none."""

    number: int
    value: Any
    error: Exception | None


class Died(NamedTuple):
    """The engine has failed; its process ends."""


def carried(error: Exception) -> Exception:
    """`error` as it may cross: one that is meant for a client as it is, any other one as a hint at the log it goes to."""
    if isinstance(error, ApiError | RequestError):
        return error
    log.error("a request failed in the engine process", exc_info=error)
    return RuntimeError(f"{type(error).__name__} in the engine process; its log says why")


def pack(message: Any) -> bytes:
    """A message as bytes for the socket."""
    data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    return _LENGTH.pack(len(data)) + data


class Unpacker:
    """Bytes as they come → messages."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def take(self, data: bytes) -> Iterator[Any]:
        """The messages that are complete now."""
        buffer = self._buffer
        buffer += data
        at, end = 0, len(buffer)
        with memoryview(buffer) as view:
            while end - at >= _LENGTH.size:
                (size,) = _LENGTH.unpack_from(view, at)
                if end - at - _LENGTH.size < size:
                    break
                at += _LENGTH.size + size
                yield pickle.loads(view[at - size : at])
        del buffer[:at]
