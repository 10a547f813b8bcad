"""How many bytes a program needs beside its arguments, from its trace alone: nothing is compiled, no memory is taken.

A simple model of what a compiler does. Values of element by element operations, and of what only renames or cuts, are made
where they are read; all others live in memory from where they are made to where they were last read. What is written in
place, or carried round a loop, takes over the place of an operand that nobody reads later, as donated caches do. Inside `shard_map` shapes are
those of a device; outside, values are taken as whole where no sharding is written down.
"""

import math
from collections.abc import Iterator
from typing import Any

import jax
from jax.extend import core

# Operations whose results are not stored for their own sake: what is not listed is.
_FUSED = frozenset(
    (
        "abs",
        "add",
        "and",
        "argmax",
        "bitcast_convert_type",
        "broadcast_in_dim",
        "ceil",
        "clamp",
        "convert_element_type",
        "cos",
        "div",
        "dynamic_slice",
        "eq",
        "exp",
        "exp2",
        "expand_dims",
        "floor",
        "ge",
        "gt",
        "integer_pow",
        "iota",
        "is_finite",
        "le",
        "log",
        "log1p",
        "logistic",
        "lt",
        "max",
        "min",
        "mul",
        "ne",
        "neg",
        "not",
        "nextafter",
        "or",
        "pow",
        "reshape",
        "rem",
        "round",
        "rsqrt",
        "select_n",
        "shift_left",
        "shift_right_arithmetic",
        "shift_right_logical",
        "sign",
        "sin",
        "slice",
        "sqrt",
        "square",
        "squeeze",
        "sub",
        "tanh",
        "transpose",
        "xor",
        "axis_index",
        "stop_gradient",
        "copy",
        "reduce_and",
        "reduce_max",
        "reduce_min",
        "reduce_or",
        "reduce_sum",
        "optimization_barrier",
        "threefry2x32",
        "random_bits",
        "random_wrap",
        "random_unwrap",
    )
)


# Operations that may write their result over an operand that nobody reads later.
_IN_PLACE = frozenset(("scatter", "scatter-add", "dynamic_update_slice", "sharding_constraint"))


def peak_bytes(program: core.ClosedJaxpr) -> int:
    """The most bytes on one device that `program` (of `jax.make_jaxpr`) holds at once, its arguments not counted."""
    return _walk(program.jaxpr)[0]


def _walk(jaxpr: Any) -> tuple[int, list[int]]:
    """The most bytes of one body, and those of its results; a result that lies where an argument lay takes none."""
    roots, ends, stored = _lives(jaxpr)
    read = {v for ended in ends.values() for v in ended}
    sizes: dict[Any, int] = {}  # of what is stored here; arguments are none of ours
    live = most = 0
    for at, eqn in enumerate(jaxpr.eqns):
        inside = [_walk(body) for body in _bodies(eqn)]
        before, free = live, [v for v in ends.get(at, ()) if _may_be_reused(eqn, inside)]
        for place, (out, size) in enumerate(zip(stored[at], _sizes(eqn), strict=False)):
            new = any(len(outs) > place and outs[place] for _, outs in inside)
            same = (v for v in free if (v.aval.size, v.aval.dtype) == (out.aval.size, out.aval.dtype))
            taken = None if new else next(same, None)
            if taken is None:
                sizes[out] = size
                live += size
            else:
                free.remove(taken)
                sizes[out] = sizes.pop(taken, 0)
        # What a body makes for its results is counted among what it holds.
        most = max(most, live, before + max((peak for peak, _ in inside), default=0))
        live -= sum(sizes.pop(v, 0) for v in ends.get(at, ()))
        live -= sum(sizes.pop(v, 0) for v in stored[at] if v not in read)
    return most, [
        sum(sizes.get(root, 0) for root in roots.get(v, (v,))) if not isinstance(v, core.Literal) else 0
        for v in jaxpr.outvars
    ]


def _may_be_reused(eqn: Any, inside: list[Any]) -> bool:
    return bool(inside) or eqn.primitive.name in _IN_PLACE


def _lives(jaxpr: Any) -> tuple[dict[Any, tuple], dict[int, list[Any]], list[list[Any]]]:
    """Of each value the stored ones it is made from; at each operation, what is read last there, and what it stores."""
    roots: dict[Any, tuple] = {}
    last: dict[Any, int] = {}
    stored: list[list[Any]] = []
    for at, eqn in enumerate(jaxpr.eqns):
        # In the order of the trace, so that the same program is told the same bytes.
        read = tuple(dict.fromkeys(root for v in _variables(eqn.invars) for root in roots.get(v, (v,))))
        last |= dict.fromkeys(read, at)
        fused = _is_fused(eqn)
        stored.append([] if fused else list(eqn.outvars))
        for out in eqn.outvars:
            roots[out] = read if fused else (out,)
    for v in _variables(jaxpr.outvars):
        last |= dict.fromkeys(roots.get(v, (v,)), len(jaxpr.eqns))
    ends: dict[int, list[Any]] = {}
    for v, at in last.items():
        ends.setdefault(at, []).append(v)
    return roots, ends, stored


def _is_fused(eqn: Any) -> bool:
    if eqn.primitive.name in ("jit", "custom_jvp_call"):
        return all(_is_fused(inner) for body in _bodies(eqn) for inner in body.eqns)
    return eqn.primitive.name in _FUSED


def _variables(values: Any) -> list[Any]:
    return [v for v in values if not isinstance(v, core.Literal)]


def _bodies(eqn: Any) -> Iterator[Any]:
    """Programs inside an operation. A kernel's body works in the processors' own memory."""
    if eqn.primitive.name == "pallas_call":
        return
    for value in eqn.params.values():
        for item in value if isinstance(value, (tuple, list)) else (value,):
            inner = item.jaxpr if isinstance(item, core.ClosedJaxpr) else item
            if isinstance(inner, core.Jaxpr):
                yield inner


def _sizes(eqn: Any) -> Iterator[int]:
    """Bytes on a device of each result."""
    if eqn.primitive.name == "shard_map":
        mesh, specs = eqn.params["mesh"], eqn.params["out_specs"]
        shardings = [jax.sharding.NamedSharding(mesh, spec) for spec in specs]
    elif eqn.primitive.name == "sharding_constraint":
        shardings = [eqn.params["sharding"]]
    else:
        shardings = [None] * len(eqn.outvars)
    for out, sharding in zip(eqn.outvars, shardings, strict=True):
        shape = out.aval.shape if sharding is None else sharding.shard_shape(out.aval.shape)
        yield math.prod(shape) * out.aval.dtype.itemsize
