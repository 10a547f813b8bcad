"""The training of the tiny model, phase by phase, by the clock.

1. `trunk`: dense attention over short rows. 2. `context`: long rows, and the indexer learns what attention looks at.
3. `sparse`: everything in the mode that inference uses, rows of full and of short length in turn. 4. `draft`: the rest
is frozen, five drafts are unrolled on the selection of the first. Then the gates.
"""

import argparse
import concurrent.futures
import dataclasses
import functools
import json
import pathlib
import shutil
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tokenizers

from dcpjax.mesh import make_plan
from models.config import ModelConfig, from_hf, read_config
from models.params import Params, declare, init
from models.saving import save
from models.train import data, gates, network, optim
from models.weights import load

TINY = pathlib.Path(__file__).parent.parent / "tiny"


@dataclasses.dataclass(frozen=True)
class Task:
    """One compiled step: rows of `length` tokens, `batch` of them, and how they are learned from."""

    length: int
    batch: int
    sparse: bool = False
    teach: bool = False
    draft: bool = False
    lookups: float = 0.35
    chat_share: float = 0.5
    k: int = 5


@dataclasses.dataclass(frozen=True)
class Phase:
    """Tasks that take turns, for `share` of the time; the rate goes from `rate[0]` to `rate[1]`."""

    name: str
    share: float
    tasks: tuple[Task, ...]
    rate: tuple[float, float]


@dataclasses.dataclass(frozen=True)
class Plan:
    """Phases and sizes of one training; `max_steps` ends a phase however much time is left."""

    phases: tuple[Phase, ...]
    workers: int
    count: int  # prompts that each gate rests on
    bench: dict[str, int]
    max_steps: int = 1_000_000
    own: int = 0  # rows of the model's own text that drafts learn from
    lengths: tuple[int, ...] = gates.LENGTHS
    num_layers: int = 6


def full_plan(shares: tuple[float, ...], workers: int) -> Plan:
    """For one data-centre GPU."""
    a, b, c, d = shares
    long = Task(4096, 8, True, True, lookups=0.7, chat_share=0.65)
    short = Task(512, 64, True, True, lookups=0.5)
    phases = (
        Phase("trunk", a, (Task(512, 128),), (1.0, 1.0)),
        Phase("context", b, (Task(2048, 32, teach=True, lookups=0.6, chat_share=0.6),), (1.0, 0.6)),
        Phase("sparse", c, (short, long), (0.8, 0.03)),
        Phase("draft", d, (Task(512, 64, draft=True, lookups=0.2, chat_share=0.3),), (1.0, 0.03)),
    )
    return Plan(tuple(p for p in phases if p.share > 0), workers, 64, {"batch": 64, "length": 512}, own=768)


def smoke_plan() -> Plan:
    """A minute on two cores: every code path once, on half the layers and short rows; little is learned."""
    phases = (
        Phase("trunk", 0.0, (Task(96, 4, True, True, lookups=0.5),), (1.0, 1.0)),
        Phase("draft", 0.0, (Task(224, 2, draft=True, k=2),), (1.0, 1.0)),
    )
    return Plan(phases, 0, 4, {"batch": 4, "length": 224, "steps": 8, "k": 2}, 10, 4, (224,), num_layers=3)


