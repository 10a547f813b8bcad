"""`python -m dcpjax.plan`: what a model would take on devices that need not be there, and how fast it could be.

Takes the flags of `dcpjax.serve` that concern model, devices, cache and drafts, and a few of its own. Reads a
`config.json` and nothing else; `--model` also takes the names of published checkpoints.
"""

import argparse
import json
import pathlib
import re
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from dcpjax import build
from dcpjax.build import EngineConfig
from dcpjax.errors import ConfigError
from dcpjax.forecast import Forecast, Subject, forecast
from dcpjax.hub import TINY
from dcpjax.roofline import Chip
from dcpjax.server.arguments import parse
from dcpjax.server.flags import Parser, length
from models.config import from_hf, read_raw
from models.published import GLM_5_2
from models.quantconfig import quantization_of

# Published checkpoints by name, with their quantisation.
PUBLISHED = {"glm-5.2": None, "glm-5.2-fp8": "fp8", "glm-5.2-nvfp4": "nvfp4"}
LENGTHS = {"128K": 1 << 17, "1M": 1 << 20}
# An H200 has 141 GB, of which an operator gives JAX nearly all.
_MEMORY = (
    "what JAX takes of one device (default: 134GB, an H200's with XLA_CLIENT_MEM_FRACTION=0.95; unset, it is 0.75)"
)
_UNITS = {
    "": 1,
    "K": 10**3,
    "M": 10**6,
    "G": 10**9,
    "T": 10**12,
    "Ki": 1 << 10,
    "Mi": 1 << 20,
    "Gi": 1 << 30,
    "Ti": 1 << 40,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the forecast; 0 if it fits, 2 if it does not or is not supported."""
    own, rest = _parser().parse_known_args(sys.argv[1:] if argv is None else argv)
    if own.json is not None and (own.json.is_dir() or not own.json.parent.is_dir()):
        _parser().error(f"--json {str(own.json)!r} cannot be written: give a file in a folder that is there")
    llm = parse(rest, program="dcpjax.plan").llm
    try:
        subject = read_subject(llm["model"], llm["hf_overrides"])
        config = EngineConfig.read(llm)
        if own.compile:
            build.start_devices(config.tensor_parallel_size, config.decode_context_parallel_size)
        chip = Chip(bandwidth=own.memory_bandwidth)
        found = forecast(subject, config, own.gpu_memory, own.context, chip, own.compile)
    except ConfigError as error:
        print(f"dcpjax.plan: error: {error}", file=sys.stderr)
        return 2
    print("\n".join(lines(found, llm["model"] or "tiny", subject, own.gpu_memory, config.gpu_memory_utilization)))
    if own.json is not None:
        try:
            own.json.write_text(json.dumps(as_json(found), indent=2) + "\n")
        except OSError as error:
            print(f"dcpjax.plan: error: --json {str(own.json)!r} cannot be written: {error.strerror}", file=sys.stderr)
            return 2
    if found.refusal is None:
        return 0
    print(f"dcpjax.plan: does not fit: {found.refusal}", file=sys.stderr)
    return 2


def _parser() -> Parser:
    parser = Parser(
        prog="dcpjax.plan",
        description="What a model would take on devices that need not be there, and how fast it could be.",
        epilog=(
            f"Beside these, the flags of dcpjax.serve: --model (a folder, a config.json, or {', '.join(PUBLISHED)}, tiny), --tp, "
            "--dcp, --enable-expert-parallel, --kv-cache-dtype, --speculative-config, --max-model-len, …"
        ),
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--gpu-memory", type=_large, default=_large("134GB"), metavar="134GB|80GiB", help=_MEMORY)
    add("--memory-bandwidth", type=_large, default=Chip.bandwidth, metavar="4.8TB", help="a second, of one device")
    add("--context", type=_context, metavar="128K|1M|8192", help="tokens of a request in the step floors")
    add("--compile", action="store_true", help="let the compiler of the devices here say what a step needs")
    add("--json", type=pathlib.Path, metavar="FILE", help="all figures")
    return parser


def _amount(text: str) -> int:
    """`141GB`, `80GiB`, `4.8TB`, `128Ki`, `1000`."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?i?)B?", text)
    if match is None or match[2] not in _UNITS:
        raise argparse.ArgumentTypeError(f"{text[:100]!r} is not an amount such as 141GB, 80GiB or 4.8TB")
    return int(float(match[1]) * _UNITS[match[2]])


