"""What the engine process does: it loads a model, runs the engine, and answers what the front asks."""

import concurrent.futures
import gc
import json
import logging
import math
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from dcpjax.engine import EngineCore
from dcpjax.errors import DcpjaxError
from dcpjax.grammar import Grammars, Vocabulary
from dcpjax.host.request import Grammar
from dcpjax.layout import CacheLayout
from dcpjax.server.device_metrics import DeviceMetrics
from dcpjax.server.engine_loop import EngineLoop, ReadyJob
from dcpjax.server.metrics import Metrics
from dcpjax.server.profile import Profiler
from dcpjax.server.rules import RulesMaker
from dcpjax.server.service import ServerOptions
from dcpjax.server.watch import Watch
from dcpjax.server.wire import Add, Ask, Cut, Died, Drop, Failed, Job, ModelFacts, Stop, Told, carried

if TYPE_CHECKING:  # it imports JAX: the server works with whatever has its attributes
    from dcpjax.llm import LLM

log = logging.getLogger("dcpjax.server")

# Between two looks for cycles; what a request leaves is freed without them.
_NEW_OBJECTS = 50_000
# Questions that are answered at a time without waiting for the engine, and forms of answers that are compiled.
_ASIDE, _FORMS = 4, 2


class EngineSide:
    """A loaded model with its loop, its metrics, and what compiles grammars. tell: takes messages for the front."""

    def __init__(self, llm: "LLM", options: ServerOptions, tell: Callable[[Any], None]):
        self.llm = llm
        self._tell = tell
        scheduler = llm.engine.scheduler
        cache = {
            "block_size": str(scheduler.page_tokens),
            "num_gpu_blocks": str(scheduler.pool.capacity),
            "enable_prefix_caching": str(scheduler.prefix is not None),
        }
        name = (options.served_names or (llm.name,))[0]
        self.metrics = Metrics(name, llm.max_model_len, lambda: llm.engine.stats, cache)
        self.metrics.register(self._device_metrics(options))
        self.watch = Watch(
            lambda: llm.engine.stats,
            on_step=lambda seconds: self.metrics.step(*llm.engine.step_tokens, seconds),
            pin=options.pin,
            period=10.0 if options.log_stats else math.inf,
        )
        vocabulary = Vocabulary(llm.tokenizer, llm.config.vocab_size, tuple(sorted(llm.engine.eos_token_ids)))
        self.rules = RulesMaker(Grammars(vocabulary), llm.tokenizer, self.metrics.masked)
        self.profiler = Profiler()
        self._loop = EngineLoop(llm, self.metrics, self.watch, tell)
        self._threads = {
            "aside": concurrent.futures.ThreadPoolExecutor(_ASIDE, "aside"),
            "forms": concurrent.futures.ThreadPoolExecutor(_FORMS, "forms"),
        }
        self._lock = threading.Lock()
        self._late: dict[int, list[Any]] = {}  # tickets whose rules are being made → what was said of them since

    @property
    def engine(self) -> EngineCore:
        """For questions that are answered between two steps."""
        return self.llm.engine

    def facts(self) -> ModelFacts:
        """What the front must know."""
        llm = self.llm
        return ModelFacts(llm.name, llm.tokenizer, llm.config.vocab_size, llm.max_model_len, llm.generation_defaults)

    def run(self) -> None:
        """The engine's loop, until the front says stop. Raises what the engine raises."""
        self._loop.run()

    def hear(self, message: Any) -> None:
        """Takes a message of the front; in a thread of its own, so that none of this is the loop's work, and none of it takes
        long: the messages of all others are behind it."""
        loop = self._loop
        match message:
            case Add(ticket, jobs, whole) if any(job.rules is not None for job in jobs):
                with self._lock:
                    self._late[ticket] = []
                self._threads["forms"].submit(self._add, message)
            case Add(ticket, jobs, whole):
                made = [self._ready(job, None) for job in jobs]
                loop.call(lambda: loop.add(ticket, made, whole))
            case Drop() | Cut():
                self._end(message)
            case Ask(number, function, arguments, None):
                # What fails here may have left the engine between two states: that ends it.
                loop.call(lambda: self._tell(Told(number, function(self, *arguments), None)))
            case Ask(number, function, arguments, threads):
                self._threads[threads].submit(self._answer, number, function, arguments)
            case Stop():
                loop.stop()

    def _add(self, message: Add) -> None:
        """Adds jobs with rules, which may have to be compiled again."""
        loop, (ticket, jobs, whole) = self._loop, message
        try:
            made = list(map(self._ready, jobs, self.rules.make([job.rules for job in jobs])))
            loop.call(lambda: loop.add(ticket, made, whole))
        except Exception as error:  # noqa: BLE001 - it must not end the others
            loop.call(lambda error=error: loop.refuse(ticket, len(jobs), error))
        with self._lock:
            for later in self._late.pop(ticket):
                self._end_now(later)

    def _end(self, message: Drop | Cut) -> None:
        """Ends a ticket or all of them, whether they are in the engine or on their way."""
        with self._lock:
            late = self._late.get(message.ticket)
            if late is not None:
                late.append(message)
                return
            if message.ticket is None:
                for ticket, messages in self._late.items():
                    messages.append(Cut(ticket))
            self._end_now(message)

    def _end_now(self, message: Drop | Cut) -> None:
        end = self._loop.drop if isinstance(message, Drop) else self._loop.cut
        self._loop.call(lambda: end(message.ticket))

    def _ready(self, job: Job, grammar: Grammar | None) -> ReadyJob:
        return ReadyJob(job, job.prompt.tolist(), grammar, self.engine.page_keys(job.prompt, job.cache_salt))

    def _answer(self, number: int, function: Callable, arguments: tuple) -> None:
        try:
            told = Told(number, function(self, *arguments), None)
        except Exception as error:  # noqa: BLE001 - whatever it is, whoever asked must hear of it
            told = Told(number, None, carried(error).with_traceback(None))  # which knows this frame
        self._tell(told)

    def _device_metrics(self, options: ServerOptions) -> DeviceMetrics:
        llm, scheduler = self.llm, self.llm.engine.scheduler
        layout = CacheLayout(
            num_pages=scheduler.pool.num_pages,
            page_tokens=scheduler.page_tokens,
            shards=options.parallelism[1],
            interleave=json.loads(options.fingerprint or "{}").get("cp_kv_cache_interleave_size") or 1,
        )

        def lengths() -> list[int]:
            return [request.written for request in tuple(scheduler.running)]

        return DeviceMetrics(self.metrics.labels, lambda: llm.device_state, lengths, layout)