@dataclasses.dataclass
class Trainer:
    """Parameters in training and the compiled steps."""

    cfg: ModelConfig
    params: Params
    steps: dict[Task, Any] = dataclasses.field(default_factory=dict)
    states: dict[bool, Any] = dataclasses.field(default_factory=dict)
    history: list[dict[str, Any]] = dataclasses.field(default_factory=list)

    def __post_init__(self):
        declared = declare(self.cfg)
        self.optimisers = {
            False: optim.optimiser(declared.replace(mtp=None)),
            True: optim.optimiser(declared.mtp),
        }

    def compile(self, tasks: list[Task], later: list[Any]) -> None:
        """Begins to compile all steps side by side, then `later`; a step waits for its own only."""
        pool = concurrent.futures.ThreadPoolExecutor(5)
        for task in dict.fromkeys(tasks):
            self.steps[task] = pool.submit(self._compile, task)
        for call in later:
            pool.submit(call)
        pool.shutdown(wait=False)

    def _compile(self, task: Task) -> Any:
        rows = jax.ShapeDtypeStruct((task.batch, task.length + 1), jnp.int32)
        weights = jax.ShapeDtypeStruct((task.batch, task.length), jnp.float32)
        learned = self.params.mtp if task.draft else self.params.replace(mtp=None)
        state = jax.eval_shape(self.optimisers[task.draft].init, learned)
        rate = jax.ShapeDtypeStruct((), jnp.float32)
        step = jax.jit(functools.partial(_step, task, self.cfg, self.optimisers[task.draft]), donate_argnums=(0, 1))
        given = self.params if task.draft else None
        start = time.monotonic()
        compiled = step.lower(learned, state, given, rows, weights, rate).compile()
        used = compiled.memory_analysis().temp_size_in_bytes / 1e9
        print(f"compiled {task} in {time.monotonic() - start:.0f} s, {used:.1f} GB", flush=True)
        return compiled

    def begin(self, draft: bool) -> None:
        """A fresh optimiser for a group of parameters."""
        learned = self.params.mtp if draft else self.params.replace(mtp=None)
        self.states[draft] = jax.jit(self.optimisers[draft].init)(learned)

    def step(self, task: Task, rows: np.ndarray, weights: np.ndarray, rate: float) -> dict[str, jax.Array]:
        """One update from rows `[B, S + 1]` int32 and weights `[B, S]` float32, at `rate` of the peak rates; its
        losses."""
        call = self.steps[task].result()
        if task.draft:
            # the frozen rest is not donated, so the draft must not be part of it
            learned, given = self.params.mtp, self.params.replace(mtp=jax.tree.map(jnp.copy, self.params.mtp))
        else:
            learned, given = self.params.replace(mtp=None), None
        learned, self.states[task.draft], metrics = call(
            learned, self.states[task.draft], given, rows, weights, np.float32(rate)
        )
        self.params = self.params.replace(mtp=learned) if task.draft else learned.replace(mtp=self.params.mtp)
        return metrics


def _step(task: Task, cfg: ModelConfig, optimiser, learned, state, given, rows, weights, rate):
    if task.draft:
        loss = functools.partial(network.draft_loss, params=given, rows=rows, weights=weights, cfg=cfg, k=task.k)
    else:
        loss = functools.partial(
            network.next_token_loss, rows=rows, weights=weights, cfg=cfg, sparse=task.sparse, teach=task.teach
        )
    grads, metrics = jax.grad(loss, has_aux=True)(learned)
    updates, state = optimiser.update(grads, state, learned)
    learned = jax.tree.map(lambda p, u: p + rate * u, learned, updates)
    learned = learned.replace(layers=optim.balance(learned.layers, metrics["load"], rate))
    metrics["least"] = metrics.pop("load").min()
    return learned, state, metrics


