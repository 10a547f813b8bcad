"""The command line of the server: flags in, checked `Settings` out; nothing is loaded to find a bad combination.

Both `--flag-name` and `--flag_name` are read, booleans have `--x` and `--no-x`, flags that hold JSON also take
`--flag.key value`, and `--config FILE` brings more. Flags of vLLM without a meaning here are accepted with a warning, so
that pasted commands start.
"""

import argparse
import dataclasses
import ipaddress
import json
import pathlib
from collections.abc import Sequence
from typing import Any

from dcpjax.errors import ConfigError
from dcpjax.host.keys import hash_named
from dcpjax.hub import checked_defaults
from dcpjax.server import spelling
from dcpjax.server.flags import JSON_FLAGS, WITHOUT_MEANING, Parser, json_object, make_parser
from dcpjax.server.lifetime import Listen
from dcpjax.server.service import Cors, ServerOptions

_DRAFT_KV = ("sharded", "replicated")


@dataclasses.dataclass(frozen=True)
class Settings:
    """llm: arguments of `LLM`. engine: "jax" or "echo". warnings: one line each, for the log."""

    llm: dict[str, Any]
    options: ServerOptions
    listen: Listen
    engine: str = "jax"
    warnings: tuple[str, ...] = ()


def parse(
    argv: Sequence[str],
    api_keys: Sequence[str] = (),
    draft_kv: str | None = None,
    debug: bool = False,
    program: str = "dcpjax.serve",
) -> Settings:
    """Reads the command line; exits with one line on standard error if it is wrong.

    api_keys: used if the line gives none. draft_kv, debug: likewise, see `LLM`. program: the name errors begin with.
    """
    parser = make_parser(program)
    try:
        return _settings(_read(parser, [spelling.dashes(word) for word in argv]), tuple(api_keys), draft_kv, debug)
    except ConfigError as error:
        parser.error(str(error))


def _read(parser: Parser, argv: list[str]) -> argparse.Namespace:
    """The line's values over those of its `--config`. Raises `ConfigError`."""
    first = Parser(prog=parser.prog, add_help=False, allow_abbrev=False)
    first.add_argument("--config")
    file = first.parse_known_args(argv)[0].config
    below = _words(parser, [] if file is None else spelling.file_words(file), None)
    model = below.positional_model or below.model
    below.model = below.positional_model = None
    json_values = {flag: getattr(below, flag[2:].replace("-", "_")) for flag in JSON_FLAGS}
    given = _words(parser, spelling.fold_dotted(argv, json_values), below)
    if given.model is None and given.positional_model is None:
        given.model = model
    return given


def _words(parser: Parser, words: list[str], below: argparse.Namespace | None) -> argparse.Namespace:
    given, unknown = parser.parse_known_args(words, below)
    if unknown:
        known = [flag for action in parser._actions for flag in action.option_strings]
        raise ConfigError(spelling.unknown(unknown[0], known))
    return given


