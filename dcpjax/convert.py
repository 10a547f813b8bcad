"""`python -m dcpjax.convert`: writes a checkpoint quantised as published ones are, or widened again.

Tensors pass one by one, so memory holds one matrix whatever the size of the model.
"""

import argparse
import functools
import json
import pathlib
import shutil
import sys
from collections.abc import Callable, Sequence
from typing import Any

import ml_dtypes
import numpy as np

from dcpjax.errors import CheckpointError, ConfigError, DcpjaxError
from models.checkpoint import Checkpoint, disk_shape, entries, leaves
from models.config import ModelConfig, read_config
from models.params import Weight, declare
from models.quantise import rows_of, to_fp8, to_nvfp4
from models.saving import Spec, write_folder, write_json
from models.stored import FORMATS, NVFP4, Format, in_published, parts_of, published_parts

_DTYPES = {"bfloat16": np.dtype(ml_dtypes.bfloat16), "float32": np.dtype(np.float32)}
_COPIED = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "generation_config.json",
)


def convert(
    model: str | pathlib.Path,
    out: str | pathlib.Path,
    quantization: str,
    dtype: str = "bfloat16",
    *,
    file_bytes: int = 5_000_000_000,
) -> None:
    """Writes the checkpoint in `model` to the new folder `out`.

    quantization: "fp8", "nvfp4", or "none" for plain tensors. dtype: of plain tensors, "bfloat16" or "float32" (the
    router's bias stays float32). Tokenizer and generation files are copied. Raises `ConfigError` or `CheckpointError`.
    """
    model, out = pathlib.Path(model), pathlib.Path(out)
    if out.exists():
        raise ConfigError(f"{out} exists already; nothing is overwritten: give a new folder, or remove it")
    cfg = read_config(model)
    checkpoint = Checkpoint.open(model, cfg)
    partial = out.with_name(f"{out.name}.partial")
    try:
        partial.mkdir(parents=True)
    except FileExistsError:
        raise ConfigError(f"{partial} exists already, from a conversion that did not end; remove it") from None
    except OSError as error:
        raise ConfigError(f"{out} cannot be made: {error.strerror}; give a folder that can be written") from None
    try:
        tensors = _Tensors(checkpoint, cfg, None if quantization == "none" else quantization, _DTYPES[dtype])
        write_folder(partial, tensors.specs, tensors.fetch, file_bytes)
        _write_configs(model, partial, tensors, dtype)
        partial.rename(out)
    except OSError as error:
        shutil.rmtree(partial)
        raise ConfigError(f"{out} cannot be written: {error.strerror or error}; nothing is left of it") from None
    except BaseException:
        shutil.rmtree(partial)
        raise


class _Tensors:
    """What is written, and each tensor when its turn has come."""

    def __init__(self, checkpoint: Checkpoint, cfg: ModelConfig, quantization: str | None, dtype: np.dtype):
        self.specs: dict[str, Spec] = {}
        self.quantization = quantization
        self.kept: list[str] = []
        self._makers: dict[str, Callable[[], np.ndarray]] = {}
        self._checkpoint = checkpoint
        for w in leaves(declare(cfg)):
            named = quantization is not None and in_published(quantization, w, cfg)
            for _, name in entries(w):
                if name not in self.specs:
                    self._add(w, name, FORMATS[quantization] if named else None, dtype)

    def fetch(self, name: str) -> np.ndarray:
        value = self._makers[name]()
        self._checkpoint.release()
        return value

    def _add(self, w: Weight, name: str, quantised: Format | None, dtype: np.dtype) -> None:
        shape = disk_shape(w)
        if quantised is None:
            self.specs[name] = np.dtype(np.float32) if w.float32 else dtype, shape
            self._makers[name] = lambda: self._wide(name, shape)
            self.kept.append(name.removesuffix(".weight"))
            return
        if quantised is NVFP4 and shape[1] % 16:
            raise CheckpointError(f"{name} {list(shape)}: NVFP4 takes columns that are a multiple of 16; use fp8")
        narrow = to_nvfp4 if quantised is NVFP4 else to_fp8
        parts = published_parts(quantised, name).expected(shape)
        make = functools.cache(lambda: dict(zip(parts, narrow(self._wide(name, shape)), strict=True)))
        *_, last = parts
        for part, (part_shape, kinds) in parts.items():
            self.specs[part] = kinds[0], part_shape
            self._makers[part] = functools.partial(self._part, make, part, part == last)

    def _part(self, make: Any, name: str, last: bool) -> np.ndarray:
        value = make()[name]
        if last:
            make.cache_clear()
        return value

    def _wide(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        """A tensor as plain numbers, whatever it is stored as."""
        parts = parts_of(self._checkpoint.tensors, name, len(shape) == 2)
        value = rows_of(self._checkpoint.tensors, parts, slice(0, shape[0]))
        if not np.isfinite(value.astype(np.float32)).all():
            raise CheckpointError(
                f"{name} holds values that are NaN or infinite; the checkpoint is damaged, fetch it again"
            )
        return value


def _write_configs(model: pathlib.Path, out: pathlib.Path, tensors: _Tensors, dtype: str) -> None:
    raw = json.loads((model / "config.json").read_text())
    raw = {key: value for key, value in raw.items() if key not in ("torch_dtype", "quantization_config")}
    announced = _announced(tensors)
    write_json(out / "config.json", raw | {"dtype": dtype} | announced)
    for name in _COPIED:
        if (model / name).is_file():
            shutil.copyfile(model / name, out / name)


def _announced(tensors: _Tensors) -> dict[str, Any]:
    if tensors.quantization == "fp8":
        return {
            "quantization_config": {
                "quant_method": "fp8",
                "fmt": "e4m3",
                "activation_scheme": "dynamic",
                "weight_block_size": [128, 128],
                "modules_to_not_convert": tensors.kept,
            }
        }
    if tensors.quantization == "nvfp4":
        numbers = {"num_bits": 4, "type": "float", "group_size": 16, "dynamic": False}
        return {
            "quantization_config": {
                "quant_method": "modelopt",
                "quant_algo": "NVFP4",
                "config_groups": {"group_0": {"targets": ["Linear"], "weights": numbers}},
                "ignore": tensors.kept,
            }
        }
    return {}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> Any:
        self.exit(2, f"{self.prog}: error: {message} (--help lists all flags)\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Converts as the command line says. 0, or 2 with one line on standard error."""
    parser = _Parser(prog="dcpjax.convert", description=convert.__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--model", type=pathlib.Path, required=True, help="a checkpoint folder, plain or quantised")
    parser.add_argument("--quantization", choices=("fp8", "nvfp4", "none"), required=True)
    parser.add_argument("--out", type=pathlib.Path, required=True, help="a folder that does not exist yet")
    parser.add_argument("--dtype", choices=tuple(_DTYPES), default="bfloat16", help="of what is not quantised")
    args = parser.parse_args(argv)
    try:
        convert(args.model, args.out, args.quantization, args.dtype)
    except (DcpjaxError, OSError) as error:
        print(f"dcpjax.convert: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"dcpjax.convert: interrupted; nothing is left of {args.out}", file=sys.stderr)
        return 130
    before, after = (sum(f.stat().st_size for f in d.glob("*.safetensors")) for d in (args.model, args.out))
    print(f"{args.out}: {after / 1e6:,.1f} MB, of {before / 1e6:,.1f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