def run_phase(
    trainer: Trainer, phase: Phase, plan: Plan, feed: data.Feed, seconds: float, keep: Any, own: Any = None
) -> None:
    """Trains by the clock: `seconds` from now, the rate follows the time that has passed."""
    draft = phase.tasks[0].draft
    trainer.begin(draft)
    for task in phase.tasks:
        feed.expect(task.length, task.lookups)
    trainer.steps[phase.tasks[0]].result()
    start = shown = minute = time.monotonic()
    tokens, step, pending = 0, 0, None
    while step < plan.max_steps and (not seconds or time.monotonic() - start < seconds):
        task = phase.tasks[step % len(phase.tasks)]
        if not trainer.steps[task].done():
            task = phase.tasks[0]
        rows, weights = feed.batch(task.batch, task.length, task.chat_share, task.lookups, own)
        part = min(1.0, (time.monotonic() - start) / seconds) if seconds else 0.5
        rate = min(1.0, (step + 1) / 50) * (phase.rate[0] + part * (phase.rate[1] - phase.rate[0]))
        metrics = trainer.step(task, rows, weights, rate)
        tokens, step = tokens + rows.size, step + 1
        now = time.monotonic()
        if pending is not None:
            # one step behind, so that the device never waits for the host
            jax.block_until_ready(pending["loss"])
        pending = metrics
        if now - shown > 8 or step in (2, plan.max_steps):
            trainer.history.append(_show(phase, task, step, tokens / (now - start), metrics))
            shown = now
        if now - minute > 60:
            keep()
            minute = time.monotonic()


def _show(phase: Phase, task: Task, step: int, speed: float, metrics: dict[str, Any]) -> dict[str, Any]:
    values = {k: np.round(np.asarray(v, np.float64), 4).tolist() for k, v in metrics.items()}
    print(f"{phase.name:8} T={task.length:<5} step {step:<6} {speed / 1e3:8.1f}k tokens/s  {values}", flush=True)
    return {"phase": phase.name, "length": task.length, "step": step, **values}


def train(
    plan: Plan, folder: pathlib.Path, out: pathlib.Path, seconds: float, seed: int, resume: str
) -> dict[str, Any]:
    """Runs `plan` on the prepared text in `folder`; leaves checkpoint and report in `out`. Returns the report."""
    start = time.monotonic()
    raw = _config(plan.num_layers)
    cfg = from_hf(raw)
    device = make_plan(1, 1)
    params = load(pathlib.Path(resume), cfg, device, jnp.float32) if resume else _start(cfg, seed)
    trainer, feed = Trainer(cfg, params), data.Feed(folder, plan.workers, seed)
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    bench = functools.partial(gates.bench, cfg=cfg, tokenizer=tokenizer, **plan.bench)
    ahead = gates.compile_ahead(bench(trainer.params), plan.lengths) if jax.config.jax_compilation_cache_dir else []
    trainer.compile([task for phase in plan.phases for task in phase.tasks], ahead)

    def keep() -> None:
        save(trainer.params, cfg, out / "checkpoint", jnp.bfloat16, raw_config=raw, file_bytes=12_000_000)

    total = sum(p.share for p in plan.phases) or 1.0
    for phase in plan.phases:
        left = seconds - (time.monotonic() - start)
        rest = sum(p.share for p in plan.phases[plan.phases.index(phase) :]) or total
        span = max(1.0, left * phase.share / rest) if seconds else 0.0
        began = time.monotonic()
        own = _own_text(bench(trainer.params), feed, plan.own) if phase.tasks[0].draft and plan.own else None
        print(f"phase {phase.name}: {span:.0f} s, of which {time.monotonic() - began:.0f} s for own text", flush=True)
        run_phase(
            trainer, phase, plan, feed, max(1.0, span - (time.monotonic() - began)) if seconds else 0.0, keep, own
        )
        keep()
    feed.close()
    report: dict[str, Any] = {"seconds": round(time.monotonic() - start), "history": trainer.history}
    (out / "report.json").write_text(json.dumps(report))
    report |= gates.check(bench(trainer.params), feed, plan.count, plan.lengths)
    report["missed"] = gates.failures(report)
    report["sources"] = json.loads((folder / "sources.json").read_text())
    (out / "report.json").write_text(json.dumps(report, ensure_ascii=False))
    return report


def _config(num_layers: int) -> dict[str, Any]:
    """The tiny model's `config.json`, cut to its first layers."""
    raw = json.loads((TINY / "config.json").read_text())
    cut = {key: raw[key][:num_layers] for key in ("indexer_types", "mlp_layer_types")}
    return raw | cut | {"num_hidden_layers": num_layers}


