"""What trained weights must show before they are kept, measured with the parts they were trained with."""

import dataclasses
import functools
import json
import random
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tokenizers

from models.config import ModelConfig
from models.params import Params
from models.train import data, generator, network, tables, toolcalls, words

LENGTHS = (512, 1024, 2048, 4096)
_QUESTIONS = (
    [(f"What is the capital of {c}?", words.CAPITALS[c]) for c in ("France", "Japan", "Egypt", "Peru", "Norway", "Kenya")]
    + [(f"What is {a} + {b}?", str(a + b)) for a, b in ((2, 3), (7, 8), (12, 7), (25, 14), (30, 12))]
    + [("Count from 3 to 9.", "3, 4, 5, 6, 7, 8, 9"), ("Count from 10 to 15.", "10, 11, 12, 13, 14, 15")]
    + [("Sort these words: pear, apple, fig", "apple"), ("Sort these numbers: 42, 7, 19", "7, 19, 42")]
    + [("Which day comes after Monday?", "Tuesday"), ("Which month comes before March?", "February")]
    + [("Hello", "Hello!"), ("Spell the word lamp.", "l-a-m-p"), ("As JSON, please: name Ada, age 36.", '"age": 36')]
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Bench:
    """A network to be checked. `batch` sequences of `length` tokens at once are continued by `steps`; `k` drafts."""

    params: Params
    cfg: ModelConfig
    tokenizer: tokenizers.Tokenizer
    batch: int = 64
    length: int = 512
    steps: int = 96
    k: int = 5

    @property
    def room(self) -> int:
        """Tokens of a prompt that can be continued."""
        return self.length - self.steps - 8

    def ids(self, text: str) -> list[int]:
        """Token ids of a text, its control tokens included."""
        return self.tokenizer.encode(text, add_special_tokens=False).ids


@functools.partial(jax.jit, static_argnames=("cfg", "steps"))
def proceed(params, rows, lengths, key, heat, cfg: ModelConfig, steps: int):
    """Continues rows `[B, S]` that hold `lengths [B]` tokens by `steps` tokens, sampled at temperature `heat`."""

    def step(i, rows):
        final = jax.vmap(lambda row: network.trunk(params, row, cfg, sparse=True).hidden)(rows)
        at = lengths + i
        values = network.logits(params, jnp.take_along_axis(final, (at - 1)[:, None, None], 1)[:, 0])
        noise = jax.random.gumbel(jax.random.fold_in(key, i), values.shape)
        token = jnp.argmax(values + heat * noise, -1).astype(rows.dtype)
        return rows.at[jnp.arange(len(rows)), jnp.minimum(at, rows.shape[1] - 1)].set(token)

    return jax.lax.fori_loop(0, steps, step, rows)


@functools.partial(jax.jit, static_argnames=("cfg", "sparse"))
def best_tokens(params, rows, cfg: ModelConfig, sparse: bool = True):
    """Greedy next token at every position of rows `[B, S]`, loss of the token that follows `[B, S−1]`, expert load."""

    def one(row):
        out = network.trunk(params, row, cfg, sparse=sparse)
        values = network.logits(params, out.hidden)
        loss = jax.nn.logsumexp(values, -1)[:-1] - jnp.take_along_axis(values[:-1], row[1:, None], -1)[:, 0]
        return jnp.argmax(values, -1).astype(jnp.int32), loss, out.load

    return jax.lax.map(one, rows)


@functools.partial(jax.jit, static_argnames=("cfg", "k"))
def draft_tokens(params, rows, cfg: ModelConfig, k: int = 5):
    """The k greedy drafts from every row of `[B, S]`, as far as their predecessors were right → `[B, k, S]`; expert load."""

    def one(row):
        out = network.drafts(params, row, network.trunk(params, row, cfg, sparse=True).hidden, cfg, k)
        return jnp.argmax(network.logits(params, out.hidden), -1).astype(jnp.int32), out.load

    return jax.lax.map(one, rows)


def compile_ahead(bench: Bench, lengths: tuple[int, ...]) -> list[Any]:
    """What compiles every program of `check`, for threads; it pays where compiled programs are kept on disk."""
    params = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), bench.params)

    def rows(count: int, length: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((count, length), jnp.int32)

    def program(f: Any, *args: Any, **static: Any) -> Any:
        return lambda: f.lower(params, *args, bench.cfg, **static).compile()

    counts = jax.ShapeDtypeStruct((bench.batch,), jnp.int32)
    heat, key = jax.ShapeDtypeStruct((), jnp.float32), jax.eval_shape(lambda: jax.random.key(0))
    return [
        program(proceed, rows(bench.batch, bench.length), counts, key, heat, steps=bench.steps),
        program(draft_tokens, rows(16, bench.length), k=bench.k),
        *(program(best_tokens, rows(4, n), sparse=True) for n in lengths),
        program(best_tokens, rows(4, lengths[-1]), sparse=False),
    ]


def prolong(bench: Bench, prompts: list[list[int]], heat: float = 0.0, seed: int = 0) -> np.ndarray:
    """Rows `[n, length]` int32: each prompt and `bench.steps` tokens (greedy, or sampled at `heat`), zeros behind."""
    out = []
    for start in range(0, len(prompts), bench.batch):
        group = prompts[start : start + bench.batch]
        rows = np.zeros((bench.batch, bench.length), np.int32)
        for row, prompt in zip(rows, group):
            row[: len(prompt)] = prompt
        lengths = np.array([len(p) for p in group] + [1] * (bench.batch - len(group)), np.int32)
        key = jax.random.key(seed + start)
        rows = proceed(bench.params, rows, lengths, key, np.float32(heat), bench.cfg, steps=bench.steps)
        out.append(np.asarray(rows)[: len(group)])
    return np.concatenate(out)


def answers(bench: Bench, prompts: list[str]) -> list[str]:
    """Greedy answers up to the token that ends the turn."""
    ids = [bench.ids(p) for p in prompts]
    ends = {bench.tokenizer.token_to_id(t) for t in ("<|user|>", "<|observation|>", "<|endoftext|>")}
    texts = []
    for prompt, row in zip(ids, prolong(bench, ids), strict=True):
        new = row[len(prompt) : len(prompt) + bench.steps].tolist()
        stop = next((i for i, t in enumerate(new) if t in ends), len(new))
        texts.append(bench.tokenizer.decode(new[:stop], skip_special_tokens=False))
    return texts


def look_up(bench: Bench, length: int, count: int, seed: int = 1, *, sparse: bool = True) -> float:
    """Share of right greedy answers to one question about a table that fills `length` tokens."""
    rng, rows, spans = random.Random(seed * 7919 + length), [], []
    while len(rows) < count:
        lines = int(length / 13)
        text = ""
        for _ in range(40):
            found = tables.table(rng, lines, 4)
            ask, reasoning, answer = tables.question(rng, found)
            messages = [{"role": "user", "content": f"{found.text}\n\n{ask}"}]
            thinking = rng.random() < 0.5
            prompt = generator.render(messages, thinking=thinking, prompt=True)
            said = {"role": "assistant", "content": answer, "reasoning_content": reasoning if thinking else ""}
            text = generator.render([*messages, said], thinking=thinking) + "<|user|>"
            size = len(bench.ids(text))
            if length * 0.9 < size <= length:
                break
            lines = max(4, int(lines * 0.95 * length / size))
        row, start = bench.ids(text), len(bench.ids(prompt))
        # a greedy answer is right iff each of its tokens is the likeliest one behind the right ones before it
        first = row.index(bench.tokenizer.token_to_id("</think>"), start) + 1 if thinking else start
        spans.append((first, len(row)))
        rows.append(row + [0] * (length - len(row)))
    best = _best(bench, np.array(rows, np.int32), sparse)[0]
    right = [b[s - 1 : e - 1].tolist() == r[s:e] for b, r, (s, e) in zip(best, rows, spans, strict=True)]
    return float(np.mean(right))


def _best(bench: Bench, rows: np.ndarray, sparse: bool) -> tuple[np.ndarray, ...]:
    """`best_tokens` of a multiple of four rows, four at a time."""
    parts = [best_tokens(bench.params, rows[i : i + 4], bench.cfg, sparse=sparse) for i in range(0, len(rows), 4)]
    return tuple(np.concatenate([np.asarray(p[i]) for p in parts]) for i in (0, 1, 2))


def losses(bench: Bench, feed: data.Feed, length: int, count: int) -> tuple[dict[str, float], float]:
    """Loss on held-out text of each kind, sparse and dense; least load of any expert over all kinds."""
    out, loads = {}, []
    for name in feed.kinds("held_out", length):
        rows = feed.text(count, length - 1, "held_out", name).astype(np.int32)
        loads.append([_best(bench, rows, True)[2].mean(0), _draft_load(bench, rows)])
        for way, sparse in (("sparse", True), ("dense", False)):
            out[f"{name} {way}"] = float(_best(bench, rows, sparse)[1].mean())
    rows, weights = data.chat_rows(feed.tokenizer_path, 999_331, count, length - 1, 0.3)
    rows = rows.astype(np.int32)
    loads.append([_best(bench, rows, True)[2].mean(0), _draft_load(bench, rows)])
    for way, sparse in (("sparse", True), ("dense", False)):
        out[f"chats {way}"] = float((_best(bench, rows, sparse)[1] * weights).sum() / weights.sum())
    return out, min(float(np.mean([x[i] for x in loads], 0).min()) for i in (0, 1))


def _draft_load(bench: Bench, rows: np.ndarray) -> np.ndarray:
    parts = [draft_tokens(bench.params, rows[i : i + 16], bench.cfg, k=bench.k)[1] for i in range(0, len(rows), 16)]
    return np.concatenate([np.asarray(p) for p in parts]).mean(0)


def accepted(bench: Bench, prompts: list[list[int]]) -> dict[str, Any]:
    """Greedy drafts accepted per step of the engine on the model's own continuation, and per position."""
    k, rows = bench.k, prolong(bench, prompts)
    parts = [draft_tokens(bench.params, rows[i : i + 16], bench.cfg, k=k)[0] for i in range(0, len(rows), 16)]
    counts, reached, right = [], np.zeros(k), np.zeros(k)
    for prompt, row, guess in zip(prompts, rows, np.concatenate([np.asarray(p) for p in parts]), strict=True):
        at, end = len(prompt) - 1, len(prompt) + bench.steps - 1
        while at + k + 1 <= end:
            hits = [guess[j, at] == row[at + j + 2] for j in range(k)]
            count = hits.index(False) if False in hits else k
            reached[: min(count + 1, k)] += 1
            right[:count] += 1
            counts.append(count)
            at += count + 1
    return {
        "mean": float(np.mean(counts)),
        "per position": [round(float(x), 3) for x in right / np.maximum(reached, 1)],
        "steps": len(counts),
    }


def chat_prompts(bench: Bench, count: int, seed: int) -> list[list[int]]:
    """Unseen chats, each cut before one of the model's turns."""
    rng, out = random.Random(seed), []
    opening = bench.tokenizer.token_to_id("</think>"), bench.tokenizer.token_to_id("<|assistant|>")
    while len(out) < count:
        ids = bench.ids(generator.document(rng, bench.room, 0.2))
        turns = [i for i, t in enumerate(ids) if t == opening[1]]
        cut = rng.choice(turns) + 2
        if ids[cut : cut + 1] == [opening[0]]:
            cut += 1
        if cut <= bench.room:
            out.append(ids[:cut])
    return out


def tool_calls(bench: Bench, count: int, seed: int = 3) -> float:
    """Share of prompts that need a tool which are answered by exactly the right calls."""
    rng, prompts, wanted = random.Random(seed), [], []
    while len(prompts) < count:
        tools, messages = toolcalls.chat(rng)
        if not messages[1].get("tool_calls"):
            continue
        prompt = generator.render(messages[:1], tools, thinking=False, prompt=True)
        if len(bench.ids(prompt)) > bench.room:
            continue
        prompts.append(prompt)
        wanted.append("".join(toolcalls.call_text(c["function"]) for c in messages[1]["tool_calls"]))
    return float(np.mean([a == w for a, w in zip(answers(bench, prompts), wanted)]))


def questions(bench: Bench) -> tuple[int, list[str]]:
    """How many of the fixed questions are answered right, and the wrong answers."""
    prompts = [
        generator.render([{"role": "user", "content": ask}], thinking=i % 2 == 0, prompt=True)
        for i, (ask, _) in enumerate(_QUESTIONS)
    ]
    said = answers(bench, prompts)
    wrong = [
        f"{ask} → {text}" for (ask, right), text in zip(_QUESTIONS, said) if right not in re.split("</think>", text)[-1]
    ]
    return len(_QUESTIONS) - len(wrong), wrong


def check(bench: Bench, feed: data.Feed, count: int, lengths: tuple[int, ...] = LENGTHS) -> dict[str, Any]:
    """Every figure of the model card. `count` scales how many prompts each one rests on."""
    right, wrong = questions(bench)
    report: dict[str, Any] = {"questions of 20": right, "wrong answers": wrong}
    report["tool calls"] = tool_calls(bench, count)
    report["look-ups"] = {n: look_up(bench, n, count) for n in lengths}
    report["look-ups, dense"] = {n: look_up(bench, n, count, sparse=False) for n in lengths[-1:]}
    report["drafts on chats"] = accepted(bench, chat_prompts(bench, count, 5))
    code = feed.text(count, min(255, bench.room), "held_out", "python").astype(np.int32).tolist()
    report["drafts on source code"] = accepted(bench, code)
    report["loss"], report["least load"] = losses(bench, feed, bench.length, count)
    return report


def failures(report: dict[str, Any]) -> list[str]:
    """The gates that `report` misses."""
    ups, loss = report["look-ups"], report["loss"]
    kinds = {k.split()[0] for k in loss}
    gates = {
        "look-ups at 1k ≥ 95 %": ups.get(1024, 1) >= 0.95,
        "look-ups at 4k ≥ 85 %": ups.get(4096, 1) >= 0.85,
        "18 of 20 questions": report["questions of 20"] >= 18,
        "tool calls ≥ 95 %": report["tool calls"] >= 0.95,
        "drafts on chats ≥ 2.5": report["drafts on chats"]["mean"] >= 2.5,
        "drafts on source code ≥ 1.5": report["drafts on source code"]["mean"] >= 1.5,
        "sparse loss within 1 % of dense": all(loss[f"{k} sparse"] <= 1.01 * loss[f"{k} dense"] for k in kinds),
        "every expert ≥ 2 % of its layer": report["least load"] >= 0.02,
    }
    return [name for name, passed in gates.items() if not passed]


def as_text(report: dict[str, Any]) -> str:
    """The report as JSON, to keep beside the weights."""
    return json.dumps(report, indent=1, ensure_ascii=False)


def stored(params: Params) -> Params:
    """Float32 parameters with the values that the checkpoint will hold."""
    return jax.tree.map(lambda x: x.astype(jnp.float32), network.half(params))


def bench(params: Params, cfg: ModelConfig, tokenizer: tokenizers.Tokenizer, **sizes: int) -> Bench:
    """Accelerators check in bfloat16, a CPU in float32, where drafts and answers are what the engine gives."""
    on_cpu = jax.default_backend() == "cpu"
    return Bench(stored(params) if on_cpu else network.half(params), cfg, tokenizer, **sizes)
