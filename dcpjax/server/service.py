"""What the routes share: the model they serve, whether it can be used now, and the limits on what may be asked."""

import dataclasses
import enum
import hashlib
import time
from typing import Any

import dcpjax
from dcpjax.server.engine_client import EngineClient
from dcpjax.server.errors import ApiError, unavailable
from dcpjax.server.ticket import TicketLimits
from dcpjax.server.wire import ModelFacts
from dcpjax.text import Tokenizer

# Longer without a step, while there are requests, and the engine counts as stuck.
_STALL_SECONDS = 60


class Phase(enum.Enum):
    """What a server is at: in this order, but for DEAD, which follows on a failure of the engine."""

    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"
    DEAD = "dead"


@dataclasses.dataclass(frozen=True)
class Cors:
    """What browsers may do from pages of other origins."""

    origins: tuple[str, ...] = ("*",)
    methods: tuple[str, ...] = ("*",)
    headers: tuple[str, ...] = ("*",)
    credentials: bool = False


@dataclasses.dataclass(frozen=True)
class ServerOptions:
    """sampling_defaults: values for fields that a request leaves out. max_logprobs: −1 is no limit. trust_templates:
    whether requests may bring a chat template. allow_special: whether control tokens in message texts count as such.
    reasoning_fields: names of the thinking in answers. auto_tools: whether calls are parsed that nothing forced.
    priorities: whether requests may say how urgent they are. stream_interval: tokens between chunks. max_queued: requests
    that may wait. request_timeout: seconds to the first token, None: no limit. retry_after: seconds that clients are told
    to wait while the server drains. parallelism: devices and dcp size. fingerprint: what of the configuration can change
    an answer, as text. pin: the acceptance length that is forced, see `Speculation`.
    profile_dir: where profiles go, see `Profiler.start`. log_requests: whether every request gets a line in the log, but for
    those of quiet_paths.
    """

    served_names: tuple[str, ...] = ()
    api_keys: tuple[str, ...] = ()
    sampling_defaults: dict[str, Any] | None = None  # None: the model's own
    sampling_overrides: dict[str, Any] = dataclasses.field(default_factory=dict)
    max_logprobs: int = 20
    template_defaults: dict[str, Any] = dataclasses.field(default_factory=dict)
    trust_templates: bool = False
    allow_special: bool = False
    parse_reasoning: bool = True
    reasoning_fields: tuple[str, ...] = ("reasoning_content",)
    parse_tools: bool = True
    auto_tools: bool = True
    priorities: bool = False
    stream_interval: int = 1
    prompt_details: bool = True
    force_usage: bool = False
    max_body_bytes: int = 32 << 20
    max_queued: int = 1024
    request_timeout: float | None = None
    retry_after: int = 30
    request_id_headers: bool = False
    cors: Cors = Cors()
    dev_endpoints: bool = True
    profile_dir: str | None = None
    log_stats: bool = True
    log_requests: bool = False
    quiet_paths: tuple[str, ...] = ()
    parallelism: tuple[int, int] = (1, 1)
    fingerprint: str = ""
    pin: float | None = None

    @property
    def ticket_limits(self) -> TicketLimits:
        """Those of them that hold for every ticket."""
        return TicketLimits(self.max_queued, self.request_timeout, self.stream_interval)


@dataclasses.dataclass(frozen=True)
class Served:
    """What is known of the model that is loaded, and the way to the engine that runs it."""

    model: ModelFacts
    engine: EngineClient
    names: tuple[str, ...]
    sampling_defaults: dict[str, Any]
    created: int
    system_fingerprint: str

    @property
    def name(self) -> str:
        """The first served name, which answers carry."""
        return self.names[0]

    @property
    def vocab_size(self) -> int:
        """Ids of the vocabulary."""
        return self.model.vocab_size

    def tokenizer(self, param: str) -> Tokenizer:
        """Raises `ApiError` if the model has none."""
        if self.model.tokenizer is None:
            raise ApiError(
                400, f"{param}: this model has no tokenizer; send token ids as prompt to /v1/completions", param
            )
        return self.model.tokenizer

    def check_model(self, name: str | None) -> None:
        """Raises `ApiError` (404) for a name that is not served; None is any."""
        if name is not None and name not in self.names:
            raise ApiError(
                404, f"The model {name[:200]!r} does not exist; this server has {', '.join(self.names)}.", "model"
            )


class Service:
    """The phase of the server, and the model once it is loaded."""

    def __init__(self, options: ServerOptions):
        self.options = options
        self.phase = Phase.LOADING
        self.num_inflight = 0  # HTTP requests that are being answered
        self._served: Served | None = None

    @property
    def served(self) -> Served:
        """Raises `ApiError` (503) before the model is loaded."""
        if self._served is None:
            raise unavailable("The model is being loaded.", retry_after=5)
        return self._served

    @property
    def healthy(self) -> bool:
        """Whether requests are answered: the model is loaded, and the engine makes steps."""
        return self.phase is Phase.READY and not self.served.engine.stalled(_STALL_SECONDS)

    def open(self, model: ModelFacts, engine: EngineClient) -> None:
        """Starts serving `model`, which `engine` runs."""
        options = self.options
        names = options.served_names or (model.name,)
        defaults = model.generation_defaults if options.sampling_defaults is None else options.sampling_defaults
        pinned = "" if options.pin is None else "-pinned"
        digest = hashlib.sha256(f"{model.name} {options.fingerprint}".encode()).hexdigest()[:8]
        self._served = Served(
            model=model,
            engine=engine,
            names=names,
            sampling_defaults={**defaults, **options.sampling_overrides},
            created=int(time.time()),
            system_fingerprint="dcpjax-{}-tp{}-dcp{}-{}{}".format(
                dcpjax.__version__, *options.parallelism, digest, pinned
            ),
        )
        self.phase = Phase.READY

    def die(self) -> None:
        """The engine has failed."""
        self.phase = Phase.DEAD

    def drain(self) -> None:
        """No new work from now on."""
        if self.phase is not Phase.DEAD:
            self.phase = Phase.DRAINING

    def admit(self, method: str) -> None:
        """Raises `ApiError` (503) if a request of this method cannot be answered now."""
        if self.phase is Phase.LOADING:
            raise unavailable("The model is being loaded.", retry_after=5)
        if self.phase is Phase.DEAD:
            raise unavailable("The engine has failed; the server is ending.")
        if self.phase is Phase.DRAINING and method == "POST":
            raise unavailable("The server is ending; it takes no new requests.", self.options.retry_after)
