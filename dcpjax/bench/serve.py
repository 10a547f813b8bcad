"""Load on a running server, as its users see it: how long to the first token, how long a token, how long in all.

Three kinds: random prompts at several concurrencies; the same with a prefix that all of them share; a trace, replayed at its
own times. Prompts are token ids, every answer has the length that was asked for, and what the server says of itself is read
from `/metrics` before and after: cached tokens, and the acceptance of drafts.

Give `--alone` to measure the server without an engine instead (see `serve_alone`).
"""

import argparse
import asyncio
import dataclasses
import json
import pathlib
import random
import re
import statistics
import time
from collections.abc import Iterable, Sequence
from typing import Any

from dcpjax.bench import serve_alone

# The longest time to wait for one answer.
_PATIENCE_SECONDS = 3600
_SHARES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}


@dataclasses.dataclass(frozen=True)
class Ask:
    """One request. at: seconds after the start, None: as soon as somebody is free."""

    prompt: list[int]
    tokens: int
    at: float | None = None


@dataclasses.dataclass(frozen=True)
class Answer:
    """ttft, e2e: seconds. tpot: seconds a token after the first, None for a single one. cached: prompt tokens."""

    ttft: float
    tpot: float | None
    e2e: float
    prompt: int
    tokens: int
    cached: int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds this benchmark's arguments, and what runs it."""
    add = parser.add_argument
    add("--url", default="http://127.0.0.1:8000", help="of the server")
    add("--concurrency", default="1,4,16", help="requests at a time, one measurement each")
    add("--requests", type=int, default=64, help="of each measurement")
    add("--prompt-tokens", type=int, default=512)
    add("--output-tokens", type=int, default=64)
    add("--shared", type=float, default=0.0, metavar="SHARE", help="of each prompt that all prompts begin with, 0 to 1")
    add("--trace", type=pathlib.Path, help="JSON lines with timestamp, input_length, output_length and hash_ids")
    add("--speed", type=float, default=1.0, help="a trace's seconds in a second")
    add("--divide", type=int, default=1, help="lengths of a trace are divided by this")
    add("--vocab", type=int, default=1000, help="prompts are of ids below")
    add("--seed", type=int, default=0)
    add("--api-key")
    add("--json", type=pathlib.Path, help="write the figures here")
    add("--quick", action="store_true", help="with --alone: small sizes, shows that it runs, figures mean nothing")
    add("--alone", action="store_true", help="start an echo server and measure what the server itself costs")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Prints a line for each measurement."""
    if args.alone:
        figures = serve_alone.measure(
            serve_alone.QUICK if args.quick else serve_alone.Sizes(), lambda line: print(line, flush=True)
        )
    else:
        figures = {
            "rows": asyncio.run(_rows(args)),
            "arguments": {k: str(v) for k, v in vars(args).items() if k != "run"},
        }
    if args.json:
        args.json.write_text(json.dumps(figures, indent=1))


async def _rows(args: argparse.Namespace) -> list[dict[str, Any]]:
    import httpx

    headers = {} if args.api_key is None else {"Authorization": f"Bearer {args.api_key}"}
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(
        base_url=args.url, headers=headers, timeout=_PATIENCE_SECONDS, limits=limits
    ) as client:
        model = (await client.get("/v1/models")).raise_for_status().json()["data"][0]
        rows = []
        for number, concurrency in enumerate(_concurrencies(args)):
            asks = _asks(args, random.Random(f"{args.seed} {number}"), model["max_model_len"])
            rows.append(await measure(client, model["id"], asks, concurrency))
            print(_line(rows[-1]), flush=True)
        return rows


def _concurrencies(args: argparse.Namespace) -> list[int | None]:
    """None: every request at its own time."""
    return [None] if args.trace else [int(number) for number in args.concurrency.split(",")]


def _asks(args: argparse.Namespace, rng: random.Random, most: int) -> list[Ask]:
    if args.trace:
        return [ask for ask in _from_trace(args) if len(ask.prompt) + ask.tokens <= most]
    shared = round(args.prompt_tokens * args.shared)
    prefix = [rng.randrange(args.vocab) for _ in range(shared)]
    return [
        Ask([*prefix, *(rng.randrange(args.vocab) for _ in range(args.prompt_tokens - shared))], args.output_tokens)
        for _ in range(args.requests)
    ]


def _from_trace(args: argparse.Namespace) -> Iterable[Ask]:
    """Equal hash ids are equal blocks of tokens."""
    with args.trace.open() as lines:
        for line, _ in zip(lines, range(args.requests), strict=False):
            each = json.loads(line)
            length = max(each["input_length"] // args.divide, 1)
            block = -(-length // len(each["hash_ids"]))
            blocks = (random.Random(f"{hash_id}").choices(range(args.vocab), k=block) for hash_id in each["hash_ids"])
            prompt = [token for tokens in blocks for token in tokens][:length]
            yield Ask(prompt, max(each["output_length"] // args.divide, 1), each["timestamp"] / 1000 / args.speed)


async def measure(client, model: str, asks: Sequence[Ask], concurrency: int | None) -> dict[str, Any]:
    """One row: `asks`, so many at a time, or each at its own. client: an `httpx.AsyncClient` with the server's address."""
    before = await _metrics(client)
    start = time.perf_counter()
    free = asyncio.Semaphore(concurrency or len(asks))

    async def one(ask: Ask) -> Answer:
        if ask.at is not None:
            await asyncio.sleep(max(start + ask.at - time.perf_counter(), 0))
        async with free:
            return await _ask(client, model, ask)

    answers = await asyncio.gather(*map(one, asks))
    seconds = time.perf_counter() - start
    return _row(answers, seconds, concurrency, before, await _metrics(client))


