"""Time of one call of a function inside a jitted chain of calls, as a layer is in a step: launches and host included."""

import time
from collections.abc import Callable
from typing import Any

import jax

# Reads of scattered rows reach this on an H200, bytes a second.
READ_CEILING = 4.24e12


def chain_us(fn: Callable[..., Any], args: tuple[Any, ...], calls: int = 78, rounds: int = 5) -> float:
    """Microseconds a call of `fn(*args)`: the least of `rounds` runs of a program of `calls` calls one after another.

    Inputs should be larger than the device's cache, or the cache is what is measured.
    """

    def many(first, *rest):
        outs = []
        for _ in range(calls):
            # Each call waits for the one before, and none is left out for being the same, or for not being used.
            first, out = jax.lax.optimization_barrier((first, fn(first, *rest)))
            outs.append(out)
        return outs

    return run_us(jax.jit(many).lower(*args).compile(), args, rounds) / calls


def run_us(program: Callable[..., Any], args: tuple[Any, ...], rounds: int = 5) -> float:
    """Microseconds of a compiled program: the least of `rounds` runs after one that is not counted."""
    jax.block_until_ready(program(*args))
    best = float("inf")
    for _ in range(rounds):
        begin = time.perf_counter()
        jax.block_until_ready(program(*args))
        best = min(best, time.perf_counter() - begin)
    return best * 1e6


def row(name: str, arm: str, us: float, nbytes: float, predicted_us: float, **shape: Any) -> dict[str, Any]:
    """One line of a table: time, bandwidth of `nbytes`, its share of the read ceiling, and what was predicted."""
    rate = nbytes / us * 1e6
    return {
        "kernel": name,
        "arm": arm,
        **shape,
        "us": round(us, 1),
        "gb_per_s": round(rate / 1e9),
        "share": round(rate / READ_CEILING, 3),
        "predicted_us": round(predicted_us, 1),
    }
