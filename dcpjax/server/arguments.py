"""The command line of the server: flags in, checked `Settings` out; nothing is loaded to find a bad combination.

Both `--flag-name` and `--flag_name` are read, booleans have `--x` and `--no-x`, flags that hold JSON also take
`--flag.key value`. Flags of vLLM without a meaning here are accepted with a warning, so that pasted commands start.
"""

import argparse
import dataclasses
import difflib
import json
import pathlib
from collections.abc import Sequence
from typing import Any, NoReturn

from dcpjax.errors import ConfigError
from dcpjax.server.service import ServerOptions

_UNITS = {"k": 10**3, "m": 10**6, "g": 10**9, "K": 2**10, "M": 2**20, "G": 2**30}

# Name → whether it takes a value. All of them are about machinery that works differently here, or not at all.
_WITHOUT_MEANING = {
    "--trust-remote-code": False,
    "--enforce-eager": False,
    "--disable-custom-all-reduce": False,
    "--enable-chunked-prefill": False,
    "--enable-auto-tool-choice": False,
    "--disable-log-requests": False,
    "--disable-log-stats": False,
    "--moe-backend": True,
    "--attention-backend": True,
    "--gpu-memory-utilization": True,
    "--load-format": True,
    "--reasoning-parser": True,
    "--tool-call-parser": True,
    "--distributed-executor-backend": True,
    "--swap-space": True,
    "--uvicorn-log-level": True,
}
_JSON_FLAGS = (
    "--hf-overrides",
    "--speculative-config",
    "--override-generation-config",
    "--default-chat-template-kwargs",
)
_DRAFT_KV = ("sharded", "replicated")


@dataclasses.dataclass(frozen=True)
class Settings:
    """llm: arguments of `LLM`. warnings: one line each, for the log."""

    llm: dict[str, Any]
    options: ServerOptions
    host: str
    port: int
    shutdown_timeout: float
    warnings: tuple[str, ...] = ()


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """One line that says what to change, instead of a page of usage."""
        self.exit(2, f"{self.prog}: error: {message} (--help lists all flags)\n")


