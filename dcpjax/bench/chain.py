"""Time of one call of a function inside a jitted chain of calls, as a layer is in a step.

Two figures: wall time, launches and host included, and the sum of the kernels' own times, which CUPTI reports. The second
is taken last, because it slows the host for the rest of the process.
"""

import concurrent.futures
import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.mosaic.gpu import profiler

# Reads of scattered rows reach this on an H200, bytes a second.
READ_CEILING = 4.24e12


@dataclasses.dataclass(frozen=True)
class Case:
    """A figure to take: `call(number, *begin(*inputs()))`, number being that of the call in a chain of `calls`.

    shape: what tells this case from others of its kernel and arm. nbytes: what a call must read and write, once.
    Inputs should be larger than the device's cache, or the cache is what is measured.
    """

    kernel: str
    arm: str
    shape: dict[str, Any]
    call: Callable[..., Any]
    inputs: Callable[[], tuple[Any, ...]]
    nbytes: float
    predicted_us: float
    calls: int = 78
    # Placed on several devices, inputs must be made to be compiled for.
    placed: bool = False
    # Once a chain and inside of it, as a step does what all its layers share.
    begin: Callable[..., tuple[Any, ...]] = lambda *inputs: inputs

    def compile(self) -> Callable[..., Any]:
        """The program of the whole chain."""
        args = self.inputs() if self.placed else jax.eval_shape(self.inputs)
        return jax.jit(self.chain).lower(*args).compile()

    def chain(self, *inputs: Any) -> list[Any]:
        """What all calls return; each waits for the one before."""
        one = jax.jit(self.call)  # traced once for all calls
        first, *rest = self.begin(*inputs)
        outs = []
        for number in range(self.calls):
            # None is left out for being the same, or for not being used.
            first, out = jax.lax.optimization_barrier((first, one(jnp.int32(number), first, *rest)))
            outs.append(out)
        return outs

    def row(self, us: float) -> dict[str, Any]:
        """One line of a table: time of a call, bandwidth, its share of the read ceiling, and what was predicted."""
        rate = self.nbytes / us * 1e6
        return {
            "kernel": self.kernel,
            "arm": self.arm,
            **self.shape,
            "us": round(us, 1),
            "gb_per_s": round(rate / 1e9),
            "share": round(rate / READ_CEILING, 3),
            "predicted_us": round(self.predicted_us, 1),
        }


def measure(cases: Sequence[Case]) -> Iterator[dict[str, Any]]:
    """A row for every case, by wall time; then, on GPUs, again with `gpu_us`, by the kernels' own times."""
    # All of them before the first is timed: compiling takes the host from what is timed.
    with concurrent.futures.ThreadPoolExecutor() as workers:
        compiled = list(workers.map(Case.compile, cases))
    rows = []
    for case, program in zip(cases, compiled, strict=True):
        rows.append(case.row(run_us(program, case.inputs()) / case.calls))
        yield rows[-1]
    if jax.default_backend() == "gpu":
        for case, program, row in zip(cases, compiled, rows, strict=True):
            _, ms = profiler.Cupti(finalize=False).measure(program)(*case.inputs())
            gpu_us = ms * 1e3 / case.calls / len(jax.devices() if case.placed else [0])
            share = case.nbytes / gpu_us * 1e6 / READ_CEILING
            yield row | {"gpu_us": round(gpu_us, 1), "gpu_share": round(share, 3)}


def run_us(program: Callable[..., Any], args: tuple[Any, ...], rounds: int = 5) -> float:
    """Microseconds of a compiled program: the least of `rounds` runs after one that is not counted."""
    jax.block_until_ready(program(*args))
    best = float("inf")
    for _ in range(rounds):
        begin = time.perf_counter()
        jax.block_until_ready(program(*args))
        best = min(best, time.perf_counter() - begin)
    return best * 1e6