def _own_text(bench: gates.Bench, feed: data.Feed, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows that the model continued itself at temperature 0.8, with full weight on what it wrote.

    Half of the prompts are chats, half source code.
    """
    prompts = gates.chat_prompts(bench, count // 2, 77)
    prompts += feed.text(count - count // 2, min(255, bench.room), only="python").astype(int).tolist()
    rows = gates.prolong(bench, prompts, heat=0.8)
    at = np.arange(bench.length)[None]
    size = np.array([len(p) for p in prompts])[:, None]
    weights = np.where(at < size - 1, 20, np.where(at < size + bench.steps - 1, 100, 0)).astype(np.uint8)
    return np.pad(rows, ((0, 0), (0, 1))).astype(np.uint16), weights


def _start(cfg: ModelConfig, seed: int) -> Params:
    """Fresh weights; what writes to the residual begins small."""
    params = init(cfg, jax.random.key(seed))

    def small(layers: Any) -> Any:
        def scaled(part: Any, *names: str) -> Any:
            return part and part.replace(**{n: 0.3 * getattr(part, n) for n in names})

        return layers.replace(
            attention=scaled(layers.attention, "o"),
            dense=scaled(layers.dense, "down"),
            moe=scaled(layers.moe, "down", "shared_down"),
        )

    params = params.replace(embed=0.3 * params.embed)
    return params.replace(layers=small(params.layers), mtp=params.mtp.replace(layers=small(params.mtp.layers)))


def main() -> None:
    """`python -m models.train`."""
    parser = argparse.ArgumentParser(prog="python -m models.train", description="Trains the tiny model.")
    parser.add_argument("--data", type=pathlib.Path, default=pathlib.Path(".cache/train/data"), help="prepared text")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path(".cache/train/out"))
    parser.add_argument("--prepare", action="store_true", help="only prepare text and tokenizer")
    parser.add_argument("--text", type=pathlib.Path, action="append", default=[], help="root to look for text below")
    parser.add_argument("--minutes", type=float, default=8.0, help="time for all phases; the gates come on top")
    parser.add_argument("--shares", type=float, nargs=4, default=(35, 20, 25, 20), help="time of each phase")
    parser.add_argument("--resume", default="", help="folder of a checkpoint to go on from")
    parser.add_argument("--workers", type=int, default=12, help="processes that write chats")
    parser.add_argument("--compile-cache", default="", help="folder for compiled programs")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--smoke", action="store_true", help="a minute on a CPU: asserts that losses fall")
    args = parser.parse_args()
    if args.compile_cache:
        jax.config.update("jax_compilation_cache_dir", args.compile_cache)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    if args.smoke:
        # tiny programs that run a few times: compiling them well takes longer than it saves
        jax.config.update("jax_disable_most_optimizations", True)
        smoke(args.out / "smoke")
        return
    if args.prepare or not (args.data / "text.npz").is_file():
        data.prepare(args.data, read_config(TINY).max_position, args.text)
        print((args.data / "sources.json").read_text())
    if not args.prepare:
        args.out.mkdir(parents=True, exist_ok=True)
        plan = full_plan(tuple(args.shares), args.workers)
        report = train(plan, args.data, args.out, args.minutes * 60, args.seed, args.resume)
        print(gates.as_text({k: v for k, v in report.items() if k != "history"}))


def smoke(out: pathlib.Path) -> dict[str, Any]:
    """Trains for seconds on little text; asserts that the losses of both phases fall. Returns the report."""
    shutil.rmtree(out, ignore_errors=True)
    data.prepare(out / "data", read_config(TINY).max_position, limit=300_000)
    report = train(smoke_plan(), out / "data", out, 0.0, 0, "")
    for phase in ("trunk", "draft"):
        first, *_, last = (h["loss"] for h in report["history"] if h["phase"] == phase)
        assert last < first, f"the loss of phase {phase} rose from {first} to {last}"
    return report