def _settings(given: argparse.Namespace, api_keys: tuple[str, ...], draft_kv: str | None, debug: bool) -> Settings:
    warnings = []
    if given.positional_model and given.model and given.positional_model != given.model:
        raise ConfigError(f"two models: {given.positional_model!r} and --model {given.model!r}; give one")
    if given.dcp_kv_cache_interleave_size is not None:
        warnings.append("--dcp-kv-cache-interleave-size is deprecated; use --cp-kv-cache-interleave-size")
        given.cp_kv_cache_interleave_size = given.dcp_kv_cache_interleave_size
    for name in WITHOUT_MEANING:
        if getattr(given, name[2:].replace("-", "_")) is not None:
            warnings.append(f"{name} has no effect here")
    if given.load_format not in ("auto", "safetensors", "dummy"):
        warnings.append(f"--load-format {given.load_format:.100} has no effect here: safetensors are read")
        given.load_format = "auto"
    speculative = _speculative(given)
    if speculative is not None and draft_kv is not None:
        speculative = {"draft_kv": draft_kv, **speculative}
    num_drafts, pin = _check_speculative(speculative)
    _check(given, num_drafts)
    if pin is not None:
        warnings.append(
            f"pin: the acceptance length is forced to {pin:g}, for benchmarks only: texts are not the model's"
        )
    llm = {
        "model": _model(given),
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
        "kernels": given.kernels or "auto",
        "load_format": given.load_format,
        "gpu_memory_utilization": given.gpu_memory_utilization,
        "enable_prefix_caching": given.enable_prefix_caching,
        "prefix_caching_hash_algo": given.prefix_caching_hash_algo,
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
        sampling_overrides=checked_defaults(given.override_generation_config, "--override-generation-config"),
        max_logprobs=given.max_logprobs,
        template_defaults=given.default_chat_template_kwargs,
        trust_templates=given.trust_request_chat_template,
        allow_special=given.allow_special_in_content,
        parse_reasoning=given.reasoning_parser != "none",
        reasoning_fields=_reasoning_fields(given.reasoning_field),
        parse_tools=given.tool_call_parser != "none",
        auto_tools=given.enable_auto_tool_choice,
        priorities=given.scheduling_policy == "priority",
        stream_interval=given.stream_interval,
        prompt_details=given.enable_prompt_tokens_details,
        force_usage=given.enable_force_include_usage,
        max_body_bytes=given.max_request_body_bytes,
        max_queued=given.max_queued_requests,
        request_timeout=given.request_timeout,
        retry_after=max(1, round(given.shutdown_timeout)),
        request_id_headers=given.enable_request_id_headers,
        cors=Cors(
            tuple(given.allowed_origins),
            tuple(given.allowed_methods),
            tuple(given.allowed_headers),
            given.allow_credentials,
        ),
        dev_endpoints=_loopback(given) if given.enable_dev_endpoints is None else given.enable_dev_endpoints,
        profile_dir=given.profile_dir,
        log_stats=not given.disable_log_stats,
        log_requests=given.enable_log_requests and not given.disable_log_requests,
        quiet_paths=given.disable_access_log_for_endpoints,
        parallelism=(
            given.tensor_parallel_size or given.decode_context_parallel_size,
            given.decode_context_parallel_size,
        ),
        fingerprint=json.dumps(llm, sort_keys=True, default=str),
        pin=pin,
    )
    listen = Listen(
        host=given.host,
        port=given.port,
        uds=given.uds,
        root_path=given.root_path.rstrip("/"),
        keyfile=given.ssl_keyfile,
        certfile=given.ssl_certfile,
        shutdown_timeout=given.shutdown_timeout,
        log_level=given.uvicorn_log_level,
    )
    return Settings(llm, options, listen, given.engine, tuple(warnings))


def _model(given: argparse.Namespace) -> str | None:
    """The folder or the Hub id, with its revision. Raises `ConfigError` for a revision of anything else."""
    model = given.positional_model if given.model is None else given.model
    if model == "":
        raise ConfigError("--model is empty; give a folder or a Hub id, or leave it out for the tiny model")
    if given.revision is None:
        return model
    if model is None or "@" in model or pathlib.Path(model).exists():
        raise ConfigError(
            f"--revision {given.revision[:100]!r} is for a Hub id owner/name without @; the model is {model!r}"
        )
    return f"{model}@{given.revision}"


def _speculative(given: argparse.Namespace) -> dict[str, Any] | None:
    """`--speculative-config`, and what its short forms lay over it."""
    short = {"method": given.spec_method, "num_speculative_tokens": given.spec_tokens}
    short = {key: value for key, value in short.items() if value is not None}
    return {**(given.speculative_config or {}), **short} if short else given.speculative_config


def _reasoning_fields(given: str) -> tuple[str, ...]:
    return ("reasoning_content", "reasoning") if given == "both" else (given,)


def _loopback(given: argparse.Namespace) -> bool:
    if given.uds is not None or given.host == "localhost":
        return True
    try:
        return ipaddress.ip_address(given.host).is_loopback
    except ValueError:
        return False


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
    hash_named(given.prefix_caching_hash_algo)  # its package must be there
    if not 0 < given.gpu_memory_utilization <= 1:
        raise ConfigError(f"--gpu-memory-utilization must be above 0 and at most 1; got {given.gpu_memory_utilization}")
    if given.root_path and not given.root_path.startswith("/"):
        raise ConfigError(f"--root-path must begin with /; got {given.root_path[:200]!r}")
    if not 0 <= given.port < 65536:
        raise ConfigError(f"--port must be between 0 and 65535; got {given.port}")
    if given.max_logprobs < -1:
        raise ConfigError(f"--max-logprobs must be at least -1; got {given.max_logprobs}")
    if given.request_timeout is not None and not given.request_timeout > 0:
        raise ConfigError(f"--request-timeout must be above 0; got {given.request_timeout}")
    if (given.ssl_keyfile is None) != (given.ssl_certfile is None):
        raise ConfigError("--ssl-keyfile and --ssl-certfile need each other")
    if given.structured_outputs_config.get("backend", "llguidance") not in ("auto", "llguidance"):
        raise ConfigError(
            f"--structured-outputs-config: backend {given.structured_outputs_config['backend']!r:.100} is not known; use "
            "llguidance"
        )
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
        return checked_defaults(json_object(path.read_text(encoding="utf-8")), str(path))
    except (OSError, argparse.ArgumentTypeError):
        raise ConfigError(f"--generation-config {given[:200]!r}: use auto, vllm, or a folder with that file") from None
