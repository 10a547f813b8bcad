"""`--engine echo`: a server without a network, for measuring the server alone and for testing clients against it.

Everything but the device is real: tokenizer, scheduler, prefix cache, engine loop, drafts. What "the model" answers is the
text of the last turn, of the user or a tool, and then an end-of-text token; a plain prompt is answered with itself.
"""

import contextlib
import dataclasses
import json
import pathlib
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from dcpjax.engine import EngineCore
from dcpjax.errors import ConfigError, RequestError
from dcpjax.host.keys import hash_named
from dcpjax.host.plan import RowLogprobs, StepPlan, StepResult
from dcpjax.host.report import DeviceState
from dcpjax.host.request import Request, SamplingParams
from dcpjax.hub import generation_defaults
from dcpjax.text import TextStream, Tokenizer

TINY = pathlib.Path(__file__).resolve().parent.parent.parent / "models" / "tiny"

# Turns that are answered, and the turn of the answer.
_ASKED = ("<|user|>", "<|observation|>")
_ANSWER = "<|assistant|>"
_TAGS = ("</think>", "<tool_call>")
_TAG_TOKENS = max(map(len, _TAGS))  # at most, where a tag is text
_NUM_LOGPROBS = 20
_MOST_PAGES = 8192
# Of a step. A device would leave the processor to the server meanwhile.
_STEP_SECONDS = 0.0002


class EchoRunner:
    """Recites; a step is over when it is dispatched. Every draft is right."""

    def __init__(self, script: "Script", vocab_size: int, limits: dict[str, int], num_drafts: int):
        self.num_pages = limits["num_pages"]
        self.page_tokens = limits["page_tokens"]
        self.max_model_len = limits["max_model_len"]
        self.max_num_seqs = limits["max_num_seqs"]
        self.max_num_batched_tokens = limits["max_num_batched_tokens"]
        self.num_drafts = num_drafts
        self._script = script
        self._vocab_size = vocab_size
        self._rows: dict[int, _Row] = {}  # by row slot

    def check(self, request: Request) -> None:
        """Raises `RequestError` for ids outside the vocabulary, as `Runner.check` does."""
        for name, ids in (("prompt", request.prompt), ("stop_token_ids", request.params.stop_token_ids)):
            bad = [token for token in (min(ids, default=0), max(ids, default=0)) if not 0 <= token < self._vocab_size]
            if bad:
                raise RequestError(f"{name}: token id {bad[0]} is not in the vocabulary of {self._vocab_size} ids")

    def dispatch(self, plan: StepPlan) -> "_Done":
        """The whole step; tokens and counts as `StepResult` has them: int32 `[rows, 1 + drafts]` and `[rows]`."""
        width = self.num_drafts + 1
        said: list[list[int]] = []
        wanted, prompts = False, {}  # logprobs of the answers; of which rows' prompts
        for planned in plan.rows:
            request = planned.request
            wanted = wanted or request.params.logprobs is not None
            if planned.tokens is not None and request.params.prompt_logprobs is not None:
                following = np.array([[*planned.tokens[1:], planned.next_token]])
                prompts[len(said)] = _logprobs(following, self._vocab_size)
            if planned.new:
                self._rows[planned.row] = _Row(
                    self._script.answer(request.prompt, request.limit), request.num_tokens, len(request.output)
                )
            new: list[int] = []
            if planned.emit:
                row, most = self._rows[planned.row], 1 if planned.tokens is not None else plan.num_drafts + 1
                new = self._script.tokens(row, request, min(most, request.limit - row.length), self._vocab_size)
                row.length, row.said = row.length + len(new), row.said + len(new)
            said.append(new)
        tokens = np.array([new + [-1] * (width - len(new)) for new in said], np.int32)
        accepted = np.array([len(new) for new in said], np.int32)
        logprobs = _logprobs(tokens, self._vocab_size) if wanted else None
        return _Done(StepResult(tokens, accepted, logprobs, prompts=prompts or None))


@dataclasses.dataclass
class _Row:
    """script: ids to recite; length: tokens of prompt and answer; said: those of the answer."""

    script: list[int]
    length: int
    said: int


@dataclasses.dataclass(frozen=True)
class _Done:
    result: StepResult

    def fetch(self) -> StepResult:
        time.sleep(_STEP_SECONDS)
        return self.result


