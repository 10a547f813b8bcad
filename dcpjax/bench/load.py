"""Loading a checkpoint: bytes a second beside what the disk and the way to the devices give, and the host's memory.

Prediction: the slower of reading and travelling sets the pace, since one layer is read while the one before travels. The
checkpoint is random, with GLM-5.2's widths and every kind of layer; what was read before is dropped from the page cache
where the system lets us.
"""

import argparse
import concurrent.futures
import json
import os
import pathlib
import threading
import time
from typing import Self

import jax
import jax.numpy as jnp
import numpy as np

from dcpjax import LLM, SamplingParams, build
from dcpjax.bench import synthetic
from dcpjax.mesh import make_plan
from models.checkpoint import Checkpoint
from models.config import ModelConfig, read_config
from models.params import declare, is_weight
from models.stored import abstract
from models.weights import place

_PIECE = 1 << 26


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds this benchmark's arguments, and what runs it."""
    parser.add_argument("folder", type=pathlib.Path, help="a checkpoint; written if it is not there")
    parser.add_argument("--quantization", choices=("fp8", "nvfp4", "none"), default="fp8", help="of what is written")
    parser.add_argument("--config", type=pathlib.Path, help="config.json of what is written (default: six layers)")
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--decode", type=int, default=0, metavar="N", help="load an LLM too, and make N tokens")
    parser.add_argument("--json", type=pathlib.Path, help="write the figures here")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Writes the checkpoint if it is not there, loads it, and prints the figures."""
    build.start_devices(args.tensor_parallel_size, 1)
    if not args.folder.exists():
        raw = synthetic.FEW_LAYERS if args.config is None else json.loads(args.config.read_text())
        start = time.monotonic()
        size = synthetic.write(args.folder, raw, None if args.quantization == "none" else args.quantization)
        print(f"wrote {size / 1e9:.2f} GB in {time.monotonic() - start:.1f} s", flush=True)
    row = measure(args.folder, args.tensor_parallel_size, jnp.dtype(args.dtype))
    print(
        f"{row['gb']:.2f} GB: reading {row['read_gb_s']:.2f} GB/s, travelling {row['travel_gb_s']:.2f} GB/s, "
        f"loading {row['load_gb_s']:.2f} GB/s in {row['seconds']:.1f} s, {row['share']:.0%} of the slower; host memory "
        f"{row['host_gb']:.2f} GB at most, {row['host_share']:.2f} of the largest layer ({row['layer_gb']:.2f} GB)",
        flush=True,
    )
    if args.decode:
        row["tokens"] = decode(args.folder, args.tensor_parallel_size, args.dtype, args.decode)
        print(f"decoded {row['tokens']}")
    if args.json:
        args.json.write_text(json.dumps(row, indent=1))


def measure(folder: pathlib.Path, devices: int, dtype: jnp.dtype) -> dict[str, float]:
    """Rates in GB/s, and bytes of the host's memory beyond what the process had before. On CPU weights are among them."""
    cfg, plan = read_config(folder), make_plan(devices)
    files = sorted(folder.glob("*.safetensors"))
    read, travel = _read_rate(files), _travel_rate(plan.sharding("width"))
    _forget(files)
    with _Memory() as memory:
        start = time.monotonic()
        params = jax.block_until_ready(place(Checkpoint.open(folder, cfg), cfg, plan, dtype))
        seconds = time.monotonic() - start
    total = sum(path.stat().st_size for path in files)
    del params
    host = memory.most - memory.before
    layer = _largest_layer(cfg, folder, dtype)
    return {
        "gb": total / 1e9,
        "read_gb_s": read / 1e9,
        "travel_gb_s": travel / 1e9,
        "load_gb_s": total / seconds / 1e9,
        "seconds": seconds,
        "share": total / seconds / min(read, travel),
        "host_gb": host / 1e9,
        "layer_gb": layer / 1e9,
        "host_share": host / layer,
    }


def decode(folder: pathlib.Path, devices: int, dtype: str, count: int) -> list[int]:
    """The first tokens of a short prompt; what they say is nothing."""
    llm = LLM(folder, tensor_parallel_size=devices, dtype=dtype, max_model_len=128, max_num_seqs=1)
    params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, logprobs=0)
    (choice,) = llm.generate([1, 2, 3, 4, 5], params)[0].outputs
    assert all(np.isfinite(entry.chosen) for entry in choice.logprobs)
    return choice.token_ids


def _largest_layer(cfg: ModelConfig, folder: pathlib.Path, dtype: jnp.dtype) -> int:
    """Bytes of the layer with the most, as stored on one device."""
    checkpoint = Checkpoint.open(folder, cfg)
    sizes: dict[int, float] = {}
    tree = abstract(cfg, make_plan(1), dtype, checkpoint.form)

    def add(w, target):
        nbytes = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(target))
        for layer in w.layers:
            sizes[layer] = sizes.get(layer, 0) + nbytes / len(w.layers)

    jax.tree.map(add, declare(cfg), tree, is_leaf=is_weight)
    return int(max(sizes.values()))


def _read_rate(files: list[pathlib.Path], most: int = 8 << 30) -> float:
    """Bytes a second of eight threads that read whole pieces of the files."""
    _forget(files)
    pieces = [(path, at) for path in files for at in range(0, path.stat().st_size, _PIECE)][: most // _PIECE]

    def read(piece: tuple[pathlib.Path, int]) -> int:
        path, at = piece
        with path.open("rb", buffering=0) as file:
            file.seek(at)
            return len(file.read(_PIECE))

    start = time.monotonic()
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        total = sum(pool.map(read, pieces))
    return total / (time.monotonic() - start)


def _travel_rate(sharding: jax.sharding.Sharding, nbytes: int = 1 << 30) -> float:
    """Bytes a second of one array from ordinary memory to the devices."""
    x = np.ones(nbytes, np.uint8)
    jax.device_put(x, sharding).block_until_ready()
    times = []
    for _ in range(3):
        start = time.monotonic()
        jax.device_put(x, sharding).block_until_ready()
        times.append(time.monotonic() - start)
    return nbytes / min(times)


def _forget(files: list[pathlib.Path]) -> None:
    """Asks the system to drop the files from its page cache."""
    for path in files:
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


class _Memory:
    """The most memory of this process while it is open, looked at twenty times a second: mapped files do not count."""

    def __enter__(self) -> Self:
        self.before = self.most = self._now()
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._end.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._end.wait(0.05):
            self.most = max(self.most, self._now())

    @staticmethod
    def _now() -> int:
        lines = pathlib.Path("/proc/self/status").read_text().splitlines()
        kilobytes = {line.split()[0]: int(line.split()[1]) for line in lines if line.startswith("Rss")}
        return 1024 * (kilobytes["RssAnon:"] + kilobytes["RssShmem:"])
