"""`LLM`: load a model, generate, and look inside; what notebooks and tests use."""

import dataclasses
import logging
import numbers
import pathlib
import time
from collections.abc import Sequence
from typing import Any

import jax

from dcpjax import build, hub
from dcpjax.describe import describe, device_state
from dcpjax.engine import EngineCore
from dcpjax.errors import CacheFullError, ConfigError, RequestError
from dcpjax.explanation import plan_of
from dcpjax.host.keys import hash_named
from dcpjax.host.report import DeviceState
from dcpjax.host.request import Request, SamplingParams, Times, TokenLogprobs
from dcpjax.host.speculation import AcceptanceAlarm, AdaptiveDrafts
from dcpjax.interrupts import interrupts_held
from dcpjax.progress import loading
from dcpjax.prompts import as_ids, as_list, check_conversation
from dcpjax.runner import Runner
from dcpjax.spec import USUAL_DRAFTS, Speculation
from dcpjax.text import TextStream, Tokenizer
from dcpjax.trace import Draft, Trace, Tracer
from models.config import ModelConfig, read_config
from models.params import Params

log = logging.getLogger("dcpjax")


@dataclasses.dataclass(frozen=True)
class CompletionOutput:
    """One choice. finish_reason: "stop", "length" or "abort"; logprobs: one entry a token, or None."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None
    stop_reason: int | str | None
    logprobs: list[TokenLogprobs] | None


@dataclasses.dataclass(frozen=True)
class RequestOutput:
    """One prompt's choices. `metrics` are the first choice's times in seconds of a monotonic clock. acceptance_pin: None,
    or the acceptance length that was forced for a benchmark: then the texts are not the model's."""

    prompt_token_ids: list[int]
    num_cached_tokens: int
    outputs: list[CompletionOutput]
    metrics: Times
    acceptance_pin: float | None = None