def _large(text: str) -> int:
    """An amount of which a device has thousands of millions."""
    amount = _amount(text)
    if amount < 10**9:
        raise argparse.ArgumentTypeError(
            f"{text[:100]!r} is {amount:,} bytes, less than any device has: give as much as 141GB or 4.8TB, with the unit"
        )
    return amount


def _context(text: str) -> int:
    tokens = length(text)
    if not isinstance(tokens, int):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of tokens such as 8192, 128K or 1M")
    return tokens


def read_subject(name: str | None, overrides: dict[str, Any] | None = None) -> Subject:
    """A folder, a `config.json`, a published name; None is the tiny model. Raises `ConfigError`."""
    path = TINY if name in (None, "tiny") else pathlib.Path(name)
    if name in PUBLISHED and not path.exists():
        return Subject(from_hf(GLM_5_2, overrides), PUBLISHED[name])
    if not path.exists():
        raise ConfigError(
            f"--model {name!r} is neither a folder, nor a config.json, nor one of {', '.join(PUBLISHED)}, tiny"
        )
    raw = read_raw(path)
    return Subject(from_hf(raw, overrides), quantization_of(raw))


def as_json(found: Forecast) -> dict[str, Any]:
    """All figures. step_floor_ms: of a step of one request (or the fewest there can be) with `context` tokens."""
    floors = {rows: floor.total * 1e3 for rows, floor in found.floors.items()}
    return {
        "fits": found.refusal is None,
        "refusal": found.refusal,
        "changes": list(found.changes),
        "weight_bytes_per_device": found.weight_bytes,
        "weight_bytes_per_device_by_group": found.groups,
        "kv_bytes_per_token_per_device": found.chosen.bytes_per_token,
        "kv_tokens": found.kv_tokens,
        "max_model_len": found.ready.limits.max_model_len,
        "activation_bytes": found.activations.traced,
        "compiled_scratch_bytes": found.activations.compiled,
        "context": found.context,
        "step_floor_ms": next(iter(floors.values())),
        "step_floor_ms_by_requests": floors,
        "layouts": [
            {
                "dcp": row.dcp,
                "kv_cache_dtype": row.kind,
                "draft_kv": row.draft_kv,
                "index_shards": row.index_shards,
                "kv_bytes_per_token_per_device": row.bytes_per_token,
                "kv_tokens": row.tokens,
                "requests": {name: row.tokens // size for name, size in LENGTHS.items()},
            }
            for row in found.layouts
        ],
        "crossings": [
            {"where": c.where, "operation": c.operation, "bytes_received": c.nbytes, "times": c.times}
            for c in found.crossings
        ],
    }


def lines(found: Forecast, name: str, subject: Subject, device_bytes: int, share: float) -> Iterator[str]:
    """The report."""
    ready, plan = found.ready, found.ready.net.plan
    stored = subject.quantisation or str(ready.dtype.__name__)
    yield (
        f"{name}: {ready.net.cfg.num_layers} layers, weights {stored}; {plan.num_devices} device{'s' * (plan.num_devices > 1)} of {_bytes(device_bytes)}, "
        f"dcp {plan.dcp}, {'whole experts' if plan.expert_parallel else 'a part of each expert'} on a device"
    )
    yield from _memory(found, device_bytes, share)
    yield from _layouts(found)
    yield from _crossings(found)
    yield from _floors(found)
    if found.refusal is not None:
        yield ""
        yield f"DOES NOT FIT: {found.refusal}"
        yield "It would fit with any of: " + "; ".join(found.changes) if found.changes else "No single change fits it."


def _memory(found: Forecast, device_bytes: int, share: float) -> Iterator[str]:
    ready, act = found.ready, found.activations
    yield ""
    yield "Memory of a device"
    for name, nbytes in found.groups.items():
        if nbytes:
            yield f"  {name:<22}{_bytes(nbytes):>12}"
    yield f"  {'weights':<22}{_bytes(found.weight_bytes):>12}"
    yield f"  {'left for the cache':<22}{_bytes(found.room):>12}   of {share:.0%} for weights and cache"
    rest = (1 - share) * device_bytes
    told = f"largest step: {act.shape.tokens} tokens of {act.shape.rows} requests, {act.shape.pages} pages each"
    yield f"  {'activations, about':<22}{_bytes(act.traced):>12}   {told}"
    if act.compiled is not None:
        yield f"  {'compiler’s scratch':<22}{_bytes(act.compiled):>12}   for the devices of this process"
    verdict = "fits" if act.most <= rest else "LESS THAN THAT: lower --gpu-memory-utilization"
    if found.room <= 0:
        verdict = "the weights take the cache's room"
    yield f"  {'left beside both':<22}{_bytes(rest):>12}   {verdict}"
    capped = ", all that --max-num-seqs of the longest sequence need" if found.kv_tokens < found.chosen.tokens else ""
    yield (
        f"  the cache {'would hold' if found.refusal else 'holds'} {found.chosen.tokens if found.refusal else found.kv_tokens:,} "
        f"tokens{'' if found.refusal else capped}, {found.chosen.bytes_per_token:,.0f} "
        f"bytes a token; longest sequence {ready.limits.max_model_len:,}"
    )


def _layouts(found: Forecast) -> Iterator[str]:
    yield ""
    yield "Tokens that the cache could hold (* as asked for), and whole requests of them"
    heads = ("dcp", "kv", "draft", "index shards", "bytes/token", "tokens", *LENGTHS)
    yield _row("  {:>3}  {:<9} {:<11} {:>12} {:>12} {:>14} {:>7} {:>6}", heads)
    for row in found.layouts:
        mark = "*" if row.key == found.chosen.key else " "
        counts = (row.tokens // size for size in LENGTHS.values())
        values = (
            row.dcp,
            row.kind,
            row.draft_kv,
            row.index_shards,
            f"{row.bytes_per_token:,.0f}",
            f"{row.tokens:,}",
            *counts,
        )
        yield _row(mark + " {:>3}  {:<9} {:<11} {:>12} {:>12} {:>14} {:>7} {:>6}", values)


def _crossings(found: Forecast) -> Iterator[str]:
    if not found.crossings:
        return
    yield ""
    rows = next(iter(found.floors))
    yield f"Collectives of a step of {rows} request(s), bytes that a device receives"
    for c in found.crossings:
        yield f"  {c.where:<11} {c.operation:<22} {c.nbytes:>14,.0f} × {c.times}"
    total = sum(c.nbytes * c.times for c in found.crossings)
    yield f"  {sum(c.times for c in found.crossings)} in all, {_bytes(total)}; {total / Chip.link * 1e6:,.1f} µs at 450 GB/s, latencies not counted"


def _floors(found: Forecast) -> Iterator[str]:
    yield ""
    yield f"Least time of a decode step, ms, {found.context:,} tokens a request (bytes over bandwidth; drafts included)"
    form = "  {:>8} {:>9} {:>10} {:>9} {:>9} {:>9}"
    yield _row(form, ("requests", "weights", "attention", "index", "drafts", "step"))
    for rows, f in found.floors.items():
        values = (f"{x * 1e3:.3f}" for x in (f.weights, f.attention, f.index, f.drafts, f.total))
        full = "" if rows * found.context <= found.kv_tokens else "   more than the cache holds"
        yield _row(form, (rows, *values)) + full


def _row(form: str, values: Any) -> str:
    return form.format(*map(str, values)).rstrip()


def _bytes(n: float) -> str:
    return f"{n / 1e9:,.2f} GB" if abs(n) >= 1e9 else f"{n / 1e6:,.2f} MB"


if __name__ == "__main__":
    sys.exit(main())
