"""Every flag of the server, by group, with its default and its form. What they mean together: `arguments.py`."""

import argparse
import json
from typing import Any, NoReturn

_UNITS = {"k": 10**3, "m": 10**6, "g": 10**9, "K": 2**10, "M": 2**20, "G": 2**30}

# Name → whether it takes a value. All of them are about machinery that works differently here, or not at all.
WITHOUT_MEANING = {
    "--trust-remote-code": False,
    "--enforce-eager": False,
    "--disable-custom-all-reduce": False,
    "--enable-chunked-prefill": False,
    "--async-scheduling": False,
    "--moe-backend": True,
    "--attention-backend": True,
    "--distributed-executor-backend": True,
    "--swap-space": True,
}

# They hold a JSON object, and take `--flag.key value` too.
JSON_FLAGS = (
    "--hf-overrides",
    "--speculative-config",
    "--override-generation-config",
    "--default-chat-template-kwargs",
    "--structured-outputs-config",
    "--kernels",
)


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line and exit code 2."""

    def error(self, message: str) -> NoReturn:
        """One line that says what to change, instead of a page of usage."""
        self.exit(2, f"{self.prog}: error: {message} (--help lists all flags)\n")


def make_parser(program: str = "dcpjax.serve") -> Parser:
    """A parser of all flags. program: the name its errors begin with."""
    parser = Parser(
        prog=program,
        description="Serves a GLM-5.2 checkpoint over the OpenAI and Anthropic protocols.",
        allow_abbrev=False,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("positional_model", nargs="?", metavar="MODEL", help="a folder or a Hub id; none: the embedded tiny model")
    add("--config", metavar="FILE", help="YAML whose keys are flag names; the command line wins over it")
    _add_model(parser.add_argument_group("model"))
    _add_devices(parser.add_argument_group("devices"))
    _add_cache(parser.add_argument_group("cache and scheduling"))
    _add_answers(parser.add_argument_group("answers"))
    _add_server(parser.add_argument_group("server"))
    group = parser.add_argument_group("accepted without effect")
    for name, has_value in WITHOUT_MEANING.items():
        kind = {} if has_value else {"action": argparse.BooleanOptionalAction}
        group.add_argument(name, default=None, help=argparse.SUPPRESS, **kind)
    return parser


def _add_model(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--model", help="the same as MODEL")
    add("--tokenizer", help="a folder with tokenizer.json (default: the model's)")
    add("--served-model-name", nargs="+", metavar="NAME", help="names in the API, the first is echoed")
    add("--engine", choices=("jax", "echo"), default="jax", help="echo: no network, to measure the server alone")
    add("--dtype", choices=("auto", "bfloat16", "float32"), default="auto", help="auto: float32 on CPU")
    add("--revision", metavar="NAME", help="branch, tag or commit of a Hub id")
    add("--load-format", metavar="auto|dummy", default="auto", help="dummy: random weights, from config.json alone")
    add("--hf-overrides", type=json_object, metavar="JSON", default={}, help="laid over config.json")
    add("--max-model-len", type=length, metavar="N|64k|1M|auto", help="tokens of prompt and answer together")
    add("--seed", type=int, default=0, help="of requests that bring none")


def _add_devices(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--tensor-parallel-size", "--tp", "-tp", type=count, metavar="T", help="devices (default: the dcp size)")
    add("--decode-context-parallel-size", "--dcp", "-dcp", type=count, metavar="N", default=1, help="must divide T")
    whole = {"action": argparse.BooleanOptionalAction, "default": False}
    add("--enable-expert-parallel", "-ep", **whole, help="whole experts on devices")
    add("--data-parallel-size", "-dp", type=count, metavar="1", default=1, help="only 1")
    add("--cp-kv-cache-interleave-size", type=count, default=1, help="tokens of a rank's turn")
    add("--dcp-kv-cache-interleave-size", type=count, help="deprecated name of --cp-kv-cache-interleave-size")
    add("--dcp-comm-backend", choices=("ag_rs", "a2a", "psum"), default="ag_rs", help="how ranks' partial results meet")
    add("--dcp-index-shards", type=count, help="the dcp size (default), or 1: whole on every rank")
    add("--kernels", type=kernels, metavar="auto|xla|JSON", help='{"topk":"xla"} changes auto (the default) by name')
    add("--dcp-debug", action=argparse.BooleanOptionalAction, help="a line a layer from every device; slow")


def _add_cache(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--block-size", type=count, default=64, help="tokens of a logical page, the same at every dcp size")
    add("--num-gpu-blocks-override", type=count, help="exact number of blocks, the dummy block 0 included")
    add("--kv-cache-memory-bytes", type=count, help="for the cache over all devices")
    share = {"type": float, "default": 0.92, "metavar": "SHARE"}
    add("--gpu-memory-utilization", **share, help="for weights and cache, of what JAX takes of a GPU")
    add("--kv-cache-dtype", choices=("auto", "bfloat16", "float32", "fp8", "fp8_e4m3"), default="auto", help="records")
    add("--enable-prefix-caching", action=argparse.BooleanOptionalAction, default=True, help="reuse equal beginnings")
    add("--prefix-caching-hash-algo", choices=("sha256", "xxhash"), default="sha256", help="of page contents")
    add("--max-num-seqs", type=count, help="requests at a time")
    add("--max-num-batched-tokens", type=count, help="tokens of a step, prefill chunks included")
    add("--scheduling-policy", choices=("fcfs", "priority"), default="fcfs", help="priority: by that field of requests")
    add("--overlap", action=argparse.BooleanOptionalAction, default=True, help="dispatch before the last step is read")
    add("--speculative-config", type=json_object, metavar="JSON", help='{"method":"mtp","num_speculative_tokens":5}')
    add("--spec-method", choices=("mtp",), help="method of --speculative-config")
    add("--spec-tokens", type=int, metavar="K", help="num_speculative_tokens of --speculative-config")


def _add_answers(group: argparse._ArgumentGroup) -> None:
    add, switch = group.add_argument, {"action": argparse.BooleanOptionalAction}
    add("--generation-config", default="auto", help="sampling defaults: auto (the model's), vllm (neutral) or a folder")
    add("--override-generation-config", type=json_object, metavar="JSON", default={}, help="laid over them")
    add("--max-logprobs", type=int, default=20, help="-1: no limit")
    add("--chat-template", help="a file, or the template itself")
    add("--default-chat-template-kwargs", type=json_object, metavar="JSON", default={}, help="for every chat")
    add("--trust-request-chat-template", **switch, default=False, help="render templates that requests bring")
    add("--allow-special-in-content", **switch, default=False, help="control tokens in message texts count as such")
    add("--reasoning-parser", choices=("glm45", "none"), default="glm45", help="none: thinking stays in the content")
    fields = ("reasoning_content", "reasoning", "both")
    add("--reasoning-field", choices=fields, default=fields[0], help="name of the thinking in answers")
    add(
        "--tool-call-parser",
        choices=("glm47", "glm45", "none"),
        default="glm47",
        help="none: calls stay in the content",
    )
    add("--enable-auto-tool-choice", **switch, default=True, help="parse calls that the model makes on its own")
    add("--structured-outputs-config", type=json_object, metavar="JSON", default={}, help='{"backend":"llguidance"}')
    add("--stream-interval", type=count, default=1, help="tokens between the chunks of a stream")
    add("--enable-prompt-tokens-details", **switch, default=True, help="cached_tokens in usage")
    add("--enable-force-include-usage", **switch, default=False, help="usage at the end of every stream")


def _add_server(group: argparse._ArgumentGroup) -> None:
    add, switch = group.add_argument, {"action": argparse.BooleanOptionalAction}
    add("--host", default="127.0.0.1", help="address to listen on")
    add("--port", type=int, default=8000, help="0: any free one")
    add("--uds", metavar="PATH", help="a Unix socket to listen on instead")
    add("--root-path", default="", help="prefix that a proxy in front takes away")
    add("--api-key", nargs="+", metavar="KEY", help="allowed keys")
    add("--allowed-origins", type=json_list, metavar="JSON", default=["*"], help="for browsers (CORS)")
    add("--allowed-methods", type=json_list, metavar="JSON", default=["*"], help="for browsers (CORS)")
    add("--allowed-headers", type=json_list, metavar="JSON", default=["*"], help="for browsers (CORS)")
    add("--allow-credentials", **switch, default=False, help="for browsers (CORS)")
    add("--ssl-keyfile", metavar="FILE", help="serve HTTPS")
    add("--ssl-certfile", metavar="FILE", help="serve HTTPS")
    add("--enable-request-id-headers", **switch, default=False, help="X-Request-Id on every answer")
    add("--max-request-body-bytes", type=count, default=32 << 20, help="larger ones are refused")
    add("--max-queued-requests", type=count, default=1024, help="more are refused")
    add("--request-timeout", type=float, metavar="SECONDS", help="a request without a token by then is refused")
    add("--shutdown-timeout", type=float, default=30.0, help="seconds that running requests get after SIGTERM")
    add("--disable-log-stats", **switch, default=False, help="no line every few busy seconds")
    add("--enable-log-requests", **switch, default=False, help="a line for every request, without its text")
    add("--disable-log-requests", **switch, default=False, help="wins over --enable-log-requests")
    quiet = {"type": paths, "metavar": "/A,/B", "default": "/health,/metrics,/ping,/ready"}
    add("--disable-access-log-for-endpoints", **quiet, help="paths of which --enable-log-requests writes none")
    levels = ("critical", "error", "warning", "info", "debug", "trace")
    add("--uvicorn-log-level", choices=levels, default="warning", help="what the log has of connections")
    add("--profile-dir", metavar="FOLDER", help="for /start_profile (default: a temporary folder each time)")
    add("--enable-dev-endpoints", **switch, help="reset, server_info, abort (default: on a loopback address)")


def json_object(text: str) -> dict[str, Any]:
    """A flag's JSON object. Raises `argparse.ArgumentTypeError`."""
    value = _json(text)
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text[:200]!r} is not a JSON object")
    return value


def json_list(text: str) -> list[str]:
    """A flag's JSON list of strings. Raises `argparse.ArgumentTypeError`."""
    value = _json(text)
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise argparse.ArgumentTypeError(f"{text[:200]!r} is not a JSON list of strings")
    return value


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text[:200]!r} is not valid JSON") from None


def kernels(text: str) -> str | dict[str, Any]:
    """`auto`, `xla`, or a JSON object by the kernel's name; see `Kernels`."""
    return text if text in ("auto", "xla") else json_object(text)


def paths(text: str) -> tuple[str, ...]:
    """`/health,/metrics`; none if empty. Raises `argparse.ArgumentTypeError`."""
    given = tuple(path.strip() for path in text.split(",") if path.strip())
    for path in given:
        if not path.startswith("/"):
            raise argparse.ArgumentTypeError(f"{path[:200]!r} must begin with /; give paths with commas between them")
    return given


def count(text: str) -> int:
    """A whole number of at least 1. Raises `argparse.ArgumentTypeError`."""
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text[:200]!r} is not a whole number of at least 1")
    return value


def length(text: str) -> int | str:
    """`65536`, `64k` (thousands), `64K` (1024s), `1M`, `auto`. Raises `argparse.ArgumentTypeError`."""
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
