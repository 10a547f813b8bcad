"""A model whose answers are written down: the real engine and text, over a runner that recites."""

import dataclasses
import time
from collections.abc import Callable

import numpy as np
import tokenizers

from dcpjax.engine import EngineCore
from dcpjax.errors import ConfigError, RequestError
from dcpjax.host.plan import RowLogprobs, StepPlan, StepResult
from dcpjax.host.report import DeviceState
from dcpjax.host.request import Request
from dcpjax.template import ChatTemplate
from dcpjax.text import TextStream, Tokenizer

THOUGHT = "<think>Let me see: naïve\nquestion."
ANSWER = "Hello 🙂 from 東京, café number {choice} is open. The END is near."
STORY = " the quick brown fox {choice} naïve 🙂 jumps over the END of the 東京 story."

TEMPLATE = """[gMASK]<sop>
{%- if tools %}<|system|>{{ tools | tojson }}{% endif %}
{%- for m in messages %}<|{{ m.role }}|>
{%- if m.role == 'assistant' %}<think>{{ m.reasoning_content or '' }}</think>{% endif %}{{ m.content }}
{%- for call in m.tool_calls or [] %}{{ call.function.arguments.items() | list }}{% endfor %}
{%- if 'forbidden' in m.content %}{{ raise_exception('forbidden word') }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|assistant|>
{{- '<think></think>' if enable_thinking is defined and not enable_thinking else '<think>' }}
{%- if reasoning_effort is defined %}{{ reasoning_effort }}{% endif %}
{%- endif %}"""

_SPECIAL = ["<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"]
_TAGS = ["<think>", "</think>", "<tool_call>", "</tool_call>"]


def make_tokenizer() -> Tokenizer:
    inner = tokenizers.Tokenizer(tokenizers.models.BPE())
    inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=330, show_progress=False, initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet()
    )
    # Not on the wide characters: they stay several tokens each.
    inner.train_from_iterator(
        [STORY.replace("🙂", "").replace("東京", ""), "Hello from the END of the café", "choice number is open"],
        trainer,
    )
    inner.add_special_tokens(_SPECIAL)
    inner.add_tokens([tokenizers.AddedToken(tag, special=False, normalized=False) for tag in _TAGS])
    return Tokenizer(inner, ChatTemplate(TEMPLATE))


@dataclasses.dataclass
class _Row:
    script: list[int]
    done: int  # tokens recited


class _Pending:
    def __init__(self, result: StepResult, delay: float):
        self._result, self._delay = result, delay

    def fetch(self) -> StepResult:
        time.sleep(self._delay)
        return self._result


class Reciter:
    """`script(request)`: the ids to answer, an end-of-text id follows them. Each step takes `delay` seconds and
    brings a decode row 1 + `num_accepted` tokens (default: all of the `num_drafts`)."""

    max_num_seqs = 8
    max_num_batched_tokens = 64
    page_tokens = 16

    def __init__(
        self,
        script: Callable[[Request], list[int]],
        eos: int,
        *,
        num_pages=256,
        num_drafts=0,
        num_accepted=None,
        delay=0.0,
    ):
        self.num_pages = num_pages
        self.max_model_len = 256
        self.num_drafts = num_drafts
        self._width = 1 + (num_drafts if num_accepted is None else num_accepted)
        self._script = script
        self._eos = eos
        self._delay = delay
        self._rows: dict[str, _Row] = {}

    def check(self, request: Request) -> None:
        if len(request.params.stop_token_ids) > 30:
            raise RequestError("stop_token_ids: too many for a row")

    def dispatch(self, plan: StepPlan) -> _Pending:
        tokens = np.full((len(plan.rows), self.num_drafts + 1), -1, np.int32)
        accepted = np.zeros(len(plan.rows), np.int32)
        for i, row in enumerate(plan.rows):
            if row.new:
                self._rows[row.request.id] = _Row(self._script(row.request), len(row.request.output))
            if row.emit:
                new = [self._next(row.request) for _ in range(1 if row.tokens is not None else self._width)]
                new = [token for token in new if token is not None]
                tokens[i, : len(new)], accepted[i] = new, len(new)
        prompts = {
            i: _logprobs(np.array([[*row.tokens[1:], row.next_token]]))
            for i, row in enumerate(plan.rows)
            if row.tokens is not None and row.request.params.prompt_logprobs is not None
        }
        return _Pending(StepResult(tokens, accepted, _logprobs(tokens), prompts=prompts or None), self._delay)

    def _next(self, request: Request) -> int | None:
        row = self._rows[request.id]
        if len(request.prompt) + row.done >= request.limit:
            return None
        row.done += 1
        if row.done <= len(row.script):
            return row.script[row.done - 1]
        return row.script[0] if row.done <= request.params.min_tokens or request.params.ignore_eos else self._eos


def _logprobs(tokens: np.ndarray) -> RowLogprobs:
    """The chosen token has −0.25 and is never among the best; the last of the best is impossible."""
    ids = np.broadcast_to(np.arange(20, dtype=np.int32), (*tokens.shape, 20))
    values = np.broadcast_to(np.r_[-np.arange(1, 20), -np.inf].astype(np.float32), ids.shape)
    chosen = np.full(tokens.shape, -0.25, np.float32)
    return RowLogprobs(chosen=chosen, ids=ids, values=values, rank=np.ones(tokens.shape, np.int32))


@dataclasses.dataclass
class FakeConfig:
    vocab_size: int


class FakeLLM:
    """What the server uses of an `LLM`; `reciter`: arguments of `Reciter`. Prompts may hold DIE (the engine fails) or
    SLOW (it never ends by itself)."""

    name = "fake"

    def __init__(self, *, load_seconds=0.0, broken=False, no_tokenizer=False, prefix_caching=True, **reciter):
        time.sleep(load_seconds)
        if broken:
            raise ConfigError("this model is broken; take another")
        words = make_tokenizer()
        self.tokenizer = None if no_tokenizer else words
        self.config = FakeConfig(words.vocab_size)
        self.generation_defaults = {"temperature": 0.5, "top_p": 0.95, "eos_token_id": [1, 2]}
        think = words.token_id("<think>")

        def script(request: Request) -> list[int]:
            asked = words.decode(request.prompt, skip_special_tokens=False)
            if "DIE" in asked:
                raise RuntimeError("/secret/path: the device is gone")
            if "SLOW" in asked:
                return words.encode(STORY.format(choice=request.choice)) * 20
            text = ANSWER if "<|assistant|>" in asked else STORY
            if request.prompt[-1] == think:
                text = THOUGHT + "</think>" + text
            return words.encode(text.format(choice=request.choice))

        eos = words.token_id("<|user|>")
        runner = Reciter(script, eos, **reciter)
        self.max_model_len = runner.max_model_len
        self.engine = EngineCore(runner, eos_token_ids=[eos], prefix_caching=prefix_caching)

    device_state = DeviceState(3, 1.5, {"fake:0": 2**40})

    def add(self, prompt, params, **more):
        text = None if self.tokenizer is None else TextStream(self.tokenizer, params, prompt[-4:])
        if text is None and params.stop:
            raise RequestError("stop: no tokenizer")
        return self.engine.add(prompt, params, text=text, **more)