class Channel(Protocol):
    """The way to the front."""

    def send(self, message: Any) -> None:
        """From any thread."""

    def listen(self, hear: Callable[[Any], None]) -> None:
        """Calls `hear` with every message, until the front has gone."""


def work(load: Callable[[], "LLM"], options: ServerOptions, channel: Channel) -> int:
    """The whole life of the engine process; returns its exit code. load: returns a model that is ready to use."""
    sides: list[EngineSide] = []

    def hear(message: Any) -> None:
        for side in sides:  # none where the model could not be loaded: then the process is about to end
            side.hear(message)

    threading.Thread(target=channel.listen, args=(hear,), name="listen", daemon=True).start()
    try:
        llm = load()
    except DcpjaxError as error:
        channel.send(Failed(2, str(error)))
        return 2
    except Exception:
        log.exception("the model could not be loaded")
        channel.send(Failed(1, ""))
        return 1
    settle_memory()
    side = EngineSide(llm, options, channel.send)
    sides.append(side)
    channel.send(side.facts())
    try:
        side.run()
    except Exception:
        log.exception("the engine failed; the server ends")
        channel.send(Died())
        return 1
    return 0


def settle_memory() -> None:
    """What is loaded stays: the collector need not look through it again and again, nor as often as for a script."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(_NEW_OBJECTS)
