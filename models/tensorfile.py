"""One safetensors file as memory-mapped arrays, and back: 8 bytes of header length, a JSON header, the data.

Reading maps the file and touches no data, so a checkpoint larger than memory can be opened and checked; the dtype of
each array is the one on disk. Writing streams: arrays are asked for one at a time, after all shapes are known.
"""

import dataclasses
import json
import math
import mmap
import pathlib
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

from dcpjax.errors import CheckpointError

DTYPES = {
    "BOOL": np.dtype(np.bool_),
    "U8": np.dtype(np.uint8),
    "I8": np.dtype(np.int8),
    "I16": np.dtype(np.int16),
    "I32": np.dtype(np.int32),
    "I64": np.dtype(np.int64),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F32": np.dtype(np.float32),
    "F64": np.dtype(np.float64),
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


# What the format allows.
_LARGEST_HEADER = 100_000_000


@dataclasses.dataclass(frozen=True, eq=False)
class TensorFile:
    """A mapped file: tensor name → read-only array `[…]`, in the dtype on disk."""

    tensors: dict[str, np.ndarray]
    mapping: mmap.mmap

    def release(self) -> None:
        """Takes what was read out of this process's memory; it is read again when it is asked for again."""
        self.mapping.madvise(mmap.MADV_DONTNEED)


def open_file(path: pathlib.Path) -> TensorFile:
    """Maps a file. Raises `CheckpointError`, which names it, when it is missing, truncated or not in this format."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if size else mmap.mmap(-1, 1)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}; fetch it again") from None
    data = np.frombuffer(mapping, np.uint8)[:size]
    body, header = _header(path, data)
    tensors, end = {}, 0
    for name, (dtype, shape, start, stop) in sorted(header.items(), key=lambda item: item[1][2:]):
        if start != end or stop - start != math.prod(shape) * dtype.itemsize:
            raise CheckpointError(f"{path} is corrupt: the header gives {name!r} the bytes {start} to {stop}")
        if stop > body.size:
            raise CheckpointError(f"{path} is truncated: {name!r} ends at byte {stop} of {body.size}. Fetch it again")
        tensors[name] = body[start:stop].view(dtype).reshape(shape)
        end = stop
    if end != body.size:
        raise CheckpointError(f"{path} is corrupt: {body.size - end} bytes follow the last tensor")
    return TensorFile(tensors, mapping)


def _header(path: pathlib.Path, data: np.ndarray) -> tuple[np.ndarray, dict[str, tuple]]:
    """The data after the header, and name → (dtype, shape, start, stop)."""
    size = int.from_bytes(data[:8].tobytes(), "little")
    if data.size < 8 or size > data.size - 8:
        raise CheckpointError(
            f"{path} is truncated or no safetensors file: its header does not fit in {data.size} bytes"
        )
    if size > _LARGEST_HEADER:
        raise CheckpointError(f"{path} is corrupt: a header of {size} bytes, at most {_LARGEST_HEADER} are allowed")
    raw = read_json(data[8 : 8 + size].tobytes(), f"{path} is corrupt: its header")
    raw.pop("__metadata__", None)
    return data[8 + size :], {name: _entry(path, name, entry) for name, entry in raw.items()}


def _entry(path: pathlib.Path, name: str, entry: Any) -> tuple[np.dtype, tuple[int, ...], int, int]:
    try:
        shape, (start, stop) = tuple(entry["shape"]), entry["data_offsets"]
        if all(type(n) is int and n >= 0 for n in (*shape, start, stop)):
            return DTYPES[entry["dtype"]], shape, start, stop
    except (ValueError, KeyError, TypeError):
        pass
    raise CheckpointError(
        f"{path} is corrupt: its header's entry of {name!r} cannot be read: {repr(entry)[:200]}. Known dtypes: {[*DTYPES]}"
    )


def read_json(text: bytes, what: str) -> dict[str, Any]:
    """A JSON object whose keys are unique. Raises `CheckpointError`, which begins with `what`."""
    try:
        raw = json.loads(text, object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{what} cannot be parsed ({str(error) or type(error).__name__})") from None
    if not isinstance(raw, dict):
        raise CheckpointError(f"{what} cannot be parsed (it is no mapping)")
    return raw


def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """`pairs` as a mapping; JSON lets a key stand twice, and readers differ in which one counts. Raises `ValueError`."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)!r} occurs twice")
    return found


def write_file(
    path: pathlib.Path,
    tensors: dict[str, tuple[np.dtype, tuple[int, ...]]],
    fetch: Callable[[str], np.ndarray],
) -> None:
    """Writes named tensors (dtype, shape `[…]`) in the mapping's order; `fetch(name)` gives each when its turn has
    come."""
    header, end = {"__metadata__": {"format": "pt"}}, 0
    for name, (dtype, shape) in tensors.items():
        start, end = end, end + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, (dtype, shape) in tensors.items():
            value = np.asarray(fetch(name), dtype, order="C")
            assert value.shape == shape, (name, value.shape, shape)
            file.write(value.reshape(-1).view(np.uint8))
