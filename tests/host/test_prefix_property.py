"""100,000 operations on a small pool: nothing is lost, no hit is wrong, and the hit formula holds as on the first day."""

import random

import numpy as np

from dcpjax.engine import EngineCore
from dcpjax.host.plan import StepPlan, StepResult
from dcpjax.host.request import SamplingParams
from tests.engine.fake_runner import Replay

EOS, JUNK = 2, 9
PAGE = 4


class Device:
    """Memory of pages and lengths of rows. Tokens are drawn from two letters, so that sequences nearly collide."""

    num_pages = 65
    page_tokens = PAGE
    max_model_len = 60
    max_num_seqs = 4
    max_num_batched_tokens = 48
    num_drafts = 3

    def __init__(self, rng):
        self._rng = rng
        self._memory = [[JUNK] * PAGE for _ in range(self.num_pages)]
        self._rows = {}  # row slot → [slots written, token after them]
        self.num_resets = 0
        self._admitted = {}  # row slot → resets before its request was admitted
        self._age = [0] * self.num_pages  # the same of whoever wrote the page last
        self.num_hits = 0

    def check(self, request):
        pass

    def dispatch(self, plan: StepPlan):
        for page in plan.taken:
            self._memory[page] = [JUNK] * PAGE
        tokens = np.zeros((len(plan.rows), self.num_drafts + 1), np.int32)
        accepted = np.zeros(len(plan.rows), np.int32)
        for i, row in enumerate(plan.rows):
            new = self._decode(row) if row.tokens is None else self._chunk(row)
            tokens[i, : len(new)], accepted[i] = new, len(new)
        return Done(StepResult(tokens, accepted))

    def _chunk(self, row):
        matched = row.request.matched
        if row.new:
            hit = [token for page in row.pages[: matched // PAGE] for token in self._memory[page]]
            assert hit == row.request.tokens[:matched], "a hit holds other tokens"
            assert all(self._age[page] == self.num_resets for page in row.pages[: matched // PAGE]), (
                "from before a reset"
            )
            self._admitted[row.row] = self.num_resets
            self.num_hits += matched > 0
        for slot, token in enumerate(row.tokens, row.start):
            if slot >= matched:
                self._write(row, slot, token)
        self._rows[row.row] = [row.start + row.num_tokens, self._token()]
        return [self._rows[row.row][1]] if row.emit else []

    def _decode(self, row):
        state, new = self._rows[row.row], []
        for slot in range(state[0] + 1, state[0] + row.num_tokens):
            self._write(row, slot, JUNK)
        for _ in range(min(self._rng.randrange(1, row.num_tokens + 1), row.request.limit - state[0] - 1)):
            self._write(row, state[0], state[1])
            state[0] += 1
            state[1] = self._token()
            new.append(state[1])
        return new

    def _write(self, row, slot, token):
        if slot < row.request.limit:
            page = row.pages[slot // PAGE]
            self._memory[page][slot % PAGE] = token
            self._age[page] = self._admitted[row.row]

    def _token(self):
        return EOS if self._rng.random() < 0.03 else self._rng.randrange(2)


class Done:
    def __init__(self, result):
        self._result = result

    def fetch(self):
        return self._result


def test_inv_21_24_33_random_operations():
    rng = random.Random(0)
    device = Device(rng)
    engine = EngineCore(device, eos_token_ids=[EOS], kv_events=True)
    scheduler, replay, live = engine.scheduler, Replay(), []
    counts = dict.fromkeys(("admit", "finish", "abort", "preempt", "reset"), 0)
    kinds = rng.choices(tuple(counts), weights=(40, 30, 10, 15, 5), k=100_000)
    for number, kind in enumerate(kinds):
        done = True
        if kind == "admit":
            if len(scheduler.waiting) < 6:
                prompt = [rng.randrange(2) for _ in range(rng.choice((3, 4, 8, 11, 16, 20, 40)))]
                params = SamplingParams(max_tokens=rng.choice((1, 4, 9, 20, 40)))
                salt = rng.choice((None, None, "a"))
                live.append(engine.add(prompt, params, cache_salt=salt, no_store=rng.random() < 0.1))
        elif kind == "finish":
            while engine.has_work and not any(delta.finished for delta in engine.step()):
                pass
        elif kind == "abort" and (live := [request for request in live if request.status != "finished"]):
            engine.abort(rng.choice(live).id)
        elif kind == "preempt" and scheduler.running:
            scheduler.preempt(scheduler.running[-1])
        elif kind == "reset":
            idle = engine.reset_prefix_cache(running=rng.random() < 0.5)
            device.num_resets += 1
            assert scheduler.prefix.num_cached == 0 and idle == (scheduler.pool.num_used == 0)
        else:
            done = False
        counts[kind] += done
        engine.step()
        replay.apply(engine.drain_events())
        assert replay.keys == scheduler.prefix._nodes.keys()
        assert scheduler.pool.num_used + scheduler.pool.num_free == 64
        if number % 10 == 0:
            scheduler.check()
    engine.abort_all()
    engine.drain()
    scheduler.check()
    assert scheduler.pool.num_used == 0 and scheduler.pool.num_free == 64
    assert min(counts.values()) > 1000 and device.num_hits > 10_000, (counts, device.num_hits)

    for n in range(1, 59):
        assert engine.reset_prefix_cache()
        device.num_resets += 1
        prompt = [rng.randrange(2) for _ in range(n)]
        for want in (0, min(n // PAGE * PAGE, n - 1)):
            request = engine.add(prompt, SamplingParams(max_tokens=1))
            engine.drain()
            assert request.cached_tokens == want