async def _ask(client, model: str, ask: Ask) -> Answer:
    body = {
        "model": model,
        "prompt": ask.prompt,
        "max_tokens": ask.tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    start, first, last, usage = time.perf_counter(), None, None, {}
    async with client.stream("POST", "/v1/completions", json=body) as response:
        if response.status_code != 200:
            raise RuntimeError(f"{response.status_code}: {(await response.aread()).decode()[:300]}")
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line[6:])
            if "error" in chunk:
                raise RuntimeError(chunk["error"]["message"])
            if chunk["choices"]:
                last = time.perf_counter()
                first = first or last
            usage = chunk.get("usage") or usage
    tokens = usage["completion_tokens"]
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    tpot = (last - first) / (tokens - 1) if tokens > 1 else None
    return Answer(first - start, tpot, last - start, usage["prompt_tokens"], tokens, cached)


def _row(
    answers: Sequence[Answer],
    seconds: float,
    concurrency: int | None,
    before: dict[str, float],
    after: dict[str, float],
) -> dict[str, Any]:
    def grown(name: str) -> float:
        return after.get(name, 0) - before.get(name, 0)

    prompt, tokens = sum(answer.prompt for answer in answers), sum(answer.tokens for answer in answers)
    drafts, places = grown("vllm:spec_decode_num_drafts_total"), "vllm:spec_decode_num_accepted_tokens_per_pos_total"
    queries = grown("vllm:prefix_cache_queries_total")
    return {
        "concurrency": concurrency,
        "requests": len(answers),
        "seconds": seconds,
        "requests_per_second": len(answers) / seconds,
        "output_tokens_per_second": tokens / seconds,
        "prompt_tokens": prompt,
        "output_tokens": tokens,
        "ttft_ms": percentiles(answer.ttft * 1e3 for answer in answers),
        "tpot_ms": percentiles(answer.tpot * 1e3 for answer in answers if answer.tpot is not None),
        "e2e_ms": percentiles(answer.e2e * 1e3 for answer in answers),
        "cached_share": sum(answer.cached for answer in answers) / prompt,
        "cached_share_by_metrics": grown("vllm:prefix_cache_hits_total") / queries if queries else 0.0,
        # The mean number of tokens of a decode row: accepted drafts and one of the target's own.
        "acceptance_length": 1 + grown("vllm:spec_decode_num_accepted_tokens_total") / drafts if drafts else None,
        "acceptance_by_place": [
            (after[key] - before.get(key, 0)) / drafts for key in sorted(after) if key.startswith(places) and drafts
        ],
    }


def percentiles(values: Iterable[float]) -> dict[str, float] | None:
    """Mean, median and the slow ones; None of nothing."""
    ordered = sorted(values)
    if not ordered:
        return None
    at = {name: ordered[min(int(share * len(ordered)), len(ordered) - 1)] for name, share in _SHARES.items()}
    return {"mean": statistics.fmean(ordered), **at}


async def _metrics(client) -> dict[str, float]:
    """Values by name, summed over labels; those by place keep it."""
    found: dict[str, float] = {}
    for line in (await client.get("/metrics")).raise_for_status().text.splitlines():
        match = re.fullmatch(r"([a-z0-9_:]+)\{(.*)\} (\S+)", line)
        if match:
            place = re.search(r'position="(\d+)"', match[2])
            name = match[1] if place is None else f"{match[1]} {int(place[1]):02}"
            found[name] = found.get(name, 0.0) + float(match[3])
    return found


def _line(row: dict[str, Any]) -> str:
    def shown(name: str) -> str:
        figures = row[name]
        return "-" if figures is None else f"{figures['p50']:.1f}/{figures['p99']:.1f}"

    length = row["acceptance_length"]
    return (
        f"{'trace' if row['concurrency'] is None else f'{row["concurrency"]} at a time'}: {row['requests']} requests, "
        f"{row['requests_per_second']:.2f}/s, {row['output_tokens_per_second']:.1f} tokens/s; ms p50/p99: to the first "
        f"token {shown('ttft_ms')}, a token {shown('tpot_ms')}, in all {shown('e2e_ms')}; cached "
        f"{row['cached_share']:.1%}, acceptance length {'-' if length is None else f'{length:.2f}'}"
    )