def make_parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="dcpjax.serve",
        description="Serves a GLM-5.2 checkpoint over the OpenAI protocol.",
        allow_abbrev=False,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("positional_model", nargs="?", metavar="MODEL", help="a checkpoint folder; none: the embedded tiny model")
    group = parser.add_argument_group("model")
    add = group.add_argument
    add("--model", help="the same as MODEL")
    add("--tokenizer", help="a folder with tokenizer.json (default: the model's)")
    add("--served-model-name", nargs="+", metavar="NAME", help="names in the API, the first is echoed")
    add("--dtype", choices=("auto", "bfloat16", "float32"), default="auto", help="auto: float32 on CPU")
    add("--hf-overrides", type=_json, metavar="JSON", default={}, help="laid over config.json")
    add("--max-model-len", type=_length, metavar="N|64k|1M|auto", help="tokens of prompt and answer together")
    add("--seed", type=int, default=0, help="of requests that bring none")
    group = parser.add_argument_group("devices")
    add = group.add_argument
    add("--tensor-parallel-size", "--tp", "-tp", type=_count, metavar="T", help="devices (default: the dcp size)")
    add("--decode-context-parallel-size", "--dcp", "-dcp", type=_count, metavar="N", default=1, help="must divide T")
    add(
        "--enable-expert-parallel",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="whole experts on devices",
    )
    add("--data-parallel-size", "-dp", type=_count, metavar="1", default=1, help="only 1")
    add("--cp-kv-cache-interleave-size", type=_count, default=1, help="tokens of a rank's turn")
    add("--dcp-kv-cache-interleave-size", type=_count, help="deprecated name of --cp-kv-cache-interleave-size")
    add("--dcp-comm-backend", choices=("ag_rs", "a2a", "psum"), default="ag_rs", help="how partial results meet")
    add("--dcp-index-shards", type=_count, help="1 or the dcp size (default)")
    add("--dcp-debug", action=argparse.BooleanOptionalAction, help="a line a layer from every device; slow")
    group = parser.add_argument_group("cache and scheduling")
    add = group.add_argument
    add("--block-size", type=_count, default=64, help="tokens of a logical page, the same at every dcp size")
    add("--num-gpu-blocks-override", type=_count, help="exact number of blocks")
    add("--kv-cache-memory-bytes", type=_count, help="for the cache over all devices")
    add("--kv-cache-dtype", choices=("auto", "bfloat16", "float32", "fp8", "fp8_e4m3"), default="auto", help="records")
    add("--enable-prefix-caching", action=argparse.BooleanOptionalAction, default=True, help="reuse equal beginnings")
    add("--max-num-seqs", type=_count, help="requests at a time")
    add("--max-num-batched-tokens", type=_count, help="tokens of a step, prefill chunks included")
    add("--overlap", action=argparse.BooleanOptionalAction, default=True, help="dispatch before the last step is read")
    add("--speculative-config", type=_json, metavar="JSON", help='{"method":"mtp","num_speculative_tokens":5}')
    group = parser.add_argument_group("answers")
    add = group.add_argument
    add("--generation-config", default="auto", help="sampling defaults: auto (the model's), vllm (neutral) or a folder")
    add("--override-generation-config", type=_json, metavar="JSON", default={}, help="laid over them")
    add("--max-logprobs", type=int, default=20, help="-1: no limit")
    add("--chat-template", help="a file, or the template itself")
    add("--default-chat-template-kwargs", type=_json, metavar="JSON", default={}, help="for every chat")
    group = parser.add_argument_group("server")
    add = group.add_argument
    add("--host", default="127.0.0.1", help="address to listen on")
    add("--port", type=int, default=8000, help="0: any free one")
    add("--api-key", nargs="+", metavar="KEY", help="allowed keys")
    add("--max-request-body-bytes", type=_count, default=32 << 20, help="larger ones are refused")
    add("--shutdown-timeout", type=float, default=30.0, help="seconds that running requests get after SIGTERM")
    group = parser.add_argument_group("accepted without effect")
    for name, has_value in _WITHOUT_MEANING.items():
        kind = {} if has_value else {"action": argparse.BooleanOptionalAction}
        group.add_argument(name, default=None, help=argparse.SUPPRESS, **kind)
    return parser


def parse(
    argv: Sequence[str], api_keys: Sequence[str] = (), draft_kv: str | None = None, debug: bool = False
) -> Settings:
    """Reads the command line; exits with one line on standard error if it is wrong.

    api_keys: used if the line gives none. draft_kv, debug: likewise, see `LLM`.
    """
    parser = make_parser()
    given, unknown = parser.parse_known_args(_fold_dotted(parser, [_dashes(word) for word in argv]))
    if unknown:
        parser.error(_unknown(parser, unknown[0]))
    try:
        return _settings(given, tuple(api_keys), draft_kv, debug)
    except ConfigError as error:
        parser.error(str(error))


