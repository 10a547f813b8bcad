"""What the benchmarks of whole engines share: arms that are alike but for one setting, timed in turn.

An arm decodes at a long context without computing it first: its pools are filled with random rows, the same ones whatever
the layout, and published as the pages of random prompts, so that the engine takes them over as hits.
"""

import argparse
import dataclasses
import gc
import os
import pathlib
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from dcpjax import build
from dcpjax.bench.cache import serve
from dcpjax.build import EngineConfig
from dcpjax.cache import PagedCache, Pool
from dcpjax.engine import EngineCore
from dcpjax.host.request import SamplingParams
from dcpjax.runner import Runner
from models import toy
from models.config import ModelConfig


@dataclasses.dataclass(frozen=True)
class Arm:
    """One engine and the prompts that it answers, all of them together and each of them cached."""

    runner: Runner
    engine: EngineCore
    prompts: tuple[tuple[int, ...], ...]


@dataclasses.dataclass(frozen=True)
class Run:
    """One decode run. seconds: from the first token of the last prompt to the end; tokens, steps: of that time.
    text: the tokens of each prompt."""

    seconds: float
    tokens: int
    steps: int
    text: tuple[tuple[int, ...], ...]


def planted(cfg: ModelConfig, config: EngineConfig, num_prompts: int, prompt_pages: int) -> Arm:
    """An engine with random weights whose cache holds `num_prompts` prompts of `prompt_pages` whole pages each."""
    ready = build.resolve(cfg, config)
    runner = build.make_runner(ready, toy.weights(cfg, ready.net.plan))
    runner.cache, runner.draft_cache = filled(runner.cache, 1), filled(runner.draft_cache, 2)
    engine = EngineCore(runner, eos_token_ids=())
    rng = np.random.default_rng(3)
    prompts = rng.integers(cfg.vocab_size, size=(num_prompts, prompt_pages * config.block_size)).tolist()
    pool, prefix = engine.scheduler.pool, engine.scheduler.prefix
    for prompt in prompts:
        keys = prefix.scheme.start()
        keys.extend(prompt)
        serve(pool, prefix, keys, prompt_pages)
    return Arm(runner, engine, tuple(map(tuple, prompts)))


def filled(cache: PagedCache, seed: int) -> PagedCache:
    """`cache` with random rows: the same row in the same slot whatever the layout."""
    rng = np.random.default_rng(seed)
    return cache.replace(latent=_filled(cache.latent, rng), index=_filled(cache.index, rng))


def _filled(pool: Pool, rng: np.random.Generator) -> Pool:
    layout = pool.layout
    offset = np.arange(layout.page_tokens)
    values = np.empty(pool.data.shape, pool.data.dtype)
    rows = rng.standard_normal(pool.data.shape, np.float32)
    values[:, :, layout.owner(offset) * layout.page_rows + layout.row(offset)] = rows
    return pool.replace(data=jax.device_put(values, pool.data.sharding))


def decode(arm: Arm, num_tokens: int) -> Run:
    """Generates `num_tokens` greedy tokens for every prompt at once."""
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    engine = arm.engine
    requests = [engine.add(prompt, params, no_store=True) for prompt in arm.prompts]
    while any(not request.output for request in requests):
        engine.step()
    begin, had, steps = time.perf_counter(), sum(len(request.output) for request in requests), engine.stats.steps
    engine.drain()
    seconds = time.perf_counter() - begin
    text = tuple(tuple(request.output) for request in requests)
    return Run(seconds, sum(map(len, text)) - had, engine.stats.steps - steps, text)


def add_arguments(parser: argparse.ArgumentParser, run: Callable[[argparse.Namespace], None]) -> None:
    """What commands that build engines take."""
    parser.add_argument("--quick", action="store_true", help="small sizes: shows that it runs, times mean nothing")
    parser.add_argument("--json", type=pathlib.Path, help="write the figures here")
    parser.set_defaults(run=run)


def compile_carelessly() -> None:
    """For runs that only show that something runs: compiling well would take longer than they do."""
    jax.config.update("jax_disable_most_optimizations", True)


def forget_programs() -> None:
    """Drops all compiled programs. Each lies in many memory maps, and a process may have some 65,000 of them in all: an
    engine more, and the compiler finds no memory.
    """
    jax.clear_caches()
    gc.collect()


def summary(values: Sequence[float]) -> dict[str, Any]:
    """Median and quartiles."""
    if len(values) == 1:
        return {"median": values[0], "quartiles": [values[0], values[0]]}
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return {"median": middle, "quartiles": [low, high]}


def machine() -> dict[str, Any]:
    """What else ran: processors, and the load average of the last minute."""
    return {"cpus": os.cpu_count(), "load": round(os.getloadavg()[0], 1), "platform": jax.default_backend()}