class LLM:
    """An engine on this process's devices.

    model: a checkpoint folder, plain or quantised, or a Hub id "owner/name"; None is the embedded tiny model.
    tokenizer: a folder with tokenizer.json (default: the model's; a folder without one works with token ids, and `text`
    is ''). chat_template: Jinja source instead of the model's. tensor_parallel_size: devices (default: the dcp size).
    decode_context_parallel_size: how many of them deal the tokens out among themselves. enable_expert_parallel: whole
    routed experts on a device each, instead of a part of each expert on every device. cp_kv_cache_interleave_size:
    tokens in a turn. dcp_comm_backend: "ag_rs", "a2a" or "psum". index_shards: 1 or the dcp size (default). block_size:
    tokens of a logical page, the same at every dcp. num_blocks: pages, block 0 included (default: what memory holds).
    max_model_len: default the smaller of the model's positions and the pool. max_num_seqs: requests at a time (16 on
    CPU, else 128). max_num_batched_tokens: tokens of a step (512 on CPU, else 2048). dtype: "auto" is float32 on CPU,
    else bfloat16. kv_cache_dtype: "auto" is the same, "fp8" packs rows in 8 bits. kv_cache_memory_bytes: of the cache
    over all devices. gpu_memory_utilization: share of what JAX takes of an accelerator, for weights and cache; without
    effect on CPU. load_format: "auto", or "dummy": random plain weights by config.json. kernels: "auto" (None) is what
    measured best on the platform, "xla" none, or implementations by name, see `Kernels`. enable_prefix_caching: whether whole pages of tokens that were computed before are reused.
    prefix_caching_hash_algo: "sha256" or "xxhash", see `hash_named`. speculative_config: None, or {"method": "mtp",
    "num_speculative_tokens": k (1), "draft_kv": "sharded" or "replicated", "acceptance": "coupled" (the text is the one
    without drafts) or "rejection" (the same distribution), "pin": None or a mean acceptance length to force in
    benchmarks, "adaptive": whether steps may use fewer drafts (False; a program for each number of drafts is compiled
    and timed when the LLM is made)}. dcp_debug: a line a layer from every device on standard error. zero_new_pages:
    clear pages before they are written to; reads are right without it. overlap: dispatch a step before reading the last
    one. seed: of requests without one. hf_overrides: laid over config.json. Raises `ConfigError` or `CheckpointError`.
    """

    def __init__(
        self,
        model: str | pathlib.Path | None = None,
        *,
        tokenizer: str | pathlib.Path | None = None,
        chat_template: str | None = None,
        tensor_parallel_size: int | None = None,
        decode_context_parallel_size: int = 1,
        enable_expert_parallel: bool = False,
        cp_kv_cache_interleave_size: int = 1,
        dcp_comm_backend: str = "ag_rs",
        index_shards: int | None = None,
        block_size: int = 64,
        num_blocks: int | None = None,
        max_model_len: int | None = None,
        max_num_seqs: int | None = None,
        max_num_batched_tokens: int | None = None,
        dtype: str = "auto",
        kv_cache_dtype: str = "auto",
        kv_cache_memory_bytes: int | None = None,
        gpu_memory_utilization: float = 0.92,
        kernels: str | dict[str, Any] | None = "auto",
        load_format: str = "auto",
        enable_prefix_caching: bool = True,
        prefix_caching_hash_algo: str = "sha256",
        speculative_config: dict[str, Any] | None = None,
        dcp_debug: bool = False,
        zero_new_pages: bool = False,
        overlap: bool = True,
        seed: int = 0,
        hf_overrides: dict[str, Any] | None = None,
    ):
        hash = hash_named(prefix_caching_hash_algo)
        folder, self.name = hub.find(model)
        speculation, draft_kv = Speculation.read(speculative_config)
        if speculation is not None and speculation.num_drafts > USUAL_DRAFTS:
            log.warning("%d drafts a step: more than %d seldom pay", speculation.num_drafts, USUAL_DRAFTS)
        config = build.EngineConfig(
            tensor_parallel_size=tensor_parallel_size,
            decode_context_parallel_size=decode_context_parallel_size,
            expert_parallel=enable_expert_parallel,
            interleave=cp_kv_cache_interleave_size,
            backend=dcp_comm_backend,
            debug=dcp_debug,
            zero_new_pages=zero_new_pages,
            index_shards=index_shards,
            draft_kv=draft_kv,
            speculation=speculation,
            block_size=block_size,
            num_blocks=num_blocks,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            dtype=dtype,
            kv_cache_dtype=kv_cache_dtype,
            kv_cache_memory_bytes=kv_cache_memory_bytes,
            gpu_memory_utilization=gpu_memory_utilization,
            kernels=kernels,
            load_format=load_format,
        )
        self.tokenizer = _load_tokenizer(folder, tokenizer, chat_template)
        _check_vocabulary(self.tokenizer, read_config(folder, hf_overrides))
        self.generation_defaults = hub.generation_defaults(folder)
        build.start_devices(tensor_parallel_size, decode_context_parallel_size)
        build.keep_compiled_programs()
        with loading() as progress:
            self.runner = build.build_runner(folder, config, hf_overrides, progress)
        self.engine = EngineCore(
            self.runner,
            eos_token_ids=self.config.eos_token_ids,
            overlap=overlap,
            seed=seed,
            prefix_caching=enable_prefix_caching,
            model=self.name,
            hash=hash,
            drafts=_adaptive(self.runner),
        )
        self._alarm = AcceptanceAlarm(self.runner.num_drafts)
        self._watched = self.engine.stats.acceptance
        self._tracer = Tracer(self.runner)
        self._compile_seconds = 0.0

    @property
    def config(self) -> ModelConfig:
        """What the network is, from `config.json` and the overrides."""
        return self.runner.net.cfg

    @property
    def max_model_len(self) -> int:
        """Tokens of a prompt and its answer together, at most."""
        return self.runner.max_model_len

    @property
    def plan(self) -> build.Resolved:
        """The configuration as it runs; `dcpjax.explain_plan` tells what it means."""
        return plan_of(self.runner)

    @property
    def params(self) -> Params:
        """The weights, padded and sharded; a pytree of few stacked leaves."""
        return self.runner.params

    def set_params(self, params: Params) -> None:
        """Replaces the weights; cached prefixes are forgotten. Running requests keep the tokens they have and go on, from
        rows computed anew, with the new weights.

        Raises `ConfigError` unless shapes and dtypes are those of `params`.
        """

        def form(tree):
            return jax.tree.map(lambda x: (x.shape, x.dtype.name), tree)

        if form(params) != form(self.runner.params):
            raise ConfigError("set_params needs the tree, shapes and dtypes of LLM.params; change leaves by .replace")
        self.engine.reset_prefix_cache(running=True)
        self.runner.params = jax.tree.map(
            lambda new, old: jax.device_put(new, old.sharding), params, self.runner.params
        )

    def describe(self) -> list[str]:
        """Lines for a log: devices, mesh, memory, prefixes and drafts."""
        return describe(self.runner, self.engine.scheduler.prefix is not None)

    def warm_up(self, progress=lambda done, total: None) -> None:
        """Compiles every step shape ahead; `progress(done, total)` is called after each."""
        start = time.monotonic()
        self.runner.warm_up(progress)
        self._compile_seconds += time.monotonic() - start

    @property
    def device_state(self) -> DeviceState:
        """What was compiled ahead, and bytes in use on each device."""
        return device_state(self.runner, self._compile_seconds)

    def add(self, prompt: Sequence[int], params: SamplingParams, **more: Any) -> Request:
        """Queues one choice of a prompt of token ids, with its text. `more`: request_id, choice, cache_salt, no_store,
        grammar and priority as `EngineCore.add` takes them. Raises `RequestError`."""
        text = None
        if self.tokenizer is not None:
            text = TextStream(self.tokenizer, params, prompt[-4:])
        elif params.stop:
            raise RequestError("stop: this model has no tokenizer, so stop strings cannot be found; use stop_token_ids")
        return self.engine.add(prompt, params, text=text, **more)

    def generate(
        self,
        prompts: str | Sequence[int] | Sequence[str] | Sequence[Sequence[int]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        cache_salt: str | None = None,
        no_store: bool = False,
    ) -> list[RequestOutput]:
        """Completes one prompt (a text or a flat list of ids) or several. Raises `RequestError`, then nothing runs.

        cache_salt: cached prefixes are shared only among prompts of the same one. no_store: none is kept of these.
        """
        ids = [self._encode(prompt) for prompt in as_list(prompts)]
        params = self._as_params(sampling_params, len(ids))
        requests: list[list[Request]] = []
        try:
            for prompt, wanted in zip(ids, params, strict=True):
                requests.append([])
                for choice in range(wanted.n):
                    requests[-1].append(
                        self.add(prompt, wanted, choice=choice, cache_salt=cache_salt, no_store=no_store)
                    )
            with interrupts_held() as pending:
                while any(request.status != "finished" for choices in requests for request in choices):
                    self.engine.step()
                    if pending:
                        raise KeyboardInterrupt
        except BaseException:
            for choices in requests:
                for request in choices:
                    self.engine.abort(request.id)
            raise
        self._watch_drafts()
        pin = None if self.runner.spec is None else self.runner.spec.pin
        return [_output(choices, pin) for choices in requests]

    def _watch_drafts(self) -> None:
        """Warns, once, when drafts stop being accepted: nothing else shows it, since the texts stay right."""
        now = self.engine.stats.acceptance
        warning = self._alarm.take(now - self._watched)
        self._watched = now
        if warning is not None:
            log.warning(warning)

    def chat(
        self,
        messages: Sequence[dict[str, Any]],
        sampling_params: SamplingParams | None = None,
        *,
        cache_salt: str | None = None,
        no_store: bool = False,
        **template: Any,
    ) -> list[RequestOutput]:
        """Answers one conversation by the chat template, which gets `template` as it is. Raises `RequestError`."""
        if self.tokenizer is None:
            raise RequestError("messages: this model has no tokenizer; use generate with token ids")
        check_conversation(messages)
        prompt = self.tokenizer.encode_chat(self.tokenizer.apply_chat_template(messages, **template))
        return self.generate(prompt, sampling_params, cache_salt=cache_salt, no_store=no_store)

    def trace(self, token_ids: Sequence[int], next_token: int | None = None, *, parts: bool = False) -> Trace:
        """Activations of one sequence, from the paged, sharded path; of the draft too with `next_token`; see `Trace`."""
        ids = self._check_ids("token_ids", token_ids)
        if next_token is not None:
            self._check_ids("next_token", [next_token])
        pages = self._borrow(len(ids) + (next_token is not None))
        try:
            with interrupts_held():
                return self._tracer.trace(ids, None if next_token is None else int(next_token), pages, parts)
        finally:
            self._give_back(pages)

    def draft(self, token_ids: Sequence[int], k: int) -> Draft:
        """The target's greedy next token, then k recursive greedy drafts. Raises `RequestError` or `ConfigError`."""
        ids = self._check_ids("token_ids", token_ids)
        if not self.config.has_mtp:
            raise ConfigError("this checkpoint has no MTP layer, so it cannot draft")
        if isinstance(k, bool) or not isinstance(k, numbers.Integral) or k < 0:
            raise RequestError(f"k: got {k!r}, the number of drafts must be a whole number, at least 0")
        pages = self._borrow(len(ids) + k)
        try:
            with interrupts_held():
                return self._tracer.draft(ids, int(k), pages)
        finally:
            self._give_back(pages)

    def _borrow(self, num_tokens: int) -> list[int]:
        if num_tokens > self.max_model_len:
            raise RequestError(f"token_ids: {num_tokens} tokens are more than max_model_len {self.max_model_len}")
        needed, pool = self._tracer.num_pages(num_tokens), self.engine.scheduler.pool
        if needed > pool.num_free and not (self.engine.scheduler.running or self.engine.scheduler.waiting):
            self.engine.drain()  # a step in flight holds pages back, those of earlier traces too
        pages = pool.take(needed)
        if pages is None:
            raise CacheFullError(f"a trace needs {needed} blocks, {pool.num_free} are free: wait for requests to end")
        return pages

    def _give_back(self, pages: list[int]) -> None:
        scheduler = self.engine.scheduler
        scheduler.pool.retire(pages, scheduler.epoch)

    def _encode(self, prompt: str | Sequence[int]) -> list[int]:
        if not isinstance(prompt, str):
            return as_ids("prompts", prompt)
        if self.tokenizer is None:
            raise RequestError("prompts: this model has no tokenizer; give token ids")
        return self.tokenizer.encode(prompt)

    def _check_ids(self, name: str, ids: Sequence[int]) -> list[int]:
        ids = as_ids(name, ids)
        bad = [token for token in ids if not 0 <= token < self.config.vocab_size]
        if not ids or bad:
            got = f"got id {bad[0]}" if bad else "got none"
            raise RequestError(
                f"{name}: {got}; give at least one id, each below the vocabulary of {self.config.vocab_size}"
            )
        return ids

    def _as_params(self, given: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
        if given is None or isinstance(given, SamplingParams):
            return [given or SamplingParams()] * count
        if isinstance(given, dict) or not all(isinstance(params, SamplingParams) for params in given):
            raise RequestError("sampling_params: give a SamplingParams, or a list of one for each prompt")
        if len(given) != count:
            raise RequestError(f"sampling_params: got {len(given)} for {count} prompts; give one, or one for each")
        return list(given)


def _output(choices: list[Request], pin: float | None) -> RequestOutput:
    return RequestOutput(
        prompt_token_ids=choices[0].prompt,
        num_cached_tokens=choices[0].cached_tokens,
        outputs=[
            CompletionOutput(
                index=request.choice,
                text=request.text.text if request.text is not None else "",
                token_ids=request.output,
                finish_reason=request.finish_reason,
                stop_reason=request.stop_reason,
                logprobs=request.logprobs if request.params.logprobs is not None else None,
            )
            for request in choices
        ],
        metrics=choices[0].metrics,
        acceptance_pin=pin,
    )


def _adaptive(runner: Runner) -> AdaptiveDrafts | None:
    """What chooses the number of drafts of a step; it weighs them by the times of steps, measured here."""
    if runner.spec is None or not runner.spec.adaptive:
        return None
    log.info("adaptive drafts: measuring decode steps with 0 to %d drafts", runner.spec.num_drafts)
    return AdaptiveDrafts(runner.spec.num_drafts, runner.decode_costs())


def _load_tokenizer(folder: pathlib.Path, given: str | pathlib.Path | None, template: str | None) -> Tokenizer | None:
    if given is None and not (folder / "tokenizer.json").is_file():
        return None
    return Tokenizer.load(folder if given is None else given, template)


def _check_vocabulary(tokenizer: Tokenizer | None, cfg: ModelConfig) -> None:
    if tokenizer is not None and tokenizer.vocab_size > cfg.vocab_size:
        raise ConfigError(
            f"the tokenizer has ids up to {tokenizer.vocab_size - 1}, the model a vocabulary of {cfg.vocab_size}: they do not "
            "belong together; give the model's own with tokenizer"
        )