def _settings(given: argparse.Namespace, api_keys: tuple[str, ...], draft_kv: str | None, debug: bool) -> Settings:
    warnings = []
    if given.positional_model and given.model and given.positional_model != given.model:
        raise ConfigError(f"two models: {given.positional_model!r} and --model {given.model!r}; give one")
    if given.dcp_kv_cache_interleave_size is not None:
        warnings.append("--dcp-kv-cache-interleave-size is deprecated; use --cp-kv-cache-interleave-size")
        given.cp_kv_cache_interleave_size = given.dcp_kv_cache_interleave_size
    for name in _WITHOUT_MEANING:
        if getattr(given, name[2:].replace("-", "_")) is not None:
            warnings.append(f"{name} has no effect here")
    speculative = given.speculative_config
    if speculative is not None and draft_kv is not None:
        speculative = {"draft_kv": draft_kv, **speculative}
    num_drafts, pin = _check_speculative(speculative)
    _check(given, num_drafts)
    if pin is not None:
        warnings.append(
            f"pin: the acceptance length is forced to {pin:g}, for benchmarks only: texts are not the model's"
        )
    llm = {
        "model": given.model or given.positional_model,
        "tokenizer": given.tokenizer,
        "chat_template": None if given.chat_template is None else _template(given.chat_template),
        "tensor_parallel_size": given.tensor_parallel_size,
        "decode_context_parallel_size": given.decode_context_parallel_size,
        "enable_expert_parallel": given.enable_expert_parallel,
        "cp_kv_cache_interleave_size": given.cp_kv_cache_interleave_size,
        "dcp_comm_backend": given.dcp_comm_backend,
        "index_shards": given.dcp_index_shards,
        "block_size": given.block_size,
        "num_blocks": given.num_gpu_blocks_override,
        # The longest that fits is what an LLM takes when it is told nothing.
        "max_model_len": None if given.max_model_len == "auto" else given.max_model_len,
        "max_num_seqs": given.max_num_seqs,
        "max_num_batched_tokens": given.max_num_batched_tokens,
        "dtype": given.dtype,
        "kv_cache_dtype": "fp8" if given.kv_cache_dtype == "fp8_e4m3" else given.kv_cache_dtype,
        "kv_cache_memory_bytes": given.kv_cache_memory_bytes,
        "enable_prefix_caching": given.enable_prefix_caching,
        "speculative_config": speculative,
        "dcp_debug": debug if given.dcp_debug is None else given.dcp_debug,
        "overlap": given.overlap,
        "seed": given.seed,
        "hf_overrides": given.hf_overrides or None,
    }
    options = ServerOptions(
        served_names=tuple(given.served_model_name or ()),
        api_keys=tuple(given.api_key or api_keys),
        sampling_defaults=_generation_defaults(given.generation_config),
        sampling_overrides=given.override_generation_config,
        max_logprobs=given.max_logprobs,
        template_defaults=given.default_chat_template_kwargs,
        max_body_bytes=given.max_request_body_bytes,
        retry_after=max(1, round(given.shutdown_timeout)),
        parallelism=(
            given.tensor_parallel_size or given.decode_context_parallel_size,
            given.decode_context_parallel_size,
        ),
        fingerprint=json.dumps(llm, sort_keys=True, default=str),
        pin=pin,
    )
    return Settings(llm, options, given.host, given.port, given.shutdown_timeout, tuple(warnings))


def _check(given: argparse.Namespace, num_drafts: int) -> None:
    """Combinations that could not run. Raises `ConfigError`."""
    dcp, size = given.decode_context_parallel_size, given.tensor_parallel_size
    turn = dcp * given.cp_kv_cache_interleave_size
    if given.data_parallel_size != 1:
        raise ConfigError(f"--data-parallel-size {given.data_parallel_size} is not supported; use 1")
    if size is not None and size % dcp:
        raise ConfigError(
            f"--decode-context-parallel-size {dcp} must divide --tensor-parallel-size {size}: dcp uses the same "
            "devices, it adds none"
        )
    if given.dcp_comm_backend == "a2a" and dcp == 1:
        raise ConfigError("--dcp-comm-backend a2a needs --decode-context-parallel-size above 1; use ag_rs")
    if given.block_size % turn:
        raise ConfigError(
            f"--block-size {given.block_size} must be a multiple of dcp size × interleave = {turn}; raise it to "
            f"{-(-given.block_size // turn) * turn}"
        )
    if given.dcp_index_shards not in (None, 1, dcp):
        raise ConfigError(f"--dcp-index-shards must be 1 or the dcp size {dcp}; got {given.dcp_index_shards}")
    if given.num_gpu_blocks_override == 1:
        raise ConfigError("--num-gpu-blocks-override must be at least 2: block 0 is a dummy")
    tokens, rows = given.max_num_batched_tokens, given.max_num_seqs
    if tokens is not None and rows is not None and tokens < rows * (1 + num_drafts):
        drafts = f" × (1 + {num_drafts} drafts)" if num_drafts else ""
        raise ConfigError(f"--max-num-batched-tokens {tokens} must be at least --max-num-seqs {rows}{drafts}")
    if not 0 <= given.port < 65536:
        raise ConfigError(f"--port must be between 0 and 65535; got {given.port}")
    if given.max_logprobs < -1:
        raise ConfigError(f"--max-logprobs must be at least -1; got {given.max_logprobs}")
    if not given.shutdown_timeout >= 0:
        raise ConfigError(f"--shutdown-timeout must be at least 0; got {given.shutdown_timeout}")