class Script:
    """What is answered to which prompt."""

    def __init__(self, tokenizer: Tokenizer | None, eos: int):
        ids = [] if tokenizer is None else [tokenizer.token_id(turn) for turn in _ASKED]
        self._asked = frozenset(token for token in ids if token is not None)
        self._answer = None if tokenizer is None else tokenizer.token_id(_ANSWER)
        self._eos = eos
        self._tokenizer = tokenizer

    def answer(self, prompt: Sequence[int], limit: int) -> list[int]:
        """The last turn without its control token, or all of a prompt that has no turns. limit: tokens of prompt and answer
        at most; no more is made of a long turn than may be said."""
        backwards, end = prompt[::-1], len(prompt)
        for token in self._asked:
            with contextlib.suppress(ValueError):
                end = backwards.index(token, 0, end)
        if end == len(prompt):
            return list(prompt)
        start = len(prompt) - end
        turn = list(prompt[start : start + _TAG_TOKENS * (limit - len(prompt))])
        return self._spoken(turn[: turn.index(self._answer)] if self._answer in turn else turn)

    def _spoken(self, turn: list[int]) -> list[int]:
        """As a model says it: tags are single tokens, where what was asked has them as text."""
        text = self._tokenizer.decode(turn, skip_special_tokens=False)
        if not any(tag in text for tag in _TAGS):
            return turn
        spoken = self._tokenizer.encode(text, add_special_tokens=False)
        return turn if any(map(self._tokenizer.is_special, spoken)) else spoken

    def tokens(self, row: _Row, request: Request, count: int, vocab_size: int) -> list[int]:
        """The next tokens, at most `count`: those of the script; where a grammar forbids one, another that ends the run."""
        wanted = row.script[row.said : row.said + count]
        if len(wanted) < count:
            wanted += [self._token(row, request, row.said + i) for i in range(len(wanted), count)]
        if request.grammar is None:
            return wanted
        allowed = np.full((count, -(-vocab_size // 32)), 2**32 - 1, np.uint32)
        request.grammar.masks(wanted[:-1], allowed)
        for i, token in enumerate(wanted):
            if not allowed[i, token // 32] >> np.uint32(token % 32) & 1:
                return [*wanted[:i], self._instead(allowed[i])]
        return wanted

    def _token(self, row: _Row, request: Request, place: int) -> int:
        if place < len(row.script):
            return row.script[place]
        goes_on = place < request.params.min_tokens or request.params.ignore_eos
        # Told to go on, it begins again.
        return row.script[place % len(row.script)] if goes_on and row.script else self._eos

    def _instead(self, allowed: np.ndarray) -> int:
        """The end of the text if it may come, or the first token that may."""
        if allowed[self._eos // 32] >> np.uint32(self._eos % 32) & 1:
            return self._eos
        return int(np.flatnonzero(np.unpackbits(allowed.view(np.uint8), bitorder="little"))[0])


def _logprobs(tokens: np.ndarray, vocab_size: int) -> RowLogprobs:
    """The chosen token is certain and the others are impossible."""
    ids = np.arange(min(_NUM_LOGPROBS, vocab_size), dtype=np.int32)
    return RowLogprobs(
        chosen=np.zeros(tokens.shape, np.float32),
        ids=np.broadcast_to(ids, (*tokens.shape, len(ids))),
        values=np.full((*tokens.shape, len(ids)), -np.inf, np.float32),
        rank=np.ones(tokens.shape, np.int32),
    )


@dataclasses.dataclass(frozen=True)
class EchoConfig:
    """What the server reads of a `ModelConfig`. vocab_size: ids."""

    vocab_size: int


class EchoLLM:
    """What the server uses of an `LLM`, made from the same arguments; of the checkpoint only the tokenizer and
    config.json are read. Raises `ConfigError`."""

    def __init__(self, arguments: dict[str, Any]):
        given = arguments["model"]
        folder = TINY if given is None else pathlib.Path(given)
        config = {**_read(folder / "config.json"), **(arguments["hf_overrides"] or {})}
        self.name = "tiny" if given is None else folder.resolve().name
        self.tokenizer = Tokenizer.load(arguments["tokenizer"] or folder, arguments["chat_template"])
        self.config = EchoConfig(config["vocab_size"])
        self.generation_defaults = generation_defaults(folder)
        block, rows = arguments["block_size"], arguments["max_num_seqs"] or 128
        length = arguments["max_model_len"] or config["max_position_embeddings"]
        drafts = (arguments["speculative_config"] or {"num_speculative_tokens": 0}).get("num_speculative_tokens", 1)
        most = arguments["max_num_batched_tokens"] or max(8192, rows * (1 + drafts))
        whole = -(-length // block)
        pages = arguments["num_blocks"] or 1 + max(whole, min(rows * whole, _MOST_PAGES))
        eos = config["eos_token_id"]
        eos = eos if isinstance(eos, list) else [eos]
        runner = EchoRunner(
            Script(self.tokenizer, eos[0]),
            self.config.vocab_size,
            {
                "num_pages": pages,
                "page_tokens": block,
                "max_model_len": min(length, (pages - 1) * block),
                "max_num_seqs": rows,
                "max_num_batched_tokens": most,
            },
            drafts,
        )
        self.max_model_len = runner.max_model_len
        self.engine = EngineCore(
            runner,
            eos_token_ids=eos,
            overlap=arguments["overlap"],
            seed=arguments["seed"],
            prefix_caching=arguments["enable_prefix_caching"],
            hash=hash_named(arguments["prefix_caching_hash_algo"]),
        )

    @property
    def device_state(self) -> DeviceState:
        """Nothing: there is no device."""
        return DeviceState()

    def describe(self) -> list[str]:
        """The start-up lines."""
        return [f"echo engine: {self.engine.scheduler.pool.capacity} blocks, sequences of {self.max_model_len} tokens"]

    def add(self, prompt: Sequence[int], params: SamplingParams, **more: Any) -> Request:
        """As `LLM.add`."""
        text = TextStream(self.tokenizer, params, prompt[-4:])
        return self.engine.add(prompt, params, text=text, **more)


def _read(path: pathlib.Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError:
        raise ConfigError(f"{path} cannot be read; give a checkpoint folder") from None
    except ValueError as error:
        raise ConfigError(f"{path} is not valid JSON: {error}") from None
