"""What 8-bit records cost in quality: look-ups of the tiny model with each kind of cache, and what the indexer selects.

Prediction: three bits of fraction move a score by some per cent, so that selections differ at their ends and an answer
seldom does. Float32 arithmetic in every arm; only what the pools keep differs.
"""

import argparse
import json
import pathlib
import random
from collections.abc import Iterator
from typing import Any

import numpy as np

from dcpjax.host.request import SamplingParams
from dcpjax.llm import LLM
from models.train import tables

KINDS = ("float32", "bfloat16", "fp8")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds this benchmark's arguments, and what runs it."""
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 1024, 2048], help="tokens of a prompt, about")
    parser.add_argument("--count", type=int, default=100, help="look-ups of each length")
    parser.add_argument("--traced", type=int, default=4, help="prompts of each length whose selections are compared")
    parser.add_argument("--dcp", type=int, default=1)
    parser.add_argument("--json", type=pathlib.Path, help="write the figures here")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Measures, and prints a line for each kind and length."""
    rows = []
    for row in measure(args.lengths, args.count, args.traced, args.dcp):
        print("  ".join(f"{name} {value}" for name, value in row.items()), flush=True)
        rows.append(row)
        if args.json:
            args.json.write_text(json.dumps(rows, indent=1))


def measure(
    lengths: list[int], count: int, traced: int, dcp: int = 1, kinds: tuple[str, ...] = KINDS
) -> Iterator[dict[str, Any]]:
    """A row for every kind and length: share of right answers, drafts accepted a row (of 3), and the share of the
    first kind's selected positions that this one selects too."""
    selected = {}
    for kind in kinds:
        llm = LLM(
            decode_context_parallel_size=dcp,
            kv_cache_dtype=kind,
            dtype="float32",
            max_model_len=max(lengths) + 128,
            max_num_seqs=4,
            speculative_config={"method": "mtp", "num_speculative_tokens": 3},
        )
        for length in lengths:
            asked = look_ups(llm, length, count)
            before = llm.engine.stats.acceptance
            answers = llm.generate([prompt for prompt, _ in asked], SamplingParams(temperature=0.0, max_tokens=32))
            kept = llm.engine.stats.acceptance - before
            right = [code in answer.outputs[0].text for answer, (_, code) in zip(answers, asked, strict=True)]
            topk = [llm.trace(prompt).topk for prompt, _ in asked[:traced]]
            overlap = [_overlap(a, b) for a, b in zip(selected.setdefault(length, topk), topk, strict=True)]
            yield {
                "kind": kind,
                "tokens": length,
                "right": round(float(np.mean(right)), 4),
                "drafts_a_row": round(kept.drafts_per_row, 3),
                "overlap": round(float(np.mean(overlap)), 4),
            }


def look_ups(llm: LLM, length: int, count: int) -> list[tuple[list[int], str]]:
    """Prompts of at most `length` tokens that ask for one code of a table, and the codes."""
    found = []
    for seed in range(count):
        rng, lines = random.Random(seed * 7919 + length), length // 12
        while True:
            table = tables.table(rng, lines, digits=4)
            name, code = rng.choice(table.entries)
            chat = [{"role": "user", "content": f"{table.text}\n\nWhat is the code of {name}?"}]
            prompt = llm.tokenizer.encode_chat(llm.tokenizer.apply_chat_template(chat, enable_thinking=False))
            if len(prompt) <= length:
                break
            lines -= 1 + lines // 20
        found.append((prompt, code))
    return found


def _overlap(first: dict[int, np.ndarray], second: dict[int, np.ndarray]) -> float:
    """Share of the positions that all layers select in the first trace that they select in the second."""
    shares = []
    for layer, rows in first.items():
        for a, b in zip(rows, second[layer], strict=True):
            a, b = a[a >= 0], b[b >= 0]
            shares.append(np.isin(a, b).mean())
    return float(np.mean(shares))
