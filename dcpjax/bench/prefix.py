"""Time to the first token of the tiny model, cold and with nine tenths of the prompt in the prefix cache.

A round, with new text each time: *cold* `A + b` in an empty cache; *warm* `A + c`; *again* `A + c`, of which only the last
token is computed; and `A + c` *cold* again. The last three must give the same text. `A` is nine tenths of the prompt, and
a step takes as many prompt tokens as b or c have, so that the cold prompt is ten steps and the warm one is one.

Prediction: cold / warm = 1 / (0.1 + fixed / cold). `fixed`, what a request takes however short it is, is the time of
*again*. dcp 4 must keep 0.9 of what dcp 1 gains.
"""

import argparse
import dataclasses
import json
import statistics
from typing import Any

from dcpjax import build
from dcpjax.bench import arms, chats
from dcpjax.host.request import SamplingParams
from dcpjax.llm import LLM, RequestOutput

DCPS = (1, 4)


@dataclasses.dataclass(frozen=True)
class Sizes:
    """prompt, shared: tokens, whole pages of `block`. drafts: of the arms. tokens: of an answer."""

    prompt: int = 3840
    shared: int = 3456
    drafts: tuple[int, ...] = (0, 3)
    tokens: int = 4
    rounds: int = 5
    block: int = 64


# No longer than eight blocks, for which a step has one shape.
QUICK = Sizes(prompt=112, shared=96, drafts=(2,), rounds=1, block=16)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds this benchmark's arguments, and what runs it."""
    arms.add_arguments(parser, run)


def run(args: argparse.Namespace) -> None:
    """Prints a line for each arm, then what dcp 4 keeps."""
    if args.quick:
        arms.compile_carelessly()
    figures = measure(QUICK if args.quick else Sizes(), lambda line: print(line, flush=True))
    for drafts, kept in figures["kept"].items():
        print(f"{drafts} drafts: dcp {DCPS[1]} gains {kept:.2f} of what dcp {DCPS[0]} does (at least 0.9)")
    if args.json:
        args.json.write_text(json.dumps(figures, indent=1))


def measure(sizes: Sizes, say=lambda line: None) -> dict[str, Any]:
    """Figures: `rows`, one for each dcp size and number of drafts; `kept`, by number of drafts, the gain at dcp 4 over the
    one at dcp 1. The arms take turns, round by round."""
    build.start_devices(None, max(DCPS))
    build.keep_compiled_programs()
    before = arms.machine()
    llms = {(dcp, drafts): _llm(sizes, dcp, drafts) for drafts in sizes.drafts for dcp in DCPS}
    for llm in llms.values():
        _round(llm, sizes, 0)  # compiles
    rounds: dict[tuple[int, int], list[dict[str, Any]]] = {arm: [] for arm in llms}
    for number in range(1, sizes.rounds + 1):
        for arm, llm in llms.items():
            rounds[arm].append(_round(llm, sizes, number))
    rows = [_row(sizes, *arm, made) for arm, made in rounds.items()]
    for row in rows:
        say(_line(row))
    gain = {(row["dcp"], row["drafts"]): row["measured"] for row in rows}
    texts = [{tuple(made[i]["text"]) for made in rounds.values()} for i in range(sizes.rounds)]
    return {
        "rows": rows,
        "kept": {drafts: gain[DCPS[1], drafts] / gain[DCPS[0], drafts] for drafts in sizes.drafts},
        "equal_arms": all(len(each) == 1 for each in texts),
        "sizes": dataclasses.asdict(sizes),
        "machine": arms.machine() | {"load_before": before["load"]},
    }


def _llm(sizes: Sizes, dcp: int, drafts: int) -> LLM:
    """`drafts` 0 is an engine without a draft, whose cache is not written."""
    wanted = {"method": "mtp", "num_speculative_tokens": drafts}
    length = sizes.prompt + sizes.block
    return LLM(
        decode_context_parallel_size=dcp,
        block_size=sizes.block,
        max_model_len=length,
        num_blocks=1 + 2 * length // sizes.block,
        max_num_seqs=1,
        max_num_batched_tokens=sizes.prompt - sizes.shared,
        speculative_config=wanted if drafts else None,
    )


def _round(llm: LLM, sizes: Sizes, number: int) -> dict[str, Any]:
    """Times of one round in seconds, tokens taken from the cache, and the text of the prompt that was asked three times."""
    tail = sizes.prompt - sizes.shared
    text = chats.stream(llm.tokenizer, number, sizes.prompt + tail)
    shared, b, c = text[: sizes.shared], text[sizes.shared : sizes.prompt], text[sizes.prompt :]
    _forget(llm)
    cold = _ask(llm, sizes, shared + b)
    warm, again = (_ask(llm, sizes, shared + c) for _ in range(2))
    _forget(llm)
    alone = _ask(llm, sizes, shared + c)
    answers = [list(answer.outputs[0].token_ids) for answer in (warm, again, alone)]
    return {
        "cold": (_ttft(cold), _ttft(alone)),
        "warm": _ttft(warm),
        "again": _ttft(again),
        "cached": [answer.num_cached_tokens for answer in (cold, warm, again, alone)],
        "equal": answers[0] == answers[1] == answers[2],
        "text": answers[0],
    }


def _forget(llm: LLM) -> None:
    assert llm.engine.reset_prefix_cache()


def _ask(llm: LLM, sizes: Sizes, prompt: list[int]) -> RequestOutput:
    params = SamplingParams(temperature=0.0, max_tokens=sizes.tokens, ignore_eos=True)
    return llm.generate(prompt, params)[0]


def _ttft(answer: RequestOutput) -> float:
    return answer.metrics.first_token - answer.metrics.arrival


def _row(sizes: Sizes, dcp: int, drafts: int, rounds: list[dict[str, Any]]) -> dict[str, Any]:
    cold = [seconds for each in rounds for seconds in each["cold"]]
    warm, again = ([each[name] for each in rounds] for name in ("warm", "again"))
    medians = {name: statistics.median(times) for name, times in (("cold", cold), ("warm", warm), ("again", again))}
    share = 1 - sizes.shared / sizes.prompt
    # The prompts of a round saw the same machine.
    paired = arms.summary([statistics.mean(each["cold"]) / each["warm"] for each in rounds])
    return {
        "dcp": dcp,
        "drafts": drafts,
        "ttft_seconds": {"cold": arms.summary(cold), "warm": arms.summary(warm), "again": arms.summary(again)},
        "cached_tokens": rounds[0]["cached"],
        "measured": paired["median"],
        "measured_quartiles": paired["quartiles"],
        "ratio_of_medians": medians["cold"] / medians["warm"],
        "predicted": 1 / (share + medians["again"] / medians["cold"]),
        "equal_text": all(each["equal"] for each in rounds),
    }


def _line(row: dict[str, Any]) -> str:
    ms = {name: times["median"] * 1e3 for name, times in row["ttft_seconds"].items()}
    return (
        f"dcp {row['dcp']}, {row['drafts']} drafts: cold {ms['cold']:.0f} ms, warm {ms['warm']:.0f} ms, again "
        f"{ms['again']:.0f} ms; cold / warm {row['measured']:.2f} (predicted {row['predicted']:.2f}, at least 6), "
        f"{'equal' if row['equal_text'] else 'OTHER'} text, cached {row['cached_tokens']}"
    )