def _check_speculative(config: dict[str, Any] | None) -> tuple[int, float | None]:
    """Drafts of a step, and the acceptance length that is forced, if one is. Raises `ConfigError`."""
    if config is None:
        return 0, None
    from dcpjax.spec import Speculation  # it imports JAX, which a wrong command line need not wait for

    try:
        speculation, draft_kv = Speculation.read(config)
    except ConfigError as error:
        raise ConfigError(str(error).replace("speculative_config", "--speculative-config", 1)) from None
    if draft_kv not in _DRAFT_KV:
        raise ConfigError(
            f"--speculative-config: draft_kv must be one of {', '.join(_DRAFT_KV)}; got {draft_kv!r:.100}"
        )
    return speculation.num_drafts, speculation.pin


def _template(given: str) -> str:
    try:
        path = pathlib.Path(given)
        if path.is_file():
            return path.read_text(encoding="utf-8")
    except OSError:  # too long for a name: it is the template itself
        pass
    if "{" not in given:
        raise ConfigError(f"--chat-template {given[:200]!r} is neither a file nor a template")
    return given


def _generation_defaults(given: str) -> dict[str, Any] | None:
    """None: the model's own."""
    if given in ("auto", "vllm"):
        return None if given == "auto" else {}
    path = pathlib.Path(given)
    path = path / "generation_config.json" if path.is_dir() else path
    try:
        return _json(path.read_text(encoding="utf-8"))
    except (OSError, argparse.ArgumentTypeError):
        raise ConfigError(f"--generation-config {given[:200]!r}: use auto, vllm, or a folder with that file") from None


def _dashes(word: str) -> str:
    """`--flag_name=x_y` → `--flag-name=x_y`; keys after a dot are kept."""
    if not word.startswith("--"):
        return word
    name, equals, value = word.partition("=")
    flag, dot, key = name.partition(".")
    return f"{flag.replace('_', '-')}{dot}{key}{equals}{value}"


def _fold_dotted(parser: argparse.ArgumentParser, argv: list[str]) -> list[str]:
    """`--flag.key value` → one `--flag JSON`, laid over the `--flag JSON` that is also given."""
    rest: list[str] = []
    folded: dict[str, dict[str, Any]] = {
        flag: {} for flag in _JSON_FLAGS if any(w.startswith(f"{flag}.") for w in argv)
    }
    words = iter(argv)
    for word in words:
        name, equals, value = word.partition("=")
        flag, dot, key = name.partition(".")
        if flag not in folded:
            rest.append(word)
            continue
        value = value if equals else next(words, None)
        if value is None:
            parser.error(f"{name} needs a value")
        held = folded[flag]
        if not dot:
            try:
                folded[flag] = {**_json(value), **held}
            except argparse.ArgumentTypeError as error:
                parser.error(f"{flag}: {error}")
            continue
        *path, last = key.split(".")
        for part in path:
            held = held.setdefault(part, {})
        held[last] = _value(value)
    for flag, value in folded.items():
        rest += [flag, json.dumps(value)]
    return rest


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _unknown(parser: argparse.ArgumentParser, word: str) -> str:
    name = word.partition("=")[0]
    known = [flag for action in parser._actions for flag in action.option_strings]
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.0)
    hint = f"; did you mean {near[0]}?" if near and name.startswith("-") else ""
    return f"unknown argument {name[:200]!r}{hint}"


def _json(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text[:200]!r} is not valid JSON") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text[:200]!r} is not a JSON object")
    return value


def _count(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text[:200]!r} is not a whole number of at least 1")
    return value


def _length(text: str) -> int | str:
    """`65536`, `64k` (thousands), `64K` (1024s), `1M`, `auto`."""
    if text == "auto":
        return text
    unit = _UNITS.get(text[-1:], 1)
    try:
        value = float(text[:-1] if unit > 1 else text) * unit
    except ValueError:
        value = 0.0
    if not value >= 1 or value != int(value):
        raise argparse.ArgumentTypeError(f"{text[:200]!r} is not a length such as 65536, 64k, 1M or auto")
    return int(value)
