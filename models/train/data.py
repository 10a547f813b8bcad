"""Token rows for training: windows of real text, and chats from worker processes that never run dry.

A row has `length + 1` tokens; its weights say how much each predicted token counts, in percent.
"""

import collections
import concurrent.futures
import json
import multiprocessing
import pathlib
import random
from collections.abc import Iterable

import numpy as np
import tokenizers

from models.train import corpus, generator
from models.train import tokenizer as make

# What a user writes cannot be foretold; a little of it keeps the model's English.
_USER_WEIGHT = 10


def prepare(folder: pathlib.Path, context: int, extra: Iterable[pathlib.Path] = (), limit: int = 12_000_000) -> None:
    """Writes the tokenizer and the tokens of all real text at hand to `folder`, once for many trainings."""
    found = corpus.sources(extra, limit)
    rng = random.Random(0)
    chats = [generator.document(rng, 600) for _ in range(max(300, limit // 2000))]
    sample = [text[:20_000] for s in found for text in s.train[: max(20, limit // 60_000)]]
    tokenizer = make.train(chats + sample)
    make.save(tokenizer, folder, context)
    end = tokenizer.token_to_id("<|endoftext|>")
    notes, arrays = [], {}
    for source in found:
        for part, texts in (("train", source.train), ("held_out", source.held_out)):
            encoded = tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
            ids = [np.array([*e.ids, end], np.uint16) for e in encoded]
            arrays[f"{source.name}.{part}"] = np.concatenate(ids) if ids else np.zeros(0, np.uint16)
        notes.append(f"{source.note}, {arrays[f'{source.name}.train'].size / 1e6:.1f} M tokens")
    np.savez_compressed(folder / "text.npz", **arrays)
    (folder / "sources.json").write_text(json.dumps(notes, indent=1))


def weigh(rows: np.ndarray, tokenizer: tokenizers.Tokenizer) -> np.ndarray:
    """Percent for each predicted token of chat rows `[n, length+1]` → uint8 `[n, length]`.

    Full weight from behind `<|assistant|>` up to the control token that ends the turn. An empty think block counts
    nothing: it is written by the template, in turns where thinking was cleared away too.
    """
    ids = [tokenizer.token_to_id(t) for t in ("<|assistant|>", "<|system|>", "<|user|>", "<|observation|>", "[gMASK]")]
    role = np.where(np.isin(rows, ids), np.arange(rows.shape[1]), -1)
    last = np.maximum.accumulate(role, axis=1)[:, :-1]
    speaker = np.take_along_axis(rows, np.maximum(last, 0), axis=1)
    weights = np.where((last >= 0) & (speaker == ids[0]), 100, _USER_WEIGHT).astype(np.uint8)
    begin, close = tokenizer.token_to_id("<think>"), tokenizer.token_to_id("</think>")
    weights[(rows[:, :-1] == begin) & (rows[:, 1:] == close)] = 0
    return weights


def chat_rows(path: str, seed: int, count: int, length: int, lookups: float) -> tuple[np.ndarray, np.ndarray]:
    """Rows `[count, length + 1]` uint16 of packed chats, and `weigh` of them. Every row begins with the begin of a
    chat."""
    tokenizer, rng = tokenizers.Tokenizer.from_file(path), random.Random(seed)
    rows = np.zeros((count, length + 1), np.uint16)
    for row in rows:
        at = 0
        while at <= length:
            ids = tokenizer.encode(generator.document(rng, length + 1 - at, lookups), add_special_tokens=False).ids
            ids = ids[: length + 1 - at]
            row[at : at + len(ids)] = ids
            at += len(ids)
    return rows, weigh(rows, tokenizer)


class Feed:
    """Batches of mixed rows. Chats come from `workers` processes; when they lag, earlier chats are drawn again."""

    def __init__(self, folder: pathlib.Path, workers: int, seed: int):
        with np.load(folder / "text.npz") as arrays:
            self._text = {k: arrays[k] for k in arrays}
        self._tokenizer = str(folder / "tokenizer.json")
        self._rng = np.random.default_rng(seed)
        self._seed = seed * 1_000_003
        context = multiprocessing.get_context("spawn")
        self._pool = concurrent.futures.ProcessPoolExecutor(workers, mp_context=context) if workers else None
        self._waiting: dict[tuple, collections.deque] = {}
        self._done: dict[tuple, list] = {}
        self._ahead = 3 * workers

    @property
    def tokenizer_path(self) -> str:
        """The tokenizer's file."""
        return self._tokenizer

    def chats(self, count: int, length: int, lookups: float) -> tuple[np.ndarray, np.ndarray]:
        """`count` rows `[count, length + 1]` uint16 of chats, with their weights `[count, length]` uint8."""
        key = (length, lookups)
        done, waiting = self._done.setdefault(key, []), self._waiting.setdefault(key, collections.deque())
        chunk = max(4, 16_384 // length)
        pieces, have = [], 0
        while have < count or not pieces:
            self._order(key, chunk)
            if waiting and (waiting[0].done() or not done):
                done.append(waiting.popleft().result())
                piece = done[-1]
            elif done:
                piece = done[self._rng.integers(len(done))]
            else:
                self._seed += 1
                piece = chat_rows(self._tokenizer, self._seed, min(chunk, max(count, 1)), length, lookups)
            pieces.append(piece)
            have += len(piece[0])
        rows, weights = (np.concatenate(x)[:count] for x in zip(*pieces))
        return rows, weights

    def expect(self, length: int, lookups: float) -> None:
        """Lets the workers begin on rows of this kind."""
        self._order((length, lookups), max(4, 16_384 // length))

    def _order(self, key: tuple, chunk: int) -> None:
        waiting = self._waiting.setdefault(key, collections.deque())
        while self._pool and len(waiting) < self._ahead:
            self._seed += 1
            waiting.append(self._pool.submit(chat_rows, self._tokenizer, self._seed, chunk, *key))

    def kinds(self, part: str, length: int) -> list[str]:
        """Kinds of real text of which there is enough for a row."""
        return [n for n in corpus.SHARES if self._text.get(f"{n}.{part}", np.zeros(0)).size > length + 1]

    def text(self, count: int, length: int, part: str = "train", only: str = "") -> np.ndarray:
        """`count` windows `[count, length + 1]` uint16 of real text, of all kinds in their shares or `only` of one."""
        names = [n for n in self.kinds(part, length) if not only or n == only]
        shares = np.array([corpus.SHARES[n] for n in names])
        kinds = self._rng.choice(len(names), count, p=shares / shares.sum())
        rows = []
        for kind in kinds:
            tokens = self._text[f"{names[kind]}.{part}"]
            start = self._rng.integers(tokens.size - length - 1)
            rows.append(tokens[start : start + length + 1])
        return np.stack(rows)

    def batch(
        self,
        count: int,
        length: int,
        chat_share: float,
        lookups: float,
        own: tuple[np.ndarray, np.ndarray] | None = None,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Tokens int32 `[count, length+1]` and weights float32 `[count, length]`.

        `own` are rows that the model wrote, with weights; they take half of the batch.
        """
        owned = count // 2 if own else 0
        chats = round((count - owned) * chat_share)
        rows, weights = self.chats(chats, length, lookups)
        rest = count - owned - chats
        rows = np.concatenate([rows, self.text(rest, length)])
        weights = np.concatenate([weights, np.full((rest, length), 100, np.uint8)])
        if own:
            drawn = self._rng.integers(len(own[0]), size=owned)
            rows, weights = np.concatenate([rows, own[0][drawn]]), np.concatenate([weights, own[1][drawn]])
        return rows.astype(np.int32), weights.astype(np.float32) / 100

    def close(self) -> None:
        """Ends the workers."""
        if self._pool:
            self._pool.shutdown(wait=False, cancel_futures=True)
