"""One safetensors file as memory-mapped arrays, and back: 8 bytes of header length, a JSON header, the data.

Reading maps the file and touches no data, so a checkpoint larger than memory can be opened and checked; the dtype of
each array is the one on disk. Writing streams: arrays are asked for one at a time, after all shapes are known.
"""

import json
import math
import pathlib
from collections.abc import Callable

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


def open_file(path: pathlib.Path) -> dict[str, np.ndarray]:
    """Tensor name → read-only array mapped from the file.

    Raises `CheckpointError`, which names the file, when it is missing, truncated or not in this format.
    """
    try:
        data = np.asarray(np.memmap(path, np.uint8, mode="r")) if path.stat().st_size else np.zeros(0, np.uint8)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from None
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
    return tensors


def _header(path: pathlib.Path, data: np.ndarray) -> tuple[np.ndarray, dict[str, tuple]]:
    """The data after the header, and name → (dtype, shape, start, stop)."""
    size = int.from_bytes(data[:8].tobytes(), "little")
    if data.size < 8 or size > data.size - 8:
        raise CheckpointError(
            f"{path} is truncated or no safetensors file: its header does not fit in {data.size} bytes"
        )
    try:
        raw = json.loads(data[8 : 8 + size].tobytes())
        raw.pop("__metadata__", None)
        header = {}
        for name, entry in raw.items():
            start, stop = entry["data_offsets"]
            header[name] = DTYPES[entry["dtype"]], tuple(map(int, entry["shape"])), int(start), int(stop)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} is corrupt: its header cannot be parsed ({error!r})") from None
    return data[8 + size :], header


def write_file(
    path: pathlib.Path,
    tensors: dict[str, tuple[np.dtype, tuple[int, ...]]],
    fetch: Callable[[str], np.ndarray],
) -> None:
    """Writes the named tensors in the order of the mapping; `fetch(name)` gives each when its turn has come."""
    header, end = {"__metadata__": {"format": "pt"}}, 0
    for name, (dtype, shape) in tensors.items():
        start, end = end, end + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, (dtype, shape) in tensors.items():
            value = np.ascontiguousarray(fetch(name), dtype)
            assert value.shape == shape, (name, value.shape, shape)
            file.write(value.reshape(-1).view(np.uint8))
